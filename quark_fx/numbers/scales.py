"""Formats of scales: the values that a scale can take, and the mapping from ranges to scales.

A scale is a float, a power of two, or itself quantized: a code times a second scale, which a group of scales, or all
scales of a tensor, share.

>>> str(E8M0_EVEN), QuantizedScale(IntFormat(6, signed=False), group_size=8, scale=FLOAT16).plain
('e8m0_even', {'format': 'uint6', 'group_size': 8, 'scale': 'float16'})
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP8_E4M3, Codebook, Format, IntFormat, parse_format  # noqa: F401
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.system import accelerator
from quark_fx.system.names import absent
from quark_fx.system.options import PositiveInt, checked, parsed
from quark_fx.system.registry import Registry
from quark_fx.system.untrusted import brief

if TYPE_CHECKING:
    from quark_fx.numbers.qparams import Scheme

_FLOAT32, _FLOAT16 = torch.finfo(torch.float32), torch.finfo(torch.float16)


class ScaleFormat:
    """Format of scales; the base class of `NumberScale` and `QuantizedScale`."""

    bits: int
    """Bits of a stored scale; for a quantized scale, bits of its code alone."""
    format: Format | None = None
    """Format of the codes of quantized scales."""
    group_size: int | None = None
    """Number of scales that share a second scale; `None` for one per tensor, or if scales are not quantized."""
    calibrated: bool = False
    """Whether calibration chooses the second scale of scales that are measured at run time."""
    unit: float | None = None
    """Second scale, shared by all scales of a tensor; `None` until it is known."""
    rule: str | None = None
    """Rounding of 8-bit exponents, "floor", "even", or "ceil"; `None` for other scales."""

    def nearest(self, ideal: Tensor) -> Tensor:
        """Round ideal scales, nonnegative float64, to scales in this format, float32.

        A scale too small for a normal float32 belongs to a tensor of zeros, and becomes 1.
        """
        raise NotImplementedError

    def allowed(self, stored: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that rounds ideal scales, nonnegative float64, to scales that can replace stored ones."""
        return self.nearest

    def of_range(self, amax: Tensor, scheme: Scheme, high: Tensor | None = None) -> Tensor:
        """Return the scales of ranges, float32; in formats with 8 bits, a NaN or infinite range gets NaN.

        Args:
            amax: Largest magnitudes, any shape.
            scheme: Symmetric scheme.
            high: Largest nonnegative values. Default: `amax`. Two's complement has one more code below zero than above,
                so negative values do not raise an exponent.

        Source:
            OCP Microscaling Formats v1.0, section 6.3; NVIDIA's NVFP4, as TensorRT Model Optimizer computes it.
        """
        if self.rule is not None:
            return _of_exponents(amax.float(), scheme, self.rule, None if high is None else high.float())
        return self.nearest(amax.double() / scheme.largest)

    def quantized(self, values: Tensor, axis: int = -1) -> QuantizedTensor:
        """Return a quantized tensor whose values are exactly the given scales, or offsets.

        Args:
            values: Scales or offsets rounded to this format, float32.
            axis: Dimension along which groups of them share a second scale.

        Raises:
            ValueError: If no quantized tensor has these values, for example because scales were changed one by one.
                For one second scale per tensor, `accelerator.checked_later` can defer the check.
        """
        raise ValueError(f"scales in {self} are not quantized")

    def of_tensor(self, amax: Tensor, scheme: Scheme) -> ScaleFormat:
        """Return the format with its `unit` set for a tensor whose largest magnitude is `amax`."""
        return self

    def under(self, largest: float) -> ScaleFormat:
        """Return the format with its `unit` set for a set of scales whose maximum is `largest`."""
        return self

    def of_groups(self, own: Tensor, group: Tensor) -> Tensor:
        """Clamp the scale of each block to the range from half of its group's scale to the group's scale.

        Args:
            own: Scales of the blocks.
            group: Scale of each block's group, in the same shape.

        Source:
            Rouhani et al. 2023, "With Shared Microexponents, A Little Shifting Goes a Long Way", section 3.
        """
        return torch.minimum(torch.maximum(own, group / 2), group)

    def in_groups(self, values: Tensor, axis: int, *, offsets: bool = False) -> Tensor:
        """Round ideal scales, or offsets, float32, to values that can be stored.

        Args:
            values: Ideal scales or offsets.
            axis: Dimension along which groups of scales share a second scale.
            offsets: Whether `values` are offsets.
        """
        return self.nearest_offset(values.double()) if offsets else self.nearest(values.abs().double()).copysign(values)

    def nearest_offset(self, ideal: Tensor) -> Tensor:
        """Round an ideal offset, float64, to an offset that can be stored, float32."""
        return ideal.clamp(-_FLOAT16.max, _FLOAT16.max).half().float() if self == FLOAT16 else ideal.float()

    def stored_bytes(self, count: int, groups: int) -> int:
        """Return the number of bytes that `count` scales take; quantized scales form `groups` groups."""
        return (count * self.bits + 7) // 8

    @property
    def multiples(self) -> Format | None:
        """Integer format of the codes of quantized scales; `None` for other scales."""
        return self.format if self.format is not None and self.format.is_integer else None

    @property
    def has_unit(self) -> bool:
        """True if all scales of a tensor share a second scale."""
        return self.format is not None and self.group_size is None

    @property
    def is_8_bit(self) -> bool:
        """True if one byte holds the scale of a group of values."""
        return self.rule is not None or self.has_unit

    @property
    def has_offsets(self) -> bool:
        """True if this format can also store offsets."""
        fmt = self.multiples
        return self in (FLOAT32, FLOAT16) or (fmt is not None and not fmt.signed)

    @property
    def plain(self) -> Any:
        """Name or mapping of fields that `scale_format` converts back to this format."""
        return str(self)


