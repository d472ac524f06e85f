"""Find scales of a weight that keep its operator's output, not the weight itself, nearest to the float output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import decode
from quark_fx.solvers.error_feedback import Factor
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.system import accelerator

_CHUNK = 128
"""Number of inputs whose errors are evaluated together with rounding to nearest; correlations of inputs further apart
are ignored in the search."""

_AT_ONCE = 1 << 20
"""Approximate number of weights processed together."""

_QUADRATURE = ((0.0, 2 / 3), (3**0.5, 1 / 6), (-(3**0.5), 1 / 6))
"""Deviations from the mean of a normal distribution, in standard deviations, with weights (3-point Gauss-Hermite)."""

RATIOS = tuple(1.0 - 0.05 * step for step in range(11))
"""Candidate fractions of the range, from all of it to half."""

_EXPONENTS = (1.0, 2.0, 0.5)
"""Candidate ratios for scales that are powers of two."""

_AROUND = (1.0, *(1.0 + sign * step / 16 for step in range(1, 9) for sign in (1, -1)))
"""Candidate ratios from one half to one and a half, in sixteenths; they cover nearly all E4M3 scales in between."""

_MORE = tuple(0.1 * step for step in range(-9, 10))
"""Numbers added to the number of steps that a block's range is first divided into."""

_ROUNDS = 2
"""Number of alternating updates of codes and scales."""


_Fit = tuple[Tensor, ...]
"""Parameters of blocks; the last tensor is their error."""

MOST_TRIED = len(_AROUND)
"""Largest number of ratios that `around` returns."""


def around(scheme: Scheme) -> tuple[float, ...]:
    """Return the ratios of a scale to try, including ratios above 1; the first is 1, the scale itself.

    Large float values are further apart than small ones, so a wider range may suit a block better (Cook et al. 2025,
    "Four Over Six"); and weights with error feedback may exceed the range of the original weights.
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
    """Return, per output and block of inputs, the ratio of the scale at which rounding changes the output least.

    The error of a block is `d H d'`, where `d` is the rounding error of its weights: the squared error of the partial
    product over the data.

    Args:
        weight: Weight of shape (groups, outputs, inputs), float32.
        h: Sum of `x x'`, shape (groups, inputs, inputs).
        grid: Current scales, zero points, and format of the codes.
        columns: Inputs that share a scale, one block per scale.
        allowed: Function from desired scales to scales that can be stored; default: the scales themselves.
        tried: Candidate ratios.

    Returns:
        A ratio of `tried` for each block, shape (groups, outputs, blocks).

    Source:
        Lin et al. 2024 (AWQ), clip search of the reference code, with the sum over tokens computed beforehand.
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
    """Return the columns of a block, in parts of at most `_CHUNK`."""
    if isinstance(block, Tensor):
        return list(block.split(_CHUNK))
    return [slice(first, min(first + _CHUNK, block.stop)) for first in range(block.start, block.stop, _CHUNK)]


def fitted_to_feedback(
    weight: QuantizedMatrix, target: Tensor, factors: Iterable[tuple[slice, Factor]]
) -> QuantizedMatrix:
    """Return `weight` with the scales that minimize the expected error of error feedback.

    The scales must be adjustable, individually or with offsets. Scales with offsets, and two-level scales, are fitted
    to the weights, whose errors count by the curvature of the input (`fit_ranges`).
    """
    if weight.columns is None:
        return _fitted_ranges(weight, target, factors)
    columns, allowed, ratios = weight.columns, weight.allowed, []
    for matrices, factor_ in factors:
        grid, values = weight.grid(matrices), target[matrices].float()
        ratios.append(_fit_scales_to_feedback(values, factor_, grid, columns, allowed))
    return weight.with_scales(torch.cat(ratios))


def _fitted_ranges(weight: QuantizedMatrix, target: Tensor, factors: Iterable[tuple[slice, Factor]]) -> QuantizedMatrix:
    columns, ranges = weight.ranged_columns, []
    assert columns is not None
    for matrices, factor_ in factors:
        ranges.append(fit_ranges(target[matrices].float(), factor_.pivots_by_input, weight.scheme, columns))
    scale, offset = zip(*ranges, strict=True)
    return weight.with_ranges(torch.cat(scale), None if offset[0] is None else torch.cat(offset))


