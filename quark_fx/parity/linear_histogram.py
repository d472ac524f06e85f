"""Linear histogram of other tools: the first batch fixes the width of the bins, later batches add bins of that width.

The result depends on which batch comes first, so two histograms merge only if they happen to have the same bins. This
module exists to reproduce the numbers of ONNX Runtime, ModelOpt, and Quark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quark_fx.observers.grids import register_grid
from quark_fx.observers.histogram import Bins
from quark_fx.parity.percentile import left_edges

CAPACITY = 16
"""Largest number of bins, as a multiple of the initial number."""

SPANS = {
    "onnxruntime": "[-max|x|, max|x|]: ONNX Runtime's entropy and asymmetric percentile",
    "onnxruntime_absolute": "[min|x|, max|x|]: ONNX Runtime's symmetric percentile, ModelOpt's NumPy histogram",
    "modelopt": "[0, max|x|]: ModelOpt",
    "quark": "[min x, max x]: Quark for PyTorch, and the binned MinMSE of Quark for ONNX",
}


class LinearHistogram(NamedTuple):
    """Counts in bins of equal width, one row per channel.

    Bin `i` counts `edges[i] <= x < edges[i + 1]`; the last bin includes its right edge, like in `numpy.histogram`.

    Attributes:
        counts: Count per bin, int64, `(channels, room)`.
        edges: Edges of the bins, float32, `(channels, room + 1)`; infinite after index `size`.
        size: Number of bins in use, int64, `(channels,)`; more than `room` if the data needs more bins than allowed.
        low: Exact minimum, float32, `(channels,)`; NaN or infinite if the data contains such a value.
        high: Exact maximum, float32, `(channels,)`; NaN or infinite if the data contains such a value.
    """

    counts: Tensor
    edges: Tensor
    size: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor, span: str, bins: int, *, skip_zeros: bool = False) -> LinearHistogram:
        """Count `x`, shape `(channels, values)`, in `bins` new bins; `span` is a key of `SPANS`."""
        low, high = x.amin(1).float(), x.amax(1).float()
        values = _values(x, span)
        first, last = _limits(values, span)
        if skip_zeros and span in ("onnxruntime_absolute", "quark"):  # these spans begin at the smallest value
            first, last = _limits_without_zeros(values)
        size = torch.full_like(first, bins, dtype=torch.int64)
        point = first == last
        first = torch.where(point & (span != "modelopt"), first - 0.5, first)
        last = torch.where(point, last + (1.0 if span == "modelopt" else 0.5), last)
        edges = _linspace(first, last, size, bins)
        return cls(_count(values, edges, size, skip_zeros), edges, size, low, high)

    def extend(self, x: Tensor, span: str, bins: int, *, skip_zeros: bool = False) -> LinearHistogram:
        """Return a histogram that also counts `x`, shape `(channels, values)`; never synchronizes the device."""
        values = _values(x, span)
        room = CAPACITY * bins
        edges = torch.nn.functional.pad(self.edges, (0, room + 1 - self.edges.shape[1]), value=torch.inf)
        counts = torch.nn.functional.pad(self.counts, (0, room - self.counts.shape[1]))
        edges, size, added = _grow(edges, self.size, values, span, (self.low == 0) & (self.high == 0))
        steps = torch.arange(room, device=x.device) + added[:, None]
        moved = torch.zeros_like(counts).scatter_add_(1, steps.clamp(max=room - 1), counts)
        low = torch.minimum(self.low, x.amin(1).float())
        high = torch.maximum(self.high, x.amax(1).float())
        return LinearHistogram(moved + _count(values, edges, size, skip_zeros), edges, size, low, high)

    def merge(self, other: LinearHistogram) -> LinearHistogram:
        """Return the histogram of the data of both histograms.

        Raises:
            ValueError: If the histograms have different bins, because their first batches differed.
        """
        if not (torch.equal(self.size, other.size) and torch.equal(self._used(), other._used())):
            raise ValueError(
                "two linear histograms whose first batches differed have different bins and cannot be merged: "
                'use grid="dyadic", or observe all data with one observer'
            )
        wide, narrow = sorted((self, other), key=lambda part: part.counts.shape[1], reverse=True)
        extra = wide.counts.shape[1] - narrow.counts.shape[1]
        return wide._replace(
            counts=wide.counts + torch.nn.functional.pad(narrow.counts, (0, extra)),
            low=torch.minimum(self.low, other.low),
            high=torch.maximum(self.high, other.high),
        )

    def bins(self) -> Bins:
        """Return edges and counts; rows with fewer bins are padded with empty bins of the same width.

        Raises:
            ValueError: If the data needs more bins than allowed.
        """
        count = int(self.size.max())
        if count > self.counts.shape[1]:
            raise ValueError(
                f"the data needs {count} bins of the first batch's width, but the limit is {self.counts.shape[1]}: "
                'use grid="dyadic", or a representative first batch'
            )
        edges = self.edges[:, : count + 1].double()
        last = edges.gather(1, self.size[:, None])
        width = (last - edges[:, :1]) / self.size[:, None]
        beyond = torch.arange(count + 1, device=edges.device) - self.size[:, None]
        return Bins(torch.where(beyond > 0, last + beyond * width, edges), self.counts[:, :count].double())

    def _used(self) -> Tensor:
        count = min(int(self.size.max()), self.counts.shape[1])
        return self.edges[:, : count + 1]


def _values(x: Tensor, span: str) -> Tensor:
    return (x.abs() if PeerGrid(span).absolute else x).float()


def _limits(values: Tensor, span: str) -> tuple[Tensor, Tensor]:
    low, high = values.amin(1).nan_to_num(), values.amax(1).nan_to_num()
    if span == "onnxruntime":
        high = torch.maximum(-low, high)
        low = -high
    elif span == "modelopt":
        low = torch.zeros_like(high)
    return low, high


def _limits_without_zeros(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest nonzero value per row; 0 and 1 for a row of zeros, like `numpy.histogram`."""
    low = torch.where(values == 0, torch.inf, values).amin(1)
    high = torch.where(values == 0, -torch.inf, values).amax(1)
    none = low > high
    return torch.where(none, 0.0, low.nan_to_num()), torch.where(none, 1.0, high.nan_to_num())


