"""Scales of sub-groups that are integers times one float16 per group: llama.cpp's K-quants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quark_fx.numbers.formats import IntFormat
from quark_fx.numbers.qparams import QParams, ScaleType

_HALF = torch.finfo(torch.float16)
_SUBNORMAL = 2.0**-24
"""Smallest float16 above zero: with few bits it is still a factor that files can store."""


def two_levels(qparams: QParams, scale_type: ScaleType, axis: int, count: int) -> QParams:
    """Return scales, and offsets if there are any, rounded to two levels.

    The largest of a group takes the outermost integer. Offsets can become zero, scales cannot.

    Args:
        qparams: Scales and offsets, one per sub-group.
        scale_type: Scale type with two levels.
        axis: Dimension that sub-groups lie along.
        count: Number of sub-groups in a group; the last group can have fewer.
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
    """Return float16 factors and integers with `values` as products, exactly.

    Args:
        values: Scales or offsets that `two_levels` returned, shape (rows, sub-groups), float32.
        fmt: Format of the integers.
        count: Number of sub-groups in a group; it divides the number of sub-groups.

    Returns:
        Factors, float16, shape (rows, groups), and integers, float32, shape (rows, groups, count).

    Raises:
        ValueError: If there are none, such as for scales that were changed one by one.
    """
    groups = values.unflatten(1, (-1, count)).flatten(0, 1)
    outermost = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    unit, rest = torch.ones_like(outermost), torch.arange(len(groups), device=values.device)
    for multiple in sorted(range(fmt.qmin, fmt.qmax + 1), key=abs, reverse=True):
        if multiple == 0 or not len(rest):
            continue
        ideal = outermost[rest] / multiple
        whole = (groups[rest] / torch.where(ideal == 0, 1.0, ideal)).round()
        factor = ideal.half().float()
        matches = (factor * whole == groups[rest]) & (whole >= fmt.qmin) & (whole <= fmt.qmax)
        exact = matches.all(-1)
        unit[rest[exact]] = torch.where(factor == 0, 1.0, factor)[exact]
        rest = rest[~exact]
    if len(rest):
        raise ValueError(f"{len(rest)} groups have scales that are not {fmt.bits}-bit integers times a float16")
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
