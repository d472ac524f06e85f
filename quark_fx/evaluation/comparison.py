"""How far the outputs of two models are from each other, whatever forms these have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quark_fx.errors import QuarkError
from quark_fx.evaluation.runs import named_tensors, run_of, same_place


@dataclass(frozen=True)
class Distance:
    """How far an output of one model is from the same output of another.

    Attributes:
        name: of the output, empty for the only one.
        max_abs: largest absolute difference.
        sqnr: signal to noise of the second model's values against the first one's, dB.
        cosine: between all values of both.
        agreement: how often both have the same largest value along the last dimension, from 0 to 1.
    """

    name: str
    max_abs: float
    sqnr: float
    cosine: float
    agreement: float


@torch.no_grad()
def compare(first: Any, second: Any, batches: Iterable[Any]) -> tuple[Distance, ...]:
    """Run the same batches through two models; return a row for each output that both have.

    Args:
        first: what the other is compared with, in any form that `evaluate` takes.
        second: likewise.
        batches: as calibration data.

    Raises:
        QuarkError: if there is no batch, or the models have no outputs in common.
    """
    runs = run_of(first), run_of(second)
    sums: dict[str, _Sums] = {}
    for batch in batches:
        left, right = ({same_place(k): v for k, v in named_tensors(run(batch)).items()} for run in runs)
        for name, a, b in _pairs(left, right):
            sums.setdefault(name, _Sums()).add(name, a, b)
    if not sums:
        raise QuarkError("no batch to compare the models on; pass at least one")
    return tuple(found.distance(name) for name, found in sums.items())


def _pairs(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the outputs that both models have: by name, or by position where they have as many."""
    if common := [name for name in left if name in right]:
        return [(name, left[name], right[name]) for name in common]
    if len(left) == len(right):
        names = [b if a.isdecimal() else a for a, b in zip(left, right, strict=True)]
        return list(zip(names, left.values(), right.values(), strict=True))
    raise QuarkError(
        f"the models have no output in common: {', '.join(left) or 'none'} and {', '.join(right) or 'none'}"
    )


class _Sums:
    """What the distance of two values is computed from, over batches."""

    def __init__(self) -> None:
        self.largest = self.left = self.right = self.product = self.noise = 0.0
        self.same = self.rows = 0

    def add(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            raise QuarkError(
                f"output {name!r} has shape {tuple(a.shape)} in one model and {tuple(b.shape)} in the other; are they "
                "the same model?"
            )
        a, b = a.double(), b.double()  # booleans, too
        if a.dim() and a.shape[-1]:
            equal = a.argmax(-1) == b.argmax(-1)
            self.same, self.rows = self.same + int(equal.sum()), self.rows + equal.numel()
        x, y = a.flatten(), b.flatten()
        furthest = float((x - y).abs().max()) if x.numel() else 0.0
        self.largest = furthest if math.isnan(furthest) else max(furthest, self.largest)
        self.left, self.right = self.left + float(x @ x), self.right + float(y @ y)
        self.product, self.noise = self.product + float(x @ y), self.noise + float((x - y).square().sum())

    def distance(self, name: str) -> Distance:
        sqnr = math.inf
        if self.noise:
            sqnr = 10 * math.log10(self.left / self.noise) if self.left else -math.inf
        norms, zeros = math.sqrt(self.left * self.right), self.left == self.right == 0
        return Distance(
            name,
            self.largest,
            sqnr,
            self.product / norms if norms else float(zeros),
            self.same / self.rows if self.rows else 1.0,
        )


__all__ = ["Distance", "compare"]
