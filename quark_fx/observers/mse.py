"""Ranges with the smallest squared quantization error, estimated on a histogram."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.observers.base import observer
from quark_fx.observers.constant import smallest_error_qparams
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.histogram import Bins
from quark_fx.observers.reading import HistogramObserver
from quark_fx.observers.squared_error import best_range
from quark_fx.system.options import NonNegativeInt, PositiveInt


@observer
@dataclass(frozen=True, kw_only=True)
class Mse(HistogramObserver):
    """Clipping thresholds with the smallest mean squared error.

    Every `stride`-th bin from `start_bin` on gives a candidate: its outer edge on the dyadic grid, which also has the
    exact extreme as a candidate, or its center on a grid of another tool. A symmetric scheme tries all candidates for
    both ends at once. An asymmetric scheme first shrinks the whole range, then tries every candidate for the upper end,
    then every candidate for the lower end.

    Raises:
        ConfigError: If `stride` is not positive, or `start_bin` is not below `bins`.

    Source:
        ModelOpt `compute_amax("mse")` as intended; Quark `PerTensorMSEObserver` as intended.
    """

    stride: PositiveInt = 1
    start_bin: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_bin >= self.bins:
            raise ConfigError(f"start_bin={self.start_bin} must be less than bins={self.bins}")

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

    def of_constant(self, x: Tensor, scheme: Scheme) -> QParams:
        """Measure the error instead of estimating it on a histogram, if all options have their defaults."""
        return smallest_error_qparams(x, scheme) if self == Mse() else super().of_constant(x, scheme)

    def _candidates(self, bins: Bins, low: Tensor, high: Tensor) -> Tensor:
        largest = torch.maximum(-low, high)[:, None]
        if GRIDS[self.grid].exact:
            outer = bins.edges[:, self.bins + 1 :][:, self.start_bin :: self.stride]
            return torch.cat((torch.minimum(outer, largest), largest), dim=1)
        positive = bins.centers.shape[1] // 2 if GRIDS[self.grid].centered else 0
        centers = bins.centers[:, positive:][:, self.start_bin :: self.stride]
        return torch.where(centers > 0, torch.minimum(centers, largest), largest)


@observer
@dataclass(frozen=True, kw_only=True)
class HistogramL2(HistogramObserver):
    """Pair of clipping thresholds with the smallest squared error, of all pairs of a coarse grid.

    Each end is tried at `candidates` evenly spaced fractions of its extreme, in every combination (for a symmetric
    scheme, both ends at the same fraction), so that outliers on both sides are found together.

    Raises:
        ConfigError: If `candidates` is not positive.

    Source:
        `torch.ao.quantization.HistogramObserver`, with the minimum over all pairs instead of its greedy walk.
    """

    candidates: PositiveInt = 64

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        bins = self.collected()
        share = torch.arange(1, self.candidates + 1, device=low.device).double() / self.candidates
        if scheme.symmetric or self.absolute:
            tried = torch.maximum(-low, high)[:, None] * share
            return best_range(bins, -tried, tried, scheme)
        below, above = torch.cartesian_prod(share, share).unbind(1)
        low, high = low.clamp(max=0)[:, None] * below, high.clamp(min=0)[:, None] * above
        return best_range(bins, low, high, scheme)
