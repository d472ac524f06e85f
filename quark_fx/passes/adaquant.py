"""Learn weights by gradient descent through their rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt


class _StraightThrough(LearnedWeight):
    """A weight that is rounded in every step with a straight-through gradient, and factors of its scales.

    Args:
        grid: Scales, zero points, and format of the codes.
        weight: Weight to round.
        start: Initial codes.
        range_rate: Learning rate of adjustable scales, as a fraction of the weight's; 0 keeps the scales.
    """

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor, range_rate: float = 0.0) -> None:
        self.grid, self.range_rate = grid, range_rate
        # Start as close to the weight as possible while still rounding to the initial code.
        low, high = start + 0.49 * (grid.below(start) - start), start + 0.49 * (grid.above(start) - start)
        # The unit is a step of the initial scales.
        self.parameter = torch.minimum(torch.maximum(grid.position(weight), low), high)
        self.parameter.requires_grad_()
        self.logarithms: Tensor | None = None
        if grid.free is not None and range_rate > 0:
            self.logarithms = torch.zeros_like(grid.free.stored, dtype=torch.float32).requires_grad_()
        self.parameters = (self.parameter,) if self.logarithms is None else (self.parameter, self.logarithms)

    @property
    def ratio(self) -> Tensor | None:
        """Factors of the scales; the learned parameters are their logarithms, in units of `range_rate`."""
        return None if self.logarithms is None else (self.range_rate * self.logarithms).exp()

    def weight(self) -> Tensor:
        """Return the rounded weight; its scales get the gradients of LSQ."""
        grid = self.grid.times(self.ratio)
        position = grid.within_reach(self._position(grid))
        return grid.value(position + (grid.round(position) - position).detach())

    def codes(self) -> Tensor:
        """Return the codes of the rounded weight."""
        with torch.no_grad():
            return self.grid.round(self._position(self.grid.times(self.ratio)))

    def _position(self, grid: Grid) -> Tensor:
        """Return the position of the weight on a grid; the weight before rounding does not depend on the scales."""
        if self.logarithms is None:
            return self.parameter
        return grid.position(self.grid.value(self.parameter))


@solver
@dataclass(frozen=True, kw_only=True)
class AdaQuant(GradientSolver):
    """Learn weights through their rounding, with biases and activation scales, so that outputs match the float model.

    Outputs are compared per operator or per block. Weights may move by more than one code, so the pass needs more data
    than `AdaRound`. The other options are documented in `quark_fx.solvers.schedule.Schedule`; the unit of
    `learning_rate` is codes per step.

    Args:
        range_rate: Learning rate of weight scales that can change individually, relative to their size, as a fraction
            of `learning_rate`. 0 keeps the scales.

    Source:
        Hubara et al. 2021, section 3; by default codes start from coordinate descent. Gradients of scales: Esser et al.
        2020 (LSQ).
    """

    iterations: NonNegativeInt = 250
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 1e-2
    bias_rate: NonNegativeFloat = 1e-3
    range_rate: NonNegativeFloat = 0.0

    @property
    def fits_scales(self) -> bool:
        """True if scales of weights are learned."""
        return self.range_rate > 0

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> _StraightThrough:
        """Return the weight with straight-through rounding."""
        return _StraightThrough(grid, weight, start, self.range_rate)


__all__ = ["AdaQuant"]
