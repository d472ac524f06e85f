"""Number formats: which codes exist, and nothing else.

A format is a frozen value. Scales, granularity and symmetry belong to `quark_fx.qparams.Scheme`; how a
range is found belongs to an observer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quark_fx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IntFormat:
    """Two's complement or unsigned integers of `bits` bits.

    >>> INT8.qmin, INT8.qmax, str(UINT4)
    (-128, 127, 'uint4')
    """

    bits: int
    signed: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 32:
            raise ConfigError(f"an integer format has 2 to 32 bits, not {self.bits}")

    @property
    def qmin(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - self.signed)) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The smallest torch dtype that holds every code (unsigned 16/32-bit codes use their own dtype)."""
        width = next(width for width in (8, 16, 32) if self.bits <= width)
        return getattr(torch, f"{'int' if self.signed else 'uint'}{width}")  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{'int' if self.signed else 'uint'}{self.bits}"


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Sign, `exponent` and `mantissa` bits, as IEEE 754 or (`finite`) without infinities.

    Args:
        exponent: exponent bits.
        mantissa: explicit mantissa bits.
        finite: the all-ones exponent holds numbers, and only the all-ones mantissa is NaN
            (E4M3 of the OCP 8-bit floating point specification, section 5).

    >>> FP8_E4M3.max, FP8_E5M2.max, FP16.max
    (448.0, 57344.0, 65504.0)
    """

    exponent: int
    mantissa: int
    finite: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def max(self) -> float:
        """The largest finite value."""
        bias = (1 << (self.exponent - 1)) - 1
        if self.finite:
            return float(2 ** ((1 << self.exponent) - 1 - bias) * (2 - 2 * 2**-self.mantissa))
        return float(2 ** ((1 << self.exponent) - 2 - bias) * (2 - 2**-self.mantissa))

    @property
    def dtype(self) -> torch.dtype:
        return _FLOAT_DTYPES[self]

    @property
    def needs_scale(self) -> bool:
        """Whether tensors are scaled into the format's range; 16-bit floats are reached by a cast alone."""
        return self.bits < 16

    def __str__(self) -> str:
        return _FLOAT_NAMES.get(self) or f"fp{self.bits}_e{self.exponent}m{self.mantissa}"


Format = IntFormat | FloatFormat

INT2, INT3, INT4, INT8, INT16, INT32 = (IntFormat(bits) for bits in (2, 3, 4, 8, 16, 32))
UINT2, UINT3, UINT4, UINT8, UINT16, UINT32 = (IntFormat(bits, signed=False) for bits in (2, 3, 4, 8, 16, 32))
FP16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
FP8_E4M3 = FloatFormat(4, 3, finite=True)
FP8_E5M2 = FloatFormat(5, 2)

_FLOAT_NAMES = {FP16: "fp16", BF16: "bf16"}
_FLOAT_DTYPES = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}

FORMATS: dict[str, Format] = {
    str(fmt): fmt
    for fmt in (
        *(INT2, INT3, INT4, INT8, INT16, INT32, UINT2, UINT3, UINT4, UINT8, UINT16, UINT32),
        *(FP16, BF16, FP8_E4M3, FP8_E5M2),
    )
}
"""Every named format, by its name in configurations and graphs."""


def parse_format(name: str) -> Format:
    """Return the format called `name`, as printed by `str(format)`.

    Raises:
        ConfigError: if there is none; the message lists those that exist.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown number format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]
