"""A gradient solver of one file: each output channel rounds up or down a little more than to nearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.starts import Start
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt


class Shifted(LearnedWeight):
    """A weight that is rounded after an offset per channel, with the gradient of one that is not rounded."""

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor) -> None:
        position = grid.position(weight)
        # Codes that are not the nearest are as they are, whatever the weight is.
        self.grid, self.position = grid, torch.where(grid.round(position) == start, position, start)
        self.offset = weight.new_zeros(len(weight), *[1] * (weight.dim() - 1)).requires_grad_()
        self.parameters = (self.offset,)

    def weight(self) -> Tensor:
        """Return the rounded weight."""
        position = self.grid.within_reach(self.position + self.offset)
        return self.grid.value(position + (self.grid.round(position) - position).detach())

    def codes(self) -> Tensor:
        """Return the codes it rounds to."""
        return self.grid.round(self.position + self.offset)


@solver
@dataclass(frozen=True, kw_only=True)
class ShiftChannels(GradientSolver):
    """Learn an offset before rounding, in codes, for each output channel."""

    iterations: NonNegativeInt = 100
    learning_rate: NonNegativeFloat = 0.02
    start: Start = Start.CODES

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> Shifted:
        """Return the weight with offsets of zero."""
        return Shifted(grid, weight, start)