@dataclass(frozen=True)
class NumberScale(ScaleFormat):
    """Scales that are not quantized: floats or powers of two.

    Attributes:
        name: Name in configurations and files.
        round: Function that rounds ideal scales, nonnegative float64, to scales in this format, float32.
        bits: Bits of a stored scale.
        rule: Rounding of 8-bit exponents, "floor", "even", or "ceil"; `None` for other scales.
    """

    name: str
    round: Callable[[Tensor], Tensor] = field(repr=False, compare=False)
    bits: int = 32
    rule: str | None = None

    def nearest(self, ideal: Tensor) -> Tensor:
        return self.round(ideal)

    def __str__(self) -> str:
        return self.name


def _float32(ideal: Tensor) -> Tensor:
    return torch.where(ideal < _FLOAT32.tiny, 1.0, ideal).float()


def _float16(ideal: Tensor) -> Tensor:
    return torch.where(ideal < _FLOAT32.tiny, 1.0, ideal).clamp(_FLOAT16.smallest_normal, _FLOAT16.max).half().float()


def _float20(ideal: Tensor) -> Tensor:
    cut = (ideal.float().view(torch.int32) & -16).view(torch.float32)
    return torch.where(ideal == 0, 1.0, cut.clamp_min(2.0**-100))  # products with E4M3 floats are normal numbers


def _power_of_two(ideal: Tensor) -> Tensor:
    return _power_not_below(torch.where(ideal < _FLOAT32.tiny, 1.0, ideal))


def _power_not_below(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype)).float()


def _e8m0(ideal: Tensor) -> Tensor:
    return _power_not_below(torch.where(ideal == 0, 1.0, ideal.clamp(2.0**-127, 2.0**127)))


FLOAT32 = NumberScale("float32", _float32)
FLOAT16 = NumberScale("float16", _float16, 16)
"""Float16 numbers nearest to the ideal scales; the format also stores offsets."""
FLOAT20 = NumberScale("float20", _float20)
"""Floats truncated to 20 significant bits, so that their products with E4M3 scales are exact."""
POWER_OF_TWO = NumberScale("power_of_two", _power_of_two)
"""The smallest power of two that is not below the ideal scale: rounding up never overflows the range."""
E8M0_FLOOR = NumberScale("e8m0_floor", _e8m0, 8, "floor")
"""Powers of two in 8 bits: the exponent of the largest magnitude minus the exponent of the format's largest value.
Larger values saturate (OCP Microscaling Formats v1.0, section 6.3)."""
E8M0_EVEN = NumberScale("e8m0_even", _e8m0, 8, "even")
"""Like `E8M0_FLOOR`, but the largest magnitude is first rounded, half up, to the mantissa of the format. A magnitude
that rounds to the next power of two does not saturate."""
E8M0_CEIL = NumberScale("e8m0_ceil", _e8m0, 8, "ceil")
"""The smallest power of two in 8 bits at which nothing saturates."""

