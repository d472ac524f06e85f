"""Quantized tensors: codes with their scales and zero points, and the values that codes represent."""

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
    """Return `(codes - zero_point) * scale`, the values that codes represent.

    Args:
        codes: Codes, in the dtype of the computation.
        scale: Scales that broadcast over `codes`.
        zero_point: Zero points that broadcast over `codes`; `None` for zero.
        out: Tensor to write the values to; can be `codes`. Default: a new tensor.
    """
    shifted = codes if zero_point is None else torch.sub(codes, zero_point, out=out)
    return torch.mul(shifted, scale, out=out)


def dequantized_like(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for dequantized codes."""
    if fmt.vector == 1:
        return torch.empty_like(codes, dtype=dtype)  # keeps the memory layout
    return codes.new_empty(fmt.shape_of(codes), dtype=dtype)


def values_at_once(x: Tensor) -> int:
    """Return how many values of a tensor to process at a time, to bound temporary memory."""
    return accelerator.values_at_once(x, AT_ONCE, 8)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with their scales: `(codes - zero_point) * scale`, or `codes * scale + offset`.

    Attributes:
        codes: Codes in the format's dtype (sub-byte codes in one byte each), any shape.
        scale: Scales, shape `layout.scale_shape`.
        zero_point: Zero points, 0 for formats without integer codes; or offsets in float32, the values of code 0
            (`Symmetry.OFFSET`). The shape equals the shape of `scale`, or is `()`.
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
        """Build a tensor from the arguments of `quark_fx.numbers.ops.dequantize`; `zero_point=None` stands for 0."""
        if zero_point is None:
            zero_point = torch.zeros((), dtype=torch.int32, device=scale.device)
        fmt = parse_format(format) if isinstance(format, str) else format
        return cls(codes, scale, zero_point, fmt, Layout.of(fmt.shape_of(codes), axis, block_size))

    @classmethod
    def cast(cls, x: Tensor, format: Format) -> Self:
        """Return `x` cast to a 16-bit float format, with scale 1."""
        one = torch.ones((), dtype=torch.float32, device=x.device)
        return cls.of(x.to(format.dtype), one, None, format)

    @property
    def axis(self) -> int | None:
        """Dimension along which the scales vary, as in `quark_fx.numbers.ops`."""
        return self.layout.axis

    @property
    def block_size(self) -> int:
        """Values per scale along `axis`, 0 for one scale per index, as in `quark_fx.numbers.ops`."""
        return 0 if self.layout.flat else self.layout.block

    @property
    def is_symmetric(self) -> bool:
        """True if every zero point is 0, and the tensor does not have offsets."""
        return not self.format.is_integer or not (self.has_offsets or bool(self.zero_point.any()))

    @property
    def has_offsets(self) -> bool:
        """True if `zero_point` holds offsets, the values of code 0."""
        return self.zero_point.is_floating_point()

    @property
    def points(self) -> Tensor:
        """Zero points in steps, float32; fractions, rounded to float32, if the tensor has offsets."""
        return -self.zero_point / self.scale if self.has_offsets else self.zero_point.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of the codes, computed in float32."""
        result = dequantized_like(self.codes, self.format, dtype)
        # Decoding a large weight at once would take several times the memory of the result.
        for rows, part in self.pieces():
            result[rows] = part.decoded()
        return result

    def decoded(self) -> Tensor:
        """Return the values of the codes, float32, computed at once; `dequantize` computes them in pieces."""
        codes, scale = self.format.decode(self.codes), self.layout.spread(self.scale)
        if self.has_offsets:
            return decode(codes, scale).add_(self.layout.spread(self.zero_point))
        return decode(codes, scale, self.layout.spread(self.zero_point) if self.format.is_integer else None)

    def pieces(self) -> Iterator[tuple[slice | EllipsisType, QuantizedTensor]]:
        """Yield slices of dimension 0, each with its part of the tensor, until all rows are covered."""
        for rows in self.layout.pieces(values_at_once(self.codes)):
            yield rows, self[rows]

    def __getitem__(self, rows: slice | EllipsisType) -> QuantizedTensor:
        """Return a slice of dimension 0; it must not split a block."""
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
        """Return the tensor on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("codes", "scale", "zero_point")}
        return replace(self, **parts)

    def signed(self) -> QuantizedTensor:
        """Return the same values in the signed format with as many bits; a tensor with offsets is unchanged."""
        if not self.format.is_integer or self.format.signed or self.has_offsets:
            return self
        half, bits = 1 << (self.format.bits - 1), self.format.bits
        codes = self.codes.to(torch.int16 if bits <= 8 else torch.int32) - half
        signed = IntFormat(bits)
        return replace(self, codes=codes.to(signed.dtype), zero_point=self.zero_point - half, format=signed)

    def sqnr(self, real: Tensor) -> float:
        """Return the signal-to-quantization-noise ratio in dB; `real` is the tensor before quantization.

        The host waits for the device once.
        """
        return decibels(accelerator.read(self.norms(real)))

    def norms(self, real: Tensor) -> list[Tensor]:
        """Return the norms of each piece of `real`, the tensor before quantization, and of its error, alternating."""
        norms = list[Tensor]()
        for rows, part in self.pieces():
            values = real[rows].float()
            norms += [torch.linalg.vector_norm(values), torch.linalg.vector_norm(part.decoded().sub_(values))]
        return norms


def decibels(norms: Sequence[float]) -> float:
    """Return the signal-to-noise ratio in dB; infinite if the signal or the noise is zero.

    Args:
        norms: Norms of signal and noise, alternating.
    """
    powers = [norm**2 for norm in norms]
    signal, noise = sum(powers[::2]), sum(powers[1::2])
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


__all__ = ["QuantizedTensor", "decibels", "decode", "values_at_once"]
