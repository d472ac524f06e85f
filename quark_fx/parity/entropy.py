"""Threshold of ONNX Runtime's entropy calibration, `HistogramCollector.get_entropy_threshold`."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.observers.entropy import METHODS, Method
from quark_fx.observers.histogram import Bins


def onnxruntime_threshold(bins: Bins, levels: int, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of the range, scalars, for one row of signed values, by ONNX Runtime's rules.

    ONNX Runtime sums divergences in float32, so rounding decides among candidates that agree to 1e-6.

    Args:
        bins: Bins of one row.
        levels: Number of quantized bins over both signs.
        inside: Candidate thresholds: increasing numbers of bins on each side of the middle.
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
    # ONNX Runtime stores the averages in an integer array, which truncates them.
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


METHODS.add(Method(onnxruntime_threshold, signed=True), "onnxruntime")
