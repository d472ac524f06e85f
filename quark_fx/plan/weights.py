"""Quantize a constant tensor: choose the granularity, observe once, encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.graph.linear import Linear
from quark_fx.numbers.ops import encode, spread
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import FLOAT32, POWER_OF_TWO, ScaleFormat
from quark_fx.observers.base import naming_observer, per_channel
from quark_fx.plan.pair_sums import PairBound

_ROWS_AT_ONCE = 8192


def stored_bytes(tensor: QuantizedTensor, spec: TensorSpec, linear: Linear | None = None) -> int:
    """Return the bytes of a stored tensor: packed codes, scales, and zero points unless the scheme is symmetric.

    Args:
        tensor: Tensor quantized with `spec`.
        spec: Spec that determines the bits of the scales.
        linear: See `quantize_tensor`.
    """
    total = (tensor.codes.numel() * spec.format.bits + 7) // 8
    if spec.is_cast:
        return total
    if tensor.has_offsets:
        return total + 2 * _scale_bytes(tensor, spec, linear)
    points = 0 if spec.scheme.symmetric else (tensor.zero_point.numel() * spec.format.bits + 7) // 8
    return total + _scale_bytes(tensor, spec, linear) + points


def _scale_bytes(tensor: QuantizedTensor, spec: TensorSpec, linear: Linear | None) -> int:
    count = tensor.scale.numel()
    if (together := _rows_together(tensor.codes, spec)) > 1 and count:
        rows = tensor.scale.shape[_axes(tensor.codes, linear)[0]]
        count = count // rows * -(-rows // together)
    groups = 0
    if spec.scale.group_size is not None and tensor.axis is not None:
        blocks = tensor.scale.shape[tensor.axis]
        groups = count // blocks * -(-blocks // spec.scale.group_size)
    return spec.scale.stored_bytes(count, groups)


def _axes(x: Tensor, linear: Linear | None) -> tuple[int, int]:
    """Return the dimension of a constant that indexes output channels, and the dimension that is split into groups."""
    return (0, min(1, x.dim() - 1)) if linear is None else (linear.output_axis, linear.input_axis)


def _rows_together(x: Tensor, spec: TensorSpec) -> int:
    """Return the number of output channels of a constant that share the scales of their groups."""
    return spec.group_rows if x.dim() > 1 else 1


@dataclass(frozen=True)
class Observed:
    """The scales of a constant that its observer chose, and their layout.

    Attributes:
        axis: Scale axis, a parameter of `quark_fx.numbers.ops`.
        block: Block size, a parameter of `quark_fx.numbers.ops`.
        qparams: Parameters before other limits apply.
    """

    axis: int | None
    block: int
    qparams: QParams


@dataclass(frozen=True)
class RoundedWeight:
    """A weight rounded with scales that no bias limits.

    Attributes:
        spec: Spec of the weight.
        amax: Value of the argument of `quantize_tensor`.
        pairs: Value of the argument of `quantize_tensor`.
        observed: Result of `observe_tensor`.
        tensor: Codes and scales.
        norms: Result of `tensor.norms`.
    """

    spec: TensorSpec
    amax: float | None
    pairs: PairBound | None
    observed: Observed
    tensor: QuantizedTensor
    norms: list[Tensor]

    def is_of(self, spec: TensorSpec, amax: float | None, pairs: PairBound | None, smallest: Tensor | None) -> bool:
        """Tell whether `quantize_tensor` returns the same tensor for these arguments."""
        if (self.spec, self.amax, self.pairs) != (spec, amax, pairs):
            return False
        qparams = self.observed.qparams
        return smallest is None or torch.equal(_raise_scale(qparams, smallest, spec).scale, qparams.scale)

    def copied(self) -> QuantizedTensor:
        """Return a copy of the codes and scales."""
        tensor = self.tensor
        return replace(
            tensor, codes=tensor.codes.clone(), scale=tensor.scale.clone(), zero_point=tensor.zero_point.clone()
        )


def observe_tensor(x: Tensor, spec: TensorSpec, linear: Linear | None = None, amax: Tensor | None = None) -> Observed:
    """Return the observer's parameters for a constant; the arguments are documented in `quantize_tensor`."""
    outputs, inputs = _axes(x, linear)
    groups = 1 if linear is None else linear.output_groups
    if groups > 1 and spec.granularity is Granularity.CHANNEL:
        return Observed(*_channels_of_groups(x, spec, outputs, inputs, groups))
    axis, block = _layout(x, spec, outputs, inputs, linear is not None and linear.stacked)
    return Observed(axis, block, _observed(x, spec, axis, block, amax, outputs))


