"""From a real range to a scale and a zero point."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from quark_fx.numbers.formats import FP8_E4M3, Format, IntFormat
from quark_fx.system import accelerator


class Symmetry(StrEnum):
    """Position of the codes around zero."""

    ASYMMETRIC = "asymmetric"
    """A zero point; every code is used."""
    SYMMETRIC = "symmetric"
    """Zero point in the middle and as many codes below it as above: int8 uses -127 … 127, scale `amax / 127`. With E8M0
    scales, which are steps of the format itself, integers of two's complement have every code."""
    SYMMETRIC_FULL = "symmetric_full"
    """Zero point in the middle and every code used: int8 uses -128 … 127, scale `amax / 127.5`."""
    SIGN_AWARE = "sign_aware"
    """Zero point 0 and every code used, for weights: the scale is `amax / 128` for int8, and negative where the largest
    magnitude is a positive value, so that it falls on -128, which lacks a positive counterpart."""
    OFFSET = "offset"
    """For weights in unsigned integers: every code is used; an offset, stored like a scale, is the value of code 0."""


class ScaleType(StrEnum):
    """Kind of scales."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    """Scales that float16 represents exactly (nearest to the ideal one)."""
    POWER_OF_TWO = "power_of_two"
    """The smallest power of two that is not below the ideal scale: rounding up never overflows the range."""
    E8M0_FLOOR = "e8m0_floor"
    """A power of two in 8 bits: the exponent of the largest magnitude less the exponent of the format's largest value.
    Larger values saturate (OCP Microscaling Formats v1.0, section 6.3)."""
    E8M0_EVEN = "e8m0_even"
    """The same, of the largest magnitude rounded half up to the mantissa of the format: it does not saturate where it
    would round to the next power of two."""
    E8M0_CEIL = "e8m0_ceil"
    """The smallest power of two in 8 bits at which nothing saturates."""
    FP8_E4M3 = "fp8_e4m3"
    """Two levels: an E4M3 float per group, times one float32 per tensor that maps the largest magnitude of the tensor
    to the largest E4M3 float (NVIDIA NVFP4)."""
    UINT4_FLOAT16 = "uint4_float16"
    """Two levels: an unsigned 4-bit integer per sub-group times one float16 per group (`Q2_K`). Offsets have the same
    form, with another float16."""
    UINT6_FLOAT16 = "uint6_float16"
    """The same with 6 bits (`Q4_K`, `Q5_K`)."""
    INT6_FLOAT16 = "int6_float16"
    """The same with 6 bits and a sign (`Q3_K`)."""
    INT8_FLOAT16 = "int8_float16"
    """The same with 8 bits and a sign (`Q6_K`)."""

    @property
    def multiples(self) -> IntFormat | None:
        """Format of the integers that one float16 per group is multiplied by; `None` for other kinds."""
        return _MULTIPLES.get(self)

    @property
    def is_e8m0(self) -> bool:
        """True if scales are powers of two in 8 bits, 2**-127 to 2**127."""
        return self in (ScaleType.E8M0_FLOOR, ScaleType.E8M0_EVEN, ScaleType.E8M0_CEIL)

    @property
    def is_8_bit(self) -> bool:
        """True if one byte holds the scale of a group."""
        return self.is_e8m0 or self is ScaleType.FP8_E4M3

    @property
    def bits(self) -> int:
        """Bits of a stored scale; with two levels, of the integer of a sub-group."""
        if self.multiples is not None:
            return self.multiples.bits
        return 8 if self.is_8_bit else 16 if self is ScaleType.FLOAT16 else 32


_MULTIPLES = {
    ScaleType.UINT4_FLOAT16: IntFormat(4, signed=False),
    ScaleType.UINT6_FLOAT16: IntFormat(6, signed=False),
    ScaleType.INT6_FLOAT16: IntFormat(6),
    ScaleType.INT8_FLOAT16: IntFormat(8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Everything that decides how a range maps to codes.

    A float format that needs a scale is symmetric whatever `symmetry` says: zero is one of its codes.

    Args:
        format: Number format of the codes.
        symmetry: Position of the codes around zero.
        scale_type: Kind of scales.
        global_scale: Unit of scales of `ScaleType.FP8_E4M3`, see `global_scale_of`; by default it follows the ranges of
            each call.
        reduce_range: Use half of an integer format's codes: -64 to 64 of int8, 0 to 127 of uint8.
    """

    format: Format
    symmetry: Symmetry = Symmetry.SYMMETRIC
    scale_type: ScaleType = ScaleType.FLOAT32
    global_scale: float | None = None
    reduce_range: bool = False

    @property
    def symmetric(self) -> bool:
        return not self.format.is_integer or self.symmetry not in (Symmetry.ASYMMETRIC, Symmetry.OFFSET)

    @property
    def qmin(self) -> int:
        """The smallest integer code in use."""
        fmt = self.format
        if self.reduce_range:
            return -self.qmax if fmt.signed else 0
        restricted = fmt.signed and self.symmetry is Symmetry.SYMMETRIC and not self.scale_type.is_e8m0
        return -fmt.qmax if restricted else fmt.qmin

    @property
    def qmax(self) -> int:
        """The largest integer code in use."""
        fmt = self.format
        if self.reduce_range:
            return 1 << (fmt.bits - 2) if fmt.signed else fmt.qmax // 2
        return fmt.qmax

    @property
    def middle(self) -> int:
        """Zero point of a symmetric scheme: 0, or half the range of unsigned integers (128 for uint8)."""
        return self.format.middle >> self.reduce_range

    @property
    def largest(self) -> float:
        """The code, counted from the zero point, that a symmetric scheme maps the largest magnitude to."""
        if not self.format.is_integer:
            return max(abs(limit) for limit in self.limits)
        if self.symmetry is Symmetry.SYMMETRIC and self.format.signed:
            return self.qmax
        return -self.qmin if self.symmetry is Symmetry.SIGN_AWARE else (self.qmax - self.qmin) / 2

    @property
    def one_more_below(self) -> bool:
        """True if one more code lies below the zero point than above: two's complement."""
        return self.format.is_integer and self.middle - self.qmin > self.qmax - self.middle

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest code in use."""
        return (self.qmin, self.qmax) if self.format.is_integer else self.format.limits

    def clip_range(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value that codes in use stand for."""
        low, high = ((end - zero_point.to(scale.dtype)) * scale for end in self.limits)  # int32 would overflow
        return low, high

    def levels(self, device: torch.device) -> Tensor:
        """Return the values of all codes in use at scale 1 and zero point 0, increasing, float64."""
        if self.format.is_integer:
            return torch.arange(self.qmin, self.qmax + 1, device=device).double()
        return self.format.levels().to(device)


