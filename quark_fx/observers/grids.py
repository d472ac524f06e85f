"""Grids of histogram bins: the dyadic grid, and the grids of other tools."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from quark_fx.observers.histogram import Bins, Histogram
from quark_fx.observers.peers.linear_histogram import SPANS, PeerGrid


class Grid(Protocol):
    """Interface of a grid: counts values, and returns their bins."""

    @property
    def absolute(self) -> bool:
        """True if it holds only magnitudes."""
        ...

    def count(self, before: Any, x: Tensor, bins: int, *, skip_zeros: bool) -> Any:
        """Return the histogram `before` (`None` at the start) plus the counts of `x`, shape `(channels, values)`."""
        ...

    def bins(self, histogram: Any, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes; raises `ValueError` if there are none."""
        ...


class Dyadic:
    """Bins of a power-of-two width: exact merge, any order of batches."""

    absolute = False

    def count(self, before: Histogram | None, x: Tensor, bins: int, *, skip_zeros: bool) -> Histogram:
        """Return the histogram that also counts `x`."""
        if before is None:
            return Histogram.of(x, bins, skip_zeros=skip_zeros)
        return before.merge(Histogram.of(x, bins, skip_zeros=skip_zeros, coarse=before.exponent))

    def bins(self, histogram: Histogram, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes."""
        return histogram.bins(absolute=absolute)


GRIDS: dict[str, Grid] = {"dyadic": Dyadic(), **{span: PeerGrid(span) for span in SPANS}}
"""Every grid by its name in configurations."""