SCALES: Registry[ScaleFormat, ScaleFormat] = Registry("scale format")
"""Scale formats that configurations can name."""
for _scale in (FLOAT32, FLOAT16, POWER_OF_TWO, E8M0_FLOOR, E8M0_EVEN, E8M0_CEIL):
    SCALES.add(_scale, str(_scale))


def _of_exponents(amax: Tensor, scheme: Scheme, rule: str, high: Tensor | None) -> Tensor:
    power = _power(amax, scheme, rule, below=True)
    above = _power(amax if high is None else high, scheme, rule, below=False)
    power = torch.where(amax == 0 if high is None else high == 0, power, torch.maximum(power, above))
    # With a larger exponent, the largest value would exceed float32.
    power = power.clamp(-127, 127 - scheme.format.max_exponent).to(torch.int32)
    # 2**-127 is subnormal.
    scale = torch.where(power < -126, 1 << 22, (power + 127) << 23).to(torch.int32).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where((amax >= 0) & (amax < torch.inf), scale, torch.nan)


def _power(size: Tensor, scheme: Scheme, rule: str, *, below: bool) -> Tensor:
    """Return the exponent, before clamping to 8 bits, of the scale for values of magnitude `size`.

    Args:
        size: Largest magnitudes.
        scheme: Symmetric scheme.
        rule: Rounding of the exponent, "floor", "even", or "ceil".
        below: Whether the values are negative.
    """
    mantissa, exponent = torch.frexp(size)  # size = mantissa * 2**exponent, with a mantissa of at least a half
    more = below and scheme.one_more_below
    if rule == "ceil":
        lowest, highest = (limit - scheme.middle for limit in scheme.limits)
        largest, offset = math.frexp(-lowest if more else highest)
        return exponent - offset + (mantissa > largest)
    power = exponent - 1 - scheme.format.max_exponent
    if rule == "even" and not more:
        power = power + (mantissa >= 1 - 2.0 ** -(scheme.format.mantissa + 2))
    return power


HALVES = Codebook("half_or_one", (0.5, 1.0))
"""One bit that halves a scale: the shared microexponents of MX4, MX6, and MX9."""


