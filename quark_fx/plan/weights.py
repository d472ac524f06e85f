"""Quantize a constant tensor: settle the granularity, observe once, encode."""

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
from quark_fx.plan.pair_sums import PairBound

_ROWS_AT_ONCE = 8192


def stored_bytes(tensor: QuantizedTensor, spec: TensorSpec, linear: Linear | None = None) -> int:
    """Return the bytes of a stored tensor: packed codes, scales, zero points unless all are the format's.

    Args:
        tensor: quantized as `spec` says.
        spec: what the bits of the scales follow from.
        linear: see `quantize_tensor`.
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
    """Return the dimensions of a constant that count output channels and what groups lie along."""
    return (0, min(1, x.dim() - 1)) if linear is None else (linear.output_axis, linear.input_axis)


def _rows_together(x: Tensor, spec: TensorSpec) -> int:
    """Return how many output channels of a constant share the scales of their groups."""
    return spec.group_rows if x.dim() > 1 else 1


@dataclass(frozen=True)
class Observed:
    """How the values of a constant share scales, and what its observer found.

    Attributes:
        axis: of `quark_fx.numbers.ops`.
        block: likewise.
        qparams: before anything else limits them.
    """

    axis: int | None
    block: int
    qparams: QParams


@dataclass(frozen=True)
class RoundedWeight:
    """A weight as a spec rounds it where nothing else limits its scales.

    Attributes:
        spec: of the weight.
        amax: see `quantize_tensor`.
        pairs: likewise.
        observed: what its observer found.
        tensor: codes and scales.
        sqnr: of them, in dB.
    """

    spec: TensorSpec
    amax: float | None
    pairs: PairBound | None
    observed: Observed
    tensor: QuantizedTensor
    sqnr: float

    def is_of(self, spec: TensorSpec, amax: float | None, pairs: PairBound | None, smallest: Tensor | None) -> bool:
        """Tell whether `quantize_tensor` makes the same of these arguments."""
        if (self.spec, self.amax, self.pairs) != (spec, amax, pairs):
            return False
        found = self.observed.qparams
        return smallest is None or torch.equal(_raise_scale(found, smallest, spec).scale, found.scale)

    def copied(self) -> QuantizedTensor:
        """Return the codes and scales in memory of their own."""
        tensor = self.tensor
        return replace(
            tensor, codes=tensor.codes.clone(), scale=tensor.scale.clone(), zero_point=tensor.zero_point.clone()
        )


def observe_tensor(x: Tensor, spec: TensorSpec, linear: Linear | None = None, amax: Tensor | None = None) -> Observed:
    """Return what the observer of a spec finds in a constant; arguments are those of `quantize_tensor`."""
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
        x: floating point, any shape.
        spec: static, not per token.
        linear: the operator that multiplies by `x` or by some of its rows, which says what its dimensions count:
            channels of different matrices of a stack, or groups of a transposed convolution, have scales of their own.
            Default: dimension 0 counts channels, and groups lie along dimension 1.
        smallest_scale: lower bound of the scales, broadcastable to one value per output channel.
        amax: the largest magnitude that the scale of E4M3 scales follows, shape `()`; default: that of `x`. Give
            tensors that will be joined one.
        qparams: what to use instead of what the observer finds, shaped by the granularity.
        pairs: of codes that must not saturate in 16 bits: what the observer finds is widened where that costs less
            than limiting codes, and the pairs that still exceed the limit are lowered to it.
        observed: what `observe_tensor` returns, if it is known.

    Raises:
        ValueError: if `x` holds NaN or infinity.
    """
    if spec.is_cast:
        if not torch.isfinite(x).all():
            raise ValueError("it holds NaN or infinity")
        if not torch.isfinite(x.to(spec.format.dtype)).all():
            raise ValueError(f"it overflows {spec.format}, whose largest value is {spec.scheme.largest:.6g}")
        return QuantizedTensor.cast(x, spec.format)
    settled = qparams is not None
    if qparams is not None:
        outputs, inputs = _axes(x, linear)
        axis, block = _layout(x, spec, outputs, inputs, linear is not None and linear.stacked)
    else:
        found = observed or observe_tensor(x, spec, linear, amax)
        axis, block, qparams = found.axis, found.block, found.qparams
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
    """Return larger scales where that costs less than lowering the codes of pairs that saturate."""
    joint = qparams.scale.numel() == 1
    # What the observer chose to clip stays clipped.
    position = (x.float() / spread(qparams.scale, x, axis, block)).clamp_(*spec.scheme.limits)
    ratio = pairs.widening(position, joint=joint, doubled=spec.scale == POWER_OF_TWO)
    wanted = qparams.scale.abs().double() * ratio.reshape(qparams.scale.shape)
    scale = spec.scale.nearest(wanted).copysign(qparams.scale)
    return QParams(torch.where(ratio.reshape(scale.shape) > 1, scale, qparams.scale), qparams.zero_point)


