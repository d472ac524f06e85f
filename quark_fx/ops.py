"""The two operators of a quantized graph, `quark_fx::quantize` and `quark_fx::dequantize`, with ONNX's semantics.

What these compute is what `QuantizeLinear` and `DequantizeLinear` compute: division by the scale, round
half to even, zero point added, saturation at the limits of the *format*. A third, `dynamic_qparams`,
measures scale and zero point at run time; a fourth, `grouped_mm`, is in loaded graphs of experts.

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
import torch.nn.functional as F
from torch import Tensor

from quark_fx.formats import FloatFormat, IntFormat, parse_format
from quark_fx.layout import Layout
from quark_fx.qparams import QParams, ScaleType, Scheme, Symmetry, block_scale, like, share_scale

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
        format: name of a format with integer codes or a float of at most 8 bits.
        axis: see the module docstring.
        block_size: see the module docstring.
    """
    fmt = parse_format(format)
    y = x.float() / spread(scale, x, axis, block_size)
    if isinstance(fmt, FloatFormat):
        # Of 8 bits, the dtype rounds by itself.
        y = fmt.round_(y) if fmt.bits < 8 else y.clamp_(-fmt.max, fmt.max)
        return y.to(fmt.dtype)
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
    result = torch.empty_like(codes, dtype=dtype)
    # The float32 values of a large weight beside its spread scales would take several times what the result does.
    for rows, some_scale, some_point in row_pieces(codes, QParams(scale, zero_point), axis, block_size):
        values = codes[rows].to(torch.float32)
        if isinstance(parse_format(format), IntFormat):
            values = values.sub_(spread(some_point, values, axis, block_size))
        result[rows] = values.mul_(spread(some_scale, values, axis, block_size))
    return result


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


@torch.library.custom_op("quark_fx::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the products of groups of rows with a matrix each, and 0 for rows after the last group.

    `aten._grouped_mm` leaves those rows as the memory was; everything else it computes alike.

    Args:
        x: `(rows, inputs)`.
        weight: `(groups, inputs, outputs)`, of the dtype of `x`.
        offsets: int32, `(groups,)`; the (exclusive) ends of the groups, in order.
    """
    y: Tensor = torch.ops.aten._grouped_mm.default(x, weight, offsets)
    covered = torch.arange(y.shape[0], device=y.device) < offsets[-1]
    return y.where(covered.unsqueeze(-1), 0.0)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if (x.dim(), weight.dim(), offsets.dim()) != (2, 3, 1) or offsets.shape[0] != weight.shape[0]:
        raise ValueError(f"no grouped product: {x.dim()}, {weight.dim()} and {offsets.dim()} dimensions")
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("quark_fx::dynamic_qparams", mutates_args=())
def dynamic_qparams(
    x: Tensor,
    format: str,
    symmetry: str,
    axis: int | None = None,
    block_size: int = 0,
    scale_type: str = "float32",
    group_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return scale (float32) and zero point (int32) of the range of `x`, measured now.

    Args:
        x: floating point, any shape.
        format: name of a format with integer codes or a float of at most 8 bits.
        symmetry: a `Symmetry` value.
        axis: see the module docstring.
        block_size: see the module docstring; 0 goes with `axis=None`, for one scale.
        scale_type: a `ScaleType` value: `"float32"`, or one of 8 bits.
        group_size: of the groups that blocks of `block_size` share an exponent in, but for one bit; 0 for none.

    Source:
        https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html, for uint8 per tensor;
        `quark_fx.qparams.block_scale` for scales of 8 bits.
    """
    x = x.float()
    scheme = Scheme(format=parse_format(format), symmetry=Symmetry(symmetry), scale_type=ScaleType(scale_type))
    low, high = _extremes(x, axis, block_size)
    if scheme.scale_type.is_8_bit:
        scale = block_scale(torch.maximum(-low, high), scheme, high=high)
        if group_size:
            low, high = _extremes(x, axis, group_size)
            group = block_scale(torch.maximum(-low, high), scheme, high=high)
            scale = share_scale(scale, spread(group, scale, axis, group_size // block_size))
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    if scheme.symmetric:
        scale = _nonzero(torch.maximum(-low, high) / like(low, scheme.largest))
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    scale = _nonzero((high - low) / like(low, scheme.qmax - scheme.qmin))
    zero_point = (scheme.qmin - low / scale).clamp_(scheme.qmin, scheme.qmax).round_()
    return scale, zero_point.to(torch.int32)


@dynamic_qparams.register_fake
def _(
    x: Tensor,
    format: str,
    symmetry: str,
    axis: int | None = None,
    block_size: int = 0,
    scale_type: str = "float32",
    group_size: int = 0,
) -> tuple[Tensor, Tensor]:
    shape: list[int] = []
    if axis is not None:
        shape = list(x.shape)
        shape[axis] = 1 if block_size < 0 else (shape[axis] + block_size - 1) // block_size
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def _extremes(x: Tensor, axis: int | None, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper end of the range of each block, with zero in it; shapes as scales have them."""
    if axis is None:
        low, high = torch.aminmax(x)
        return low.clamp(max=0), high.clamp(min=0)
    if block_size > 0:
        blocks = -(-x.shape[axis] // block_size)
        # Zeros fill the last block up: they are in every range.
        padding = blocks * block_size - x.shape[axis]
        x = F.pad(x.movedim(axis, -1), (0, padding)).movedim(-1, axis) if padding else x
        x, axis = x.unflatten(axis, (blocks, block_size)), axis % x.dim() + 1
    # torch.aminmax over a dimension is not vectorised on a CPU
    low, high = (x.amin(axis, keepdim=True), x.amax(axis, keepdim=True))
    low, high = low.clamp(max=0), high.clamp(min=0)
    return (low.squeeze(axis), high.squeeze(axis)) if block_size > 0 else (low, high)


def spread(parameter: Tensor, x: Tensor, axis: int | None, block_size: int) -> Tensor:
    """Return a scale or zero point shaped by the granularity (module docstring) so that it broadcasts over `x`."""
    return Layout.of(x.shape, axis, block_size).spread(parameter)


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
    layout = Layout.of(codes.shape, axis, block_size)
    for rows in layout.pieces(_AT_ONCE if codes.is_cpu else _AT_ONCE << 8):
        yield rows, layout.of_rows(qparams.scale, rows), layout.of_rows(qparams.zero_point, rows)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


__all__ = ["dequantize", "dynamic_qparams", "encode", "quantize", "row_pieces", "spread"]