@dataclass(frozen=True, slots=True)
class QParams:
    """Quantization parameters of one tensor.

    Attributes:
        scale: float32, one per channel or group, positive; of either sign for `Symmetry.SIGN_AWARE`.
        zero_point: int32, the shape of `scale`; all zero for a float format. For `Symmetry.OFFSET`, in float32, what
            code 0 stands for.
    """

    scale: Tensor
    zero_point: Tensor

    def saturates(self, low: float, high: float, scheme: Scheme) -> bool:
        """Return True if saturation with one scale implies a clamp to `[low, high]`, which can be infinite."""
        if not scheme.format.is_integer:
            return False
        scale, zero_point = float(self.scale), int(self.zero_point)
        return (low == -math.inf or round(low / scale) + zero_point <= scheme.format.qmin) and (
            high == math.inf or round(high / scale) + zero_point >= scheme.format.qmax
        )


def affine_qparams(low: Tensor, high: Tensor, scheme: Scheme) -> QParams:
    """Map the real range `[low, high]` onto the codes of `scheme`, keeping zero exact.

    The range is widened to contain zero; the scale is computed in float64, as ONNX Runtime does.

    Args:
        low: smallest real value, any shape `S`.
        high: largest real value, shape `S`, `high >= low`.
        scheme: format, symmetry and kind of scale.

    Returns:
        Parameters of shape `S`. A range that is the single point zero gets scale 1.

    Raises:
        ValueError: if a bound is NaN or infinite, or `low` is above `high`.

    Source:
        Jacob et al. 2018, section 2.1 (`r = S * (q - Z)`); ONNX Runtime `compute_scale_zp`.
    """
    require_range(low, high)
    return unchecked_affine_qparams(low, high, scheme)


