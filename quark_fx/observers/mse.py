"""Ranges with the smallest squared quantization error, estimated on a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.formats import FloatFormat, IntFormat
from quark_fx.observers.base import observer
from quark_fx.observers.histogram import Bins
from quark_fx.observers.reading import HistogramObserver
from quark_fx.qparams import QParams, Scheme, affine_qparams

_AT_ONCE = 1 << 20


@observer
@dataclass(frozen=True, kw_only=True)
class Mse(HistogramObserver):
    """The clipping thresholds with the smallest mean squared error.

    Every `stride`-th bin from `start_bin` on is a candidate: its outer edge on the dyadic grid, whose last one is
    the exact extreme, its centre on a peer's. A symmetric scheme tries them all. An asymmetric one first shrinks
    the whole range, then tries every candidate for the upper end, then every one for the lower.

    Raises:
        ConfigError: if `stride` is not positive or `start_bin` not below `bins`.

    Source:
        ModelOpt `compute_amax("mse")` as intended; Quark `PerTensorMSEObserver` as intended.
    """

    stride: int = 1
    start_bin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 1 or not 0 <= self.start_bin < self.bins:
            raise ConfigError(f"needs stride >= 1 and 0 <= start_bin < {self.bins}: {self.stride}, {self.start_bin}")

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        bins = self.collected(absolute=False)
        tried = self._candidates(bins, low, high)
        if scheme.symmetric or self.absolute:
            return best_range(bins, -tried, tried, scheme)
        share = tried / torch.maximum(-low, high).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        low, high = low.clamp(max=0)[:, None], high.clamp(min=0)[:, None]
        best_low, best_high = best_range(bins, low * share, high * share, scheme)
        if bool((low < 0).any()):
            best_low, best_high = best_range(bins, best_low[:, None], torch.minimum(tried, high), scheme)
            best_low, best_high = best_range(bins, torch.maximum(-tried, low), best_high[:, None], scheme)
        return best_low, best_high

    def _candidates(self, bins: Bins, low: Tensor, high: Tensor) -> Tensor:
        largest = torch.maximum(-low, high)[:, None]
        if self.grid == "dyadic":
            outer = bins.edges[:, self.bins + 1 :][:, self.start_bin :: self.stride]
            return torch.cat((torch.minimum(outer, largest), largest), dim=1)
        positive = bins.centres.shape[1] // 2 if self.grid == "onnxruntime" else 0
        centres = bins.centres[:, positive:][:, self.start_bin :: self.stride]
        return torch.where(centres > 0, torch.minimum(centres, largest), largest)


@observer
@dataclass(frozen=True, kw_only=True)
class HistogramL2(HistogramObserver):
    """The pair of clipping thresholds with the smallest squared error, of all pairs of a coarse grid.

    Both ends take each of `candidates` equal fractions of their extreme independently (a symmetric scheme: both the
    same one), so that outliers on both sides are found together.

    Raises:
        ConfigError: if `candidates` is not positive.

    Source:
        `torch.ao.quantization.HistogramObserver`, whose greedy walk this replaces by the minimum.
    """

    candidates: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 1:
            raise ConfigError(f"the search needs candidates, not {self.candidates}")

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        bins = self.collected()
        share = torch.arange(1, self.candidates + 1, device=low.device).double() / self.candidates
        if scheme.symmetric or self.absolute:
            tried = torch.maximum(-low, high)[:, None] * share
            return best_range(bins, -tried, tried, scheme)
        below, above = torch.cartesian_prod(share, share).unbind(1)
        low, high = low.clamp(max=0)[:, None] * below, high.clamp(min=0)[:, None] * above
        return best_range(bins, low, high, scheme)


def best_range(bins: Bins, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the first pair with the smallest squared error in each row.

    Args:
        bins: `(channels, n)` bins; each stands for its centre.
        low: candidates `(channels, k)` or `(channels, 1)`.
        high: candidates likewise.
        scheme: what they will be quantized to.

    Returns:
        Two tensors `(channels,)`.
    """
    shape = torch.broadcast_shapes(low.shape, high.shape)
    low, high = low.expand(shape), high.expand(shape)
    moments = Moments.of(bins)
    step = max(1, _AT_ONCE // (len(low) * _level_count(scheme)))
    pieces = [
        squared_error(moments, affine_qparams(some_low, some_high, scheme), scheme)
        for some_low, some_high in zip(torch.split(low, step, 1), torch.split(high, step, 1), strict=True)
    ]
    best = torch.cat(pieces, dim=1).argmin(1, keepdim=True)
    return low.gather(1, best)[:, 0], high.gather(1, best)[:, 0]


class Moments(NamedTuple):
    """Prefix sums over equally wide bins, float64, `(channels, n + 1)`, and where the bins lie, `(channels, 1)`."""

    zeroth: Tensor
    first: Tensor
    second: Tensor
    start: Tensor
    width: Tensor

    @classmethod
    def of(cls, bins: Bins, sums: Tensor | None = None) -> Moments:
        """Sum up the bins, each value standing at its bin's centre unless `sums` gives the values' sums."""
        start, width = bins.edges[:, :1], (bins.edges[:, -1:] - bins.edges[:, :1]) / bins.counts.shape[1]
        if sums is None:
            first, second = bins.counts * bins.centres, bins.counts * bins.centres**2
        else:
            first, second = sums, sums**2 / bins.counts.clamp(min=1) + bins.counts * width**2 / 12
        count, first, second = (
            torch.nn.functional.pad(moment.cumsum(1), (1, 0)) for moment in (bins.counts, first, second)
        )
        return cls(count, first, second, start, width)


def squared_error(moments: Moments, qparams: QParams, scheme: Scheme) -> Tensor:
    """Return the summed squared error, `(channels, k)`, of quantizing with each of the `(channels, k)` parameters.

    Within the cell of one level `v` the sum of `(x - v)**2` is `sum x**2 - 2 v sum x + n v**2`: prefix sums give every
    cell of every candidate without visiting its bins. Where the levels outnumber the bins, these say nothing about
    rounding, and each value inside the range costs `scale**2 / 12`.
    """
    scale, zero_point = qparams.scale.double(), qparams.zero_point
    count, first, second, start, width = moments

    room = count.shape[1] - 1

    def below(edge: Tensor) -> Tensor:
        """The number of bins whose centre lies below `edge`, `(channels, any)`."""
        return ((edge - start) / width - 0.5).ceil().clamp(0, room).long()

    if _level_count(scheme) > room:
        bottom, top = (scheme.qmin - zero_point) * scale, (scheme.qmax - zero_point) * scale
        i, j = below(bottom), below(top)
        inside = (count.gather(1, j) - count.gather(1, i)) * scale**2 / 12
        under = second.gather(1, i) - 2 * bottom * first.gather(1, i) + bottom**2 * count.gather(1, i)
        n, s1, s2 = (table[:, -1:] - table.gather(1, j) for table in (count, first, second))
        return inside + under + s2 - 2 * top * s1 + top**2 * n
    levels = (_levels(scheme, scale.device) - zero_point[..., None]) * scale[..., None]
    cells = below(((levels[..., 1:] + levels[..., :-1]) / 2).flatten(1))

    def per_cell(table: Tensor) -> Tensor:
        inner = table.gather(1, cells).view(*levels.shape[:2], -1)
        ends = table[:, None, -1:].expand(-1, levels.shape[1], 1)
        return torch.diff(inner, dim=2, prepend=torch.zeros_like(ends), append=ends)

    return second[:, -1:] + (levels * (levels * per_cell(count) - 2 * per_cell(first))).sum(2)


def _level_count(scheme: Scheme) -> int:
    return 1 << scheme.format.bits


def _levels(scheme: Scheme, device: torch.device) -> Tensor:
    """Return the values of all codes at scale 1 and zero point 0, increasing, float64."""
    if isinstance(scheme.format, IntFormat):
        return torch.arange(scheme.qmin, scheme.qmax + 1, device=device).double()
    assert isinstance(scheme.format, FloatFormat)
    if not scheme.format.needs_scale:
        raise ValueError(f"{scheme.format} needs no range: observe it with a placeholder")
    codes = torch.arange(1 << scheme.format.bits, dtype=torch.uint8).view(scheme.format.dtype).double()
    return torch.unique(codes[codes.isfinite()]).to(device)
