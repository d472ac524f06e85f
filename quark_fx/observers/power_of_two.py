"""Power-of-two scales, from the extremes or with the smallest squared error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import parse_format
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry, affine_qparams, symmetric_qparams
from quark_fx.numbers.scales import FLOAT32, POWER_OF_TWO
from quark_fx.observers.base import Observer, finite_range, observer, state
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.histogram import Histogram, power_of_two
from quark_fx.observers.minmax import MinMax
from quark_fx.observers.squared_error import Moments, squared_error
from quark_fx.system.names import unknown
from quark_fx.system.options import Interval, NonNegativeInt


@observer
@dataclass(frozen=True)
class NonOverflow(MinMax):
    """Power-of-two scale for the smallest and largest observed value.

    Args:
        rounding: Direction of rounding in the log domain: `"ceil"` never overflows; `"nearest"`, which Quark's method
            of this name uses, overflows by up to sqrt(2).

    Raises:
        ConfigError: For an unknown rounding.
    """

    rounding: str = "ceil"

    def __post_init__(self) -> None:
        if self.rounding not in ("ceil", "nearest"):
            raise ConfigError(f'rounding must be "ceil" or "nearest", not {self.rounding!r}')

    def qparams(self, scheme: Scheme) -> QParams:
        low, high = self.range(scheme)
        if self.rounding == "ceil":
            return affine_qparams(low, high, replace(scheme, scale=POWER_OF_TWO))
        exponent, zero_point = nearest_exponent(low, high, scheme)
        return QParams(power_of_two(exponent), zero_point)


def nearest_exponent(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the exponent of the power of two nearest to the float scale, and the float scale's zero point (int32).

    The zero point is computed from the float scale; the widened minimum `(qmin - zp) * 2**exponent` leads to the same
    zero point.
    """
    scheme = replace(scheme, scale=FLOAT32)
    if scheme.symmetric:
        qparams = symmetric_qparams(torch.maximum(-low, high).clamp(min=0), scheme)
    else:
        qparams = affine_qparams(low, high, scheme)
    exponent = qparams.scale.double().log2().round().clamp(-126, 127)
    return exponent.to(torch.int32), qparams.zero_point


