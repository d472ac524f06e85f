"""Learn which way to round each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import Interval, NonNegativeFloat, NonNegativeInt

_ZETA, _GAMMA = 1.1, -0.1
"""The sigmoid is stretched to this range and cut off at 0 and 1, so that it reaches both."""

_STEEPEST, _FLATTEST = 20.0, 2.0
"""Exponent of the penalty at its beginning and at its end."""


class SoftRounding(LearnedWeight):
    """A weight between the code it starts at and the next one on the side where the weight lies that it is to be near.

    The weight is `floor + h(v) * gap`, with `gap` the distance of the two codes (1, but for floats) and `h` a stretched
    and cut sigmoid. It begins `softness` of the way from the starting code to that weight.
    """

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor, options: AdaRound) -> None:
        self.grid, self.options = grid, options
        # Codes that make up for the errors of others may lie more than one step from the weight.
        below, above = grid.below(start), grid.above(start)
        real = torch.minimum(torch.maximum(grid.position(weight), below), above)
        position = start + options.softness * (real - start)
        self.floor = torch.where(position < start, below, start)
        self.gap = torch.where(position < start, start, above) - self.floor
        # At 0 and 1 the sigmoid would have no gradient; half way it would not say which code it starts at.
        h = ((position - self.floor) / self.gap).clamp(0.01, 0.99)
        h = torch.where(self.floor < start, h.clamp(min=0.5 + 1e-6), h.clamp(max=0.5 - 1e-6))
        self.parameter = torch.logit((h - _GAMMA) / (_ZETA - _GAMMA)).requires_grad_()
        self.parameters = (self.parameter,)

    def weight(self) -> Tensor:
        """Return the weight with its soft rounding."""
        return self.grid.value((self.floor + self._h() * self.gap).clamp(*self.grid.limits))

    def penalty(self, progress: float) -> Tensor | float:
        """Return `1 - |2 h - 1| ** beta`, averaged, once the warm start is over; `beta` falls from 20 to 2."""
        warm = self.options.warm_start
        if progress < warm:
            return 0.0
        beta = _STEEPEST + (_FLATTEST - _STEEPEST) * (progress - warm) / (1 - warm)
        return self.options.regularization * (1 - (2 * self._h() - 1).abs().pow(beta)).mean()

    def codes(self) -> Tensor:
        """Return the codes on the side that `h` is nearer to."""
        return (self.floor + (self.parameter.detach() >= 0) * self.gap).clamp(*self.grid.limits)

    def _h(self) -> Tensor:
        return (torch.sigmoid(self.parameter) * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


@solver
@dataclass(frozen=True, kw_only=True)
class AdaRound(GradientSolver):
    """Learn, for each weight, which of two codes to take, so that what an operator or a block makes is kept.

    Scales stay. By default codes start from coordinate descent on each operator's error, which most of the gain comes
    from, and gradient steps refine them. With `start="codes", softness=1, iterations=10_000, learning_rate=1e-3` they
    start where the paper's do, at the float weight; what differs from it then is that the penalty is a mean and the
    error relative, that the rate decays, and that the best state on validation batches is kept. `unit="block"`
    reconstructs blocks as BRECQ does, without Fisher weights; `drop=0.5, scale_rate=0.01` besides mixes float into
    what enters the block and into every activation of it, and learns activation scales, as QDrop does.

    Args:
        regularization: weight of the penalty that drives soft codes to hard ones, relative to the relative error.
        warm_start: share of the steps without it.
        softness: how far towards the float weight a code begins, 0 to 1.

    The other options are those of `quark_fx.solvers.schedule.Schedule`.

    Source:
        Nagel et al. 2020, section 3; Li et al. 2021 (BRECQ); Wei et al. 2022 (QDrop).
    """

    iterations: NonNegativeInt = 100
    learning_rate: NonNegativeFloat = 1e-2
    regularization: NonNegativeFloat = 0.01
    warm_start: Annotated[float, Interval("[0, 1)")] = 0.2
    softness: Annotated[float, Interval("[0, 1]")] = 0.5

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> SoftRounding:
        """Return the weight between two codes each."""
        return SoftRounding(grid, weight, start, self)


__all__ = ["AdaRound", "SoftRounding"]
