"""Ranges that leave out the rarest large values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import observer
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.histogram import Bins
from quark_fx.observers.reading import HistogramObserver


@observer
@dataclass(frozen=True, kw_only=True)
class Percentile(HistogramObserver):
    """Range that holds `percentile` percent of the values.

    A symmetric scheme takes the percentile of the magnitudes; an asymmetric scheme leaves out half of the remaining
    values on each side. On the dyadic grid, the range ends at the outer edge of the bin that reaches the percentile, so
    that 100 gives the range of `MinMax`. On a grid of another tool, it ends at the left edge of the bin, like in that
    tool, and the grid, not the scheme, decides between magnitudes and values.

    Raises:
        ConfigError: If `percentile` is not in (1, 100]: a fraction would clip nearly all values.

    Source:
        ONNX Runtime `HistogramCollector.compute_percentile`; ModelOpt `compute_amax("percentile")`.
    """

    percentile: float = 99.999

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.percentile <= 100:
            raise ConfigError(
                f"percentile={self.percentile} must be a percentage above 1 and at most 100: for example, 99.9 keeps "
                "all but a thousandth of the values"
            )

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        share = self.percentile / 100
        side = 1.0 - (100.0 - self.percentile) / 200.0
        ends = GRIDS[self.grid].ends(self.collected(), self.percentile)
        if ends is not None:
            return ends
        if scheme.symmetric:
            limit = outer_edge(self.collected(absolute=True), share)
            return -limit, limit
        bins = self.collected()
        mirrored = Bins(-bins.edges.flip(1), bins.counts.flip(1))
        return -outer_edge(mirrored, side), outer_edge(bins, side)


def outer_edge(bins: Bins, share: float) -> Tensor:
    """Return the smallest edge, `(channels,)`, below which at least `share` of each row's values lie."""
    below = bins.counts.cumsum(1)
    index = torch.searchsorted(below, share * below[:, -1:])
    return bins.edges.gather(1, index + 1)[:, 0]