@checked
@dataclass(frozen=True)
class QuantizedScale(ScaleFormat):
    """Quantized scales: codes times a second scale.

    Args:
        format: Format of the codes: FP8 E4M3, integers of at most 8 bits, or `HALVES`.
        group_size: Number of scales that share a second scale; `None` for one per tensor, with E4M3.
        scale: Format of the second scale: `FLOAT20` for E4M3, `FLOAT16` for integers, or E8M0 for `HALVES`.
        calibrated: Whether calibration chooses the second scale of E4M3 scales that are measured at run time (larger
            ranges saturate). By default, each call measures the second scale, too.

    Raises:
        ConfigError: If the fields are not one of these combinations.

    >>> str(E4M3_SCALES), str(QuantizedScale(IntFormat(8), 16, FLOAT16)), str(QuantizedScale(HALVES, 8, E8M0_FLOOR))
    ('fp8_e4m3', 'int8_float16', 'e8m0_floor')
    """

    format: Format = field()
    group_size: PositiveInt | None = None
    scale: ScaleFormat = FLOAT32
    calibrated: bool = False
    unit: float | None = field(default=None, repr=False, metadata={"state": True})
    """Second scale of all E4M3 scales; `None` to compute it from the scales of each call."""
    bits: int = field(init=False, repr=False)
    rule: str | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", self.format.bits)
        object.__setattr__(self, "rule", self.scale.rule)
        of_groups, fmt = self.group_size is not None, self.format
        integers = fmt.is_integer and fmt.bits <= 8 and not fmt.sign_magnitude
        if not (
            (fmt == FP8_E4M3 and not of_groups and self.scale == FLOAT20)
            or (integers and of_groups and self.scale == FLOAT16)
            or (fmt == HALVES and of_groups and isinstance(self.scale, NumberScale) and self.rule is not None)
        ) or (self.calibrated and of_groups):
            size = f" in groups of {self.group_size}" if of_groups else ""
            raise ConfigError(
                f"scales are not quantized to {fmt}{size} with scales in {self.scale}; write "
                "QuantizedScale('fp8_e4m3', scale='float20'), QuantizedScale(format, group_size=..., scale='float16') "
                "with integers of at most 8 bits, or QuantizedScale(HALVES, group_size=..., scale='e8m0_floor') with "
                "HALVES of quark_fx.numbers.scales; its group_size counts scales, not values"
            )

    def nearest(self, ideal: Tensor) -> Tensor:
        """Round ideal scales; for scales in groups, `in_groups` does the final rounding.

        With integer codes, the scale of a block of zeros stays tiny: 1 would be the largest scale of its group.
        """
        if not self.has_unit:
            return ideal.clamp_min(_FLOAT32.tiny).float() if self.rule is None else self.scale.nearest(ideal)
        target = ideal.float()
        unit = self.scale.nearest(target.amax() / FP8_E4M3.max) if self.unit is None else like(target, self.unit)
        return _times_unit(target, target / unit, unit)

    def allowed(self, stored: Tensor) -> Callable[[Tensor], Tensor]:
        if not self.has_unit:
            return self.nearest
        unit = _unit_of(stored)
        return lambda ideal: _times_unit(ideal.float(), ideal.float() / unit.to(ideal.device), unit.to(ideal.device))

    def of_range(self, amax: Tensor, scheme: Scheme, high: Tensor | None = None) -> Tensor:
        if not self.has_unit:
            return super().of_range(amax, scheme, high)
        amax = amax.float()
        unit = global_scale_of(amax.amax(), scheme) if self.unit is None else like(amax, self.unit)
        return _times_unit(amax, amax / (scheme.largest * unit), unit)  # exact, because a unit has 20 bits

    def stored_bytes(self, count: int, groups: int) -> int:
        return super().stored_bytes(count, 1) + self.scale.stored_bytes(1 if self.has_unit else groups, 1)

    def of_tensor(self, amax: Tensor, scheme: Scheme) -> QuantizedScale:
        return replace(self, unit=float(global_scale_of(amax, scheme))) if self.has_unit else self

    def under(self, largest: float) -> QuantizedScale:
        return replace(self, unit=float(self.scale.nearest(torch.tensor(largest / FP8_E4M3.max, dtype=torch.float32))))

    def in_groups(self, values: Tensor, axis: int, *, offsets: bool = False) -> Tensor:
        """Round scales, or offsets, to integers times a float16 per group, or as the base class does for other codes.

        The largest magnitude of a group gets the outermost integer. The last group can be shorter. Offsets can become
        zero; scales cannot.
        """
        if not self.multiples:
            return super().in_groups(values, axis, offsets=offsets)
        (low, high), groups = self.format.limits, self._cut(values, axis)
        outermost = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        unit = (outermost / (low or high)).clamp(-_FLOAT16.max, _FLOAT16.max).half().float()
        # 2**-24 is the smallest float16 above zero, which files can still store.
        unit = torch.where(unit.abs() < 2.0**-24, 1.0 if offsets else 2.0**-24, unit)
        whole = (groups / unit).round_().clamp_(low, high)
        if not offsets:
            whole = torch.where(whole == 0, torch.where(groups / unit < 0, -1.0, 1.0), whole)
        return self._joined(whole * unit, values, axis)

    def _cut(self, values: Tensor, axis: int) -> Tensor:
        """Split `values` along an axis into shape (..., groups, values per group); the last group is zero-padded."""
        count, last = self.group_size or 1, values.movedim(axis, -1)
        groups: Tensor = F.pad(last, (0, -last.shape[-1] % count)).unflatten(-1, (-1, count))
        return groups

    def _joined(self, groups: Tensor, values: Tensor, axis: int) -> Tensor:
        """Return groups in the shape of `values`: the inverse of `_cut`."""
        return groups.flatten(-2)[..., : values.shape[axis]].movedim(-1, axis).contiguous()

    def quantized(self, values: Tensor, axis: int = -1) -> QuantizedTensor:
        if self.has_unit:
            unit = _unit_of(values) if self.unit is None else like(values, self.unit)
            return QuantizedTensor.of((values / unit).to(self.format.dtype), unit, None, self.format)
        low, high = map(int, self.format.limits)
        cut = self._cut(values, axis)
        groups = cut.flatten(0, -2)
        outermost = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        unit, rest = torch.ones_like(outermost), torch.arange(len(groups), device=values.device)
        for multiple in sorted(range(low, high + 1), key=abs, reverse=True):
            if multiple == 0 or not len(rest):
                continue
            ideal = outermost[rest] / multiple
            whole = (groups[rest] / torch.where(ideal == 0, 1.0, ideal)).round()
            factor = ideal.half().float()
            exact = ((factor * whole == groups[rest]) & (whole >= low) & (whole <= high)).all(-1)
            unit[rest[exact]] = torch.where(factor == 0, 1.0, factor)[exact]
            rest = rest[~exact]
        if len(rest):
            raise ValueError(f"{len(rest)} groups have scales that are not {self.bits}-bit integers times a float16")
        unit = unit.view(*cut.shape[:-1], 1)
        codes = self._joined((cut / unit).round(), values, axis).to(self.format.dtype)
        scale = unit.squeeze(-1).movedim(-1, axis).contiguous()
        return QuantizedTensor.of(codes, scale, None, self.format, axis, self.group_size or 1)

    @property
    def plain(self) -> dict[str, Any]:
        size = {} if self.group_size is None else {"group_size": self.group_size}
        known = {"calibrated": True} if self.calibrated else {}
        return {"format": str(self.format), **size, "scale": self.scale.plain, **known}

    def __str__(self) -> str:
        if self.calibrated:
            return _CALIBRATED if self.unit is None else f"{self.format}_{self.unit!r}"
        return f"{self.format}_{self.scale}" if self.multiples else str(self.scale if self.rule else self.format)


