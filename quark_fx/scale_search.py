"""Scales of a weight that keep the output of its operator, not the weight, nearest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from quark_fx.grid import Grid

_CHUNK = 128
"""Inputs whose errors are weighed together. What inputs further apart have in common is left out of the search."""

RATIOS = tuple(1.0 - 0.05 * step for step in range(11))
"""Shares of the range that are tried, from all of it to half."""


def fit_scales(
    weight: Tensor, h: Tensor, grid: Grid, block: int, allowed: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return, per block of inputs and output, the share of the scale whose rounding changes the output least.

    The error of a block is `d H d'` with `d` what rounding to nearest takes from its weights: the squared error of the
    partial product over the data.

    Args:
        weight: shape (groups, outputs, inputs), float32.
        h: sum of `x x'`, shape (groups, inputs, inputs).
        grid: what codes stand for now.
        block: inputs that share a scale.
        allowed: from wanted scales to those that are tried for them; default: the scales themselves.

    Returns:
        Shape (groups, outputs, blocks), one of `RATIOS` each.

    Source:
        Lin et al. 2024 (AWQ), the clip search of its reference code, with the sum over tokens taken beforehand.
    """
    inputs = weight.shape[-1]
    blocks = -(-inputs // block)
    shape = (*weight.shape[:2], blocks)
    best, least = weight.new_ones(shape), weight.new_full(shape, torch.inf)
    scale, zero_point = (p.expand_as(weight) for p in (grid.scale, grid.zero_point))
    edges = sorted({*range(0, inputs, block), *range(0, inputs, _CHUNK), inputs})
    for ratio in RATIOS:
        error = weight.new_zeros(shape)
        for start, stop in itertools.pairwise(edges):
            part = slice(start, stop)
            w, s, z = weight[..., part], scale[..., part] * ratio, zero_point[..., part]
            s = s if allowed is None else allowed(s)
            lost = grid.round_((w / s).add_(z)).sub_(z).mul_(s).sub_(w)
            error[..., start // block] += torch.linalg.vecdot(lost @ h[:, part, part], lost)
        better = error < least
        best, least = torch.where(better, ratio, best), torch.where(better, error, least)
    return best


__all__ = ["RATIOS", "fit_scales"]
