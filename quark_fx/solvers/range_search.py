"""Fit scales and offsets of blocks by least squares, weighted by the importance of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import Scheme, Symmetry

_AT_ONCE = 1 << 20
"""Approximate number of weights processed together."""

_MORE = tuple(0.1 * step for step in range(-9, 10))
"""Numbers added to the number of steps that a block's range is first divided into."""

_ROUNDS = 2
"""Number of alternating updates of codes and scales."""


_Fit = tuple[Tensor, ...]
"""Parameters of blocks; the last tensor is their error."""


def fit_ranges(weight: Tensor, importance: Tensor, scheme: Scheme, columns: Columns) -> tuple[Tensor, Tensor | None]:
    """Return, per block of inputs and output, the scale and offset whose nearest codes have the smallest error.

    The error is the squared error of each weight times the importance of its input. For given codes, the best scale
    and offset solve a linear system of two unknowns; initial codes come from ranges slightly wider and narrower than
    the block's. Offsets of two levels are at most zero, because their blocks hold no positive ones.

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
    """Fit scales and offsets to blocks, the last dimension of `x` and of its weights."""
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


__all__ = ["fit_ranges"]
