"""Scales of sub-groups that are whole numbers times one float16 per group, as llama.cpp's K-quants have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quark_fx.numbers.formats import IntFormat
from quark_fx.numbers.qparams import QParams, ScaleType

_HALF = torch.finfo(torch.float16)
_SUBNORMAL = 2.0**-24
"""The smallest float16 above zero: with few bits it is still a factor that a file holds."""


def two_levels(qparams: QParams, scale_type: ScaleType, axis: int, count: int) -> QParams:
    """Return scales, and offsets if there are any, rounded to what two levels hold.

    The largest of a group takes the outermost whole number. No scale becomes zero; an offset may.

    Args:
        qparams: one per sub-group.
        scale_type: of two levels.
        axis: dimension that sub-groups lie along.
        count: of sub-groups in a group; the last group may have fewer.
    """
    fmt = scale_type.multiples
    assert fmt is not None
    scale, zero_point = qparams.scale, qparams.zero_point
    scale = _rounded(scale, fmt, axis, count, nonzero=True)
    if zero_point.is_floating_point():
        zero_point = _rounded(zero_point, fmt, axis, count, nonzero=False)
    return QParams(scale, zero_point)


def _rounded(values: Tensor, fmt: IntFormat, axis: int, count: int, *, nonzero: bool) -> Tensor:
    groups = _grouped(values, axis, count)
    outermost = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    unit = (outermost / (fmt.qmin or fmt.qmax)).clamp(-_HALF.max, _HALF.max).half().float()
    unit = torch.where(unit.abs() < _SUBNORMAL, _SUBNORMAL if nonzero else 1.0, unit)
    whole = (groups / unit).round_().clamp_(fmt.qmin, fmt.qmax)
    if nonzero:
        whole = torch.where(whole == 0, torch.where(groups / unit < 0, -1.0, 1.0), whole)
    return _ungrouped(whole * unit, values, axis)


def units(values: Tensor, fmt: IntFormat, count: int) -> tuple[Tensor, Tensor]:
    """Return float16 factors and whole numbers whose products are `values`, exactly.

    Args:
        values: of `two_levels`, shape (rows, sub-groups), float32.
        fmt: of the whole numbers.
        count: of sub-groups in a group, which divides their number.

    Returns:
        Factors, float16, shape (rows, groups), and whole numbers, float32, shape (rows, groups, count).

    Raises:
        ValueError: if there are none, as for scales that were changed one by one.
    """
    groups = values.unflatten(1, (-1, count)).flatten(0, 1)
    outermost = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    unit, left = torch.ones_like(outermost), torch.arange(len(groups), device=values.device)
    for multiple in sorted(range(fmt.qmin, fmt.qmax + 1), key=abs, reverse=True):
        if multiple == 0 or not len(left):
            continue
        tried = outermost[left] / multiple
        whole = (groups[left] / torch.where(tried == 0, 1.0, tried)).round()
        held = tried.half().float()
        found = (held * whole == groups[left]) & (whole >= fmt.qmin) & (whole <= fmt.qmax)
        exact = found.all(-1)
        unit[left[exact]] = torch.where(held == 0, 1.0, held)[exact]
        left = left[~exact]
    if len(left):
        raise ValueError(f"{len(left)} groups have scales that are no whole numbers of {fmt.bits} bits times a float16")
    shape = len(values), -1
    return unit.half().reshape(shape), (groups / unit).round().reshape(*shape[:1], -1, count)


def _grouped(values: Tensor, axis: int, count: int) -> Tensor:
    """Return them as (..., groups, count), the last group filled up with zeros."""
    last = values.movedim(axis, -1)
    filled: Tensor = F.pad(last, (0, -last.shape[-1] % count)).unflatten(-1, (-1, count))
    return filled


def _ungrouped(groups: Tensor, like: Tensor, axis: int) -> Tensor:
    return groups.flatten(-2)[..., : like.shape[axis]].movedim(-1, axis).contiguous()


__all__ = ["two_levels", "units"]
