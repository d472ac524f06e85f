"""The two operators of a quantized graph, `quark_fx::quantize` and `quark_fx::dequantize`, with ONNX's semantics.

They compute the same as ONNX's `QuantizeLinear` and `DequantizeLinear`: divide by the scale, round half to even, add
the zero point, and saturate at the limits of the *format*. A third operator, `dynamic_qparams`, measures scale and zero
point at run time; a fourth, `grouped_mm`, occurs in loaded graphs of mixture-of-experts models.

No gradient flows through codes. Graphs that are trained use `fake_quantize` instead, which computes
`dequantize(quantize(x))` with the straight-through gradient.

Every operator here describes granularity by the pair (`axis`, `block_size`):

* `axis=None`: one scale, shape `()` (a zero point may have this shape under any granularity);
* `axis=k, block_size=0`: one scale per index of dimension `k`, shape `(x.shape[k],)`;
* `axis=k, block_size=-1`: one scale per row along dimension `k`, whatever its length; the scale has the rank of
  `x` and size 1 along `k`;
* `axis=k, block_size=b`: one scale per block of `b` values along dimension `k`; the scale has the rank
  of `x` and `ceil(x.shape[k] / b)` entries along `k` (the last block may be shorter).

A zero point in float32 is an offset, the value of code 0: `dequantize` returns `codes * scale + offset`. ONNX does not
have an operator with offsets.

Source: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quark_fx.numbers.formats import Format, parse_format
from quark_fx.numbers.layout import Layout
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor, decode, dequantized_like, values_at_once
from quark_fx.numbers.scales import like, scale_format


@torch.library.custom_op("quark_fx::quantize", mutates_args=())
def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, format: str, axis: int | None = None, block_size: int = 0
) -> Tensor:
    """Return the codes of `x` in the dtype of the format (sub-byte codes in one byte each).

    Args:
        x: Floats, any shape.
        scale: Scales, float32, shaped by the granularity (module docstring).
        zero_point: Zero points, int32, the shape of `scale`; only integer formats use them.
        format: Name of a format that needs a scale.
        axis: Dimension of the scales, see the module docstring.
        block_size: Values per scale, see the module docstring.
    """
    fmt = parse_format(format)
    y, points = _steps(x.float(), scale, zero_point, fmt, axis, block_size)
    return fmt.encode(y) if points is None else _integers_(y, points, fmt).to(fmt.dtype)


def _steps(
    x: Tensor, scale: Tensor, zero_point: Tensor, fmt: Format, axis: int | None, block_size: int
) -> tuple[Tensor, Tensor | None]:
    """Return `x`, minus an offset if there is one, divided by the scale, and the zero points if codes are integers.

    Zero points are shaped to broadcast over `x`.
    """
    x, zero_point = _without_offset(x, zero_point, axis, block_size)
    y = x / spread(scale, x, axis, block_size)
    return y, spread(zero_point, x, axis, block_size) if fmt.is_integer else None


def _integers_(y: Tensor, zero_point: Tensor, fmt: Format, limits: tuple[float, float] | None = None) -> Tensor:
    """Return the integer codes of `x / scale` in a float dtype; NaN becomes the smallest code. May overwrite `y`."""
    low, high = limits or fmt.limits
    y = y.double() if fmt.bits > 24 else y
    return y.round_().add_(zero_point).nan_to_num_(nan=low).clamp_(low, high)


def _nearest_(y: Tensor, fmt: Format) -> Tensor:
    """Round to values of a format without integer codes; may overwrite `y`. For 8 bits or more, casts are fastest."""
    return fmt.decode(fmt.encode(y)) if fmt.is_float and fmt.bits >= 8 else fmt.round_(y)


def _without_offset(x: Tensor, zero_point: Tensor, axis: int | None, block_size: int) -> tuple[Tensor, Tensor]:
    """Subtract the offset from `x`, if there is one, and return the difference with a zero point of zero."""
    if not zero_point.is_floating_point():
        return x, zero_point
    return x - spread(zero_point, x, axis, block_size), torch.zeros_like(zero_point, dtype=torch.int32)


@quantize.register_fake
def _quantized(
    x: Tensor, scale: Tensor, zero_point: Tensor, format: str, axis: int | None = None, block_size: int = 0
) -> Tensor:
    fmt = parse_format(format)
    if fmt.vector == 1:
        return torch.empty_like(x, dtype=fmt.dtype)
    return x.new_empty(fmt.codes_shape(x.shape), dtype=fmt.dtype)


def _cut(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _no_gradient(ctx: Any, *gradients: Any) -> None:
    raise AssertionError("no gradient flows through codes")


# Without this line, float codes would require a gradient, in 8 bits.
quantize.register_autograd(_no_gradient, setup_context=_cut)


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
    return QuantizedTensor.of(codes, scale, zero_point, format, axis, block_size).dequantize(dtype)


@dequantize.register_fake
def _dequantized(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return dequantized_like(codes, parse_format(format), dtype)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    codes, scale, zero_point, ctx.format, axis, block_size, _ = inputs
    ctx.save_for_backward(codes, scale, zero_point)
    ctx.layout = axis, block_size


def _gradient_of_dequantize(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[1]:
        return (None,) * 7
    codes, scale, zero_point = ctx.saved_tensors
    fmt = parse_format(ctx.format)
    slope = fmt.decode(codes)
    if fmt.is_integer and not zero_point.is_floating_point():
        slope = slope - spread(zero_point, slope, *ctx.layout)
    return None, Layout.of(slope.shape, *ctx.layout).total(slope * gradient, scale.shape), *(None,) * 5


dequantize.register_autograd(_gradient_of_dequantize, setup_context=_keep_codes)


@torch.library.custom_op("quark_fx::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Return `dequantize(quantize(x))` in the dtype of `x`, bit for bit, with a straight-through gradient.

    The gradient of `x` is 1 within the clip range and 0 where `x` saturates. The gradient of a learned `scale` is the
    rounding error in steps, or the limit where a value saturates, times `1 / sqrt(n * largest code)` for the `n` values
    that share the scale. The host never waits for the device.

    Args:
        x: Floats, any shape.
        scale: Scales, float32, shaped by the granularity (module docstring).
        zero_point: Zero points, int32, the shape of `scale`; only integer formats use them.
        format: Name of a format that needs a scale.
        axis: Dimension of the scales, see the module docstring.
        block_size: Values per scale, see the module docstring.
        low: Smallest integer code. Default: the format's.
        high: Largest integer code. Default: the format's.

    Source:
        Esser et al. 2020, "Learned Step Size Quantization", equations 1 to 3 and section 2.2.
    """
    fmt = parse_format(format)
    y, points = _steps(x.float(), scale, zero_point, fmt, axis, block_size)
    y = _nearest_(y, fmt) if points is None else _integers_(y, points, fmt, _limits(fmt, low, high))
    return _decoded(y, scale, zero_point, fmt, axis, block_size).to(x.dtype)


