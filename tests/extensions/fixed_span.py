"""A grid of one file: histogram bins over a span that is known before calibration.

Importing this file registers it: `Percentile(grid="span_8")`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.observers.grids import register_grid
from quark_fx.observers.histogram import Bins


@dataclass(frozen=True)
class Counts:
    """Counts of each row, `(channels, n)`, and the exact extremes, `(channels,)`, that every histogram has."""

    counts: Tensor
    low: Tensor
    high: Tensor

    def merge(self, other: Counts) -> Counts:
        """Return the histogram of the values of both."""
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return Counts(self.counts + other.counts, low, high)


@dataclass(frozen=True)
class Span:
    """Bins of equal width from `-limit` to `limit`; the first and the last bin also count the values beyond."""

    limit: float
    absolute, exact, centered = False, True, True

    def ends(self, bins: Bins, percentile: float) -> None:
        """Return `None`: `Percentile` finds the range."""

    def count(self, before: Counts | None, x: Tensor, bins: int, *, skip_zeros: bool) -> Counts:
        """Return the histogram that also counts `x`, shape `(channels, values)`."""
        index = (x.nan_to_num().div(self.limit).add(1) * bins).clamp(0, 2 * bins - 1).long()
        ones = (x != 0).long() if skip_zeros else torch.ones_like(index)
        counts = ones.new_zeros(len(x), 2 * bins).scatter_add_(1, index, ones)
        new = Counts(counts, x.amin(1), x.amax(1))
        return new if before is None else before.merge(new)

    def bins(self, histogram: Counts, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes."""
        counts = histogram.counts.double()
        half = counts.shape[1] // 2
        edges = torch.linspace(-self.limit, self.limit, 2 * half + 1, dtype=torch.float64).expand(len(counts), -1)
        return Bins(edges[:, half:], counts[:, half:] + counts[:, :half].flip(1)) if absolute else Bins(edges, counts)


register_grid("span_8", Span(8.0))
