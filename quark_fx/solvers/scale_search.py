"""Scales of a weight that keep the output of its operator, not the weight, nearest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import Scheme
from quark_fx.numbers.quantized_tensor import decode
from quark_fx.solvers.error_feedback import Factor
from quark_fx.system import accelerator

_CHUNK = 128
"""Inputs whose errors are weighed together for rounding to nearest. What inputs further apart have in common is left
out of the search."""

_AT_ONCE = 1 << 20
"""Weights, about, that are looked at together."""

_QUADRATURE = ((0.0, 2 / 3), (3**0.5, 1 / 6), (-(3**0.5), 1 / 6))
"""Standard deviations from the mean of a normal distribution, and their weights (Gauss and Hermite, three points)."""

RATIOS = tuple(1.0 - 0.05 * step for step in range(11))
"""Shares of the range that are tried, from all of it to half."""

_EXPONENTS = (1.0, 2.0, 0.5)
"""Shares of scales that are powers of two."""

_AROUND = (1.0, *(1.0 + sign * step / 16 for step in range(1, 9) for sign in (1, -1)))
"""From half of a scale to one and a half, in sixteenths: nearly all E4M3 scales between."""


MOST_TRIED = len(_AROUND)
"""How many shares `around` returns at most."""


def around(scheme: Scheme) -> tuple[float, ...]:
    """Return the shares of a scale that may lose less than the scale itself, which is first: larger ones, too.

    Values of floats lie the farther apart the larger they are, so a wider range may suit a block better (Cook et al.
    2025, "Four Over Six"); and what makes up for the errors of other inputs may leave the range that weights had.
    """
    return _EXPONENTS if scheme.scale.rule else _AROUND


def fit_scales(
    weight: Tensor,
    h: Tensor,
    grid: Grid,
    columns: Columns,
    allowed: Callable[[Tensor], Tensor] | None = None,
    tried: Sequence[float] = RATIOS,
) -> Tensor:
    """Return, per block of inputs and output, the share of the scale whose rounding changes the output least.

    The error of a block is `d H d'` with `d` what rounding to nearest takes from its weights: the squared error of the
    partial product over the data.

    Args:
        weight: shape (groups, outputs, inputs), float32.
        h: sum of `x x'`, shape (groups, inputs, inputs).
        grid: what codes stand for now.
        columns: inputs that share a scale, a block.
        allowed: from wanted scales to those that are tried for them; default: the scales themselves.
        tried: shares of the scale.

    Returns:
        Shape (groups, outputs, blocks), one of `tried` each.

    Source:
        Lin et al. 2024 (AWQ), the clip search of its reference code, with the sum over tokens taken beforehand.
    """
    members = columns.members(weight.device)
    shape = (*weight.shape[:2], len(members))
    best, least = weight.new_ones(shape), weight.new_full(shape, torch.inf)
    scale, zero_point = (p.expand_as(weight) for p in (grid.scale, grid.zero_point))
    parts = [(number, part) for number, block in enumerate(members) for part in _parted(block)]
    for ratio in tried:
        error = weight.new_zeros(shape)
        for number, part in parts:
            s = scale[..., part] * ratio
            lost = _lost(grid, s if allowed is None else allowed(s), zero_point[..., part], weight[..., part])
            error[..., number] += torch.linalg.vecdot(lost @ h[:, part][..., part], lost)
        better = error < least
        best, least = torch.where(better, ratio, best), torch.where(better, error, least)
    return best


def _parted(block: slice | Tensor) -> list[slice | Tensor]:
    """Return the columns of a block, at most `_CHUNK` together."""
    if isinstance(block, Tensor):
        return list(block.split(_CHUNK))
    return [slice(first, min(first + _CHUNK, block.stop)) for first in range(block.start, block.stop, _CHUNK)]


def fit_scales_to_feedback(
    weight: Tensor, factor: Factor, grid: Grid, columns: Columns, allowed: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return, per block of inputs and output, the share of the scale that error feedback loses least with.

    It rounds a weight and what makes up for the errors of the inputs before, which spreads about the weight: here as
    if these errors were independent, and as large as those of rounding to nearest with the whole range. What is lost of
    one input counts by its curvature alone: the inputs after it make up for the rest. Weights of few bits so keep more
    of their range than `fit_scales` would leave them.

    Args:
        weight: to be rounded, shape (groups, outputs, inputs), float32.
        factor: of the Hessian of what it multiplies.
        grid, columns, allowed: as `fit_scales` has them.

    Returns:
        Shape (groups, outputs, blocks), one of `RATIOS` each.
    """
    transfer = factor.feedback.square()
    curvature = factor.curvature_by_input.unsqueeze(-2)
    scale, zero_point = (p.expand_as(weight) for p in (grid.scale, grid.zero_point))
    most = accelerator.values_at_once(weight, _AT_ONCE, 8)
    lines = max(1, most // (len(weight) * weight.shape[-1]))
    found = []
    for first in range(0, weight.shape[1], lines):
        rows = slice(first, first + lines)
        some = replace(grid, scale=scale[:, rows], zero_point=zero_point[:, rows])
        spread = _spread(weight[:, rows], some, columns, factor.order, transfer)
        found.append(_least_expected(weight[:, rows], spread, curvature, some, columns, allowed))
    return torch.cat(found, 1)


def _spread(weight: Tensor, grid: Grid, sharing: Columns, order: Tensor, transfer: Tensor) -> Tensor:
    """Return the standard deviation of what makes up for the errors before each input, the shape of `weight`."""
    columns = order.unsqueeze(-2).expand_as(weight)
    # Within the range an error is anywhere in a step: a weight that lies on the grid will not when it makes up for
    # others. Beyond it, it is what saturates.
    step = grid.step(grid.position(weight)) * grid.scale
    squares = _lost(grid, grid.scale, grid.zero_point, weight).square_()
    squares = torch.where(squares > step.square() / 4, squares, step.square() / 12)
    # The scale of weights that are all zero says nothing of them.
    empty = sharing.gather(weight.abs()).amax(-1) == 0
    squares = squares.masked_fill(sharing.spread(empty), 0.0)
    variance = squares.gather(-1, columns) @ transfer
    return torch.empty_like(weight).scatter_(-1, columns, variance.sqrt_())


def _least_expected(
    weight: Tensor,
    spread: Tensor,
    curvature: Tensor,
    grid: Grid,
    columns: Columns,
    allowed: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the ratios of the smallest error, averaged over weights that spread normally."""
    best = least = weight.new_zeros(())
    for ratio in RATIOS:
        scale = grid.scale * ratio if allowed is None else allowed(grid.scale * ratio)
        squares = torch.zeros_like(weight)
        for away, share in _QUADRATURE:
            squares += share * _lost(grid, scale, grid.zero_point, weight + away * spread).square_()
        error = columns.gather(squares.mul_(curvature)).sum(-1)
        if ratio == RATIOS[0]:
            best, least = torch.full_like(error, ratio), error
        better = error < least
        best, least = torch.where(better, ratio, best), torch.where(better, error, least)
    return best


def _lost(grid: Grid, scale: Tensor, zero_point: Tensor, weight: Tensor) -> Tensor:
    """Return what rounding to nearest adds to a weight."""
    codes = grid.round_((weight / scale).add_(zero_point))
    return decode(codes, scale, zero_point, out=codes).sub_(weight)


__all__ = ["MOST_TRIED", "RATIOS", "around", "fit_scales", "fit_scales_to_feedback"]
