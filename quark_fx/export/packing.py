"""Conversions of quantized weights that the checkpoint layouts have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.model.constants import Constant
from quark_fx.numbers.quantized_tensor import QuantizedTensor

NO_OFFSETS = "offsets (symmetry='offset'), which only GGUF can store; use symmetry='symmetric' or 'asymmetric'"
"""Reason why formats other than GGUF refuse `Symmetry.OFFSET`."""


def matrix_of(constant: Constant) -> QuantizedTensor:
    """Return a quantized weight as a matrix in the form that all checkpoint formats start from.

    Returns:
        Codes of shape (outputs, inputs): signed integers as int8, unsigned integers with offsets as uint8, or floats of
        at most 8 bits. Scales and zero points have the shape (outputs, groups), or (1, 1) for one scale.

    Raises:
        ExportError: If checkpoint formats do not support the weight; the message names the change to make.
    """
    stored = constant.quantized
    if stored is None or stored.codes.dim() != 2:
        raise ExportError("checkpoints store quantized weights only as matrices of codes; leave this weight in float")
    if stored.format.bits > 8:
        raise ExportError(f"checkpoints store codes of at most 8 bits, not {stored.format}; choose a smaller format")
    (outputs, inputs), axis, block = stored.codes.shape, stored.axis, stored.block_size
    if axis == 1 and block:
        if block < inputs and inputs % block:
            raise ExportError(f"{inputs} inputs are not a multiple of the group size {block}; set another group_size")
    elif axis is not None and (axis != 0 or block):
        raise ExportError("the scales are not per output or group of inputs; set granularity='channel' or 'group'")
    stored = stored.signed()
    scale = stored.scale.float().reshape(1 if axis is None else outputs, -1)
    zero_point = stored.zero_point.expand_as(stored.scale).reshape(scale.shape)
    return QuantizedTensor.of(stored.codes, scale, zero_point, stored.format, 1, inputs // scale.shape[1])


def group_size(weight: QuantizedTensor) -> int | None:
    """Return the number of inputs that share a scale in a result of `matrix_of`; `None` if all inputs do."""
    return weight.layout.block if weight.scale.shape[1] > 1 else None


def block_scales(weight: QuantizedTensor) -> Tensor | None:
    """Return one scale per square block, shape (blocks, groups); `None` if the scales within a block differ."""
    size, scale = weight.layout.block, weight.scale
    blocks = scale[::size]
    together = size > 1 and torch.equal(blocks.repeat_interleave(size, 0)[: len(weight.codes)], scale)
    return blocks.contiguous() if together else None


def exponents(weight: QuantizedTensor) -> Tensor:
    """Return the scales as E8M0, uint8: the exponents of powers of two, plus 127.

    Raises:
        ExportError: If a scale is not a power of two.
    """
    if not are_exponents(weight.scale):
        raise ExportError(f"{weight.format} in groups with scales that are not powers of two; use an MX format")
    return (torch.frexp(weight.scale)[1] - 1 + 127).to(torch.uint8)


def are_exponents(scale: Tensor) -> bool:
    """Tell whether all scales are powers of two."""
    return bool((torch.frexp(scale)[0] == 0.5).all())


def unsigned(weight: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return codes (outputs, inputs) and zero points (outputs, groups) relative to the smallest code, int32.

    Raises:
        ExportError: If the weight has offsets.
    """
    if weight.has_offsets:
        raise ExportError(NO_OFFSETS)
    half = 1 << (weight.format.bits - 1)
    zero_point = weight.zero_point.int().expand(len(weight.codes), -1)
    return weight.codes.int() + half, zero_point + half


def half_scales(weight: QuantizedTensor) -> Tensor:
    """Return the scales in float16, shape (outputs, groups).

    Raises:
        ExportError: If a scale is too small or too large for float16.
    """
    half = weight.scale.expand(len(weight.codes), -1).half()
    magnitude, exact = half.abs(), half.float() == weight.scale
    fits = magnitude.isfinite() & (exact | (magnitude >= torch.finfo(torch.float16).smallest_normal))
    if not bool(fits.all()):
        raise ExportError("a scale does not fit float16; quantize with scale='float16', or leave this weight in float")
    return half


__all__ = [
    "NO_OFFSETS",
    "are_exponents",
    "block_scales",
    "exponents",
    "group_size",
    "half_scales",
    "matrix_of",
    "unsigned",
]
