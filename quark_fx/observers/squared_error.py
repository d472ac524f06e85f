"""Squared error of quantizing a histogram, for all candidate ranges at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.observers.histogram import Bins

_AT_ONCE = 1 << 20
"""Largest number of cells (candidates times levels times channels) that are in memory together."""


def best_range(bins: Bins, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return, for each row, the first pair of ends with the smallest squared error.

    Args:
        bins: Bins, `(channels, n)`; the values in a bin count as its center.
        low: Candidates for the lower end, `(channels, k)` or `(channels, 1)`.
        high: Candidates for the upper end, of the same shapes.
        scheme: Scheme of the quantized values.

    Returns:
        Lower and upper end, `(channels,)` each.
    """
    count = max(low.shape[1], high.shape[1])
    low, high = low.expand(-1, count), high.expand(-1, count)
    moments = Moments.of(bins)
    step = max(1, _AT_ONCE // (len(low) * _level_count(scheme)))
    pieces = [
        squared_error(moments, affine_qparams(some_low, some_high, scheme), scheme)
        for some_low, some_high in zip(torch.split(low, step, 1), torch.split(high, step, 1), strict=True)
    ]
    best = torch.cat(pieces, dim=1).argmin(1, keepdim=True)
    return low.gather(1, best)[:, 0], high.gather(1, best)[:, 0]


class Moments(NamedTuple):
    """Prefix sums over bins of equal width, float64, `(channels, n + 1)`, and the grid's start and width."""

    zeroth: Tensor
    first: Tensor
    second: Tensor
    start: Tensor
    width: Tensor

    @classmethod
    def of(cls, bins: Bins, sums: Tensor | None = None) -> Moments:
        """Sum up the bins; values count as the centers of their bins unless `sums` holds the sums per bin."""
        start, width = bins.edges[:, :1], (bins.edges[:, -1:] - bins.edges[:, :1]) / bins.counts.shape[1]
        if sums is None:
            first, second = bins.counts * bins.centers, bins.counts * bins.centers**2
        else:
            first, second = sums, sums**2 / bins.counts.clamp(min=1) + bins.counts * width**2 / 12
        count, first, second = (
            torch.nn.functional.pad(moment.cumsum(1), (1, 0)) for moment in (bins.counts, first, second)
        )
        return cls(count, first, second, start, width)


def squared_error(moments: Moments, qparams: QParams, scheme: Scheme) -> Tensor:
    """Return the summed squared error, `(channels, k)`, of quantizing with each of the `(channels, k)` parameters.

    Within the cell of one level `v` the sum of `(x - v)**2` is `sum x**2 - 2 v sum x + n v**2`: prefix sums at the
    borders between cells give it for every candidate without visiting the bins. If there are more levels than bins, the
    bins say nothing about rounding, and each value inside the range costs `scale**2 / 12`.
    """
    scale, zero_point = qparams.scale.double(), qparams.zero_point
    count, first, second, start, width = moments

    room = count.shape[1] - 1

    def below(edge: Tensor) -> Tensor:
        """Return the number of bins with a center below `edge`, `(channels, any)`."""
        return ((edge - start) / width).sub_(0.5).ceil_().clamp_(0, room).long()

    if _level_count(scheme) > room:
        bottom, top = scheme.clip_range(scale, zero_point)
        i, j = below(bottom), below(top)
        inside = (count.gather(1, j) - count.gather(1, i)) * scale**2 / 12
        under = second.gather(1, i) - 2 * bottom * first.gather(1, i) + bottom**2 * count.gather(1, i)
        n, s1, s2 = (table[:, -1:] - table.gather(1, j) for table in (count, first, second))
        return inside + under + s2 - 2 * top * s1 + top**2 * n
    levels = scheme.levels(scale.device)
    borders = ((levels[1:] + levels[:-1]) / 2 - zero_point[..., None]) * scale[..., None]
    cells = below(borders.flatten(1))
    # Sum by parts: passing the border m between two levels a gap apart changes the sum of v * (v * n - 2 * s) by
    # 2 * gap * (m * N - S), with N and S the count and sum of everything below m.
    passed = borders.mul_(_pick(count, cells).view_as(borders)).sub_(_pick(first, cells).view_as(borders))
    top = (levels[-1] - zero_point) * scale
    moved = top * (top * count[:, -1:] - 2 * first[:, -1:]) - 2 * scale * (passed @ levels.diff())
    return second[:, -1:] + moved  # added last, so that equal errors of power-of-two scales stay equal


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """Return `table.gather(1, index)`; for one row, several times faster."""
    return table[0].index_select(0, index[0])[None] if len(table) == 1 else table.gather(1, index)


def _level_count(scheme: Scheme) -> int:
    if not scheme.format.needs_scale:
        raise ValueError(f"{scheme.format} needs no range: observe it with a placeholder")
    computed = scheme.format.is_integer or scheme.format.is_float
    return 1 << scheme.format.bits if computed else len(scheme.format.levels())
