"""What a model of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Judge = Callable[[Callable[..., Any]], dict[str, float]]
"""Takes what is called as the model is, and returns figures by name."""


@dataclass(frozen=True)
class RealModel:
    """A trained model, with data to calibrate it on and a judge that reads other data.

    Attributes:
        model: in eval mode, float32.
        calibration: batches as `quantize` reads them: a tensor, or a dictionary of keyword arguments.
        judged: batches of the same kind that calibration has not seen.
        judge: runs a model, a quantized one or an exported file, on `judged`; the same names in the same order.
    """

    model: nn.Module
    calibration: list[Any]
    judged: list[Any]
    judge: Judge