def _linspace(first: Tensor, last: Tensor, size: Tensor, room: int) -> Tensor:
    """Compute `numpy.linspace` in float32 for each row; values after the `size`-th step are infinite."""
    steps = torch.arange(room + 1, device=first.device)
    edges = steps.float() * ((last - first) / size)[:, None] + first[:, None]
    edges = torch.where(steps == size[:, None], last[:, None], edges)
    return torch.where(steps > size[:, None], torch.inf, edges)


def _grow(edges: Tensor, size: Tensor, values: Tensor, span: str, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Extend the bins to cover `values`; return the edges, the sizes, and the number of bins added on the left.

    `zeros` marks rows that have only seen zeros. Their range is a single point, which ONNX Runtime and ModelOpt
    replace.
    """
    room = edges.shape[1] - 1
    low, high = _limits(values, span)
    first, last = edges[:, 0], edges.gather(1, size[:, None].clamp(max=room))[:, 0]
    steps = torch.arange(room + 1, device=edges.device)
    none = torch.zeros_like(size)
    if span == "onnxruntime_absolute":
        width = edges[:, 1] - first
        more = torch.where(high > last, _whole(((high + width) - (last + width)) / width), none)
        start = last + width
        delta = (start + width) - start
        added = steps - size[:, None] - 1
        edges = torch.where(added >= 0, start[:, None] + added.float() * delta[:, None], edges)
        size = size + more
        return torch.where(steps > size[:, None], torch.inf, edges), size, none
    if span == "onnxruntime":
        stride = 2 * last / size
        half = torch.where(high > last, _whole(torch.floor_divide(high - last, stride) + 1), none)
        half = torch.where(zeros, none, half)
        reach = torch.where(half > 0, half.float() * stride + last, last)
        reach = torch.where(zeros & (high > 0), high, reach)
        return _linspace(-reach, reach, size + 2 * half, room), size + 2 * half, half
    width = (last - first) / size
    below = torch.where(low < first, _whole((first - low) / width), none)
    above = torch.where(high > last, _whole((high - last) / width), none)
    if span == "modelopt":
        fresh = zeros & (high > 0)
        below, above = none, torch.where(fresh, none, above)
        last = torch.where(fresh, high, last)
        width = torch.where(fresh, high / size, width)
    size = size + below + above
    return _linspace(first - below * width, last + above * width, size, room), size, below


def _whole(ratio: Tensor) -> Tensor:
    # The bound is far above the capacity, but sums of such counts still fit in int64.
    return ratio.double().nan_to_num().clamp(0, 1 << 40).ceil().long()


def _count(values: Tensor, edges: Tensor, size: Tensor, skip_zeros: bool) -> Tensor:
    room = edges.shape[1] - 1
    index = torch.searchsorted(edges, values.contiguous(), right=True) - 1
    last = edges.gather(1, size[:, None].clamp(max=room))
    index = torch.where(values == last, size[:, None] - 1, index)
    outside = (index < 0) | (index >= size[:, None].clamp(max=room))
    if skip_zeros:
        outside |= values == 0
    index = torch.where(outside, room, index)
    counts = torch.zeros(len(edges), room + 1, dtype=torch.int64, device=edges.device)
    return counts.scatter_add_(1, index, torch.ones_like(index))[:, :room]


@dataclass(frozen=True)
class PeerGrid:
    """A grid whose bins depend on the first batch.

    Attributes:
        span: Key of `SPANS`.
    """

    span: str

    @property
    def exact(self) -> bool:
        """False, because the bins depend on the first batch."""
        return False

    @property
    def centered(self) -> bool:
        """True if the middle of the grid is zero."""
        return self.span == "onnxruntime"

    def ends(self, bins: Bins, percentile: float) -> tuple[Tensor, Tensor]:
        """Return the ends, `(channels,)`, of the range at a percentile; both are left edges of bins."""
        return left_edges(bins, percentile, absolute=self.absolute)

    @property
    def absolute(self) -> bool:
        """True if the grid counts magnitudes, not signed values."""
        return self.span in ("modelopt", "onnxruntime_absolute")

    def count(self, before: Any, x: Tensor, bins: int, *, skip_zeros: bool) -> LinearHistogram:
        """Return a histogram that also counts `x`; a new one if `before` is not a `LinearHistogram`."""
        count = before.extend if isinstance(before, LinearHistogram) else LinearHistogram.of
        return count(x, self.span, bins, skip_zeros=skip_zeros)

    def bins(self, histogram: LinearHistogram, *, absolute: bool) -> Bins:
        """Return the bins of a histogram on this grid.

        Raises:
            ValueError: If magnitudes are requested from a grid of signed values.
        """
        if absolute and not self.absolute:
            raise ValueError(f'the grid "{self.span}" holds signed values, not magnitudes: use "dyadic" or "modelopt"')
        return histogram.bins()


for _span in SPANS:
    register_grid(_span, PeerGrid(_span))
