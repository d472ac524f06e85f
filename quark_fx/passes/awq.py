"""Scale up the weights that multiply large activations, so that rounding them causes smaller errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quark_fx.solvers.hessian_trial import FeedbackTrial, HessianTrial, MeasuredSite
from quark_fx.solvers.scaling import ScalingSolver, scaling_solver

_SMALLEST = 1e-4
"""Smallest value of a channel relative to the largest; smaller ones are scaled alike."""


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class AWQ(ScalingSolver):
    """Multiply weights by `s = a ** r / w ** q` per input channel, and divide their input by it where possible.

    `a` is the root mean square of a channel on the calibration data, and `w` the mean magnitude of the weights that
    read it, each relative to the scale of its group: weights of large activations are rounded more finely, and so are
    weights far below the largest of their group. Exponents are searched on a grid from 0 to 1; each site gets the ones
    that minimize the output error of its readers with rounded weights. That error is a quadratic form of the weights,
    so the data runs only once. For wide operators it is measured on a subset of the outputs. A scale that is not better
    on validation data is rejected. Set `feedback=True` if `GPTQ` follows: its error feedback removes much of the error
    that scales for rounding to nearest are chosen by, and with those scales it may be worse than without any.

    Args:
        feedback: Choose the scales with the smallest error after error feedback.
        explicit: Insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, where `a` is the mean magnitude, `q` is 0, and the objective is the error of
        a block; squares are the proper weights for the error of an operator. llm-compressor's "duo" scales have
        `q = 1 - r`. `feedback` is ours (`quark_fx.solvers.error_feedback.Factor.residual_curvature`).
    """

    trial: ClassVar = HessianTrial
    steps: ClassVar[int] = 20
    """Intervals of the grid; about every fifth point is tried for each exponent, then points around the best."""

    feedback: bool = False

    @property
    def judge(self) -> type[HessianTrial]:
        """Trial with rounding to nearest, or with error feedback."""
        return FeedbackTrial if self.feedback else HessianTrial

    @property
    def grid(self) -> dict[str, list[float]]:
        """Exponents to try."""
        values = [step / self.steps for step in range(self.steps + 1)]
        return {"r": values, "q": values}

    def scale(self, seen: MeasuredSite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a pair of exponents, centered at 1."""
        r, q = values
        return _around_one(_relative(seen.root_mean_square) ** r / _relative(seen.mean_weight) ** q)

    def scales(self, seen: MeasuredSite) -> Tensor:
        """Return the scales of all pairs of exponents."""
        magnitudes = (_relative(x) for x in (seen.root_mean_square, seen.mean_weight))
        a, w = (
            torch.stack([x**power for power in axis]) for x, axis in zip(magnitudes, self.grid.values(), strict=True)
        )
        return _around_one(a.unsqueeze(1) / w).flatten(0, 1)


def _around_one(scale: Tensor) -> Tensor:
    return scale / (scale.amax(-1, keepdim=True) * scale.amin(-1, keepdim=True)).sqrt()


def _relative(magnitude: Tensor) -> Tensor:
    return (magnitude / magnitude.max().clamp_min(1e-30)).clamp_min(_SMALLEST)


__all__ = ["AWQ"]
