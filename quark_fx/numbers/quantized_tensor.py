"""Codes and the values they stand for: `QuantizedTensor`, whatever they were read from, and `decode`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Self

import torch
from torch import Tensor

from quark_fx.numbers.formats import AT_ONCE, Format, IntFormat, parse_format
from quark_fx.numbers.layout import Layout


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return `(codes - zero_point) * scale`, the values that codes stand for.

    Args:
        codes: in the type to compute in.
        scale: broadcasts over `codes`.
        zero_point: likewise; `None` for zero.
        out: where to put them, perhaps `codes`; default: a new tensor.
    """
    shifted = codes if zero_point is None else torch.sub(codes, zero_point, out=out)
    return torch.mul(shifted, scale, out=out)


def dequantized_like(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for what codes stand for."""
    if fmt.vector == 1:
        return torch.empty_like(codes, dtype=dtype)  # of the same memory layout
    return codes.new_empty(fmt.shape_of(codes), dtype=dtype)


def values_at_once(x: Tensor) -> int:
    """Return how many values of a tensor to process at a time, to bound temporary memory."""
    return AT_ONCE if x.is_cpu else AT_ONCE << 8


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with their scales: `(codes - zero_point) * scale`, or `codes * scale + offset`.

    Attributes:
        codes: in the format's dtype (sub-byte codes in one byte each), any shape.
        scale: of shape `layout.scale_shape`.
        zero_point: of the shape of `scale`, or `()`. Whole numbers, in an integer dtype, zero for floats; or, in
            float32, offsets: what code 0 stands for (`Symmetry.OFFSET`).
        format: of the codes.
        layout: which scale belongs to which code.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    format: Format
    layout: Layout

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        format: Format | str,
        axis: int | None = None,
        block_size: int = 0,
    ) -> Self:
        """Build one from the arguments of `quark_fx.numbers.ops.dequantize`; without a `zero_point` it is zero."""
        if zero_point is None:
            zero_point = torch.zeros((), dtype=torch.int32, device=scale.device)
        fmt = parse_format(format) if isinstance(format, str) else format
        return cls(codes, scale, zero_point, fmt, Layout.of(fmt.shape_of(codes), axis, block_size))

    @classmethod
    def cast(cls, x: Tensor, format: Format) -> Self:
        """Return `x` cast to the dtype of a 16-bit float, which needs no scale: it is one."""
        one = torch.ones((), dtype=torch.float32, device=x.device)
        return cls.of(x.to(format.dtype), one, None, format)

    @property
    def axis(self) -> int | None:
        """The dimension the scales vary along, as `quark_fx.numbers.ops` takes it."""
        return self.layout.axis

    @property
    def block_size(self) -> int:
        """Values per scale along `axis`, 0 for one scale per index, as `quark_fx.numbers.ops` takes it."""
        return 0 if self.layout.flat else self.layout.block

    @property
    def is_float(self) -> bool:
        """Whether the codes are floats."""
        return self.format.is_float

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is zero, and no offset."""
        return not self.format.is_integer or not (self.has_offsets or bool(self.zero_point.any()))

    @property
    def has_offsets(self) -> bool:
        """Whether code 0 stands for a number of its own, which `zero_point` holds."""
        return self.zero_point.is_floating_point()

    @property
    def points(self) -> Tensor:
        """The zero points, float32, in steps: that of an offset may lie between codes.

        What they make of codes is what the tensor stands for but for float32 rounding.
        """
        return -self.zero_point / self.scale if self.has_offsets else self.zero_point.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what the codes stand for, computed in float32."""
        result = dequantized_like(self.codes, self.format, dtype)
        # The float32 values of a large weight beside its spread scales would take several times what the result does.
        for rows, part in self.pieces():
            result[rows] = part.decoded()
        return result

    def decoded(self) -> Tensor:
        """Return what the codes stand for, float32, all at once: `dequantize` does it in pieces."""
        codes, scale = self.format.decode(self.codes), self.layout.spread(self.scale)
        if self.has_offsets:
            return decode(codes, scale).add_(self.layout.spread(self.zero_point))
        return decode(codes, scale, self.layout.spread(self.zero_point) if self.format.is_integer else None)

    def pieces(self) -> Iterator[tuple[slice | EllipsisType, QuantizedTensor]]:
        """Yield some rows (of dimension 0) at a time, as an index and what they are quantized to."""
        for rows in self.layout.pieces(values_at_once(self.codes)):
            yield rows, self[rows]

    def __getitem__(self, rows: slice | EllipsisType) -> QuantizedTensor:
        """Return some rows, which cut through no block."""
        if isinstance(rows, EllipsisType):
            return self
        codes = self.codes[rows]
        scale, zero_point = (self.layout.of_rows(p, rows) for p in (self.scale, self.zero_point))
        return replace(
            self,
            codes=codes,
            scale=scale,
            zero_point=zero_point,
            layout=self.layout.of_shape(self.format.shape_of(codes)),
        )

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return it on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("codes", "scale", "zero_point")}
        return replace(self, **parts)

    def signed(self) -> QuantizedTensor:
        """Return the same values in codes of the signed format of as many bits; what has offsets, as it is."""
        if not self.format.is_integer or self.format.signed or self.has_offsets:
            return self
        half, bits = 1 << (self.format.bits - 1), self.format.bits
        codes = self.codes.to(torch.int16 if bits <= 8 else torch.int32) - half
        signed = IntFormat(bits)
        return replace(self, codes=codes.to(signed.dtype), zero_point=self.zero_point - half, format=signed)

    def sqnr(self, real: Tensor) -> float:
        """Return the signal to quantization noise ratio in dB, `real` being what was quantized."""
        signal = noise = 0.0
        for rows, part in self.pieces():
            some = real[rows].float()
            signal += float(torch.linalg.vector_norm(some)) ** 2
            noise += float(torch.linalg.vector_norm(part.decoded().sub_(some))) ** 2
        return _decibels(signal, noise)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal to quantization noise ratio in dB; infinite where nothing was lost."""
    signal = float(torch.linalg.vector_norm(reference.float()))
    noise = float(torch.linalg.vector_norm(reference.float() - approximation.float()))
    return _decibels(signal**2, noise**2)


def _decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


__all__ = ["QuantizedTensor", "decode", "sqnr", "values_at_once"]
