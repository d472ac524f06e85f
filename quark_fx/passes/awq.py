"""Scale up the weights that large activations multiply, so that rounding them matters less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from quark_fx.solvers.hessian_trial import FeedbackTrial, HessianTrial, MeasuredSite
from quark_fx.solvers.scaling import ScalingSolver, scaling_solver
from quark_fx.system.options import Interval

_SMALLEST = 1e-4
"""Of a channel, relative to the largest: one that is never there is scaled like one that hardly is."""


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class AWQ(ScalingSolver):
    """Multiply weights by `s = a ** r / w ** q` per input channel and divide what they read by it, where something can.

    `a` is the root mean square of a channel on the calibration data, `w` the mean magnitude of the weights that read
    it, each relative to the scale of its group: what the data multiplies most is rounded finer, and so is what lies far
    below the largest weight of its group. Of the exponents it tries, on a grid from 0 to 1, each site takes those whose
    rounded weights change the outputs of the operators that read it least. That error is a quadratic form of the
    weights, so the data is read once, whatever is tried. Of wide operators every few outputs are asked. What is
    no better on validation data is dropped. Set `feedback=True` if `GPTQ` follows: its error feedback makes up for much
    of the error that scales for rounding to nearest are chosen by, and with those scales it may lose more than without.

    Args:
        feedback: choose the scales that error feedback loses least with.
        steps: intervals of the grid; about every fifth of it is tried for each exponent, then what lies around.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Raises:
        ConfigError: for fewer than two steps.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, where `a` is the mean magnitude, `q` is 0, and the objective the error of a
        block; squares are what the error of an operator weighs by. llm-compressor's "duo" scales have `q = 1 - r`.
        `feedback` is ours (`quark_fx.solvers.error_feedback.Factor.left_over`).
    """

    trial: ClassVar = HessianTrial

    steps: Annotated[int, Interval("[2, inf)")] = 20
    feedback: bool = False

    @property
    def judge(self) -> type[HessianTrial]:
        """Rounding to nearest, or with error feedback."""
        return FeedbackTrial if self.feedback else HessianTrial

    @property
    def grid(self) -> dict[str, list[float]]:
        """The exponents."""
        values = [step / self.steps for step in range(self.steps + 1)]
        return {"r": values, "q": values}

    def scale(self, seen: MeasuredSite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a pair of exponents, around 1."""
        r, q = values
        return _around_one(_relative(seen.root_mean_square) ** r / _relative(seen.mean_weight) ** q)

    def scales(self, seen: MeasuredSite) -> Tensor:
        """Return the scales of all pairs of exponents."""
        found = (_relative(x) for x in (seen.root_mean_square, seen.mean_weight))
        a, w = (torch.stack([x**power for power in axis]) for x, axis in zip(found, self.grid.values(), strict=True))
        return _around_one(a.unsqueeze(1) / w).flatten(0, 1)


def _around_one(scale: Tensor) -> Tensor:
    return scale / (scale.amax(-1, keepdim=True) * scale.amin(-1, keepdim=True)).sqrt()


def _relative(found: Tensor) -> Tensor:
    return (found / found.max().clamp_min(1e-30)).clamp_min(_SMALLEST)


__all__ = ["AWQ"]
