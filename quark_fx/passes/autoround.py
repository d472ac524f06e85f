"""Learn roundings and ranges by sign gradient descent, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quark_fx.engine.blocks import Unit
from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.solver import solver
from quark_fx.solvers.starts import Start
from quark_fx.solvers.trainable import LearnedWeight
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt, PositiveInt

_FROM_FEEDBACK = 0.3
"""Number of steps times the size of the first, in codes: only values close to the edges of their bins change codes."""


class _SignRounding(LearnedWeight):
    """A rounded weight with an offset of up to half a code before rounding, and a ratio for each scale."""

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor, options: AutoRound) -> None:
        self.grid, self.options = grid, options
        self.weights = weight
        self.offset = torch.zeros_like(weight, requires_grad=True)
        # If the initial code is not the nearest code, the shift keeps it.
        self.shift = torch.where(_nearest(grid, weight) == start, 0.0, start - grid.position(weight))
        self.shares: Tensor | None = None
        if grid.free is not None and options.ranges:
            # Changes of the ratios so far, in units of `range_rate`.
            self.shares = torch.zeros_like(grid.free.stored, dtype=torch.float32).requires_grad_()
        self.parameters = (self.offset,) if self.shares is None else (self.offset, self.shares)

    @property
    def ratio(self) -> Tensor | None:
        """Ratios of the scales, between `smallest_range` and 1."""
        if self.shares is None:
            return None
        return _within(1 + self.options.range_rate * self.shares, self.options.smallest_range, 1.0)

    def weight(self) -> Tensor:
        """Return the rounded weight, with a straight-through gradient."""
        grid = self._grid()
        position = grid.within_reach(self._position(grid))
        return grid.value(position + (grid.round(position) - position).detach())

    def codes(self) -> Tensor:
        """Return the codes of the rounded weight."""
        with torch.no_grad():
            return self.grid.round(self._position(self._grid()))

    def _grid(self) -> Grid:
        return self.grid.times(self.ratio)

    def _position(self, grid: Grid) -> Tensor:
        position = grid.position(self.weights)
        return position + self.shift + _within(self.offset, -0.5, 0.5) * grid.step(position)


def _nearest(grid: Grid, weight: Tensor) -> Tensor:
    return grid.round(grid.position(weight))


def _within(x: Tensor, low: float, high: float) -> Tensor:
    """Return `x` clamped to two bounds, with a gradient of one everywhere, so that values outside can return."""
    return x + (x.clamp(low, high) - x).detach()


@solver
@dataclass(frozen=True, kw_only=True)
class AutoRound(GradientSolver):
    """Learn how each weight rounds, and how much of its range each scale covers, by sign gradient descent.

    Steps have the size `learning_rate` and shrink linearly to zero. A block learns from the outputs of the quantized
    blocks before it. By default, codes start from error feedback, like `GPTQ(asymmetry=1, fit_scales=True)`. Each
    value starts at the same distance from the next code as the weight that was rounded, so a few small steps suffice:
    together they are about 0.15 of a code. `start="codes", iterations=200, range_rate=1` follows the paper, which
    starts from the nearest codes, with steps of half a code in total. That start also keeps the codes of earlier
    passes; codes that are not the nearest hardly move.

    Args:
        ranges: Whether to learn ratios of scales as well, for scales that can change individually.
        range_rate: Step size of the ratios, relative to the step size of the codes.

    The other options are documented in `quark_fx.solvers.schedule.Schedule`.

    Source:
        Cheng et al. 2023 (SignRound); one ratio per scale instead of one for each end of the range.
    """

    smallest_range: ClassVar[float] = 0.5
    """Smallest ratio of a scale to the initial one."""

    unit: Unit = Unit.BLOCK
    start: Start = Start.FEEDBACK
    iterations: NonNegativeInt = 15
    batch_size: PositiveInt = 8
    learning_rate: NonNegativeFloat = 0.0
    ranges: bool = True
    range_rate: NonNegativeFloat = 0.1

    @property
    def rate(self) -> float:
        """Learning rate; if the option is 0, 1 / steps, or 0.3 / steps if codes start from error feedback."""
        far = _FROM_FEEDBACK if self.start is Start.FEEDBACK else 1.0
        return self.learning_rate or far / max(1, self.iterations)

    @property
    def fits_scales(self) -> bool:
        """True if scales of weights are learned."""
        return self.ranges

    def optimizer(
        self, groups: list[dict[str, Any]]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return an optimizer for sign gradient descent, implemented as Adam without momentum, and its decay."""
        # The square of a gradient below `eps` is zero in float32; such a gradient causes no step.
        optimizer = torch.optim.Adam(groups, betas=(0.0, 0.0), eps=1e-20)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.iterations)

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> _SignRounding:
        """Return the weight with its offsets, and with ratios of adjustable scales."""
        return _SignRounding(grid, weight, start, self)


__all__ = ["AutoRound"]
