"""Codes and the values they stand for: `QuantizedTensor`, whatever they were read from, and `decode`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Self

import torch
from torch import Tensor

from quark_fx.numbers.formats import AT_ONCE, Format, IntFormat, parse_format
from quark_fx.numbers.layout import Layout
from quark_fx.system import accelerator


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return `(codes - zero_point) * scale`, the values that codes stand for.

    Args:
        codes: Codes in the type to compute in.
        scale: Scales that broadcast over `codes`.
        zero_point: Zero points that broadcast over `codes`; `None` for zero.
        out: Tensor for the values, perhaps `codes`; default: a new one.
    """
    shifted = codes if zero_point is None else torch.sub(codes, zero_point, out=out)
    return torch.mul(shifted, scale, out=out)


def dequantized_like(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for dequantized codes."""
    if fmt.vector == 1:
        return torch.empty_like(codes, dtype=dtype)  # of the same memory layout
    return codes.new_empty(fmt.shape_of(codes), dtype=dtype)


def values_at_once(x: Tensor) -> int:
    """Return how many values of a tensor to process at a time, to bound temporary memory."""
    return accelerator.values_at_once(x, AT_ONCE, 8)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with their scales: `(codes - zero_point) * scale`, or `codes * scale + offset`.

    Attributes:
        codes: Codes in the format's dtype (sub-byte codes in one byte each), any shape.
        scale: Scales, of shape `layout.scale_shape`.
        zero_point: Integers, 0 unless codes are integers, or offsets in float32, the values of code 0
            (`Symmetry.OFFSET`); in the shape of `scale` or `()`.
        format: Number format of the codes.
        layout: Assignment of scales to values.
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
        """Dimension that the scales vary along, an argument of `quark_fx.numbers.ops`."""
        return self.layout.axis

    @property
    def block_size(self) -> int:
        """Values per scale along `axis`, 0 for one scale per index, an argument of `quark_fx.numbers.ops`."""
        return 0 if self.layout.flat else self.layout.block

    @property
    def is_symmetric(self) -> bool:
        """True if every zero point is zero, and not an offset."""
        return not self.format.is_integer or not (self.has_offsets or bool(self.zero_point.any()))

    @property
    def has_offsets(self) -> bool:
        """True if `zero_point` holds offsets, the values of code 0."""
        return self.zero_point.is_floating_point()

    @property
    def points(self) -> Tensor:
        """Zero points in steps, float32; offsets make them fractions, exact up to float32 rounding."""
        return -self.zero_point / self.scale if self.has_offsets else self.zero_point.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of the codes, computed in float32."""
        result = dequantized_like(self.codes, self.format, dtype)
        # All float32 values and spread scales of a large weight would take several times the memory of the result.
        for rows, part in self.pieces():
            result[rows] = part.decoded()
        return result

    def decoded(self) -> Tensor:
        """Return the values of the codes, float32, all at once; `dequantize` works in pieces."""
        codes, scale = self.format.decode(self.codes), self.layout.spread(self.scale)
        if self.has_offsets:
            return decode(codes, scale).add_(self.layout.spread(self.zero_point))
        return decode(codes, scale, self.layout.spread(self.zero_point) if self.format.is_integer else None)

    def pieces(self) -> Iterator[tuple[slice | EllipsisType, QuantizedTensor]]:
        """Yield an index of a few rows (of dimension 0) and their codes, for all rows."""
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
        """Return the same values in the signed format of as many bits; a tensor with offsets, unchanged."""
        if not self.format.is_integer or self.format.signed or self.has_offsets:
            return self
        half, bits = 1 << (self.format.bits - 1), self.format.bits
        codes = self.codes.to(torch.int16 if bits <= 8 else torch.int32) - half
        signed = IntFormat(bits)
        return replace(self, codes=codes.to(signed.dtype), zero_point=self.zero_point - half, format=signed)

    def sqnr(self, real: Tensor) -> float:
        """Return the signal to quantization noise ratio in dB; `real` is the tensor before quantization.

        The host waits for a device once.
        """
        return decibels(accelerator.read(self.norms(real)))

    def norms(self, real: Tensor) -> list[Tensor]:
        """Return the norms of each piece of `real`, the tensor before quantization, and of the error there, in turn."""
        norms = list[Tensor]()
        for rows, part in self.pieces():
            values = real[rows].float()
            norms += [torch.linalg.vector_norm(values), torch.linalg.vector_norm(part.decoded().sub_(values))]
        return norms


def decibels(norms: Sequence[float]) -> float:
    """Return the ratio of signal and noise in dB, by their norms in turn; infinite where nothing was lost."""
    powers = [norm**2 for norm in norms]
    signal, noise = sum(powers[::2]), sum(powers[1::2])
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


__all__ = ["QuantizedTensor", "decibels", "decode", "values_at_once"]