def _fit_scales_to_feedback(
    weight: Tensor, factor: Factor, grid: Grid, columns: Columns, allowed: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return, per output and block of inputs, the ratio of the scale with the smallest error after error feedback.

    Error feedback rounds a weight plus the feedback of earlier inputs' errors. The search treats this sum as normally
    distributed around the weight, with errors that are independent, and as large as with rounding to nearest over the
    whole range. The error of an input counts by its curvature alone, because later inputs compensate for the rest.
    Weights of few bits therefore keep more of their range than with `fit_scales`.

    Args:
        weight: Weight to round, shape (groups, outputs, inputs), float32.
        factor: Factors of the input's Hessian.
        grid, columns, allowed: Arguments of `fit_scales`.

    Returns:
        A ratio of `RATIOS` for each block, shape (groups, outputs, blocks).
    """
    transfer = factor.feedback.square()
    curvature = factor.pivots_by_input.unsqueeze(-2)
    scale, zero_point = (p.expand_as(weight) for p in (grid.scale, grid.zero_point))
    most = accelerator.values_at_once(weight, _AT_ONCE, 8)
    lines = max(1, most // (len(weight) * weight.shape[-1]))
    ratios = []
    for first in range(0, weight.shape[1], lines):
        rows = slice(first, first + lines)
        row_grid = replace(grid, scale=scale[:, rows], zero_point=zero_point[:, rows])
        spread = _spread(weight[:, rows], row_grid, columns, factor.order, transfer)
        ratios.append(_least_expected(weight[:, rows], spread, curvature, row_grid, columns, allowed))
    return torch.cat(ratios, 1)


def _spread(weight: Tensor, grid: Grid, sharing: Columns, order: Tensor, transfer: Tensor) -> Tensor:
    """Return the standard deviation of the feedback that each input receives, of the shape of `weight`."""
    columns = order.unsqueeze(-2).expand_as(weight)
    # Within the range, an error is uniform over a step, since a weight with feedback is not on the grid even if the
    # original weight was. Outside the range, the error is the saturated part.
    step = grid.step(grid.position(weight)) * grid.scale
    squares = _lost(grid, grid.scale, grid.zero_point, weight).square_()
    squares = torch.where(squares > step.square() / 4, squares, step.square() / 12)
    # The scale of an all-zero block is arbitrary, so its step must not count.
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
    """Return the ratios with the smallest expected error over normally distributed weights."""
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
    """Return the error of rounding a weight to nearest."""
    codes = grid.round_((weight / scale).add_(zero_point))
    return decode(codes, scale, zero_point, out=codes).sub_(weight)


def fit_ranges(weight: Tensor, importance: Tensor, scheme: Scheme, columns: Columns) -> tuple[Tensor, Tensor | None]:
    """Return, per output and block of inputs, the scale and offset whose nearest codes have the smallest error.

    The error is the squared error of each weight times the importance of its input. For given codes, the best scale
    and offset solve a linear system with two unknowns; initial codes come from ranges slightly wider and narrower than
    the block's range. Two-level offsets are at most zero, because blocks store no positive two-level offsets.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        importance: Mean square of each input, or another nonnegative importance, shape (groups, inputs).
        scheme: Scheme of integer codes, with offsets or sign-aware.
        columns: Inputs that share a scale, one block per scale.

    Returns:
        Scales, float32, shape (groups, outputs, blocks), and offsets of the same shape, or `None`.

    Source:
        The search of `make_qkx3_quants` and `make_qx_quants` in llama.cpp's `ggml-quants.c`, without their additional
        weighting by value.
    """
    weights = columns.gather(importance.float() + 1e-6 * importance.float().mean(-1, keepdim=True).clamp_min(1e-30))
    fits = []
    lines = max(1, _AT_ONCE // (len(weight) * weight.shape[-1]))
    for rows in weight.split(lines, 1):
        x = columns.gather(rows.float())
        fit = _affine if scheme.symmetry is Symmetry.OFFSET else _linear
        fits.append(fit(x, weights.unsqueeze(1), scheme))
    scale, offset = zip(*fits, strict=True)
    offsets = [o for o in offset if o is not None]
    return torch.cat(scale, 1), torch.cat(offsets, 1) if offsets else None


def _affine(x: Tensor, w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Fit scales and offsets to blocks, which are the last dimension of `x` and of its weights `w`."""
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    span, steps = (high - low).clamp_min(torch.finfo(torch.float32).tiny), scheme.qmax
    nested = scheme.scale.multiples is not None
    w = w.expand_as(x)
    wx = w * x
    total, sums = w.sum(-1), wx.sum(-1)

    def solved(scale: Tensor, offset: Tensor) -> _Fit:
        codes = ((x - offset.unsqueeze(-1)) / scale.unsqueeze(-1)).round_().clamp_(0, steps)
        weighted = w * codes
        first, second, mixed = weighted.sum(-1), (weighted * codes).sum(-1), (wx * codes).sum(-1)
        determinant = total * second - first * first
        s = (total * mixed - sums * first) / determinant
        o = (second * sums - first * mixed) / determinant
        if nested:
            s, o = torch.where(o > 0, mixed / second, s), o.clamp(max=0)
        usable = torch.isfinite(s) & torch.isfinite(o) & (s > 0)
        s, o = torch.where(usable, s, scale), torch.where(usable, o, offset)
        error = (w * (codes * s.unsqueeze(-1) + o.unsqueeze(-1) - x).square()).sum(-1)
        return s, o, error

    best = solved(span / steps, low)
    for more in _MORE:
        best = _better(best, solved(span / (steps + more), low))
    for _ in range(_ROUNDS):
        best = _better(best, solved(best[0], best[1]))
    return best[0], best[1]


def _linear(x: Tensor, w: Tensor, scheme: Scheme) -> tuple[Tensor, None]:
    """Fit scales of either sign: the largest magnitude maps near the smallest code, whose negative is not a code."""
    outermost, smallest = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1), torch.finfo(torch.float32).tiny
    outermost = torch.where(outermost.abs() < smallest, smallest, outermost)
    w = w.expand_as(x)
    wx = w * x

    def solved(scale: Tensor) -> _Fit:
        codes = (x / scale.unsqueeze(-1)).round_().clamp_(scheme.qmin, scheme.qmax)
        s = (wx * codes).sum(-1) / (w * codes * codes).sum(-1)
        s = torch.where(torch.isfinite(s) & (s * scale > 0), s, scale)
        return s, (w * (codes * s.unsqueeze(-1) - x).square()).sum(-1)

    best = solved(outermost / scheme.qmin)
    for more in _MORE:
        best = _better(best, solved(outermost / (scheme.qmin - more)))
    for _ in range(_ROUNDS):
        best = _better(best, solved(best[0]))
    return best[0], None


def _better(old: _Fit, new: _Fit) -> _Fit:
    """Return the parameters with the smaller error for each block."""
    better = new[-1] < old[-1]
    return tuple(torch.where(better, n, o) for n, o in zip(new, old, strict=True))


__all__ = ["MOST_TRIED", "RATIOS", "around", "fit_ranges", "fit_scales", "fitted_to_feedback"]
