"""Ranges after which the quantized distribution differs least from the observed one (Kullback-Leibler)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import IntFormat
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import observer
from quark_fx.observers.histogram import Bins
from quark_fx.observers.reading import HistogramObserver
from quark_fx.system.options import PositiveInt


@observer
@dataclass(frozen=True, kw_only=True)
class Entropy(HistogramObserver):
    """The threshold at which clipping and merging bins lose the least information.

    Args:
        method: `"modelopt"` compares magnitudes; `"onnxruntime"` compares signed values and needs the signed grid
            `"dyadic"` or `"onnxruntime"`.
        quantized_bins: how many bins the quantized distribution has; by default the format's number of codes on one
            side of zero (both sides for `"onnxruntime"`).
        stride: every how many bins a candidate lies.
        start_bin: number of bins inside the first candidate, by default `quantized_bins`.

    ONNX Runtime's own defaults, `bins=128, quantized_bins=128`, have a single candidate, which is `MinMax`.

    Raises:
        ConfigError: for an unknown method or a number out of range.

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
        if self.method not in ("modelopt", "onnxruntime"):
            raise ConfigError(f"unknown entropy method {self.method!r}; choose one of modelopt, onnxruntime")
        if self.method == "onnxruntime" and self.grid not in ("dyadic", "onnxruntime"):
            raise ConfigError(f'method "onnxruntime" needs the grid "dyadic" or "onnxruntime", not {self.grid!r}')
        if self.method == "modelopt" and self.grid in ("onnxruntime", "quark"):
            raise ConfigError(f'method "modelopt" needs a grid that holds magnitudes, not {self.grid!r}')

    def read(self, low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        signed = isinstance(scheme.format, IntFormat) and not scheme.format.signed and not scheme.symmetric
        levels = self.quantized_bins or 1 << (scheme.format.bits - (not signed))
        magnitudes = self.method == "modelopt"
        bins = self.collected(absolute=magnitudes)
        if not magnitudes and self.quantized_bins is None:
            levels = 1 << scheme.format.bits
        start = self.start_bin or (levels if magnitudes else levels // 2)
        available = bins.counts.shape[1] if magnitudes else bins.counts.shape[1] // 2
        if start > available:
            raise ValueError(
                f"{available} bins leave no candidate from bin {start} on: raise bins or lower quantized_bins"
            )
        inside = torch.arange(start, available + 1, self.stride, device=low.device)
        read = modelopt_threshold if magnitudes else onnxruntime_threshold
        found = [read(Bins(edges[None], row[None]), levels, inside) for edges, row in zip(*bins, strict=True)]
        lower, upper = zip(*found, strict=True)
        return torch.stack(lower), torch.stack(upper)


def modelopt_threshold(bins: Bins, levels: int, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(-threshold, threshold)`, scalars, for one row of magnitudes.

    Args:
        bins: one row.
        levels: number of quantized bins.
        inside: candidates: how many bins lie inside the threshold, increasing.

    Cells of candidate `i` start at bin `ceil(cell * i / levels)`. With `A` the count and `N` the number of non-empty
    bins of a cell, `sum p log q` over its bins is `A log(A / N)`: prefix sums replace the loop over bins.
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


def onnxruntime_threshold(bins: Bins, levels: int, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of the range, scalars, for one row of signed values, by ONNX Runtime's rules.

    Its divergences are float32 sums, so that it chooses by rounding among candidates that agree to 1e-6.

    Args:
        bins: one row.
        levels: number of quantized bins over both signs.
        inside: candidates: how many bins lie inside the threshold on each side of the middle, increasing.
    """
    pieces = [_onnxruntime_divergence(bins.counts[0], levels, part) for part in torch.split(inside, 256)]
    best = inside[torch.cat(pieces).argmin()]
    edges, middle = bins.edges[0], bins.counts.shape[1] // 2
    return edges[middle - best], edges[torch.clamp(middle + best + 1, max=bins.counts.shape[1])]


def _onnxruntime_divergence(counts: Tensor, levels: int, inside: Tensor) -> Tensor:
    room = len(counts)
    middle = room // 2
    start, end = (middle - inside)[:, None], (middle + inside + 1).clamp(max=room)[:, None]
    mass = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    steps = torch.arange(room, device=counts.device)
    within = (steps >= start) & (steps < end)
    p = torch.where(within, counts, 0.0)
    p = p + torch.where(steps == start, mass[start], 0.0) + torch.where(steps == end - 1, mass[-1] - mass[end], 0.0)
    width = (end - start) // levels
    cell = torch.div(steps - start, width, rounding_mode="floor")
    valid = within & (cell < levels)
    nonzero = torch.nn.functional.pad((p != 0).double().cumsum(1), (1, 0))
    borders = start + torch.arange(levels + 1, device=counts.device) * width
    merged = mass[borders].diff(dim=1)
    merged[:, -1] += mass[end[:, 0]] - mass[borders[:, -1]]
    filled = nonzero.gather(1, borders).diff(dim=1)
    # The peer's integer array truncates the averages.
    average = torch.where(filled > 0, merged / filled, 0.0).trunc()
    q = torch.where(valid, average.gather(1, cell.clamp(0, levels - 1)), 0.0)
    p, p_valid = _smooth(p, within)
    q, q_valid = _smooth(q, within)
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    divergence = torch.where(within, p * (p / q).log(), 0.0).sum(1)
    return torch.where(p_valid & q_valid, divergence, torch.inf)


def _smooth(p: Tensor, within: Tensor, eps: float = 1e-4) -> tuple[Tensor, Tensor]:
    zero = within & (p == 0)
    full = within & (p != 0)
    taken = eps * zero.sum(1) / full.sum(1).clamp(min=1)
    p = torch.where(zero, eps, torch.where(full, p - taken[:, None], 0.0))
    return p, full.any(1)