def require_range(low: Tensor, high: Tensor) -> None:
    """Raise `ValueError` if a bound is NaN or infinite, or `low` is above `high`; waits for the device."""

    def error() -> ValueError:
        finite = bool((torch.isfinite(low) & torch.isfinite(high)).all())
        what = "ends below its beginning" if finite else "is not finite"
        return ValueError(f"the range {what}: low {_show(low)}, high {_show(high)}")

    accelerator.require((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all(), error)


def unchecked_affine_qparams(low: Tensor, high: Tensor, scheme: Scheme) -> QParams:
    """Do what `affine_qparams` does, for bounds that `require_range` has checked."""
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if scheme.symmetric:
        symmetric = symmetric_qparams(torch.maximum(-low, high), scheme, high)
        if scheme.symmetry is Symmetry.SIGN_AWARE:
            return QParams(torch.where(high > -low, -symmetric.scale, symmetric.scale), symmetric.zero_point)
        return symmetric
    steps = scheme.qmax - scheme.qmin
    ideal = (high - low) / steps
    scale = constrain_scale(ideal, scheme.scale_type)
    if scheme.symmetry is Symmetry.OFFSET:
        return QParams(scale, constrain_offset(low, scheme.scale_type))
    # Rounding the scale to float32 must not decide ties of zero points.
    exact = (scheme.scale_type is ScaleType.FLOAT32) & (ideal >= torch.finfo(torch.float32).tiny)
    zero_point = (scheme.qmin - low / torch.where(exact, ideal, scale.double())).round().clamp(scheme.qmin, scheme.qmax)
    return QParams(scale, zero_point.to(torch.int32))


def symmetric_qparams(amax: Tensor, scheme: Scheme, high: Tensor | None = None) -> QParams:
    """Map `[-amax, amax]` onto the codes of a symmetric `scheme`; shapes and errors as `affine_qparams`.

    Args:
        amax: the largest magnitude.
        scheme: symmetric.
        high: the largest value that is not negative, which `block_scale` knows what to do with.
    """
    if scheme.scale_type.is_8_bit:
        scale = block_scale(amax.float(), scheme, high=None if high is None else high.float())
    else:
        scale = constrain_scale(amax.double() / scheme.largest, scheme.scale_type)
    return QParams(scale, torch.full_like(scale, scheme.middle, dtype=torch.int32))


def constrain_scale(ideal: Tensor, scale_type: ScaleType, global_scale: Tensor | float | None = None) -> Tensor:
    """Return the float32 scale of kind `scale_type` for an `ideal` one (float64, non-negative).

    A scale too small for a normal float32 belongs to a tensor of zeros, and becomes 1 (one global scale). With two
    levels it becomes the smallest float32 instead, because 1 would be the largest of its group; `two_levels` rounds
    these.

    Args:
        ideal: Ideal scales, any shape.
        scale_type: Kind of scales; powers of two are not below the ideal scale, others are the nearest.
        global_scale: Unit for `ScaleType.FP8_E4M3`; by default it follows the largest ideal scale.
    """
    if scale_type is ScaleType.FP8_E4M3:
        target = ideal.float()
        unit = _global_scale(target.amax() / _E4M3_MAX) if global_scale is None else like(target, global_scale)
        return _two_level(target, target / unit, unit)
    if scale_type.is_e8m0:
        scale = torch.where(ideal == 0, 1.0, ideal.clamp(2.0**-127, 2.0**127))
    else:
        smallest = torch.finfo(torch.float32).tiny
        scale = torch.where(ideal < smallest, 1.0 if scale_type.multiples is None else smallest, ideal)
    if scale_type is ScaleType.POWER_OF_TWO or scale_type.is_e8m0:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    elif scale_type is ScaleType.FLOAT16:
        half = torch.finfo(torch.float16)
        scale = scale.clamp(half.smallest_normal, half.max).half().double()
    return scale.float()


def constrain_offset(ideal: Tensor, scale_type: ScaleType) -> Tensor:
    """Return the float32 offset of kind `scale_type` nearest to an `ideal` one (float64); of two levels, the first."""
    if scale_type is ScaleType.FLOAT16:
        largest = torch.finfo(torch.float16).max
        ideal = ideal.clamp(-largest, largest).half()
    return ideal.float()


def allowed_scales(scale: Tensor, scale_type: ScaleType) -> Callable[[Tensor], Tensor]:
    """Return a function from ideal scales, float64 and not negative, to scales that can replace `scale`."""
    unit = recover_global_scale(scale) if scale_type is ScaleType.FP8_E4M3 else None
    return partial(constrain_scale, scale_type=scale_type, global_scale=unit)


def block_scale(
    amax: Tensor, scheme: Scheme, global_scale: Tensor | None = None, *, high: Tensor | None = None
) -> Tensor:
    """Return the scales of blocks whose largest magnitude is `amax`, for a scheme with 8-bit scales.

    Args:
        amax: Largest magnitudes, float32, any shape.
        scheme: Symmetric scheme.
        global_scale: Unit for `ScaleType.FP8_E4M3`, shape `()`, instead of the scheme's.
        high: Largest value of each block that is not negative, float32; default: `amax`. Two's complement has one more
            code below zero than above, so negative values do not raise the exponent.

    Returns:
        float32, the shape of `amax`. The scale of a block of zeros is 1 (one global scale); of one that holds NaN or
        infinity it is NaN, and so are its dequantized values.

    Source:
        OCP Microscaling Formats v1.0, section 6.3; NVIDIA's NVFP4, as TensorRT Model Optimizer computes it.
    """
    if scheme.scale_type is ScaleType.FP8_E4M3:
        unit_scale = scheme.global_scale if global_scale is None else global_scale
        unit = global_scale_of(amax.amax(), scheme) if unit_scale is None else like(amax, unit_scale)
        # A global scale has 20 bits: the product is exact.
        return _two_level(amax, amax / (scheme.largest * unit), unit)
    power = _power(amax, scheme, below=True)
    above = _power(amax if high is None else high, scheme, below=False)
    power = torch.where(amax == 0 if high is None else high == 0, power, torch.maximum(power, above))
    # Above, the largest value would not be a float32.
    power = power.clamp(-127, 127 - scheme.format.max_exponent).to(torch.int32)
    # 2**-127 is subnormal.
    scale = torch.where(power < -126, 1 << 22, (power + 127) << 23).to(torch.int32).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where((amax >= 0) & (amax < torch.inf), scale, torch.nan)


def _power(size: Tensor, scheme: Scheme, *, below: bool) -> Tensor:
    """Return the exponent, before it is held in 8 bits, of the scale of a value at that distance from zero."""
    mantissa, exponent = torch.frexp(size)  # size = mantissa * 2**exponent, with a mantissa of at least a half
    more = below and scheme.one_more_below
    if scheme.scale_type is ScaleType.E8M0_CEIL:
        lowest, highest = (limit - scheme.middle for limit in scheme.limits)
        largest, offset = math.frexp(-lowest if more else highest)
        return exponent - offset + (mantissa > largest)
    power = exponent - 1 - scheme.format.max_exponent
    if scheme.scale_type is ScaleType.E8M0_EVEN and not more:
        power = power + (mantissa >= 1 - 2.0 ** -(scheme.format.mantissa + 2))
    return power


_E4M3_MAX, _E4M3_TINY = FP8_E4M3.max, 2.0**-9


def global_scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """Return the scale, float32, shape `()`, that E4M3 scales of a tensor of largest magnitude `amax` are multiples of.

    It is `amax / (largest code * 448)`, cut off after 20 bits so that its product with an E4M3 float is exact.
    """
    return _global_scale(amax.float() / like(amax.float(), scheme.largest * _E4M3_MAX))


def recover_global_scale(scale: Tensor) -> Tensor:
    """Return a float32 of shape `()` whose quotient with every one of `scale` is an E4M3 float, exactly.

    Args:
        scale: Scales of `ScaleType.FP8_E4M3` with one global scale, of one or several tensors; float32.

    Raises:
        ValueError: If there is none, such as for tensors with different global scales.
    """
    # The largest scale is one of the E4M3 floats times the global scale; the quotient of an exact product is exact.
    scales: Tensor = scale.unique()
    codes = FP8_E4M3.levels().to(scale).flip(0)
    units: Tensor = scales[-1] / codes[codes > 0]
    if len(scales) > len(units):
        raise ValueError(f"{len(scales)} different scales are not E4M3 floats times one global scale")
    multiples = scales / units[:, None]
    rounded = multiples.clamp(max=_E4M3_MAX).to(FP8_E4M3.dtype).float()
    exact = ((rounded == multiples) & (rounded * units[:, None] == scales)).all(1).nonzero()
    if len(exact):
        return units[exact[0, 0]]
    raise ValueError("these scales are not E4M3 floats times one global scale")


def _global_scale(ideal: Tensor) -> Tensor:
    """Return `ideal`, float32, to 20 bits; 1 for zero, and large enough for its products to be normal numbers."""
    cut = (ideal.view(torch.int32) & -16).view(torch.float32)
    return torch.where(ideal == 0, 1.0, cut.clamp_min(2.0**-100))


def like(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return a number as a tensor of the type and device of `x`: by a Python number, a GPU does not divide exactly.

    A number is written by the device itself: a copy from the host would wait for it, and no CUDA graph holds one.
    """
    if isinstance(scale, Tensor):
        return scale.to(x)
    if abs(scale) > torch.finfo(x.dtype).max:
        scale = math.copysign(math.inf, scale)  # which `full` refuses to round to
    return torch.full((), scale, dtype=x.dtype, device=x.device)


def _two_level(size: Tensor, multiple: Tensor, unit: Tensor) -> Tensor:
    """Return E4M3 floats nearest to `multiple`, times `unit`; one `unit` where `size` is zero."""
    rounded = FP8_E4M3.round_(multiple.clamp(_E4M3_TINY, _E4M3_MAX))
    return torch.where(size == 0, 1.0, rounded) * unit


def share_scale(own: Tensor, group: Tensor) -> Tensor:
    """Return the scales of sub-blocks that share the exponent of their group but for one bit.

    Args:
        own: Scales that fit each sub-block alone, powers of two.
        group: Scales of their groups, in the shape of `own`.

    Source:
        Rouhani et al. 2023, "With Shared Microexponents, A Little Shifting Goes a Long Way", section 3.
    """
    return torch.minimum(torch.maximum(own, group / 2), group)


def _show(bound: Tensor) -> str:
    return str(bound.flatten()[:3].tolist())[1:-1]
