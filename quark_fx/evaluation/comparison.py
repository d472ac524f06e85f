"""`compare`: distances between the outputs of two models in any form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.calibration_data import require_batches
from quark_fx.errors import QuarkError
from quark_fx.evaluation.runs import named_tensors, runner_of, same_place


@dataclass(frozen=True)
class Distance:
    """Distance between an output of one model and the same output of another model.

    Attributes:
        name: Name of the output; empty for a single output.
        max_abs: Largest absolute difference.
        sqnr: Signal-to-noise ratio in dB, where the first model's values are the signal and the differences the noise.
        cosine: Cosine similarity of the two outputs, flattened over all batches.
        agreement: Fraction of rows with the same argmax along the last dimension, from 0 to 1.
    """

    name: str
    max_abs: float
    sqnr: float
    cosine: float
    agreement: float


@torch.no_grad()
def compare(first: Any, second: Any, batches: Iterable[Any]) -> tuple[Distance, ...]:
    """Run the same batches through two models, and return one `Distance` per common output.

    Args:
        first: Reference model, in any form that `evaluate` accepts.
        second: Model to compare with the reference, in any form that `evaluate` accepts.
        batches: Batches in the form of calibration data.

    Raises:
        QuarkError: If `batches` is empty or a single batch, a batch is empty, or the models do not have a common
            output.
    """
    require_batches(batches, "batches")
    runs = runner_of(first), runner_of(second)
    sums: dict[str, _Sums] = {}
    for number, batch in enumerate(batches):
        outputs = [{same_place(k): v for k, v in named_tensors(run(batch)).items()} for run in runs]
        pairs = _pairs(*outputs)
        if not any(a.numel() for _, a, _ in pairs):
            raise QuarkError(f"batch {number}: the outputs are empty; pass batches with values")
        for name, a, b in pairs:
            sums.setdefault(name, _Sums()).add(name, a, b)
    if not sums:
        raise QuarkError("there is no batch to compare the models on; pass at least one batch")
    return tuple(total.distance(name) for name, total in sums.items())


def _pairs(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the common outputs, matched by their names, or by position if no names match and the counts are equal."""
    if common := [name for name in first if name in second]:
        return [(name, first[name], second[name]) for name in common]
    if len(first) == len(second):
        names = [b if a.isdecimal() else a for a, b in zip(first, second, strict=True)]
        return list(zip(names, first.values(), second.values(), strict=True))
    raise QuarkError(
        f"the models have no output name in common: the first has {', '.join(first) or 'none'}, the second has "
        f"{', '.join(second) or 'none'}; compare versions of the same model"
    )


class _Sums:
    """Sums over batches from which a `Distance` is computed."""

    def __init__(self) -> None:
        self.largest = self.first = self.second = self.product = self.noise = 0.0
        self.same = self.rows = 0

    def add(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            raise QuarkError(
                f"output {name!r} has shape {tuple(a.shape)} in one model and {tuple(b.shape)} in the other; compare "
                "versions of the same model"
            )
        a, b = a.double(), b.double()  # also converts booleans
        if a.dim() and a.shape[-1]:
            equal = a.argmax(-1) == b.argmax(-1)
            self.same, self.rows = self.same + int(equal.sum()), self.rows + equal.numel()
        x, y = a.flatten(), b.flatten()
        furthest = float((x - y).abs().max()) if x.numel() else 0.0
        self.largest = furthest if math.isnan(furthest) else max(furthest, self.largest)
        self.first, self.second = self.first + float(x @ x), self.second + float(y @ y)
        self.product, self.noise = self.product + float(x @ y), self.noise + float((x - y).square().sum())

    def distance(self, name: str) -> Distance:
        sqnr = math.inf
        if self.noise:
            sqnr = 10 * math.log10(self.first / self.noise) if self.first else -math.inf
        norms, zeros = math.sqrt(self.first * self.second), self.first == self.second == 0
        return Distance(
            name,
            self.largest,
            sqnr,
            self.product / norms if norms else float(zeros),
            self.same / self.rows if self.rows else 1.0,
        )


__all__ = ["Distance", "compare"]