def _observed(x: Tensor, spec: TensorSpec, axis: int | None, block: int, amax: Tensor | None, outputs: int) -> QParams:
    """Return what the observer of the spec finds."""
    scheme = spec.scheme
    kind = spec.scale
    if kind.has_unit:
        amax = x.detach().abs().amax() if amax is None else amax
        if not torch.isfinite(amax):
            raise ValueError("it holds NaN or infinity")
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
    """Return scales of groups, and offsets, rounded to ones that can be stored.

    Args:
        qparams: with ideal scales, float32, as the granularity shapes them.
        spec: of the weight, with scales in float, or in integers times floats.
        axis: dimension that groups lie along.
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
    """Return (`axis`, `block_size`) and parameters of a weight whose groups share the numbers of output channels.

    One channel a group is one scale per index of `inputs`, repeated within a group. Several are one per block of
    `inputs` and channel, repeated along the kernel, where `quark_fx.numbers.ops` has scales of their own.
    """
    order = x.movedim((inputs, outputs), (0, 1)).unflatten(0, (groups, -1)).transpose(1, 2)
    found = _row_qparams(order.flatten(0, 1).flatten(1), spec, spec.scheme)
    if x.shape[outputs] == 1:
        each = x.shape[inputs] // groups
        return inputs, 0, QParams(found.scale.repeat_interleave(each), found.zero_point.repeat_interleave(each))
    kernel = [n for d, n in enumerate(x.shape) if d not in (inputs, outputs)]
    ones, sizes = ((groups, x.shape[outputs], *part) for part in ([1] * len(kernel), kernel))
    spread = (p.reshape(ones).expand(sizes) for p in (found.scale, found.zero_point))
    scale, zero_point = (p.movedim((0, 1), (inputs, outputs)).contiguous() for p in spread)
    return inputs, x.shape[inputs] // groups, QParams(scale, zero_point)


def _block_qparams(
    x: Tensor, observe: Callable[[Tensor], QParams], axis: int, block: int, outputs: int = 0, count: int = 1
) -> QParams:
    """Return parameters of blocks of `block` values along `axis`, and of `count` indices of `outputs` if that is not 1.

    Smaller blocks at the ends are observed by themselves. The indices of a block have one scale each, all the same.
    """
    moved = x.movedim(axis, -1).unsqueeze(-2) if count == 1 else x.movedim((outputs, axis), (-2, -1))
    strips = []
    for strip in _whole_and_rest(moved, -2, count):
        height, parts = min(count, strip.shape[-2]), []
        for part in _whole_and_rest(strip, -1, block):
            cells = part.unflatten(-2, (-1, height)).unflatten(-1, (-1, min(block, part.shape[-1]))).transpose(-3, -2)
            # Rows are independent; a histogram of each at once would take gigabytes.
            found = [observe(some) for some in cells.flatten(0, -3).flatten(1).split(_ROWS_AT_ONCE)]
            parts.append(
                [
                    torch.cat(p).reshape(cells.shape[:-2])
                    for p in zip(*((q.scale, q.zero_point) for q in found), strict=True)
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
    """Yield the part of a dimension that a size divides, and the rest, if they are not empty."""
    whole = x.shape[dim] // size * size
    for start, length in ((0, whole), (whole, x.shape[dim] - whole)):
        if length:
            yield x.narrow(dim, start, length)


def _row_qparams(rows: Tensor, spec: TensorSpec, scheme: Scheme) -> QParams:
    return spec.new_observer.of_constant(rows, scheme)


def _raise_scale(qparams: QParams, smallest: Tensor, spec: TensorSpec) -> QParams:
    bound = smallest if qparams.scale.dim() else smallest.max()
    if spec.scale != FLOAT32:
        # A bound of zero (no bias) is none, not that of a tensor of zeros.
        bound = torch.where(bound > 0, spec.scale.nearest(bound.double()), 0)
    # Scales of sign-aware weights may be negative.
    raised = torch.maximum(qparams.scale.abs(), bound.to(qparams.scale)).copysign(qparams.scale)
    # A symmetric zero point does not depend on the scale; an asymmetric one is left, as its range only grew.
    return QParams(raised, qparams.zero_point)


def rescale_zeros(weight: QuantizedTensor, wanted: Tensor, kind: ScaleFormat) -> QuantizedTensor:
    """Give channels whose codes all stand for zero another scale: any scale gives their values.

    What follows a weight's scale, as the steps of an int32 bias, is coarse beside the 1 that a range of zeros gets.

    Args:
        weight: with one scale, or one per channel.
        wanted: one scale per channel, 0 where any does.
        kind: Format of the scales.
    """
    used = weight.codes != weight.layout.spread(weight.zero_point).to(weight.codes.dtype)
    if weight.axis is None:
        zeros, wanted = ~used.any(), wanted.max()
    else:
        zeros = ~used.movedim(weight.axis, 0).flatten(1).any(1)
    new = kind.nearest(wanted.double()).to(weight.scale)
    return replace(weight, scale=torch.where(zeros & (wanted > 0), new, weight.scale))
