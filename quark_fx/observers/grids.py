"""Grids of histogram bins: the dyadic grid, and those that `register_grid` adds."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from quark_fx.observers.histogram import Bins, Histogram
from quark_fx.system.registry import Registry


class Grid(Protocol):
    """Interface of a grid: counts values, and returns their bins."""

    @property
    def absolute(self) -> bool:
        """True if it holds only magnitudes."""
        ...

    @property
    def exact(self) -> bool:
        """True if its bins depend on the values alone, and not on their order."""
        ...

    @property
    def centered(self) -> bool:
        """True if its middle is zero."""
        ...

    def ends(self, bins: Bins, percentile: float) -> tuple[Tensor, Tensor] | None:
        """Return the ends, `(channels,)`, of a range at a percentile; `None`: the range is that of `Percentile`."""
        ...

    def count(self, before: Any, x: Tensor, bins: int, *, skip_zeros: bool) -> Any:
        """Return the histogram `before` (`None` at the start) plus the counts of `x`, shape `(channels, values)`."""
        ...

    def bins(self, histogram: Any, *, absolute: bool) -> Bins:
        """Return the bins of the values, or of their magnitudes; raises `ValueError` if there are none."""
        ...


class Dyadic:
    """Bins of a power-of-two width: exact merge, any order of batches."""

    absolute, exact, centered = False, True, True

    def ends(self, bins: Bins, percentile: float) -> None:
        """Return `None`."""

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
