"""Learned weight clipping (Shao et al. 2023, "OmniQuant"): gradient steps move both ends of every weight range."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.errors import Declined
from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.starts import Start
from quark_fx.solvers.trainable import LearnedWeight


class Clipped(LearnedWeight):
    """A weight that is rounded to nearest between two learned ends: shares of the present ones, 98 % at first."""

    def __init__(self, grid: Grid, weight: Tensor, zero_points: Tensor) -> None:
        (first, last), self.grid, self.real = grid.limits, grid, weight
        self.ends = torch.stack([(end - zero_points) / (last - first) for end in (first, last)])
        self.shares = torch.full_like(self.ends, 4.0, requires_grad=True)
        self.parameters = (self.shares,)

    @property
    def ratio(self) -> Tensor:
        """Length of the range, relative to the present one."""
        return (self.shares.sigmoid() * self.ends).diff(dim=0)[0]

    @property
    def zero_points(self) -> Tensor:
        """Zero points at which the first code is the low end."""
        first, last = self.grid.limits
        return first - self.shares[0].sigmoid() * self.ends[0] * (last - first) / self.ratio

    def weight(self) -> Tensor:
        grid = self.grid.times(self.ratio).with_zero_points(self.zero_points)
        position = grid.position(self.real)
        return grid.value((position + (position.round() - position).detach()).clamp(*grid.limits))

    def codes(self) -> Tensor:
        grid = self.grid.times(self.ratio).with_zero_points(self.zero_points)
        return grid.round(grid.position(self.real))


@solver
@dataclass(frozen=True, kw_only=True)
class LearnedClipping(GradientSolver):
    """Learn both ends of the ranges of weights with `symmetry="asymmetric"`."""

    learning_rate: float = 0.05
    start: Start = Start.CODES

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> Clipped:
        """Return the weight with ends that are almost those of the present range."""
        if grid.free is None or grid.free.zero_points is None:
            raise Declined("its zero points are fixed; set symmetry='asymmetric'")
        return Clipped(grid, weight, grid.free.zero_points)
