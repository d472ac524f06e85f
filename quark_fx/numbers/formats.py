"""Number formats: their codes, their limits, and the conversion between values and codes.

A format is a frozen value. Scales and symmetry belong to `quark_fx.numbers.qparams.Scheme`; observers measure ranges.
Code outside of `quark_fx.numbers` uses the members of `Format` and never tests the class of a format.
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from quark_fx.errors import ConfigError
from quark_fx.system.options import Interval, checked, parsed
from quark_fx.system.registry import Registry

AT_ONCE = 1 << 20
"""Number of values to process at a time: a few megabytes, which fit in the caches of a processor."""

_BELOW_ONE = 1 - 2.0**-20


class Format(ABC):
    """Number format: integers, small floats, or a table of values.

    All values here are in steps of the scale, `x / scale`; a format is independent of scales and axes. Graphs store
    codes in `dtype`: the values themselves in a narrow type, or indices into a table.
    """

    __slots__ = ()

    is_integer: ClassVar[bool] = False
    """True if codes are integers, which a zero point can shift."""

    is_float: ClassVar[bool] = False
    """True if codes are floats with a sign, an exponent, and a mantissa."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a stored code."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Torch dtype of the codes."""

    @property
    @abstractmethod
    def limits(self) -> tuple[float, float]:
        """Smallest and largest value."""

    @property
    @abstractmethod
    def max_exponent(self) -> int:
        """Exponent of the largest value: 8 for E4M3, 6 for int8."""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; below it, the spacing of values is constant."""
        return self.max_exponent

    @property
    @abstractmethod
    def mantissa(self) -> int:
        """Number of bits after the leading one of the largest value."""

    @abstractmethod
    def levels(self) -> Tensor:
        """Return every finite value, increasing, float64."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Return the distance between neighboring values at `x`, float32."""

    @abstractmethod
    def round_(self, x: Tensor, limits: tuple[float, float] | None = None) -> Tensor:
        """Round `x`, float32, to the nearest value in place: ties to even, saturating.

        Args:
            x: Values. NaN stays NaN in float formats; a table maps NaN to one of its values.
            limits: Smallest and largest integer. Default: `self.limits`.
        """

    @property
    def vector(self) -> int:
        """Number of values per code; if there are several, they are consecutive in the last dimension of a tensor."""
        return 1

    @property
    def signed(self) -> bool:
        """True if some values are negative."""
        return True

    @property
    def sign_magnitude(self) -> bool:
        """True if codes are integers stored as a sign and a magnitude."""
        return False

    @property
    def needs_scale(self) -> bool:
        """True if tensors need a scale; False for 16-bit floats, which need only a cast."""
        return True

    @property
    def qmin(self) -> int:
        """Smallest integer code."""
        raise self._no_integers()

    @property
    def qmax(self) -> int:
        """Largest integer code."""
        raise self._no_integers()

    def _no_integers(self) -> ConfigError:
        return ConfigError(f"codes of {self} are not integers; choose an integer format, or target='torch'")

    @property
    def middle(self) -> int:
        """Zero point of symmetric codes: 0, or half the range of unsigned integers (128 for uint8)."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def end_steps(self) -> tuple[float, float]:
        """Distance between the two smallest values, and distance between the two largest values."""
        step = 2.0 ** (self.max_exponent - self.mantissa)
        return step, step

    def encode(self, x: Tensor) -> Tensor:
        """Return the nearest codes of values in float32 or float64; may overwrite `x`."""
        return self.round_(x).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32, as a new tensor."""
        return codes.to(torch.float32)

    def values_of(self, codes: Tensor) -> Tensor:
        """Return the values of codes, in any dtype; can be `codes` itself."""
        return codes

    def codes_of(self, values: Tensor) -> Tensor:
        """Return the codes of values that `round_` returned; inverse of `values_of`."""
        return values.to(self.dtype)

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the codes of a tensor.

        Raises:
            ValueError: If the last dimension is not a multiple of `vector`.
        """
        if self.vector == 1:
            return tuple(shape)
        if not shape or shape[-1] % self.vector:
            raise ValueError(
                f"{self} has {self.vector} values in each code, which must divide the last size of {[*shape]}"
            )
        return *shape[:-1], shape[-1] // self.vector

    def shape_of(self, codes: Tensor) -> tuple[int, ...]:
        """Return the shape of the tensor that `codes` represent; inverse of `codes_shape`."""
        shape = tuple(codes.shape)
        return shape if self.vector == 1 else (*shape[:-1], shape[-1] * self.vector)

    def above(self, x: Tensor) -> Tensor:
        """Return the next value above each value, as if there were one above the largest."""
        return x + self.step(torch.where(x < 0, x * _BELOW_ONE, x))

    def below(self, x: Tensor) -> Tensor:
        """Return the next value below each value, as if there were one below the smallest."""
        return -self.above(-x)

    def patterns(self, codes: Tensor) -> Tensor:
        """Return codes as indices into `pattern_values`, int64; files pack these integers."""
        return codes.long() - self.qmin

    def pattern_values(self) -> Tensor:
        """Return the value of every pattern, float32, in increasing order of the pattern.

        >>> FP4_E2M1.pattern_values()[[1, 7, 9]].tolist()
        [0.5, 6.0, -0.5]
        """
        return self.levels().float()

    # Storage in ONNX.

    @property
    def has_onnx_type(self) -> bool:
        """True if ONNX has a type for the codes."""
        return False

    @property
    def onnx_container(self) -> Format:
        """Format in which ONNX files store the codes: this format, or the next wider integer format.

        >>> str(INT7.onnx_container), str(UINT3.onnx_container), str(SM5.onnx_container)
        ('int8', 'uint4', 'sm5')
        """
        return self

    @property
    def activation_container(self) -> Format:
        """Format in which ONNX files store activations: whole bytes, because kernels need them.

        >>> str(UINT4.activation_container), str(INT7.activation_container), str(INT16.activation_container)
        ('uint8', 'int8', 'int16')
        """
        return self.onnx_container


F = TypeVar("F", bound=Format)


@checked
@dataclass(frozen=True, slots=True)
class IntFormat(Format):
    """Integers of `bits` bits: two's complement, unsigned, or sign and magnitude.

    An integer is a float with a single binade, so `max_exponent`, `min_exponent`, and `mantissa` are all `bits - 2`.

    >>> INT8.qmin, INT8.qmax, str(UINT4), SM8.qmin
    (-128, 127, 'uint4', -127)
    """

    is_integer: ClassVar[bool] = True

    bits: Annotated[int, Interval("[2, 32]")] = field()
    signed: bool = True
    sign_magnitude: bool = False

    def __post_init__(self) -> None:
        if self.sign_magnitude and not self.signed:
            raise ConfigError("a sign-magnitude format is always signed; drop signed=False")
        if self.sign_magnitude and self.bits > 8:
            raise ConfigError(f"a sign-magnitude format has at most 8 bits, not {self.bits}; use int{self.bits}")

    @property
    def qmin(self) -> int:
        return self.sign_magnitude - (1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - self.signed)) - 1

    @property
    def limits(self) -> tuple[float, float]:
        return self.qmin, self.qmax

    @property
    def dtype(self) -> torch.dtype:
        """Smallest torch dtype that holds every code (uint16 and uint32 for unsigned codes of more than 8 bits)."""
        width = next(width for width in (8, 16, 32) if self.bits <= width)
        return getattr(torch, f"{'int' if self.signed else 'uint'}{width}")  # type: ignore[no-any-return]

    @property
    def max_exponent(self) -> int:
        return self.bits - 2

    @property
    def mantissa(self) -> int:
        return self.bits - 2

    def levels(self) -> Tensor:
        return torch.arange(self.qmin, self.qmax + 1).double()

    def step(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def round_(self, x: Tensor, limits: tuple[float, float] | None = None) -> Tensor:
        return x.round_().clamp_(*(limits or self.limits))

    @property
    def has_onnx_type(self) -> bool:
        return self.bits in (2, 4, 8, 16, 32) and not self.sign_magnitude

    @property
    def onnx_container(self) -> Format:
        return self if self.sign_magnitude else self._of_at_least(2, 4, 8, 16, 32)

    @property
    def activation_container(self) -> Format:
        return self if self.sign_magnitude and self.bits >= 8 else self._of_at_least(8, 16, 32)

    def _of_at_least(self, *widths: int) -> IntFormat:
        return IntFormat(next(bits for bits in widths if bits >= self.bits), signed=self.signed)

    def __str__(self) -> str:
        return f"{'sm' if self.sign_magnitude else 'int' if self.signed else 'uint'}{self.bits}"


class Specials(StrEnum):
    """Meaning of the all-ones exponent of a float format."""

    IEEE = "ieee"
    """Infinities and NaN (IEEE 754)."""
    NAN = "nan"
    """Numbers, but the all-ones mantissa is NaN (E4M3 of the OCP 8-bit floating point specification, section 5)."""
    NONE = "none"
    """Numbers only (FP6 and FP4 of the OCP microscaling specification, section 5.3)."""


@checked
@dataclass(frozen=True, slots=True)
class FloatFormat(Format):
    """Floats with a sign bit, `exponent` exponent bits, and `mantissa` mantissa bits.

    Codes are stored as their values: in the torch dtype of the format, or in an 8-bit float dtype that contains them.

    Args:
        exponent: Number of exponent bits.
        mantissa: Number of explicit mantissa bits.

    Raises:
        ConfigError: If no torch dtype of 8 or 16 bits holds the values.

    >>> FP8_E4M3.max, FP8_E5M2.max, FP16.max, FP4_E2M1.max
    (448.0, 57344.0, 65504.0, 6.0)
    >>> str(FloatFormat(exponent=3, mantissa=3)), FloatFormat(3, 3).dtype
    ('fp7_e3m3', torch.float8_e4m3fn)
    """

    is_float: ClassVar[bool] = True

    exponent: Annotated[int, Interval("[1, 8]")]
    mantissa: Annotated[int, Interval("[0, 23]")] = field()

    def __post_init__(self) -> None:
        _dtype_of(self)  # raises if no dtype holds the values

    @property
    def specials(self) -> Specials:
        """Meaning of the all-ones exponent."""
        if (self.exponent, self.mantissa) == (4, 3):
            return Specials.NAN
        return Specials.IEEE if self.bits >= 8 else Specials.NONE

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def min_exponent(self) -> int:
        return 2 - (1 << (self.exponent - 1))

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return (1 << (self.exponent - 1)) - (self.specials is Specials.IEEE)

    @property
    def max(self) -> float:
        """Largest finite value."""
        missing = 2 if self.specials is Specials.NAN else 1
        return float(2**self.max_exponent * (2 - missing * 2**-self.mantissa))

    @property
    def limits(self) -> tuple[float, float]:
        return -self.max, self.max

    @property
    def dtype(self) -> torch.dtype:
        return _dtype_of(self)

    @property
    def needs_scale(self) -> bool:
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
        # Masking all but the exponent bits gives the largest power of two that does not exceed |x|.
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        return power.clamp_(2.0**self.min_exponent, 2.0**self.max_exponent).mul_(2.0**-self.mantissa)

    def round_(self, x: Tensor, limits: tuple[float, float] | None = None) -> Tensor:
        # Adding a number whose last mantissa bit is worth one step rounds x to a multiple of the step.
        x.clamp_(-self.max, self.max)
        shift = self.step(x).mul_(1.5 * 2.0**23)
        return x.add_(shift).sub_(shift)

    def encode(self, x: Tensor) -> Tensor:
        # For 8 bits or more, the cast to the format's dtype rounds.
        return (x.clamp_(-self.max, self.max) if self.bits >= 8 else self.round_(x)).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        if _is_traced(codes) or codes.dtype is not torch.float8_e4m3fn or not codes.is_cpu:
            return codes.to(torch.float32)
        # On a CPU, torch converts E4M3 values one by one, which takes three times as long as a table lookup.
        bits = codes.view(torch.uint8).flatten()
        values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
        for chunk, part in zip(bits.split(AT_ONCE), values.split(AT_ONCE), strict=True):
            torch.index_select(_values_of_e4m3(), 0, chunk.int(), out=part)
        values = values.view(codes.shape)
        return values if codes.is_contiguous() else torch.empty_like(codes, dtype=torch.float32).copy_(values)

    def patterns(self, codes: Tensor) -> Tensor:
        """Return the bits of each code as an integer, int64; the sign is the highest bit."""
        magnitudes = self._magnitudes().to(codes.device)
        place = torch.searchsorted(magnitudes, self.decode(codes).abs().contiguous())
        return place | codes.float().signbit().long() << self.bits - 1

    def pattern_values(self) -> Tensor:
        magnitudes = self._magnitudes()
        return torch.cat((magnitudes, -magnitudes))

    def _magnitudes(self) -> Tensor:
        levels = self.levels().float()
        return levels[levels >= 0].contiguous()

    @property
    def has_onnx_type(self) -> bool:
        return self in (FP16, BF16, FP8_E4M3, FP8_E5M2)

    def __str__(self) -> str:
        name = f"fp{self.bits}_e{self.exponent}m{self.mantissa}"
        return _SHORT_NAMES.get(name, name)


@dataclass(frozen=True, slots=True)
class Codebook(Format):
    """Table of numbers, such as NF4, or of vectors, such as the IQ types of llama.cpp.

    Ties go to the smaller number. After `register_format`, configurations, graphs, and files can refer to a codebook by
    its name.

    Args:
        name: Name in configurations and files.
        values: Increasing numbers, or tuples of the same length.
        signs: Whether vectors hold magnitudes. Each code then has a sign per value; the last sign follows from the
            other signs, because the number of negative signs is even.

    Raises:
        ConfigError: If the values break one of these rules, or a code would need more than 31 bits.

    >>> ternary = Codebook("ternary", (-1.0, 0.0, 1.0))
    >>> ternary.bits, ternary.encode(torch.tensor([0.6, -7.0])).tolist()
    (2, [2, 0])
    """

    name: str
    values: tuple[float, ...] | tuple[tuple[float, ...], ...]
    signs: bool = False

    def __post_init__(self) -> None:
        table = torch.tensor(self.values, dtype=torch.float32, device="cpu")
        if table.dim() not in (1, 2) or len(table) < 2 or not bool(table.isfinite().all()):
            raise ConfigError(f"codebook {self.name!r} needs two or more finite numbers, or vectors of one length")
        if table.dim() == 1 and not bool((table.diff() > 0).all()):
            raise ConfigError(f"the numbers of codebook {self.name!r} must increase")
        if self.signs and (table.dim() == 1 or bool((table < 0).any())):
            raise ConfigError(
                f"signs=True requires vectors of nonnegative magnitudes; codebook {self.name!r} has "
                f"{'numbers instead of vectors' if table.dim() == 1 else 'negative magnitudes'}"
            )
        if self.bits > 31:
            raise ConfigError(f"codebook {self.name!r} needs {self.bits} bits; a code has at most 31")

    @property
    def vector(self) -> int:
        first = self.values[0]
        return len(first) if isinstance(first, tuple) else 1

    @property
    def _index_bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def bits(self) -> int:
        return self._index_bits + (self.vector - 1 if self.signs else 0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.bits <= 8 else torch.int16 if self.bits < 16 else torch.int32

    @property
    def limits(self) -> tuple[float, float]:
        levels = _levels_of(self)
        return float(levels[0]), float(levels[-1])

    @property
    def max_exponent(self) -> int:
        return math.frexp(max(map(abs, self.limits)))[1] - 1

    @property
    def mantissa(self) -> int:
        return 23  # no value above the largest rounds to the next power of two

    @property
    def end_steps(self) -> tuple[float, float]:
        steps = _levels_of(self).diff()
        return float(steps[0]), float(steps[-1])

    def levels(self) -> Tensor:
        return _levels_of(self).double()

    def step(self, x: Tensor) -> Tensor:
        levels = _levels_of(self, x)
        return levels.diff()[torch.bucketize(x, levels[1:-1].contiguous(), right=True)]

    def above(self, x: Tensor) -> Tensor:
        levels = _levels_of(self, x)
        more = torch.cat((levels, 2 * levels[-1:] - levels[-2:-1]))
        return more[torch.bucketize(x, levels, right=True)]

    def below(self, x: Tensor) -> Tensor:
        levels = _levels_of(self, x)
        more = torch.cat((2 * levels[:1] - levels[1:2], levels))
        return more[torch.bucketize(x, levels)]

    def round_(self, x: Tensor, limits: tuple[float, float] | None = None) -> Tensor:
        return x.copy_(self.decode(self.encode(x)))

    def encode(self, x: Tensor) -> Tensor:
        if self.vector == 1:
            levels = _levels_of(self, x).to(x.dtype)
            return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2).to(self.dtype)
        shape = self.codes_shape(x.shape)
        rows = max(1, AT_ONCE // len(self.values))
        return torch.cat([self._nearest(v) for v in x.reshape(-1, self.vector).float().split(rows)]).reshape(shape)

    def _nearest(self, x: Tensor) -> Tensor:
        """Return the codes of the nearest vectors, shape `(n,)`.

        Args:
            x: Vectors, shape `(n, vector)`.
        """
        table = _table_of(self, x)
        size = x.abs() if self.signs else x
        gain = size @ table.T - table.square().sum(1) / 2  # the nearest vector has the largest gain
        if not self.signs:
            return gain.argmax(1).to(self.dtype)
        odd = (x < 0).sum(1) % 2 == 1
        lost, flipped = (size.unsqueeze(1) * table).min(2)  # a wrong sign costs twice this product
        index = torch.where(odd.unsqueeze(1), gain - 2 * lost, gain).argmax(1)
        signs = (x < 0).long()
        wrong = flipped.gather(1, index.unsqueeze(1))
        signs.scatter_(1, wrong, torch.where(odd.unsqueeze(1), 1 - signs.gather(1, wrong), signs.gather(1, wrong)))
        places = torch.arange(self.vector - 1, device=x.device) + self._index_bits
        return (index | (signs[:, :-1] << places).sum(1)).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        table, codes = _table_of(self, codes), codes.long()
        values = table[codes & ((1 << self._index_bits) - 1)]
        if self.signs:
            places = torch.arange(self.vector - 1, device=codes.device) + self._index_bits
            signs = codes.unsqueeze(-1) >> places & 1
            signs = torch.cat((signs, signs.sum(-1, keepdim=True) % 2), -1)
            values = values * (1 - 2 * signs)
        return values if self.vector == 1 else values.flatten(-2)

    def values_of(self, codes: Tensor) -> Tensor:
        return self.decode(codes)

    def codes_of(self, values: Tensor) -> Tensor:
        return self.encode(values)

    def patterns(self, codes: Tensor) -> Tensor:
        return codes.long()

    def pattern_values(self) -> Tensor:
        """Return the value of every pattern, float32, shape `(patterns,)`; for vectors, `(patterns, vector)`."""
        codes = torch.arange(1 << self.bits if self.signs else len(self.values))
        values = self.decode(codes)
        return values if self.vector == 1 else values.unflatten(0, (-1, self.vector))

    def __repr__(self) -> str:
        return f"Codebook({self.name!r}, {len(self.values)} values)"

    def __str__(self) -> str:
        return self.name


_CPU = torch.device("cpu")


def _table_of(book: Codebook, like: Tensor) -> Tensor:
    """Return the values of a codebook, float32, on the device of `like`."""
    return _made(book.values, like.device) if _is_traced(like) else _kept_table(book, like.device)


def _levels_of(book: Codebook, like: Tensor | None = None) -> Tensor:
    """Return the numbers of a codebook, increasing, float32, on the device of `like`. Default: the CPU."""
    if like is not None and _is_traced(like):
        return _made(_increasing(book), like.device)
    return _kept_levels(book, _CPU if like is None else like.device)


def _increasing(book: Codebook) -> list[float]:
    numbers = {n for value in book.values for n in (value if isinstance(value, tuple) else (value,))}
    return sorted(numbers | {-n for n in numbers} if book.signs else numbers)


@functools.lru_cache(maxsize=64)
def _kept_table(book: Codebook, device: torch.device) -> Tensor:
    return _made_for_good(book.values, device)


@functools.lru_cache(maxsize=64)
def _kept_levels(book: Codebook, device: torch.device) -> Tensor:
    return _made_for_good(_increasing(book), device)


def _made(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _made_for_good(values: Any, device: torch.device) -> Tensor:
    """Return a tensor that later calls can reuse: neither a traced tensor nor an inference tensor."""
    with torch.inference_mode(mode=False):
        with _disable_current_modes():
            tensor = _made(values, _CPU)
        return tensor.to(device)


def _is_traced(x: Tensor) -> bool:
    """Return True if `x` is a fake, functional, or meta tensor, or torch is compiling."""
    return isinstance(x, FakeTensor | FunctionalTensor) or x.is_meta or torch.compiler.is_compiling()


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


@functools.cache
def _values_of_e4m3() -> Tensor:
    """Return the E4M3 value of every byte, float32, shape (256,)."""
    with _disable_current_modes(), torch.inference_mode(mode=False):
        return torch.arange(256, dtype=torch.uint8, device=_CPU).view(torch.float8_e4m3fn).float()


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
"""Formats by their names in configurations, graphs, and files. Other sizes, such as `int12` and `fp7_e3m3`, do not need
an entry because their names describe them."""


for _fmt in (
    *(INT2, INT3, INT4, INT5, INT6, INT7, INT8, INT16, INT32),
    *(UINT2, UINT3, UINT4, UINT5, UINT6, UINT7, UINT8, UINT16, UINT32, SM3, SM5, SM8),
    *(FP16, BF16, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1),
):
    FORMATS.add(_fmt, str(_fmt))


def register_format(fmt: F) -> F:
    """Register a format under its name, `str(fmt)`, for configurations, graphs, and files, and return the format.

    Raises:
        ConfigError: If another module has registered the name.
    """
    FORMATS.add(fmt, str(fmt), depth=2)
    return fmt


LONG_NAMES = {"float16": "fp16", "bfloat16": "bf16"}
"""Format names by torch's names of the dtypes."""


