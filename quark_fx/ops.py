"""The two operators of a quantized graph, `quark_fx::quantize` and `quark_fx::dequantize`, with ONNX's semantics.

What these compute is what `QuantizeLinear` and `DequantizeLinear` compute: division by the scale, round
half to even, zero point added, saturation at the limits of the *format*. A third, `dynamic_qparams`,
measures scale and zero point at run time.

Granularity is the pair (`axis`, `block_size`), for every operator here:

* `axis=None`: one scale, shape `()` (a zero point may have this shape under any granularity);
* `axis=k, block_size=0`: one scale per index of dimension `k`, shape `(x.shape[k],)`;
* `axis=k, block_size=-1`: one scale per row along dimension `k`, whatever its length; the scale has the rank of
  `x` and size 1 there;
* `axis=k, block_size=b`: one scale per block of `b` values along dimension `k`; the scale has the rank
  of `x` and `ceil(x.shape[k] / b)` entries along `k` (the last block may be shorter).

Source: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quark_fx.formats import FloatFormat, IntFormat, parse_format
from quark_fx.qparams import QParams, Scheme, Symmetry

_AT_ONCE = 1 << 20
"""Values of a constant that are quantized together, about: a few megabytes, which the processor's caches hold."""


@torch.library.custom_op("quark_fx::quantize", mutates_args=())
def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, format: str, axis: int | None = None, block_size: int = 0
) -> Tensor:
    """Return the codes of `x` in the dtype of the format (sub-byte codes in one byte each).

    Args:
        x: floating point, any shape.
        scale: float32, shaped by the granularity (module docstring).
        zero_point: int32, the shape of `scale`; ignored by float formats.
        format: name of a format with integer codes or an 8-bit float.
        axis: see the module docstring.
        block_size: see the module docstring.
    """
    fmt = parse_format(format)
    y = x.float() / spread(scale, x, axis, block_size)
    if isinstance(fmt, FloatFormat):
        return y.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    y = y.double() if fmt.bits > 24 else y
    y = y.round_().add_(spread(zero_point, x, axis, block_size))
    return y.nan_to_num_(nan=fmt.qmin).clamp_(fmt.qmin, fmt.qmax).to(fmt.dtype)


@quantize.register_fake
def _(
    x: Tensor, scale: Tensor, zero_point: Tensor, format: str, axis: int | None = None, block_size: int = 0
) -> Tensor:
    return torch.empty_like(x, dtype=parse_format(format).dtype)


@torch.library.custom_op("quark_fx::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `(codes - zero_point) * scale`, computed in float32 and then cast to `dtype`; inverse of `quantize`."""
    values = codes.to(torch.float32)
    if isinstance(parse_format(format), IntFormat):
        values = values.sub_(spread(zero_point, codes, axis, block_size))
    return values.mul_(spread(scale, codes, axis, block_size)).to(dtype)


@dequantize.register_fake
def _(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return torch.empty_like(codes, dtype=dtype)


@torch.library.custom_op("quark_fx::dynamic_qparams", mutates_args=())
def dynamic_qparams(x: Tensor, format: str, symmetry: str, per_token: bool) -> tuple[Tensor, Tensor]:
    """Return scale (float32) and zero point (int32) of the range of `x`, measured now.

    Args:
        x: floating point, shape `(..., features)`.
        format: name of a format with integer codes or an 8-bit float.
        symmetry: a `Symmetry` value.
        per_token: one pair per row, shapes `(..., 1)` (a block of `features` values along the last axis);
            otherwise one pair, shapes `()`.

    Source:
        https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html, for uint8 per tensor.
    """
    x = x.float()
    if per_token:  # torch.aminmax over a dimension is not vectorised on a CPU
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    else:
        low, high = torch.aminmax(x)
    scheme = Scheme(format=parse_format(format), symmetry=Symmetry(symmetry))
    low, high = low.clamp(max=0), high.clamp(min=0)
    if scheme.symmetric:
        scale = _nonzero(torch.maximum(-low, high) / scheme.largest)
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    scale = _nonzero((high - low) / (scheme.qmax - scheme.qmin))
    zero_point = (scheme.qmin - low / scale).clamp_(scheme.qmin, scheme.qmax).round_()
    return scale, zero_point.to(torch.int32)


@dynamic_qparams.register_fake
def _(x: Tensor, format: str, symmetry: str, per_token: bool) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], 1) if per_token else ()
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def spread(parameter: Tensor, x: Tensor, axis: int | None, block_size: int) -> Tensor:
    """Return a scale or zero point shaped by the granularity (module docstring) so that it broadcasts over `x`."""
    if axis is None or parameter.dim() == 0 or block_size < 0:
        return parameter
    if block_size:
        return parameter.repeat_interleave(block_size, dim=axis).narrow(axis, 0, x.shape[axis])
    return parameter.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


def encode(x: Tensor, qparams: QParams, scheme: Scheme, axis: int | None = None, block_size: int = 0) -> Tensor:
    """Quantize `x` like `quantize`, and keep to the codes the *scheme* allows (±127 for symmetric int8)."""
    codes = torch.empty(x.shape, dtype=scheme.format.dtype, device=x.device)
    for rows, scale, zero_point in row_pieces(codes, qparams, axis, block_size):
        codes[rows] = _encode(x[rows], scale, zero_point, scheme, axis, block_size)
    return codes


def _encode(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, axis: int | None, block_size: int) -> Tensor:
    if isinstance(scheme.format, FloatFormat):
        codes: Tensor = quantize(x, scale, zero_point, str(scheme.format), axis, block_size)
        return codes
    wide = torch.float64 if scheme.format.bits > 16 else torch.float32  # float32 holds every code of 16 bits
    y = x.to(wide) / spread(scale, x, axis, block_size)
    y = y.round_().add_(spread(zero_point, x, axis, block_size))
    return y.clamp_(scheme.qmin, scheme.qmax)


def row_pieces(
    codes: Tensor, qparams: QParams, axis: int | None, block_size: int
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield indices of some rows at a time (dimension 0) and their parameters, so that what is made of a large tensor
    meanwhile stays small.
    """
    count = -(-codes.numel() // _AT_ONCE)
    apart = count > 1 and codes.dim() > 1 and not (axis == 0 and block_size)
    if not apart:
        yield ..., qparams.scale, qparams.zero_point
        return
    step = -(-len(codes) // count)
    for first in range(0, len(codes), step):
        rows = slice(first, first + step)
        # Parameters have no rows where they are one for all, or vary along another dimension.
        scale, zero_point = (
            p[rows] if p.dim() == codes.dim() or (axis == 0 and p.dim()) else p
            for p in (qparams.scale, qparams.zero_point)
        )
        yield rows, scale, zero_point


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


__all__ = ["dequantize", "dynamic_qparams", "encode", "quantize", "row_pieces", "spread"]