def quantize_tensor(
    x: Tensor,
    spec: TensorSpec,
    *,
    linear: Linear | None = None,
    smallest_scale: Tensor | None = None,
    amax: Tensor | None = None,
    qparams: QParams | None = None,
    pairs: PairBound | None = None,
    observed: Observed | None = None,
) -> QuantizedTensor:
    """Quantize the constant `x`.

    Args:
        x: Floating-point tensor, any shape.
        spec: Static spec, not per token.
        linear: Operator that multiplies by `x` or some of its rows, and defines its dimensions: channels of different
            matrices of a stack, or groups of a transposed convolution, have separate scales. Default: dimension 0
            indexes channels, and dimension 1 is split into groups.
        smallest_scale: Lower bound of the scales, broadcastable to one value per output channel.
        amax: Largest magnitude, which determines the scale of E4M3 scales, shape `()`; default: the largest magnitude
            of `x`. Tensors that will be joined need the same value.
        qparams: Parameters in place of the observer's, in the shape of the granularity.
        pairs: Pairs of codes that must not saturate in 16 bits: the observer's range is widened if that costs less than
            limiting codes, and pairs that still exceed the limit are lowered to it.
        observed: Result of `observe_tensor`, if available.

    Raises:
        ValueError: If `x` holds NaN or infinity.
    """
    if spec.is_cast:
        if not torch.isfinite(x).all():
            raise ValueError("the value contains NaN or infinity")
        if not torch.isfinite(x.to(spec.format.dtype)).all():
            raise ValueError(f"it overflows {spec.format}, whose largest value is {spec.scheme.largest:.6g}")
        return QuantizedTensor.cast(x, spec.format)
    settled = qparams is not None
    if qparams is not None:
        outputs, inputs = _axes(x, linear)
        axis, block = _layout(x, spec, outputs, inputs, linear is not None and linear.stacked)
    else:
        measured = observed or observe_tensor(x, spec, linear, amax)
        axis, block, qparams = measured.axis, measured.block, measured.qparams
    if smallest_scale is not None:
        qparams = _raise_scale(qparams, smallest_scale, spec)
    if pairs is not None and not settled and spec.scheme.symmetric and pairs.has_own_scales(x, qparams.scale, axis):
        qparams = _widened(x, qparams, spec, pairs, axis, block)
    codes = encode(x, qparams, spec.scheme, axis, block)
    if pairs is not None:
        position = x.float() / spread(qparams.scale, x, axis, block) + spread(qparams.zero_point, x, axis, block)
        codes = pairs.limited(codes, position)
    return QuantizedTensor.of(codes, qparams.scale, qparams.zero_point, spec.format, axis, block)


def _widened(x: Tensor, qparams: QParams, spec: TensorSpec, pairs: PairBound, axis: int | None, block: int) -> QParams:
    """Return larger scales where they cost less than lowering the codes of pairs that saturate."""
    joint = qparams.scale.numel() == 1
    # Values that the observer chose to clip stay clipped.
    position = (x.float() / spread(qparams.scale, x, axis, block)).clamp_(*spec.scheme.limits)
    ratio = pairs.widening(position, joint=joint, doubled=spec.scale == POWER_OF_TWO)
    widened = qparams.scale.abs().double() * ratio.reshape(qparams.scale.shape)
    scale = spec.scale.nearest(widened).copysign(qparams.scale)
    return QParams(torch.where(ratio.reshape(scale.shape) > 1, scale, qparams.scale), qparams.zero_point)