def parse_format(name: str) -> Format:
    """Return the format called `name`: the result of `str(format)`, or torch's name of a 16-bit float.

    >>> parse_format("uint12"), parse_format("fp5_e2m2").max
    (IntFormat(bits=12, signed=False, sign_magnitude=False), 7.0)

    Raises:
        ConfigError: If no format has the name; the message lists the names.
    """
    fmt = as_format(name)
    if fmt is None:
        raise FORMATS.unknown(
            name, also=", another size of 2 to 32 bits such as int12, or import the module that registers it"
        )
    return fmt


def as_format(value: Any) -> Format | None:
    """Return `value` if it is a format, or the format that it names; `None` if it is neither."""
    if not isinstance(value, str):
        return value if isinstance(value, Format) else None
    name = LONG_NAMES.get(value, value)
    return FORMATS.get(name) or _described(name)


_INT_NAME = re.compile(r"(int|uint|sm)([1-9]\d?)")
_FLOAT_NAME = re.compile(r"fp([1-9]\d?)_e(\d)m(\d\d?)")


@functools.cache
def _described(name: str) -> Format | None:
    """Return the format that a name describes, such as `int12`; `None` if the name does not describe a format."""
    if (match := _INT_NAME.fullmatch(name)) and 2 <= int(match[2]) <= 32:
        return IntFormat(int(match[2]), signed=match[1] != "uint", sign_magnitude=match[1] == "sm")
    if match := _FLOAT_NAME.fullmatch(name):
        bits, exponent, mantissa = map(int, match.groups())
        return FloatFormat(exponent, mantissa) if bits == 1 + exponent + mantissa else None
    return None


for _cls in (Format, IntFormat, FloatFormat, Codebook):
    parsed(_cls, ("a number format", "the name of one"), str, parse_format, str)
