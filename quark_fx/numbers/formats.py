"""Number formats: which codes exist, and which types hold them.

A format is a frozen value. Scales, granularity and symmetry belong to `quark_fx.numbers.qparams.Scheme`; how a
range is found belongs to an observer.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.system.options import Interval, checked, parsed
from quark_fx.system.registry import Registry


@checked
@dataclass(frozen=True, slots=True)
class IntFormat:
    """Two's complement or unsigned integers of `bits` bits, or a sign and a magnitude.

    >>> INT8.qmin, INT8.qmax, str(UINT4), SM8.qmin
    (-128, 127, 'uint4', -127)
    """

    bits: Annotated[int, Interval("[2, 32]")]
    signed: bool = True
    sign_magnitude: bool = False

    def __post_init__(self) -> None:
        if self.sign_magnitude and not self.signed:
            raise ConfigError("a format of sign and magnitude is signed; drop signed=False")
        if self.sign_magnitude and self.bits > 8:
            raise ConfigError(f"a format of sign and magnitude has at most 8 bits, not {self.bits}; use int{self.bits}")

    @property
    def qmin(self) -> int:
        return self.sign_magnitude - (1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - self.signed)) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The smallest torch dtype that holds every code (uint16 and uint32 for unsigned codes of more than 8 bits)."""
        width = next(width for width in (8, 16, 32) if self.bits <= width)
        return getattr(torch, f"{'int' if self.signed else 'uint'}{width}")  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{'sm' if self.sign_magnitude else 'int' if self.signed else 'uint'}{self.bits}"


class Specials(StrEnum):
    """What the all-ones exponent of a float format stands for."""

    IEEE = "ieee"
    """Infinities and NaN (IEEE 754)."""
    NAN = "nan"
    """Numbers; only the all-ones mantissa is NaN (E4M3 of the OCP 8-bit floating point specification, section 5)."""
    NONE = "none"
    """Numbers alone (FP6 and FP4 of the OCP microscaling specification, section 5.3)."""


