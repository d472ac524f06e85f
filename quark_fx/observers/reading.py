"""Base class of observers that compute ranges from a histogram, clipped to the exact extremes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import Observer, finite_range, state
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.histogram import Bins
from quark_fx.system.options import Interval


@dataclass(frozen=True, kw_only=True)
class HistogramObserver(Observer):
    """Observer that computes its range from a histogram; observers with the same histogram options can share it.

    Args:
        bins: Number of bins on each side of zero for the dyadic grid (a power of two), or over the first batch's span
            for the grids of other tools.
        grid: Name of the grid: `"dyadic"` (bins of a power-of-two width: exact merge, any order of batches), or the
            grid of another tool (`quark_fx.parity.SPANS`).
        skip_zeros: Whether to leave exact zeros out of the histogram.

    Raises:
        ConfigError: For an unknown grid, or a number of bins that the grid does not support.
    """

    bins: Annotated[int, Interval("[2, inf)")] = 2048
    grid: str = "dyadic"
    skip_zeros: bool = False
    histogram: Any = state()
    """Histogram of the grid."""

    def __post_init__(self) -> None:
        if self.grid not in GRIDS:
            raise GRIDS.unknown(self.grid)
        if self.grid == "dyadic" and self.bins & (self.bins - 1):
            raise ConfigError(f"the number of bins of a dyadic grid must be a power of two, not {self.bins}")

    def observe(self, x: Tensor) -> Self:
        if x.numel() == 0:
            return self
        histogram = GRIDS[self.grid].count(self.histogram, x, self.bins, skip_zeros=self.skip_zeros)
        return replace(self, histogram=histogram)

    def merge(self, other: Self) -> Self:
        if self.histogram is None:
            return other
        if other.histogram is None:
            return self
        return replace(self, histogram=self.histogram.merge(other.histogram))

    def reading(self, seen: Observer) -> Self | None:
        """Return this observer with the histogram of `seen`, or `None` if that histogram has other bins."""
        if not (isinstance(seen, HistogramObserver) and self.counts_as_all and seen.counts_as_all):
            return super().reading(seen)
        same = (self.bins, self.grid, self.skip_zeros) == (seen.bins, seen.grid, seen.skip_zeros)
        return replace(self, histogram=seen.histogram) if same else None

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        histogram = self.histogram
        low, high = finite_range(*((None, None) if histogram is None else (histogram.low, histogram.high)))
        threshold_low, threshold_high = self.read(low.double(), high.double(), scheme)
        low, high = torch.maximum(threshold_low.float(), low), torch.minimum(threshold_high.float(), high)
        # Thresholds can cross if all values are in one bin. Since the range also contains zero, the upper threshold
        # decides for positive values, the lower for others.
        crossed = low > high
        return torch.where(crossed & (low > 0), high, low), torch.where(crossed & (low <= 0), low, high)

    @abstractmethod
    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Return the range that the histogram suggests; `low` and `high` are the exact extremes, `(channels,)`."""

    @property
    def counts_as_all(self) -> bool:
        """True if the class does not override how values are counted."""
        return type(self).observe is HistogramObserver.observe

    @property
    def absolute(self) -> bool:
        """True if the grid holds only magnitudes."""
        return GRIDS[self.grid].absolute

    def collected(self, *, absolute: bool = False) -> Bins:
        """Return the bins of the values, or of their magnitudes.

        Raises:
            ValueError: If nothing was observed, or magnitudes are requested from another tool's grid of signed values.
        """
        if self.histogram is None:
            raise ValueError("nothing was observed")
        return GRIDS[self.grid].bins(self.histogram, absolute=absolute)