def scale_format(data: str | Mapping[str, Any], count: int | None = None) -> ScaleFormat:
    """Return the scale format that plain data describe.

    Args:
        data: Name of a scale format, or fields of a `QuantizedScale`. Graphs, ONNX files, and earlier configurations
            write a quantized format as its name, `str(format)`.
        count: Number of scales that share a second scale, for the name of a quantized format; `None` for no groups.

    Raises:
        ConfigError: If `data` do not describe a scale format.
    """
    if not isinstance(data, str | Mapping):
        raise ConfigError(f"a format of scales is its name, or the fields of a QuantizedScale, not {brief(data)}")
    if not isinstance(data, str):
        names = ["format", "group_size", "scale", "calibrated"]
        if missing := set(map(str, data)) - set(names):
            raise absent("QuantizedScale", "field", missing, names)
        codes = HALVES if data.get("format") == str(HALVES) else data.get("format")  # HALVES is not in FORMATS
        return QuantizedScale(**{**data, "format": codes})
    fmt, _, rest = data.partition("_")
    if rest == str(FLOAT16):
        return QuantizedScale(parse_format(fmt), count, FLOAT16)
    if unit := _UNIT.fullmatch(data):
        return replace(CALIBRATED_E4M3_SCALES, unit=float(unit[1]))
    scale = FLOAT20 if data == str(FLOAT20) else SCALES.find(data)
    if count is None:
        return scale
    if scale.rule is None:
        raise ConfigError(
            f"scales in {data} do not share a scale: drop sub_group_size={count} from your older configuration, or use "
            "integer scales such as int8_float16, or e8m0_floor"
        )
    return QuantizedScale(HALVES, count, scale)


