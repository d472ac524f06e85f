"""Ranges with which the quantized distribution diverges least from the observed distribution (Kullback-Leibler)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import observer
from quark_fx.observers.grids import GRIDS
from quark_fx.observers.histogram import Bins
from quark_fx.observers.reading import HistogramObserver
from quark_fx.system.options import PositiveInt
from quark_fx.system.registry import Registry


@observer
@dataclass(frozen=True, kw_only=True)
class Entropy(HistogramObserver):
    """Threshold at which clipping and merging bins lose the least information.

    Args:
        method: Key of `METHODS`: `"modelopt"` compares magnitudes; a method that compares signed values needs a grid
            with zero in its middle.
        quantized_bins: Number of bins of the quantized distribution; by default the format's number of codes on one
            side of zero (both sides for `"onnxruntime"`).
        stride: Number of bins between candidates.
        start_bin: Number of bins inside the first candidate, by default `quantized_bins`.

    ONNX Runtime's defaults, `bins=128, quantized_bins=128`, leave a single candidate, the range of `MinMax`.

    Raises:
        ConfigError: For an unknown method or a number out of range.

    Source:
        S. Migacz, 8-bit inference with TensorRT, GTC 2017; ModelOpt `compute_amax("entropy")`; ONNX Runtime
        `HistogramCollector.get_entropy_threshold`.
    """

    method: str = "modelopt"
    quantized_bins: PositiveInt | None = None
    stride: PositiveInt = 1
    start_bin: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise METHODS.unknown(self.method)
        grid, signed = GRIDS[self.grid], METHODS[self.method].signed
        if signed and not grid.centered:
            grids = " or ".join(f'"{name}"' for name, one in GRIDS.items() if one.centered)
            raise ConfigError(f'method "{self.method}" needs the grid {grids}, not {self.grid!r}')
        if not signed and not (grid.exact or grid.absolute):
            raise ConfigError(f'method "{self.method}" needs a grid that holds magnitudes, not {self.grid!r}')

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        signed = not scheme.format.signed and not scheme.symmetric
        levels = self.quantized_bins or 1 << (scheme.format.bits - (not signed))
        magnitudes = not METHODS[self.method].signed
        bins = self.collected(absolute=magnitudes)
        if not magnitudes and self.quantized_bins is None:
            levels = 1 << scheme.format.bits
        start = self.start_bin or (levels if magnitudes else levels // 2)
        available = bins.counts.shape[1] if magnitudes else bins.counts.shape[1] // 2
        if start > available:
            raise ValueError(
                f"{available} bins leave no candidate range from bin {start} on: raise bins or lower quantized_bins"
            )
        inside = torch.arange(start, available + 1, self.stride, device=low.device)
        ranges = [
            METHODS[self.method].threshold(Bins(edges[None], row[None]), levels, inside)
            for edges, row in zip(*bins, strict=True)
        ]
        lower, upper = zip(*ranges, strict=True)
        return torch.stack(lower), torch.stack(upper)


def modelopt_threshold(bins: Bins, levels: int, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(-threshold, threshold)`, scalars, for one row of magnitudes.

    Args:
        bins: Bins of one row.
        levels: Number of quantized bins.
        inside: Number of bins inside each candidate threshold, in increasing order.

    For a threshold with `n` bins inside, cell `c` starts at bin `ceil(c * n / levels)`. In a cell with count `A` and
    `N` non-empty bins, `sum p log q` over the bins is `A log(A / N)`, so prefix sums replace the loop over bins.
    """
    counts = bins.counts[0].clone()
    counts[0] = counts[1]
    filled = int(counts.nonzero().max()) + 1 if bool(counts.any()) else 0
    inside = inside[inside <= max(filled, int(inside[0]))]
    mass, full, information = (
        torch.nn.functional.pad(values.cumsum(0), (1, 0))
        for values in (counts, (counts > 0).double(), torch.xlogy(counts, counts))
    )
    starts = (torch.arange(levels + 1, device=counts.device) * inside[:, None] + levels - 1) // levels
    cell_mass, cell_full = mass[starts].diff(dim=1), full[starts].diff(dim=1)
    average = torch.where(cell_full > 0, cell_mass / cell_full, 1.0)
    total, last, tail = mass[-1], counts[inside - 1], mass[-1] - mass[inside]
    q_total = mass[inside]
    entropy_p = information[inside] - torch.xlogy(last, last) + torch.xlogy(last + tail, last + tail)
    last_average = average.gather(1, ((inside - 1) * levels // inside)[:, None])[:, 0]
    cross = torch.xlogy(cell_mass, average).sum(1) + tail * torch.where(last > 0, last_average, 1.0).log()
    divergence = (entropy_p - cross) / total - (total / q_total).log()
    divergence = torch.where((last == 0) & (tail > 0), torch.inf, divergence).nan_to_num(nan=torch.inf)
    best = len(divergence) - 1 - divergence.flip(0).argmin()
    threshold = bins.edges[0, inside[best]]
    return -threshold, threshold


class Method(NamedTuple):
    """Method by which `Entropy` chooses a range.

    Attributes:
        threshold: Function with the arguments of `modelopt_threshold` that returns both ends of the range, scalars.
        signed: Whether the method compares signed values instead of magnitudes.
    """

    threshold: Callable[[Bins, int, Tensor], tuple[Tensor, Tensor]]
    signed: bool


METHODS: Registry[Method, Method] = Registry("entropy method")
"""Every method by its name."""
METHODS.add(Method(modelopt_threshold, signed=False), "modelopt")