@observer
@dataclass(frozen=True, kw_only=True)
class PowerOfTwoMinMse(Observer):
    """Power-of-two scale with the smallest squared error.

    Candidates are `2**(e - offset)`, where `2**e` is the power nearest to the scale of the extremes; ties go to the
    larger scale. The zero point follows from the extremes. Sums for the error are stored per bin of a dyadic histogram.
    Rounding cells of a power-of-two scale end at edges of bins, so for integers of up to 8 bits the error is exact and
    memory does not grow with the data. Wider formats round within a bin; each value then counts `scale**2 / 12`.

    Args:
        mode: Values that the scale is chosen for. `"all"`: values of all batches together. `"most_common"`: the most
            frequent of the best scales per batch (ties go to the smaller scale), symmetric formats only.
            `"percentile"`: values up to the percentile of the magnitudes; for an asymmetric format, values between two
            percentiles that cut off equal parts on both sides.
        percentile: Percentile of mode `"percentile"`, resolved to a bin.
        offsets: Exponent offsets to try, in order; Quark for PyTorch uses `(-2, -1, 0, 1, 2)`.
        bins: 0 for the exact error; otherwise, the number of bins whose centers give the error (Quark 0.13 uses 2048).
            Symmetric formats only; the first batch fixes the grid.
        vote: Format for which the batches of `"most_common"` choose scales.
        vote_symmetry: Symmetry of the format `vote`, `"symmetric"` or `"symmetric_full"`.

    Raises:
        ConfigError: For an unknown mode, empty offsets, or `bins` with another mode than `"all"`.
    """

    mode: str = "all"
    percentile: Annotated[float, Interval("(0, 100]")] = 99.999
    offsets: tuple[Annotated[int, Interval("[-6, 6]")], ...] = (-1, 0, 1, 2, 3)
    bins: NonNegativeInt = 0
    vote: str = "int8"
    vote_symmetry: str = "symmetric"
    histogram: Any = state()
    votes: Tensor | None = state()
    """Counts of batches that chose `2**(column - 127)`, int64, `(channels, 256)`; column 0: non-finite batches."""

    def __post_init__(self) -> None:
        if self.mode not in (modes := ("all", "most_common", "percentile")):
            raise unknown("mode", self.mode, modes)
        if not self.offsets:
            raise ConfigError("offsets is empty; pass one or more integers, such as offsets=(0, 1)")
        for option, mode in (("percentile", "percentile"), ("vote", "most_common"), ("vote_symmetry", "most_common")):
            if self.mode != mode and getattr(self, option) != type(self).__dataclass_fields__[option].default:
                raise ConfigError(f"{option} applies only to mode={mode!r}, not to mode={self.mode!r}")
        if self.bins == 1 or (self.bins and self.mode != "all"):
            raise ConfigError(f'bins must be 0, or at least 2 in mode "all", not {self.bins} in mode {self.mode!r}')
        if not parse_format(self.vote).is_integer or self.vote_symmetry == Symmetry.ASYMMETRIC:
            raise ConfigError(f"vote must be a symmetric integer format, not {self.vote_symmetry} {self.vote}")

    def observe(self, x: Tensor) -> Self:
        if x.numel() == 0:
            return self
        if self.bins:
            return replace(self, histogram=GRIDS["quark"].count(self.histogram, x, self.bins, skip_zeros=False))
        # Bits of the bins: 9 from the range to the scale of an 8-bit format, 1 for rounding to nearest and half a cell.
        coarse = self.histogram.exponent if isinstance(self.histogram, Histogram) else None
        batch = Histogram.of(x, 1 << (10 + max(0, *self.offsets)), sums=True, coarse=coarse)
        if self.mode == "most_common":
            return self.merge(replace(self, votes=self._ballot(batch)))
        return self.merge(replace(self, histogram=batch))

    def merge(self, other: Self) -> Self:
        if self.votes is not None and other.votes is not None:
            return replace(self, votes=self.votes + other.votes)
        if self.histogram is not None and other.histogram is not None:
            return replace(self, histogram=self.histogram.merge(other.histogram))
        return other if self.histogram is None and self.votes is None else self

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        qparams = self.qparams(scheme)
        return scheme.clip_range(qparams.scale, qparams.zero_point)

    def qparams(self, scheme: Scheme) -> QParams:
        if self.votes is not None:
            return self._elected(self.votes, scheme)
        histogram = self.histogram
        if histogram is None:
            raise ValueError("nothing was observed")
        low, high = finite_range(histogram.low, histogram.high)
        if not scheme.format.is_integer:
            raise ValueError(f"a power-of-two search needs an integer format, not {scheme.format}")
        if not isinstance(histogram, Histogram):
            if not scheme.symmetric:
                raise ValueError("a binned power-of-two search is symmetric only: set bins=0 for an asymmetric format")
            exponent, zero_point = _search(Moments.of(histogram.bins()), low, high, scheme, self.offsets)
        else:
            bins, sums = histogram.bins(absolute=False), histogram.sums
            assert sums is not None
            if self.mode == "percentile":
                inside = self._inside_percentiles(histogram, scheme)
                bins, sums = bins._replace(counts=bins.counts * inside), sums * inside
                low, high = _outermost(bins.counts, sums)
            exponent, zero_point = _search(Moments.of(bins, sums), low, high, scheme, self.offsets)
        return QParams(power_of_two(exponent), zero_point)

    def _inside_percentiles(self, histogram: Histogram, scheme: Scheme) -> Tensor:
        """Return a mask of the bins inside the percentiles (as in `numpy.percentile`): of magnitudes, or per side."""
        bins = histogram.bins(absolute=False)
        if scheme.symmetric:
            magnitudes = histogram.bins(absolute=True)
            last = _bin_of(magnitudes.counts, self.percentile / 100, torch.floor)
            limit = magnitudes.edges.gather(1, last + 1)
            return bins.centers.abs() < limit
        cut = (100 - self.percentile) / 2
        first = _bin_of(bins.counts, cut / 100, torch.ceil)
        last = _bin_of(bins.counts, (100 - cut) / 100, torch.floor)
        places = torch.arange(bins.counts.shape[1], device=first.device)
        return (places >= torch.minimum(first, last)) & (places <= last)

    def _ballot(self, batch: Histogram) -> Tensor:
        scheme = Scheme(format=parse_format(self.vote), symmetry=Symmetry(self.vote_symmetry))
        low, high = batch.low.nan_to_num(), batch.high.nan_to_num()
        moments = Moments.of(batch.bins(absolute=False), batch.sums)
        exponent, _ = _search(moments, low, high, scheme, self.offsets)
        finite = torch.isfinite(batch.low) & torch.isfinite(batch.high)
        column = torch.where(finite, exponent.long() + 127, 0)[:, None]
        return torch.zeros(len(column), 256, dtype=torch.int64, device=column.device).scatter_(1, column, 1)

    def _elected(self, votes: Tensor, scheme: Scheme) -> QParams:
        if str(scheme.format) != self.vote or scheme.symmetry != self.vote_symmetry:
            raise ValueError(
                f"the batches voted for {self.vote_symmetry} {self.vote}, not {scheme.symmetry} {scheme.format}: "
                f'set vote="{scheme.format}" and vote_symmetry="{scheme.symmetry}"'
            )
        if bool((votes[:, 0] > 0).any()):
            raise ValueError("observed values are not finite")
        exponent = votes.argmax(1).to(torch.int32) - 127
        return QParams(power_of_two(exponent), torch.full_like(exponent, scheme.middle))


def _bin_of(counts: Tensor, share: float, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the bin, `(channels, 1)`, of the quantile `share`; `whole` rounds ranks."""
    below = counts.cumsum(1)
    rank = whole((below[:, -1:] - 1) * share)
    return torch.searchsorted(below, rank, right=True)


def _outermost(counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of the first and of the last bin that holds values, float32 `(channels,)`."""
    used, last = counts > 0, counts.shape[1] - 1
    ends = used.int().argmax(1, keepdim=True), last - used.flip(1).int().argmax(1, keepdim=True)
    low, high = ((sums.gather(1, end) / counts.gather(1, end))[:, 0].float() for end in ends)
    return low, high


def _search(
    moments: Moments, low: Tensor, high: Tensor, scheme: Scheme, offsets: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the best exponent and the zero point, int32 `(channels,)`; a symmetric search does not synchronize."""
    start, zero_point = nearest_exponent(low, high, scheme)
    tried = torch.stack([start - offset for offset in offsets], 1).clamp(-126, 127)
    qparams = QParams(power_of_two(tried), zero_point[:, None].expand_as(tried))
    best = squared_error(moments, qparams, scheme).argmin(1, keepdim=True)
    return tried.gather(1, best)[:, 0], zero_point
