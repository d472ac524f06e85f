"""Grids of histogram bins: the dyadic grid, and grids that `register_grid` adds."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from quark_fx.observers.histogram import Bins, Histogram
from quark_fx.system.registry import Registry


class Grid(Protocol):
    """Interface of a grid, which counts values and returns their bins."""

    @property
    def absolute(self) -> bool:
        """True if the grid holds only magnitudes."""
        ...

    @property
    def exact(self) -> bool:
        """True if the bins depend only on the values, not on their order."""
        ...

    @property
    def centered(self) -> bool:
        """True if zero is in the middle of the grid."""
        ...

    def ends(self, bins: Bins, percentile: float) -> tuple[Tensor, Tensor] | None:
        """Return the ends, `(channels,)`, of the range at a percentile, or `None` to let `Percentile` find them."""
        ...

    def count(self, before: Any, x: Tensor, bins: int, *, skip_zeros: bool) -> Any:
        """Return the histogram `before` (`None` at the start) plus the counts of `x`, shape `(channels, values)`."""
        ...

    def bins(self, histogram: Any, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes; raise `ValueError` if the grid cannot provide them."""
        ...


class Dyadic:
    """Grid whose bins have a power-of-two width: merging is exact, in any order of batches."""

    absolute, exact, centered = False, True, True

    def ends(self, bins: Bins, percentile: float) -> None:
        """Return `None`: `Percentile` finds the ends."""

    def count(self, before: Histogram | None, x: Tensor, bins: int, *, skip_zeros: bool) -> Histogram:
        """Return the histogram that also counts `x`."""
        if before is None:
            return Histogram.of(x, bins, skip_zeros=skip_zeros)
        return before.merge(Histogram.of(x, bins, skip_zeros=skip_zeros, coarse=before.exponent))

    def bins(self, histogram: Histogram, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes."""
        return histogram.bins(absolute=absolute)


GRIDS: Registry[Grid, Grid] = Registry("grid")
"""Every grid by its name in configurations."""
_add = GRIDS.add


def register_grid(name: str, grid: Grid) -> None:
    """Register a grid; raises `ConfigError` if another module has registered that name."""
    _add(grid, name, depth=2)


register_grid("dyadic", Dyadic())
