"""Percentiles at left edges of bins, as in ONNX Runtime (`HistogramCollector.compute_percentile`) and ModelOpt."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.observers.histogram import Bins


def left_edges(bins: Bins, percentile: float, *, absolute: bool) -> tuple[Tensor, Tensor]:
    """Return the ends, `(channels,)`, of the range that contains `percentile` percent of the values.

    Args:
        bins: Histogram of values, or of magnitudes.
        percentile: Percentage of the values inside the range.
        absolute: Whether `bins` count magnitudes; the range is then symmetric.
    """
    if absolute:
        limit = _left_edge(bins, percentile / 100)
        return -limit, limit
    return _left_edge(bins, (100.0 - percentile) / 200.0), _left_edge(bins, 1.0 - (100.0 - percentile) / 200.0)


def _left_edge(bins: Bins, share: float) -> Tensor:
    """Return the left edge, `(channels,)`, of the bin in which the cumulative fraction of counts reaches `share`."""
    cumulated = (bins.counts / bins.counts.sum(1, keepdim=True)).cumsum(1)
    index = torch.searchsorted(cumulated, torch.full_like(cumulated[:, :1], share))
    return bins.edges.gather(1, index)[:, 0]