def _observed(x: Tensor, spec: TensorSpec, axis: int | None, block: int, amax: Tensor | None, outputs: int) -> QParams:
    """Return the parameters that the spec's observer chooses."""
    scheme = spec.scheme
    kind = spec.scale
    if kind.has_unit:
        amax = x.detach().abs().amax() if amax is None else amax
        if not torch.isfinite(amax):
            raise ValueError("the value contains NaN or infinity")
        scheme = replace(scheme, scale=kind.of_tensor(amax, scheme))
    observe = partial(_row_qparams, spec=spec, scheme=scheme)
    if block:
        qparams = _block_qparams(x, observe, axis or 0, block, outputs, _rows_together(x, spec))
        if kind.multiples is not None:
            qparams = storable(qparams, spec, axis or 0)
        elif kind.group_size is not None and spec.group_size is not None:
            group = _block_qparams(x, observe, axis or 0, spec.group_size * kind.group_size).scale
            group = spread(group, qparams.scale, axis, spec.group_size * kind.group_size // block)
            qparams = QParams(kind.of_groups(qparams.scale, group), qparams.zero_point)
    else:
        rows = x.reshape(1, -1) if axis is None else x.movedim(axis, 0).flatten(1)
        qparams = observe(rows)
        if axis is None:
            qparams = QParams(qparams.scale.reshape(()), qparams.zero_point.reshape(()))
    return qparams


def storable(qparams: QParams, spec: TensorSpec, axis: int) -> QParams:
    """Round scales of groups, and offsets, to values that can be stored.

    Args:
        qparams: Parameters with ideal scales, float32, in the shape of the granularity.
        spec: Spec of the weight, with float scales, or with integer scales times float scales.
        axis: Dimension that is split into groups.
    """
    zero_point = qparams.zero_point
    if zero_point.is_floating_point():
        zero_point = spec.scale.in_groups(zero_point, axis, offsets=True)
    return QParams(spec.scale.in_groups(qparams.scale, axis), zero_point)


def _layout(x: Tensor, spec: TensorSpec, output_axis: int, input_axis: int, stacked: bool) -> tuple[int | None, int]:
    """Return (`axis`, `block_size`) of `quark_fx.numbers.ops` for a granularity."""
    if spec.granularity is Granularity.TENSOR:
        return None, 0
    if spec.group_size is not None:
        return input_axis, min(spec.group_size, x.shape[input_axis])
    if stacked:  # one scale per matrix and output channel
        return input_axis, x.shape[input_axis]
    return output_axis, 0


def _channels_of_groups(
    x: Tensor, spec: TensorSpec, outputs: int, inputs: int, groups: int
) -> tuple[int, int, QParams]:
    """Return (`axis`, `block_size`) and parameters of a weight whose groups reuse the indices of output channels.

    With one channel per group, there is one scale per index of `inputs`, repeated within a group. With several channels
    per group, there is one scale per block of `inputs` and channel, repeated along the kernel, because
    `quark_fx.numbers.ops` needs a scale for each kernel position.
    """
    order = x.movedim((inputs, outputs), (0, 1)).unflatten(0, (groups, -1)).transpose(1, 2)
    rows = _row_qparams(order.flatten(0, 1).flatten(1), spec, spec.scheme)
    if x.shape[outputs] == 1:
        each = x.shape[inputs] // groups
        return inputs, 0, QParams(rows.scale.repeat_interleave(each), rows.zero_point.repeat_interleave(each))
    kernel = [n for d, n in enumerate(x.shape) if d not in (inputs, outputs)]
    ones, sizes = ((groups, x.shape[outputs], *part) for part in ([1] * len(kernel), kernel))
    spread = (p.reshape(ones).expand(sizes) for p in (rows.scale, rows.zero_point))
    scale, zero_point = (p.movedim((0, 1), (inputs, outputs)).contiguous() for p in spread)
    return inputs, x.shape[inputs] // groups, QParams(scale, zero_point)


def _block_qparams(
    x: Tensor, observe: Callable[[Tensor], QParams], axis: int, block: int, outputs: int = 0, count: int = 1
) -> QParams:
    """Return parameters of blocks of `block` values along `axis`, and of `count` indices of `outputs` if that is not 1.

    Smaller blocks at the ends are observed separately. The scale of a block is repeated for each of its indices of
    `outputs`.
    """
    moved = x.movedim(axis, -1).unsqueeze(-2) if count == 1 else x.movedim((outputs, axis), (-2, -1))
    strips = []
    for strip in _whole_and_rest(moved, -2, count):
        height, parts = min(count, strip.shape[-2]), []
        for part in _whole_and_rest(strip, -1, block):
            cells = part.unflatten(-2, (-1, height)).unflatten(-1, (-1, min(block, part.shape[-1]))).transpose(-3, -2)
            # Rows are independent; a histogram of every row at once would take gigabytes.
            qparams = [observe(rows) for rows in cells.flatten(0, -3).flatten(1).split(_ROWS_AT_ONCE)]
            parts.append(
                [
                    torch.cat(p).reshape(cells.shape[:-2])
                    for p in zip(*((q.scale, q.zero_point) for q in qparams), strict=True)
                ]
            )
        strips.append([torch.cat(p, -1).repeat_interleave(height, -2) for p in zip(*parts, strict=True)])
    scale, zero_point = (torch.cat(p, -2) for p in zip(*strips, strict=True))
    if count == 1:
        scale, zero_point = (p.squeeze(-2).movedim(-1, axis) for p in (scale, zero_point))
    else:
        scale, zero_point = (p.movedim((-2, -1), (outputs, axis)) for p in (scale, zero_point))
    return QParams(scale.contiguous(), zero_point.contiguous())


def _whole_and_rest(x: Tensor, dim: int, size: int) -> Iterator[Tensor]:
    """Yield the part of a dimension that is divisible by a size, and the rest, if they are not empty."""
    whole = x.shape[dim] // size * size
    for start, length in ((0, whole), (whole, x.shape[dim] - whole)):
        if length:
            yield x.narrow(dim, start, length)


def _row_qparams(rows: Tensor, spec: TensorSpec, scheme: Scheme) -> QParams:
    observer = spec.new_observer
    with naming_observer(observer):
        return per_channel(observer, observer.of_constant(rows, scheme), len(rows))


def _raise_scale(qparams: QParams, smallest: Tensor, spec: TensorSpec) -> QParams:
    bound = smallest if qparams.scale.dim() else smallest.max()
    if spec.scale != FLOAT32:
        # A bound of zero (no bias) means no bound; `nearest` would raise it to the scale of a tensor of zeros.
        bound = torch.where(bound > 0, spec.scale.nearest(bound.double()), 0)
    # Scales of sign-aware weights may be negative.
    raised = torch.maximum(qparams.scale.abs(), bound.to(qparams.scale)).copysign(qparams.scale)
    # A symmetric zero point does not depend on the scale; an asymmetric zero point stays valid, since the range grew.
    return QParams(raised, qparams.zero_point)


def rescale_zeros(weight: QuantizedTensor, scales: Tensor, kind: ScaleFormat) -> QuantizedTensor:
    """Replace the scale of channels whose codes all stand for zero; any scale gives the same values.

    Steps that depend on a weight's scale, such as the steps of an int32 bias, are coarse with a scale of 1, the default
    for a range of zeros.

    Args:
        weight: Quantized weight with one scale, or one per channel.
        scales: One scale per channel, 0 where any scale fits.
        kind: Format of the scales.
    """
    used = weight.codes != weight.layout.spread(weight.zero_point).to(weight.codes.dtype)
    if weight.axis is None:
        zeros, scales = ~used.any(), scales.max()
    else:
        zeros = ~used.movedim(weight.axis, 0).flatten(1).any(1)
    new = kind.nearest(scales.double()).to(weight.scale)
    return replace(weight, scale=torch.where(zeros & (scales > 0), new, weight.scale))