def _decoded(y: Tensor, scale: Tensor, zero_point: Tensor, fmt: Format, axis: int | None, block_size: int) -> Tensor:
    """Dequantize integer codes, or values of other formats, float32; may overwrite `y`."""
    y, spread_scale = y.float(), spread(scale, y, axis, block_size)
    if zero_point.is_floating_point():
        return decode(y, spread_scale, out=y).add_(spread(zero_point, y, axis, block_size))
    points = spread(zero_point, y, axis, block_size) if fmt.is_integer else None
    return decode(y, spread_scale, points, out=y)


@fake_quantize.register_fake
def _(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    return torch.empty_like(x)


def _limits(fmt: Format, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the smallest and the largest code in use."""
    return fmt.limits[0] if low is None else low, fmt.limits[1] if high is None else high


def _keep_values(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, zero_point, format, axis, block_size, low, high = inputs
    ctx.save_for_backward(x, scale, zero_point)
    ctx.format, ctx.layout = parse_format(format), (axis, block_size)
    ctx.limits = _limits(ctx.format, low, high)


def _gradient_of_fake_quantize(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point = ctx.saved_tensors
    fmt, (low, high) = ctx.format, ctx.limits
    position, points = _steps(x.float(), scale, zero_point, fmt, *ctx.layout)
    least, most = low, high
    if points is None:
        rounded, (first, last) = position, fmt.end_steps
        low, high = low - first / 2, high + last / 2
    else:
        rounded = position.round() + points
    inside = (rounded >= low) & (rounded <= high)
    of_x = gradient * inside if ctx.needs_input_grad[0] else None
    of_scale = None
    if ctx.needs_input_grad[1]:
        if points is None:
            values = _nearest_(position.clone(), fmt)
            slope = torch.where(inside, values - position, values)
        else:
            slope = torch.where(inside, rounded - points - position, rounded.clamp(least, most) - points)
        factor = (x.numel() / max(1, scale.numel()) * max(most, 1)) ** -0.5
        of_scale = Layout.of(x.shape, *ctx.layout).total(slope * gradient, scale.shape) * factor
    return of_x, of_scale, *(None,) * 6


fake_quantize.register_autograd(_gradient_of_fake_quantize, setup_context=_keep_values)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def straight_through(value: Tensor, like: Tensor) -> Tensor:
    """Return `value`, bit for bit, and pass its gradient to `like`, which has the same shape and dtype."""
    result: Tensor = _StraightThrough.apply(value, like)
    return result


@torch.library.custom_op("quark_fx::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each group of rows by its matrix, and return 0 for rows after the last group.

    `aten._grouped_mm` computes the same but leaves the rows after the last group uninitialized.

    Args:
        x: Rows, shape `(rows, inputs)`.
        weight: One matrix per group, shape `(groups, inputs, outputs)`, in the dtype of `x`.
        offsets: Exclusive ends of the groups, increasing, int32, shape `(groups,)`.

    Returns:
        Products, shape `(rows, outputs)`.
    """
    y: Tensor = torch.ops.aten._grouped_mm.default(x, weight, offsets)
    covered = torch.arange(y.shape[0], device=y.device) < offsets[-1]
    return y.where(covered.unsqueeze(-1), 0.0)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if (x.dim(), weight.dim(), offsets.dim()) != (2, 3, 1) or offsets.shape[0] != weight.shape[0]:
        raise ValueError(f"no grouped product: {x.dim()}, {weight.dim()} and {offsets.dim()} dimensions")
    return x.new_empty(x.shape[0], weight.shape[2])


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient_of_grouped_mm(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_x = grouped_mm(gradient, weight.mT.contiguous(), offsets) if ctx.needs_input_grad[0] else None
    of_weight = torch.ops.aten._grouped_mm.default(x.mT, gradient, offsets) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None


grouped_mm.register_autograd(_gradient_of_grouped_mm, setup_context=_keep_factors)


Measurement = tuple[str, str, int | None, int, str, int, float]
"""Arguments of `dynamic_qparams` after the tensor."""


@torch.library.custom_op("quark_fx::dynamic_qparams", mutates_args=())
def dynamic_qparams(
    x: Tensor,
    format: str,
    symmetry: str,
    axis: int | None = None,
    block_size: int = 0,
    scale_type: str = "float32",
    group_size: int = 0,
    ratio: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Measure the range of `x`, and return its scale (float32) and zero point (int32).

    Args:
        x: Floats, any shape.
        format: Name of a format that needs a scale.
        symmetry: Value of `Symmetry`.
        axis: Dimension of the scales, see the module docstring.
        block_size: Values per scale, see the module docstring; 0 with `axis=None`, for one scale.
        scale_type: Name of a scale format: `"float32"`, or a format with 8 bits.
        group_size: Values per group of blocks; the scale of a block is its group's scale or half of it. 0 for no
            groups.
        ratio: Fraction of the range to keep, 1 for scales of 8 bits; values outside saturate.

    Source:
        https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html for uint8 per tensor;
        `quark_fx.numbers.scales` for scales of 8 bits.
    """
    x = x.float()
    kind = scale_format(scale_type, group_size // block_size if group_size else None)
    scheme = Scheme(format=parse_format(format), symmetry=Symmetry(symmetry), scale=kind)
    low, high = extremes(x, axis, block_size)
    if ratio != 1:
        low, high = low * ratio, high * ratio
    if kind.is_8_bit:
        scale = kind.of_range(torch.maximum(-low, high), scheme, high)
        if kind.group_size is not None:
            low, high = extremes(x, axis, group_size)
            group = kind.of_range(torch.maximum(-low, high), scheme, high)
            scale = kind.of_groups(scale, spread(group, scale, axis, kind.group_size))
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    if scheme.symmetric:
        scale = _nonzero(torch.maximum(-low, high) / like(low, scheme.largest))
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    scale = _nonzero((high - low) / like(low, scheme.qmax - scheme.qmin))
    zero_point = (scheme.qmin - low / scale).clamp_(scheme.qmin, scheme.qmax).round_()
    return scale, zero_point.to(torch.int32)


def _cut_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


# No gradient flows through measured ranges, just as through calibrated ones.
dynamic_qparams.register_autograd(_no_gradient, setup_context=_cut_both)


@dynamic_qparams.register_fake
def _(
    x: Tensor,
    format: str,
    symmetry: str,
    axis: int | None = None,
    block_size: int = 0,
    scale_type: str = "float32",
    group_size: int = 0,
    ratio: float = 1.0,
) -> tuple[Tensor, Tensor]:
    shape: list[int] = []
    if axis is not None:
        shape = list(x.shape)
        shape[axis] = 1 if block_size < 0 else (shape[axis] + block_size - 1) // block_size
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def extremes(x: Tensor, axis: int | None, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each block, extended to include zero, in the shape of the scales."""
    if axis is None:
        low, high = torch.aminmax(x)
        return low.clamp(max=0), high.clamp(min=0)
    if block_size > 0:
        blocks = -(-x.shape[axis] // block_size)
        # The last block is padded with zeros, which every range includes.
        padding = blocks * block_size - x.shape[axis]
        x = F.pad(x.movedim(axis, -1), (0, padding)).movedim(-1, axis) if padding else x
        x, axis = x.unflatten(axis, (blocks, block_size)), axis % x.dim() + 1
    # torch.aminmax over a dimension is not vectorized on a CPU.
    low, high = (x.amin(axis, keepdim=True), x.amax(axis, keepdim=True))
    low, high = low.clamp(max=0), high.clamp(min=0)
    return (low.squeeze(axis), high.squeeze(axis)) if block_size > 0 else (low, high)


def spread(parameter: Tensor, x: Tensor, axis: int | None, block_size: int) -> Tensor:
    """Reshape or repeat scales or zero points so that they broadcast over `x`; see the module docstring."""
    return Layout.of(x.shape, axis, block_size).spread(parameter)


@torch.no_grad()
def encode(x: Tensor, qparams: QParams, scheme: Scheme, axis: int | None = None, block_size: int = 0) -> Tensor:
    """Quantize `x` like `quantize`, but saturate at the limits of the *scheme* (±127 for symmetric int8)."""
    codes = torch.empty(scheme.format.codes_shape(x.shape), dtype=scheme.format.dtype, device=x.device)
    for rows, scale, zero_point in _pieces(x, qparams, axis, block_size):
        y, points = _wide_steps(x[rows], scale, zero_point, scheme, axis, block_size)
        codes[rows] = scheme.format.encode(y) if points is None else _in_use_(y, points, scheme)
    return codes


@torch.no_grad()
def rounded(x: Tensor, qparams: QParams, scheme: Scheme, axis: int | None = None, block_size: int = 0) -> Tensor:
    """Return `dequantize(encode(x))`, float32, without storing the codes."""
    values = torch.empty_like(x, dtype=torch.float32)
    for rows, scale, zero_point in _pieces(x, qparams, axis, block_size):
        y, points = _wide_steps(x[rows], scale, zero_point, scheme, axis, block_size)
        y = _nearest_(y, scheme.format) if points is None else _in_use_(y, points, scheme)
        values[rows] = _decoded(y, scale, zero_point, scheme.format, axis, block_size)
    return values


def _pieces(
    x: Tensor, qparams: QParams, axis: int | None, block_size: int
) -> Iterator[tuple[slice | EllipsisType, Tensor, Tensor]]:
    """Yield slices of dimension 0 of `x`, each with its scales and zero points."""
    layout = Layout.of(x.shape, axis, block_size)
    for rows in layout.pieces(values_at_once(x)):
        yield rows, layout.of_rows(qparams.scale, rows), layout.of_rows(qparams.zero_point, rows)


def _wide_steps(
    x: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, axis: int | None, block_size: int
) -> tuple[Tensor, Tensor | None]:
    """Compute `_steps` in float64 for integer codes of more than 16 bits, and in float32 for other codes."""
    wide = torch.float64 if scheme.format.is_integer and scheme.format.bits > 16 else torch.float32
    return _steps(x.to(wide), scale, zero_point, scheme.format, axis, block_size)


def _in_use_(y: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Return the integer codes of `x / scale` within the limits of a scheme, in a float dtype; overwrites `y`."""
    return y.round_().add_(zero_point).clamp_(*scheme.limits)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


SHAPES: dict[Any, Any] = {
    torch.ops.quark_fx.quantize.default: _quantized,
    torch.ops.quark_fx.dequantize.default: _dequantized,
}
"""Functions that create an empty result of an operator, three times as fast as a call with fake tensors."""

__all__ = [
    "SHAPES",
    "Measurement",
    "dequantize",
    "dynamic_qparams",
    "encode",
    "extremes",
    "fake_quantize",
    "quantize",
    "rounded",
    "spread",
    "straight_through",
]
