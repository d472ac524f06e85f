"""Learn the direction in which each weight is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import Interval, NonNegativeFloat, NonNegativeInt

_ZETA, _GAMMA = 1.1, -0.1
"""Ends of the range to which the sigmoid is stretched before it is clipped, so that it reaches both 0 and 1."""

_STEEPEST, _FLATTEST = 20.0, 2.0
"""Exponent of the penalty at the start and at the end."""


class _SoftRounding(LearnedWeight):
    """A weight between its initial code and the next code in the direction of the float weight.

    The value is `floor + h(v) * gap`, where `gap` is the distance between the two codes (1 for integers) and `h` is a
    stretched and clipped sigmoid. It starts at the fraction `softness` of the way from the initial code to the float
    weight.
    """

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor, options: AdaRound) -> None:
        self.grid, self.options = grid, options
        # Codes that compensate for the errors of other weights may be more than one step away from their own weight.
        below, above = grid.below(start), grid.above(start)
        real = torch.minimum(torch.maximum(grid.position(weight), below), above)
        position = start + options.softness * (real - start)
        self.floor = torch.where(position < start, below, start)
        self.gap = torch.where(position < start, start, above) - self.floor
        # At 0 and 1, the sigmoid has zero gradient; at one half, the initial code would be ambiguous.
        h = ((position - self.floor) / self.gap).clamp(0.01, 0.99)
        h = torch.where(self.floor < start, h.clamp(min=0.5 + 1e-6), h.clamp(max=0.5 - 1e-6))
        self.parameter = torch.logit((h - _GAMMA) / (_ZETA - _GAMMA)).requires_grad_()
        self.parameters = (self.parameter,)

    def weight(self) -> Tensor:
        """Return the softly rounded weight."""
        return self.grid.value((self.floor + self._h() * self.gap).clamp(*self.grid.limits))

    def penalty(self, progress: float) -> Tensor | float:
        """Return the mean of `1 - |2 h - 1| ** beta` after the warm start; `beta` falls from 20 to 2."""
        warm = self.options.warm_start
        if progress < warm:
            return 0.0
        beta = _STEEPEST + (_FLATTEST - _STEEPEST) * (progress - warm) / (1 - warm)
        return self.options.regularization * (1 - (2 * self._h() - 1).abs().pow(beta)).mean()

    def codes(self) -> Tensor:
        """Return the codes on the side that `h` is closer to."""
        return (self.floor + (self.parameter.detach() >= 0) * self.gap).clamp(*self.grid.limits)

    def _h(self) -> Tensor:
        return (torch.sigmoid(self.parameter) * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


@solver
@dataclass(frozen=True, kw_only=True)
class AdaRound(GradientSolver):
    """Learn, for each weight, which of two codes to use, so that operator or block outputs match the float model.

    Scales do not change. By default, codes start from coordinate descent on each operator's error, which accounts for
    most of the gain, and gradient steps refine them. With `start="codes", softness=1, iterations=10_000,
    learning_rate=1e-3`, they start at the float weight, as in the paper. The remaining differences from the paper are
    that the penalty is a mean, that the error is relative, that the learning rate decays, and that the best state on
    validation batches is kept. `unit="block"` reconstructs blocks like BRECQ, but without Fisher weights. With
    `drop=0.5, scale_rate=0.01` in addition, randomly chosen values of the block's inputs and activations stay in float,
    and activation scales are learned, as in QDrop.

    Args:
        regularization: Weight of the penalty that drives soft codes to integers, relative to the relative error.
        softness: Initial position of a soft code between its initial code (0) and the float weight (1).

    The other options are documented in `quark_fx.solvers.schedule.Schedule`.

    Source:
        Nagel et al. 2020, section 3; Li et al. 2021 (BRECQ); Wei et al. 2022 (QDrop).
    """

    warm_start: ClassVar[float] = 0.2
    """Fraction of the steps without the penalty."""

    iterations: NonNegativeInt = 100
    learning_rate: NonNegativeFloat = 1e-2
    regularization: NonNegativeFloat = 0.01
    softness: Annotated[float, Interval("[0, 1]")] = 0.5

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> _SoftRounding:
        """Return the weight with soft rounding."""
        return _SoftRounding(grid, weight, start, self)


__all__ = ["AdaRound"]
