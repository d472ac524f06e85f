"""Ranges from extremes: the global minimum and maximum, their moving average, and no range at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import Observer, finite_range, observer, state
from quark_fx.observers.reading import HistogramObserver
from quark_fx.system.options import Interval


@observer
@dataclass(frozen=True)
class Placeholder(Observer):
    """Observer without statistics, for tensors that are cast to float16 or bfloat16."""

    def observe(self, x: Tensor) -> Self:
        return self

    def merge(self, other: Self) -> Self:
        return self

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        raise ValueError(
            f"Placeholder measures no range, but {scheme.format} needs one; choose another observer, such as MinMax"
        )


@observer
@dataclass(frozen=True)
class MinMax(Observer):
    """Smallest and largest observed value.

    The caller reshapes tensors for the granularity, so this class is the min-max observer per tensor, per channel, and
    per group.
    """

    low: Tensor | None = state()
    high: Tensor | None = state()

    def observe(self, x: Tensor) -> Self:
        if x.numel() == 0:
            return self
        # Two reductions: torch.aminmax over a dimension is not vectorized and takes 25 times as long on a CPU.
        return self.merge(replace(self, low=x.amin(1), high=x.amax(1)))

    def merge(self, other: Self) -> Self:
        if self.low is None or self.high is None:
            return other
        if other.low is None or other.high is None:
            return self
        return replace(self, low=torch.minimum(self.low, other.low), high=torch.maximum(self.high, other.high))

    def reading(self, seen: Observer) -> Self | None:
        """Return this observer with the extremes of a histogram on the dyadic grid, or of another `MinMax`."""
        if type(self).observe is not MinMax.observe:
            return super().reading(seen)
        if isinstance(seen, MinMax) and type(seen).observe is MinMax.observe:
            return replace(self, low=seen.low, high=seen.high)
        if not (isinstance(seen, HistogramObserver) and seen.grid == "dyadic" and seen.counts_as_all):
            return None
        extremes = seen.histogram
        return self if extremes is None else replace(self, low=extremes.low, high=extremes.high)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of each row; raises `ValueError` if nothing was observed."""
        if self.low is None or self.high is None:
            raise ValueError("nothing was observed")
        return self.low, self.high

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        return finite_range(self.low, self.high)


@observer
@dataclass(frozen=True)
class MovingAverage(Observer):
    """Exponential moving average of each batch's smallest and largest value.

    The average starts at the first batch's extremes; every later batch has weight `constant`. The average depends on
    the order of the batches, which `merge` preserves.

    Raises:
        ConfigError: If `constant` is not in (0, 1].
    """

    constant: Annotated[float, Interval("(0, 1]")] = 0.01
    first: Tensor | None = state()
    """Extremes of the first batch, shape `(2, channels)`."""
    rest: Tensor | None = state()
    """Weighted sum of the extremes of all later batches, same shape."""
    decay: Tensor | None = state()
    """Weight of `first` in the average, which is `decay * first + rest`; a scalar."""

    def observe(self, x: Tensor) -> Self:
        if x.numel() == 0:
            return self
        extremes = torch.stack((x.amin(1), x.amax(1))).float()
        return self.merge(replace(self, first=extremes, rest=torch.zeros_like(extremes), decay=extremes.new_ones(())))

    def merge(self, other: Self) -> Self:
        if self.first is None or self.rest is None or self.decay is None:
            return other
        if other.first is None or other.rest is None or other.decay is None:
            return self
        faded = (1 - self.constant) * other.decay
        rest = faded * self.rest + self.constant * other.decay * other.first + other.rest
        return replace(self, rest=rest, decay=self.decay * faded)

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        if self.first is None or self.rest is None or self.decay is None:
            return finite_range(None, None)
        low, high = self.decay * self.first + self.rest
        return finite_range(low, high)
