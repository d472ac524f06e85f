"""Learn the weights themselves, through their rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt


class StraightThrough(LearnedWeight):
    """A weight that is rounded in every step, with the gradient of one that is not, and the ratios of its scales.

    Args:
        grid: what codes stand for.
        weight: what is rounded.
        start: the codes to start from.
        range_rate: of the scales where they are free, as a share of the learning rate; 0 leaves them as they are.
    """

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor, range_rate: float = 0.0) -> None:
        self.grid, self.range_rate = grid, range_rate
        # As near to the weight as still rounds to the code it starts at.
        low, high = start + 0.49 * (grid.below(start) - start), start + 0.49 * (grid.above(start) - start)
        # In steps of the scales that there are at first.
        self.parameter = torch.minimum(torch.maximum(grid.position(weight), low), high)
        self.parameter.requires_grad_()
        self.logarithms: Tensor | None = None
        if grid.free is not None and range_rate > 0:
            self.logarithms = torch.zeros_like(grid.free.stored, dtype=torch.float32).requires_grad_()
        self.parameters = (self.parameter,) if self.logarithms is None else (self.parameter, self.logarithms)

    @property
    def ratio(self) -> Tensor | None:
        """What the scales are multiplied by; what is learned of them is its logarithm, in steps of `range_rate`."""
        return None if self.logarithms is None else (self.range_rate * self.logarithms).exp()

    def weight(self) -> Tensor:
        """Return the rounded weight; of scales it has the gradient of LSQ."""
        grid = self.grid.times(self.ratio)
        position = grid.within_reach(self._position(grid))
        return grid.value(position + (grid.round(position) - position).detach())

    def codes(self) -> Tensor:
        """Return the codes it rounds to."""
        with torch.no_grad():
            return self.grid.round(self._position(self.grid.times(self.ratio)))

    def _position(self, grid: Grid) -> Tensor:
        """Return where the weight, which stays as its scale changes, lies on a grid."""
        if self.logarithms is None:
            return self.parameter
        return grid.position(self.grid.value(self.parameter))


@solver
@dataclass(frozen=True, kw_only=True)
class AdaQuant(GradientSolver):
    """Learn weights through their rounding, with biases and activation scales, to keep what an operator or block makes.

    Weights may move by more than one code, so it needs more data than `AdaRound`. The other options are those of
    `quark_fx.solvers.schedule.Schedule`; `learning_rate` is in codes per step.

    Args:
        range_rate: of the scales of weights, where they may change one by one: relative to their size, as a share of
            `learning_rate`. 0 leaves them as they are.

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
        """Whether scales of weights are learned."""
        return self.range_rate > 0

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> StraightThrough:
        """Return the weight, which is rounded in every step."""
        return StraightThrough(grid, weight, start, self.range_rate)


__all__ = ["AdaQuant", "StraightThrough"]
