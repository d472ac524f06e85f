"""Codes of a few bits packed into 32-bit words, in the layouts of checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.model.constants import Constant
from quark_fx.numbers.quantized_tensor import QuantizedTensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output channel, out of eight neighbors, in each nibble of a word."""


NO_OFFSETS = "offsets between codes, for which only GGUF has a place; use symmetry='symmetric' or 'asymmetric'"
"""Reason why formats other than GGUF refuse `Symmetry.OFFSET`."""


def matrix_of(constant: Constant) -> QuantizedTensor:
    """Return a quantized weight in the form that all checkpoint formats start from.

    Returns:
        Codes of shape (outputs, inputs): signed integers as int8, unsigned ones with offsets as uint8, or floats of at
        most 8 bits. Scales and zero points have the shape (outputs, groups), or (1, 1) for one scale.

    Raises:
        ExportError: If the formats do not support the weight; the message names the change to make.
    """
    stored = constant.quantized
    if stored is None or stored.codes.dim() != 2:
        raise ExportError("checkpoints hold matrices of at most 8-bit codes with scales")
    if stored.format.bits > 8:
        raise ExportError(f"checkpoints hold codes of at most 8 bits, not {stored.format}")
    (outputs, inputs), axis, block = stored.codes.shape, stored.axis, stored.block_size
    if axis == 1 and block:
        if block < inputs and inputs % block:
            raise ExportError(f"{inputs} inputs are not a multiple of the group size {block}; choose another one")
    elif axis is not None and (axis != 0 or block):
        raise ExportError("the scales vary along another dimension than outputs, or groups of inputs")
    stored = stored.signed()
    scale = stored.scale.float().reshape(1 if axis is None else outputs, -1)
    zero_point = stored.zero_point.expand_as(stored.scale).reshape(scale.shape)
    return QuantizedTensor.of(stored.codes, scale, zero_point, stored.format, 1, inputs // scale.shape[1])


def group_size(weight: QuantizedTensor) -> int | None:
    """Return the number of inputs that share a scale of `matrix_of`; `None` if all do."""
    return weight.layout.block if weight.scale.shape[1] > 1 else None


def block_scales(weight: QuantizedTensor) -> Tensor | None:
    """Return one scale per square block; `None` if the outputs of a block have different scales."""
    size, scale = weight.layout.block, weight.scale
    blocks = scale[::size]
    together = size > 1 and torch.equal(blocks.repeat_interleave(size, 0)[: len(weight.codes)], scale)
    return blocks.contiguous() if together else None


def exponents(weight: QuantizedTensor) -> Tensor:
    """Return scales that are powers of two as E8M0: their exponents plus 127, uint8.

    Raises:
        ExportError: If a scale is not a power of two.
    """
    if not are_exponents(weight.scale):
        raise ExportError(f"{weight.format} in groups with scales that are no powers of two; use an MX format")
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
        raise ExportError("a scale does not fit float16; quantize with scale='float16', or leave it in float")
    return half


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the last dimension into int32 words: value `i` starts at bit `i * bits`; the last word is padded with 0.

    Args:
        codes: Non-negative integers below `2 ** bits`, shape `(..., n)`.
        bits: Number of bits from 1 to 8; a code may cross words.

    Returns:
        Words of shape `(..., ceil(n * bits / 32))`.
    """
    count = codes.shape[-1]
    words = -(-count * bits // 32)
    shifts = torch.arange(bits, device=codes.device)
    planes = ((codes.unsqueeze(-1).to(torch.uint8) >> shifts.to(torch.uint8)) & 1).flatten(-2)
    planes = torch.nn.functional.pad(planes, (0, words * 32 - count * bits)).unflatten(-1, (words, 4, 8))
    weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    packed: Tensor = (planes * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32).squeeze(-1)


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """Pack the first dimension of a matrix; see `pack`."""
    return pack(codes.t().contiguous(), bits).t().contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Pack the last dimension, 4 bits per code, in the order of AWQ's kernels; its size is a multiple of 8."""
    return pack(codes.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4)


__all__ = [
    "NO_OFFSETS",
    "are_exponents",
    "block_scales",
    "exponents",
    "group_size",
    "half_scales",
    "matrix_of",
    "pack",
    "pack_awq",
    "pack_columns",
    "unsigned",
]
