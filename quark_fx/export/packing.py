"""Codes of a few bits packed into 32-bit words, as checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.correspondence import Constant
from quark_fx.errors import ExportError
from quark_fx.formats import Format, IntFormat, parse_format

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel, of eight neighbours, in each nibble of a word."""


@dataclass(frozen=True)
class Matrix:
    """A weight of shape (outputs, inputs) in the one layout all checkpoint formats start from.

    Attributes:
        codes: signed integers as int8, or floats of at most 8 bits in an 8-bit type.
        scale: float32, shape (outputs, groups); (1, 1) for one scale.
        zero_point: int32, the shape of `scale`; `None` if all are zero.
        format: of the codes; unsigned integers are stored as signed ones.
        group_size: inputs per scale; `None` for one scale per output.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: Format
    group_size: int | None

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.format.bits

    @property
    def is_float(self) -> bool:
        """Whether the codes are floats."""
        return self.codes.is_floating_point()

    def exponents(self) -> Tensor:
        """Return scales that are powers of two as E8M0: their exponents, counted from -127, uint8.

        Raises:
            ExportError: if one is no power of two.
        """
        mantissa, exponent = torch.frexp(self.scale)
        if not bool((mantissa == 0.5).all()):
            raise ExportError(f"{self.format} in groups with scales that are no powers of two; use an MX format")
        return (exponent - 1 + 127).to(torch.uint8)

    @classmethod
    def of(cls, constant: Constant) -> Matrix:
        """Bring a quantized weight into this layout.

        Raises:
            ExportError: if the format has no place for it; the message says what to change.
        """
        if constant.scale is None or constant.zero_point is None or constant.tensor.dim() != 2:
            raise ExportError("checkpoints hold matrices of at most 8-bit codes with scales")
        fmt = parse_format(constant.format)
        if fmt.bits > 8:
            raise ExportError(f"checkpoints hold codes of at most 8 bits, not {fmt}")
        codes, scale, zero_point = constant.tensor, constant.scale.float(), constant.zero_point
        inputs, group = codes.shape[1], None
        if constant.axis == 1 and constant.block_size:
            if 0 < constant.block_size < inputs:
                group = constant.block_size
            if group and inputs % group:
                raise ExportError(f"{inputs} inputs are not a multiple of the group size {group}; choose another one")
        elif constant.axis is not None and (constant.axis != 0 or constant.block_size):
            raise ExportError("the scales vary along another dimension than outputs, or groups of inputs")
        scale = scale.reshape(1 if constant.axis is None else len(codes), -1)
        zero_point = zero_point.expand_as(constant.scale).reshape(scale.shape)
        if isinstance(fmt, IntFormat) and not fmt.signed:
            half = 1 << (fmt.bits - 1)
            codes, zero_point = codes.to(torch.int16) - half, zero_point - half
        codes = codes if codes.is_floating_point() else codes.to(torch.int8)
        return cls(codes, scale, zero_point if bool(zero_point.any()) else None, fmt, group)

    def value(self) -> Tensor:
        """Return the weight, float32."""
        group = self.codes.shape[1] // self.scale.shape[1]
        scale, zero_point = (
            p.repeat_interleave(group, 1) if p is not None else 0 for p in (self.scale, self.zero_point)
        )
        return (self.codes.float() - zero_point) * scale

    def unsigned(self) -> tuple[Tensor, Tensor]:
        """Return codes (outputs, inputs) and zero points (outputs, groups) counted from the smallest code, int32."""
        half = 1 << (self.bits - 1)
        zero_point = torch.zeros_like(self.scale, dtype=torch.int32) if self.zero_point is None else self.zero_point
        outputs = len(self.codes)
        return self.codes.int() + half, zero_point.int().expand(outputs, -1) + half

    def half_scales(self) -> Tensor:
        """Return the scales in float16, shape (outputs, groups).

        Raises:
            ExportError: if one is too small or too large for it.
        """
        half = self.scale.expand(len(self.codes), -1).half()
        magnitude = half.abs()
        if not bool(((magnitude >= torch.finfo(torch.float16).smallest_normal) & magnitude.isfinite()).all()):
            raise ExportError("a scale does not fit float16; quantize with scale_type='float16', or leave it in float")
        return half


def patterns(codes: Tensor, fmt: Format) -> Tensor:
    """Return codes as integers from 0, int64: the bits of a float, its sign first; whole numbers from the smallest.

    Args:
        codes: in the dtype of the format, any shape.
        fmt: of at most 8 bits.
    """
    if isinstance(fmt, IntFormat):
        return codes.long() - fmt.qmin
    levels = fmt.levels().float().to(codes.device)
    magnitudes = torch.searchsorted(levels[levels >= 0].contiguous(), codes.float().abs().contiguous())
    return magnitudes | codes.float().signbit().long() << fmt.bits - 1


def pattern_values(fmt: Format) -> Tensor:
    """Return what each of `patterns` stands for, float32.

    >>> pattern_values(parse_format("fp4_e2m1"))[[1, 7, 9]].tolist()
    [0.5, 6.0, -0.5]
    """
    if isinstance(fmt, IntFormat):
        return torch.arange(fmt.qmin, fmt.qmax + 1).float()
    levels = fmt.levels().float()
    positive = levels[levels >= 0]
    return torch.cat((positive, -positive))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the last dimension into int32 words: value `i` at the bits from `i * bits` on, the last word filled with 0.

    Args:
        codes: non-negative integers below `2 ** bits`, shape `(..., n)`.
        bits: 1 to 8; a code may lie in two words.

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
    """Pack the first dimension of a matrix, as `pack` does the last."""
    return pack(codes.t().contiguous(), bits).t().contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Pack the last dimension, 4 bits a code, in the order of AWQ's kernels; its size is a multiple of 8."""
    return pack(codes.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4)


__all__ = ["Matrix", "pack", "pack_awq", "pack_columns", "pattern_values", "patterns"]
