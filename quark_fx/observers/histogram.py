"""Histogram that observers share, with bins whose width is a power of two.

The width is `2**exponent` with the smallest exponent at which all data fits. When the range grows, neighboring
bins join in pairs, which is exact: the histogram depends only on the values, not on their order, their batches, or the
machine that counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 17
"""Number of elements counted at a time on a CPU, so that bin numbers stay in the cache (measured: 1.5 ns each)."""

SMALLEST = -100
"""Base-2 logarithm of the smallest range that bins divide; much smaller values all fall next to zero, but the exact
extremes still differ from zero."""


class Histogram(NamedTuple):
    """Counts on a grid of `2 * bins` bins around zero, one row per channel.

    Bin `i` holds `(i - bins) * width <= x < (i - bins + 1) * width`, `width = 2**exponent`; a negative value so small
    that `x / width` underflows in float32 counts as zero.

    Attributes:
        counts: Counts per bin, int64, `(channels, 2 * bins)`.
        exponent: Base-2 logarithm of the width, int32, `(channels,)`.
        low: Exact minimum, float32, `(channels,)`; NaN or infinite if a value was.
        high: Exact maximum, with the same type and shape.
        sums: Sum of the values in each bin, float64, shape of `counts`; `None` unless requested.
    """

    counts: Tensor
    exponent: Tensor
    low: Tensor
    high: Tensor
    sums: Tensor | None = None

    @classmethod
    def of(
        cls, x: Tensor, bins: int, *, skip_zeros: bool = False, sums: bool = False, coarse: Tensor | None = None
    ) -> Histogram:
        """Count `x`, shape `(channels, values)`, without synchronizing its device.

        Args:
            x: Floating-point tensor.
            bins: Number of bins on each side of zero, a power of two.
            skip_zeros: Whether to leave exact zeros out.
            sums: Whether to also sum the values in each bin.
            coarse: Smallest exponents to use, shape `(channels,)`. The exponents of a histogram that the result will be
                merged with save work in `merge`, and do not change its result.
        """
        low, high = x.amin(1).float(), x.amax(1).float()
        largest = torch.maximum(-low, high).nan_to_num(posinf=torch.finfo(torch.float32).max)
        exponent = torch.frexp(largest.clamp(min=2.0 ** (SMALLEST - 1))).exponent - (bins.bit_length() - 1)
        exponent = exponent.to(torch.int32)
        if coarse is not None:
            exponent = torch.maximum(exponent, coarse)
        counts, total = _count(x, power_of_two(-exponent)[:, None], bins, sums)
        if skip_zeros:
            counts[:, bins] -= (x == 0).sum(1)
        return cls(counts, exponent, low, high, total)

    def merge(self, other: Histogram) -> Histogram:
        """Return the exact histogram of the data in both histograms; the order does not matter."""
        exponent = torch.maximum(self.exponent, other.exponent)
        sums = None
        if self.sums is not None and other.sums is not None:
            sums = _coarsen(self.sums, exponent - self.exponent) + _coarsen(other.sums, exponent - other.exponent)
        counts = _coarsen(self.counts, exponent - self.exponent) + _coarsen(other.counts, exponent - other.exponent)
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return Histogram(counts, exponent, low, high, sums)

    def bins(self, *, absolute: bool) -> Bins:
        """Return edges and counts of the values, or of their magnitudes."""
        half = self.counts.shape[1] // 2
        steps = torch.arange(0 if absolute else -half, half + 1, device=self.counts.device)
        edges = steps.double() * power_of_two(self.exponent).double()[:, None]
        counts = self.counts[:, half:] + self.counts[:, :half].flip(1) if absolute else self.counts
        return Bins(edges, counts.double())


class Bins(NamedTuple):
    """Bins of equal width per row, from which observers compute ranges.

    Attributes:
        edges: Edges of the bins, float64, `(channels, n + 1)`, increasing.
        counts: Counts per bin, float64, `(channels, n)`.
    """

    edges: Tensor
    counts: Tensor

    @property
    def centers(self) -> Tensor:
        return (self.edges[:, 1:] + self.edges[:, :-1]) / 2


def power_of_two(exponent: Tensor) -> Tensor:
    """Return `2**exponent` in float32, exact on every device, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def on_host(x: Tensor) -> bool:
    """Return whether a value of `x` can be read without synchronizing a device."""
    return x.is_cpu


def _count(x: Tensor, scale: Tensor, bins: int, sums: bool) -> tuple[Tensor, Tensor | None]:
    channels, values = x.shape
    counts = x.new_zeros(channels, 2 * bins, dtype=torch.int64)
    total = x.new_zeros(channels, 2 * bins, dtype=torch.float64) if sums else None
    if not on_host(x):
        # bincount reads its largest index back to the host; scatter_add_ does not.
        index = _index(x, scale, bins).long()
        counts.scatter_add_(1, index, torch.ones_like(index))
        if total is not None:
            total.scatter_add_(1, index, x.double())
        return counts, total
    rows = max(1, CHUNK // max(values, 2 * bins))
    for start in range(0, channels, rows):
        block = slice(start, start + rows)
        for piece in torch.split(x[block], CHUNK, dim=1):
            index = _index(piece, scale[block], bins)
            if len(index) > 1:
                index += torch.arange(0, len(index) * 2 * bins, 2 * bins, dtype=torch.int32)[:, None]
            flat, size = index.flatten(), len(index) * 2 * bins
            counts[block] += torch.bincount(flat, minlength=size).view(-1, 2 * bins)
            if total is not None:
                total[block].view(-1).scatter_add_(0, flat.long(), piece.double().flatten())
    return counts, total


def _index(x: Tensor, scale: Tensor, bins: int) -> Tensor:
    # NaN and infinity get any valid index, because `low` and `high` record them.
    return (x.float() * scale).floor_().int().add_(bins).clamp_(0, 2 * bins - 1)


def _coarsen(counts: Tensor, doublings: Tensor) -> Tensor:
    if on_host(counts) and not bool(doublings.any()):
        return counts
    half = counts.shape[1] // 2
    steps = torch.arange(-half, half, device=counts.device)
    index = (steps >> doublings[:, None].long().clamp(max=62)) + half
    return torch.zeros_like(counts).scatter_add_(1, index, counts)