@checked
@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Sign, `exponent` and `mantissa` bits.

    Codes are held as the values they stand for: in the torch dtype of the format, or in that of a wider float of 8 bits
    that has all of its values.

    Args:
        exponent: exponent bits.
        mantissa: explicit mantissa bits.

    Raises:
        ConfigError: if there is no such format, or no torch dtype of 8 or 16 bits holds its values.

    >>> FP8_E4M3.max, FP8_E5M2.max, FP16.max, FP4_E2M1.max
    (448.0, 57344.0, 65504.0, 6.0)
    >>> str(FloatFormat(exponent=3, mantissa=3)), FloatFormat(3, 3).dtype
    ('fp7_e3m3', torch.float8_e4m3fn)
    """

    exponent: Annotated[int, Interval("[1, 8]")]
    mantissa: Annotated[int, Interval("[0, 23]")]

    def __post_init__(self) -> None:
        _dtype_of(self)  # which refuses what none holds

    @property
    def specials(self) -> Specials:
        """What the all-ones exponent stands for."""
        if (self.exponent, self.mantissa) == (4, 3):
            return Specials.NAN
        return Specials.IEEE if self.bits >= 8 else Specials.NONE

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value; subnormal ones are as far apart as those."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite value."""
        return (1 << (self.exponent - 1)) - (self.specials is Specials.IEEE)

    @property
    def max(self) -> float:
        """The largest finite value."""
        missing = 2 if self.specials is Specials.NAN else 1
        return float(2**self.max_exponent * (2 - missing * 2**-self.mantissa))

    @property
    def dtype(self) -> torch.dtype:
        return _dtype_of(self)

    @property
    def needs_scale(self) -> bool:
        """Whether tensors are scaled into the format's range; 16-bit floats are reached by a cast alone."""
        return self.bits < 16

    def levels(self) -> Tensor:
        """Return every finite value, increasing, float64.

        >>> FP4_E2M1.levels()[7:].tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        code = torch.arange(1 << (self.bits - 1), dtype=torch.float64)
        exponent = torch.floor(code / 2**self.mantissa)
        steps = code % 2**self.mantissa + (exponent > 0) * 2**self.mantissa
        value = steps * torch.exp2(exponent.clamp(min=1) - 1 + self.min_exponent - self.mantissa)
        value = value[value <= self.max]
        return torch.cat((-value[1:].flip(0), value))

    def step(self, x: Tensor) -> Tensor:
        """Return how far apart values are where `x` (float32) lies, exactly."""
        # The exponent bits alone are the power of two not above x.
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        return power.clamp_(2.0**self.min_exponent, 2.0**self.max_exponent).mul_(2.0**-self.mantissa)

    def round_(self, x: Tensor) -> Tensor:
        """Round `x`, float32, to the nearest value in place: half to even, saturating; NaN stays, zero is positive."""
        # The sum of x and a number whose last bit is a step away from zero is rounded to whole steps.
        x.clamp_(-self.max, self.max)
        shift = self.step(x).mul_(1.5 * 2.0**23)
        return x.add_(shift).sub_(shift)

    def __str__(self) -> str:
        name = f"fp{self.bits}_e{self.exponent}m{self.mantissa}"
        return _SHORT_NAMES.get(name, name)


@functools.cache
def _dtype_of(fmt: FloatFormat) -> torch.dtype:
    """Return the torch dtype that holds the values of a format."""
    if str(fmt) in _WIDE:
        return _WIDE[str(fmt)]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        wider = torch.finfo(dtype)
        mantissa = -int(math.log2(wider.eps))
        smallest = math.log2(wider.smallest_normal) - mantissa
        if fmt.mantissa <= mantissa and fmt.max <= wider.max and fmt.min_exponent - fmt.mantissa >= smallest:
            return dtype
    raise ConfigError(
        f"no torch dtype holds the values of {fmt}: choose fp16, bf16, or a float with values of fp8_e4m3 (3 bits of "
        "mantissa, 2**-9 to 448) or fp8_e5m2 (2 bits, 2**-16 to 57344)"
    )


_SHORT_NAMES = {"fp16_e5m10": "fp16", "fp16_e8m7": "bf16"}
_WIDE = {"fp16": torch.float16, "bf16": torch.bfloat16}


Format = IntFormat | FloatFormat

_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16, 32)
INT2, INT3, INT4, INT5, INT6, INT7, INT8, INT16, INT32 = (IntFormat(bits) for bits in _WIDTHS)
UINT2, UINT3, UINT4, UINT5, UINT6, UINT7, UINT8, UINT16, UINT32 = (IntFormat(bits, signed=False) for bits in _WIDTHS)
SM3, SM5, SM8 = (IntFormat(bits, sign_magnitude=True) for bits in (3, 5, 8))
FP16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
FP8_E4M3 = FloatFormat(4, 3)
FP8_E5M2 = FloatFormat(5, 2)
FP6_E3M2 = FloatFormat(3, 2)
FP6_E2M3 = FloatFormat(2, 3)
FP4_E2M1 = FloatFormat(2, 1)

FORMATS: Registry[Format, Format] = Registry("number format")
"""Formats that have a constant, by their names in configurations and graphs. Other sizes need no entry: their names say
what they are, as `int12` and `fp7_e3m3`."""


for _fmt in (
    *(INT2, INT3, INT4, INT5, INT6, INT7, INT8, INT16, INT32),
    *(UINT2, UINT3, UINT4, UINT5, UINT6, UINT7, UINT8, UINT16, UINT32, SM3, SM5, SM8),
    *(FP16, BF16, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1),
):
    FORMATS.add(_fmt, str(_fmt))

LONG_NAMES = {"float16": "fp16", "bfloat16": "bf16"}
"""What torch calls them."""


def has_onnx_type(fmt: Format) -> bool:
    """Tell whether quantizers of ONNX have a type for the codes."""
    if isinstance(fmt, FloatFormat):
        return fmt in (FP16, BF16, FP8_E4M3, FP8_E5M2)
    return fmt.bits in (2, 4, 8, 16, 32) and not fmt.sign_magnitude


def onnx_container(fmt: Format) -> Format:
    """Return the format as whose codes ONNX stores those of `fmt`: itself, or the next wider integers.

    >>> str(onnx_container(INT7)), str(onnx_container(UINT3)), str(onnx_container(SM5))
    ('int8', 'uint4', 'sm5')
    """
    if isinstance(fmt, FloatFormat) or fmt.sign_magnitude:
        return fmt
    return IntFormat(next(bits for bits in (2, 4, 8, 16, 32) if bits >= fmt.bits), signed=fmt.signed)


def activation_container(fmt: Format) -> Format:
    """Return the format as whose codes ONNX files hold activations in `fmt`: of whole bytes, as kernels take them.

    >>> str(activation_container(UINT4)), str(activation_container(INT7)), str(activation_container(INT16))
    ('uint8', 'int8', 'int16')
    """
    held = onnx_container(fmt)
    return held if isinstance(held, FloatFormat) or held.bits >= 8 else IntFormat(8, signed=held.signed)


def parse_format(name: str) -> Format:
    """Return the format called `name`, as printed by `str(format)` or, of 16-bit floats, as torch names it.

    >>> parse_format("uint12"), parse_format("fp5_e2m2").max
    (IntFormat(bits=12, signed=False, sign_magnitude=False), 7.0)

    Raises:
        ConfigError: if there is none; the message says which there are.
    """
    name = LONG_NAMES.get(name, name)
    fmt = FORMATS.get(name) or _described(name)
    if fmt is None:
        raise FORMATS.unknown(name, also=", or another size such as int12 or fp7_e3m3")
    return fmt


_INT_NAME = re.compile(r"(int|uint|sm)([1-9]\d?)")
_FLOAT_NAME = re.compile(r"fp([1-9]\d?)_e(\d)m(\d\d?)")


@functools.cache
def _described(name: str) -> Format | None:
    """Return the format whose parts the name gives."""
    if found := _INT_NAME.fullmatch(name):
        return IntFormat(int(found[2]), signed=found[1] != "uint", sign_magnitude=found[1] == "sm")
    if found := _FLOAT_NAME.fullmatch(name):
        bits, exponent, mantissa = map(int, found.groups())
        return FloatFormat(exponent, mantissa) if bits == 1 + exponent + mantissa else None
    return None


for _format in (IntFormat, FloatFormat):
    parsed(_format, ("a number format", "the name of one"), str, parse_format, str)
