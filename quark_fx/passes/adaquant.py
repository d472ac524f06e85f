"""Learn the weights themselves, through their rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.trainable import Codes
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt


class StraightThrough(Codes):
    """A weight that is rounded in every step, with the gradient of one that is not; the unit is a code."""

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor) -> None:
        self.grid = grid
        # As near to the weight as still rounds to the code it starts at.
        low, high = start + 0.49 * (grid.below(start) - start), start + 0.49 * (grid.above(start) - start)
        self.parameter = torch.minimum(torch.maximum(grid.position(weight), low), high)
        self.parameter.requires_grad_()
        self.parameters = (self.parameter,)

    def weight(self) -> Tensor:
        """Return the rounded weight."""
        position = self.grid.within_reach(self.parameter)
        return self.grid.value(position + (self.codes() - position).detach())

    def codes(self) -> Tensor:
        """Return the codes it rounds to."""
        return self.grid.round(self.parameter)


@solver
@dataclass(frozen=True, kw_only=True)
class AdaQuant(GradientSolver):
    """Learn weights through their rounding, with biases and activation scales, to keep what an operator or block makes.

    Weights may move by more than one code, so it needs more data than `AdaRound`. Weight scales stay. The other options
    are those of `quark_fx.solvers.schedule.Schedule`; `learning_rate` is in codes per step.

    Source:
        Hubara et al. 2021, section 3; by default codes start from coordinate descent.
    """

    iterations: NonNegativeInt = 250
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 1e-2
    bias_rate: NonNegativeFloat = 1e-3

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> StraightThrough:
        """Return the weight, which is rounded in every step."""
        return StraightThrough(grid, weight, start)


__all__ = ["AdaQuant", "StraightThrough"]
