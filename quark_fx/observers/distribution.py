"""Scales that match the standard deviation of a tensor to the standard deviation of a float format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import Format
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.observers.base import finite_range, observer
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.reading import HistogramObserver
from quark_fx.system.names import unknown


@observer
@dataclass(frozen=True, kw_only=True)
class Distribution(HistogramObserver):
    """Scale at which data and float format have the same standard deviation; for floats of 4 to 8 bits.

    E4M3 then covers 4.5 standard deviations, and larger values saturate, which suits values around zero. A tensor with
    a single distinct value has zero deviation and gets the scale of `MinMax`.

    Args:
        scenario: Source of the deviation: `"same"` uses the values, `"p3"` their cube roots, which suits a format whose
            values are distributed like cubes of normal values.

    Raises:
        ConfigError: For an unknown scenario, or a grid that holds magnitudes only.

    Source:
        ONNX Runtime `HistogramCollector.compute_distribution` (`grid="onnxruntime"`) and `compute_scale_zp_float8`.
    """

    scenario: str = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scenario not in (scenarios := ("same", "p3")):
            raise unknown("scenario", self.scenario, scenarios)
        if self.absolute:
            raise ConfigError(
                f'the standard deviation depends on the signs of the values: use grid="dyadic", not {self.grid!r}'
            )

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        largest = self.qparams(scheme).scale * scheme.largest
        return -largest, largest

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        return self.range(scheme)

    def qparams(self, scheme: Scheme) -> QParams:
        histogram = self.histogram
        low, high = finite_range(*((None, None) if histogram is None else (histogram.low, histogram.high)))
        if scheme.format.is_integer or not scheme.format.needs_scale:
            raise ValueError(f"a distribution is fitted to floats of 4 to 8 bits, not to {scheme.format}")
        bins = self.collected()
        # As in the tool that the grid comes from, centers, roots, and squares are float32, and sums are not.
        values = bins.centers if GRIDS[self.grid].exact else bins.centers.float()
        if self.scenario == "p3":
            values = values.sign() * values.abs().pow(1 / 3)
        share = bins.counts / bins.counts.sum(1, keepdim=True)
        variance = (share * values.square()).sum(1) - (share * values).sum(1).square()
        deviation = variance.clamp(min=0).sqrt()
        ideal = deviation.float() / deviation_of(scheme.format)
        single = (low == high) | (deviation == 0)
        ideal = torch.where(single, torch.maximum(-low, high) / scheme.largest, ideal)
        scale = scheme.scale.nearest(ideal.double())
        return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))


@cache
def deviation_of(fmt: Format) -> float:
    """Return the standard deviation of all finite codes of a format, with both zeros counted.

    >>> from quark_fx.numbers.formats import FP8_E4M3
    >>> round(deviation_of(FP8_E4M3), 4)
    100.0577
    """
    levels = fmt.levels()
    return float((levels.square().sum() / (len(levels) + 1)).sqrt())
