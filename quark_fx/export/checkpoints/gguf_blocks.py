"""Bytes of GGUF's blocks: codes with one level of scales, or with two levels (K-quants)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark_fx.config.gguf_types import GGUF_TYPES
from quark_fx.errors import ExportError
from quark_fx.export.packing import group_size, half_scales, unsigned
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import ScaleFormat

_BLOCK, _SUPER = 32, 256
"""Number of inputs in a block with one level of scales, and in a block with two levels."""

_HELD = "int4, int5, int8, uint4 and uint5 in groups of 32, and the types in quark_fx.gguf_types"


def blocks(weight: QuantizedTensor) -> tuple[Tensor, str]:
    """Return the blocks of a weight, uint8 of shape (outputs, bytes), and the name of their type.

    The blocks represent the weight exactly, with two exceptions: scales are rounded to float16, and so is the smallest
    value of a block in Q4_1 and Q5_1, which stands for the zero point. Offsets are never rounded.

    Args:
        weight: Result of `matrix_of`.

    Raises:
        ExportError: If no type represents the weight.
    """
    kind = type_of(weight)
    return blocks_of(weight, kind), kind


def type_of(weight: QuantizedTensor) -> str:
    """Return the name of the type that represents a weight; arguments and errors are the same as for `blocks`."""
    inputs = weight.codes.shape[1]
    group = group_size(weight) or inputs
    kind = _kind(weight, group)
    if kind not in _TWO_LEVELS and (group % _BLOCK or inputs % group):
        raise ExportError(
            f"{inputs} inputs in groups of {group} do not fit GGUF's blocks of {_BLOCK}; set a group_size that is a "
            f"multiple of {_BLOCK} and divides the inputs"
        )
    if kind in _TWO_LEVELS and inputs % _SUPER:
        raise ExportError(f"{inputs} inputs are not a multiple of {_SUPER}, the block of {kind}; {_SMALLER[kind]}")
    return kind


def blocks_of(weight: QuantizedTensor, kind: str) -> Tensor:
    """Return the blocks of a weight, or of some of its rows, in the type `kind`; uint8 of shape (outputs, bytes).

    Raises:
        ExportError: If the type does not support the weight's scales.
    """
    if kind not in _TWO_LEVELS:
        return _one_level(weight, group_size(weight) or weight.codes.shape[1], kind)
    try:
        return _K_BLOCKS[kind](weight, *_levels(weight, _TWO_LEVELS[kind]))
    except ValueError as error:
        raise ExportError(
            f"{kind} cannot store {weight.format} with these scales: {error}; use a type from quark_fx.gguf_types"
        ) from error


_TWO_LEVELS = {name: spec.scale for name, spec in GGUF_TYPES.items() if spec.scale.multiples}

_SMALLER = {
    "Q2_K": "use Q4_0",
    "Q3_K": "use Q4_0",
    "Q4_K": "use Q5_0",
    "Q5_K": "use Q5_1",
    "Q6_K": "use Q8_0",
}
"""Advice for rows whose length is not a multiple of 256; keys are names of types."""


def _kind(weight: QuantizedTensor, group: int) -> str:
    """Return the name of the type for the format of a weight in groups of `group` inputs.

    Raises:
        ExportError: If no type supports this format and group size.
    """
    fmt, kind_name = weight.format, None
    if fmt.is_integer and not fmt.sign_magnitude:
        if not weight.has_offsets:
            zeros = not weight.is_symmetric
            kind_name = {4: "Q4_1" if zeros else "Q4_0", 5: "Q5_1" if zeros else "Q5_0"}.get(fmt.bits)
            if not zeros:
                kind_name = kind_name or {(8, group): "Q8_0", (3, 16): "Q3_K", (6, 16): "Q6_K"}.get((fmt.bits, group))
        elif (fmt.bits, group) == (2, 16):
            kind_name = "Q2_K"
        elif fmt.bits in (4, 5):
            halves = all(torch.equal(p.half().float(), p) for p in (weight.scale, weight.zero_point))
            kind_name = f"Q{fmt.bits}_{'1' if halves else 'K'}"
            if kind_name.endswith("K") and group != _BLOCK:
                kind_name = None
    if kind_name is None:
        raise ExportError(f"GGUF supports {_HELD}, not {fmt} in groups of {group}")
    return kind_name


def _one_level(weight: QuantizedTensor, group: int, kind: str) -> Tensor:
    def each(parameter: Tensor) -> Tensor:
        return parameter.repeat_interleave(group // _BLOCK, 1).unsqueeze(-1)

    scale, bits = each(half_scales(weight)), weight.format.bits
    if bits == 8:
        return _joined(scale, weight.codes.unflatten(1, (-1, _BLOCK)))
    smallest = []
    if weight.has_offsets:
        codes, smallest = weight.codes.int(), [each(weight.zero_point.half())]
    else:
        codes, zeros = unsigned(weight)
        if kind.endswith("1"):
            smallest = [(-each(zeros) * scale.float()).half()]
    high = [_packed(codes >> 4, 4, 8, 1, bits=1)] if bits == 5 else []
    return _joined(scale, *smallest, *high, _packed(codes & 15, 1, 2, 16, bits=4))


def _levels(weight: QuantizedTensor, kind: ScaleFormat) -> list[Tensor]:
    """Return the float16 factors and the integer multiples of the scales and, if there are any, of the negated offsets.

    Their shapes are (outputs, blocks, 1) and (outputs, blocks, groups per block).

    Raises:
        ValueError: If no factors and multiples represent the values.
    """
    levels = []
    for values in (weight.scale, -weight.zero_point)[: 1 + weight.has_offsets]:
        stored = kind.quantized(values.expand(len(weight.codes), -1))
        levels += [stored.scale.half().unsqueeze(-1), stored.codes.int().unflatten(-1, (stored.scale.shape[-1], -1))]
    return levels


def _q2_k(weight: QuantizedTensor, d: Tensor, scale: Tensor, smallest: Tensor, offset: Tensor) -> Tensor:
    return _joined((scale | offset << 4).to(torch.uint8), _packed(weight.codes.int(), 2, 4, 32, bits=2), d, smallest)


def _q3_k(weight: QuantizedTensor, d: Tensor, scale: Tensor) -> Tensor:
    codes, scale = unsigned(weight)[0], scale + 32
    low, high = _packed(codes & 3, 2, 4, 32, bits=2), _packed(codes >> 2, 1, 8, 32, bits=1)
    scales = _packed((scale & 15).flatten(1), 1, 2, 8, bits=4), _packed((scale >> 4).flatten(1), 1, 4, 4, bits=2)
    return _joined(high, low, *scales, d)


def _q4_k(weight: QuantizedTensor, d: Tensor, scale: Tensor, smallest: Tensor, offset: Tensor) -> Tensor:
    return _joined(d, smallest, _six_bits(scale, offset), _packed(weight.codes.int(), 4, 2, 32, bits=4))


def _q5_k(weight: QuantizedTensor, d: Tensor, scale: Tensor, smallest: Tensor, offset: Tensor) -> Tensor:
    codes = weight.codes.int()
    high, low = _packed(codes >> 4, 1, 8, 32, bits=1), _packed(codes & 15, 4, 2, 32, bits=4)
    return _joined(d, smallest, _six_bits(scale, offset), high, low)


def _q6_k(weight: QuantizedTensor, d: Tensor, scale: Tensor) -> Tensor:
    codes, _ = unsigned(weight)
    low, high = _packed(codes & 15, 2, 2, 64, bits=4), _packed(codes >> 4, 2, 4, 32, bits=2)
    return _joined(low, high, scale.to(torch.int8), d)


_K_BLOCKS: dict[str, Callable[..., Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _six_bits(scale: Tensor, offset: Tensor) -> Tensor:
    """Return the twelve bytes that hold eight 6-bit scales and eight 6-bit offsets.

    Four bytes hold the first four scales and, in their top two bits, the high bits of the last four scales; four bytes
    hold the offsets in the same way; and four bytes hold the low four bits of the last four scales and offsets.
    """
    whole = [p[..., :4] | p[..., 4:] >> 4 << 6 for p in (scale, offset)]
    return torch.cat([*whole, scale[..., 4:] & 15 | (offset[..., 4:] & 15) << 4], -1).to(torch.uint8)


def _packed(values: Tensor, runs: int, parts: int, size: int, *, bits: int) -> Tensor:
    """Pack `parts` values into each byte; the values are `size` positions apart, and the first is in the lowest bits.

    Args:
        values: Unsigned integers of `bits` bits, shape (outputs, values), block by block.
        runs: Number of runs of `parts * size` values in a block.
        parts: Number of values in a byte.
        size: Number of bytes in a run.
        bits: Number of bits of a value.

    Returns:
        uint8, shape (outputs, blocks, runs * size).
    """
    shifts = torch.arange(0, parts * bits, bits, device=values.device).unsqueeze(-1)
    cut: Tensor = values.int().unflatten(1, (-1, runs, parts, size))
    return (cut << shifts).sum(-2).flatten(-2).to(torch.uint8)


def _joined(*parts: Tensor) -> Tensor:
    """Concatenate the bytes of the parts of each block; the result has the shape (outputs, bytes)."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).flatten(1)


__all__ = ["blocks", "blocks_of", "type_of"]