parsed(
    ScaleFormat,
    ("a format of scales", "its name", "the fields of a QuantizedScale"),
    (str, Mapping),
    scale_format,
    lambda scale: scale.plain,
)

E4M3_SCALES = QuantizedScale(FP8_E4M3, scale=FLOAT20)
"""E4M3 scales, one per group of values, times one float per tensor (NVIDIA NVFP4).

The float maps the largest scale of the tensor to the largest E4M3 float."""
SCALES.add(E4M3_SCALES, str(E4M3_SCALES))

_CALIBRATED = "fp8_e4m3_calibrated"
_UNIT = re.compile(r"fp8_e4m3_(\d[\d.]*(?:e[-+]\d+)?)")
"""Name of `CALIBRATED_E4M3_SCALES` in graphs, which ends with the calibrated scale."""

CALIBRATED_E4M3_SCALES = QuantizedScale(FP8_E4M3, scale=FLOAT20, calibrated=True)
"""Like `E4M3_SCALES`, for activations whose float is calibrated; NVFP4 checkpoints store it as `input_global_scale`."""
SCALES.add(CALIBRATED_E4M3_SCALES, _CALIBRATED)


def global_scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """Return the global scale of a tensor with E4M3 scales, float32, shape `()`.

    It is `amax / (largest code * 448)`, truncated to 20 bits so that its product with an E4M3 float is exact.

    Args:
        amax: Largest magnitude of the tensor.
        scheme: Symmetric scheme.
    """
    return FLOAT20.nearest(amax.float() / like(amax.float(), scheme.largest * FP8_E4M3.max))


_E4M3_POSITIVE = 126
"""Number of positive E4M3 floats; their bit patterns are 1 to 126."""


def _unit_of(scale: Tensor) -> Tensor:
    """Return the number that divides every scale into an exact E4M3 float, float32, shape `()`.

    Raises:
        ValueError: If no such number exists, for example because the scales belong to tensors with different global
            scales.
    """
    # The positive E4M3 floats, decreasing.
    codes = torch.arange(_E4M3_POSITIVE, 0, -1, dtype=torch.uint8, device=scale.device).view(FP8_E4M3.dtype).float()
    # The distinct scales, in a tensor of fixed size: reading their number would make the host wait for the device.
    ordered = scale.flatten().sort().values
    place = F.pad(ordered[1:] != ordered[:-1], (1, 0)).cumsum(0).clamp_(max=_E4M3_POSITIVE)
    scales = ordered[-1:].repeat(_E4M3_POSITIVE + 1).scatter_(0, place, ordered)
    # The largest scale is an E4M3 float times the global scale; dividing an exact product by a factor is exact.
    units: Tensor = ordered[-1] / codes
    multiples = scales / units[:, None]
    rounded = multiples.clamp(max=FP8_E4M3.max).to(FP8_E4M3.dtype).float()
    exact = ((rounded == multiples) & (rounded * units[:, None] == scales)).all(1)
    accelerator.require(
        exact.any() & (place[-1] < _E4M3_POSITIVE),
        lambda: ValueError("these scales are not E4M3 floats times one global scale"),
    )
    return units.index_select(0, exact.to(torch.uint8).argmax().view(1)).view(())


def like(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return a number as a tensor with the dtype and device of `x`; a GPU does not divide exactly by a Python number.

    The device writes the number: a copy from the host would synchronize, which a CUDA graph does not allow.
    """
    if isinstance(scale, Tensor):
        return scale.to(x)
    if abs(scale) > torch.finfo(x.dtype).max:
        scale = math.copysign(math.inf, scale)  # `full` raises an error for a finite number that overflows
    return torch.full((), scale, dtype=x.dtype, device=x.device)


def _times_unit(size: Tensor, multiple: Tensor, unit: Tensor) -> Tensor:
    """Return the positive E4M3 float nearest to `multiple`, times `unit`; `unit` itself where `size` is zero."""
    rounded = FP8_E4M3.round_(multiple.clamp(2.0**-9, FP8_E4M3.max))
    return torch.where(size == 0, 1.0, rounded) * unit
