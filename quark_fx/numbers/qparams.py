"""Conversion of a real range to a scale and a zero point."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from quark_fx.numbers.formats import Format
from quark_fx.numbers.scales import FLOAT32, ScaleFormat
from quark_fx.system import accelerator
from quark_fx.system.options import checked


class Symmetry(StrEnum):
    """Position of the codes around zero."""

    ASYMMETRIC = "asymmetric"
    """Zero point anywhere in the range of the codes; every code is used."""
    SYMMETRIC = "symmetric"
    """Zero point in the middle and as many codes below it as above: int8 uses -127 … 127, scale `amax / 127`. With E8M0
    scales, two's complement integers use every code."""
    SYMMETRIC_FULL = "symmetric_full"
    """Zero point in the middle and every code used: int8 uses -128 … 127, scale `amax / 127.5`."""
    SIGN_AWARE = "sign_aware"
    """Zero point 0 and every code used, for weights. For int8, the scale is `amax / 128`. If the value of the largest
    magnitude is positive, the scale is negative, so that this value maps to -128."""
    OFFSET = "offset"
    """Offset instead of a zero point, for weights in unsigned integers: every code is used. The offset, stored like a
    scale, is the value of code 0."""


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Parameters of the mapping from a range to codes.

    A float format that needs a scale is always symmetric, whatever the value of `symmetry`.

    Args:
        format: Number format of the codes.
        symmetry: Position of the codes around zero.
        scale: Format of scales.
        reduce_range: Whether to use half of an integer format's codes: -64 to 64 of int8, 0 to 127 of uint8.

    Raises:
        ConfigError: If a field is unknown, or its value is not allowed.
    """

    format: Format
    symmetry: Symmetry = Symmetry.SYMMETRIC
    scale: ScaleFormat = FLOAT32
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
        restricted = fmt.signed and self.symmetry is Symmetry.SYMMETRIC and self.scale.rule is None
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
        """Number of steps between the zero point and the largest magnitude of a symmetric scheme."""
        if not self.format.is_integer:
            return max(abs(limit) for limit in self.limits)
        if self.symmetry is Symmetry.SYMMETRIC and self.format.signed:
            return self.qmax
        return -self.qmin if self.symmetry is Symmetry.SIGN_AWARE else (self.qmax - self.qmin) / 2

    @property
    def one_more_below(self) -> bool:
        """True if the format has one more code below the zero point than above it, as in two's complement."""
        return self.format.is_integer and self.middle - self.qmin > self.qmax - self.middle

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest code in use."""
        return _integer_limits(self) if self.format.is_integer else self.format.limits

    def clip_range(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value that the codes in use represent."""
        low, high = ((end - zero_point.to(scale.dtype)) * scale for end in self.limits)  # int32 would overflow
        return low, high

    def levels(self, device: torch.device) -> Tensor:
        """Return the values of all codes in use for scale 1 and zero point 0, increasing, float64."""
        if self.format.is_integer:
            return torch.arange(self.qmin, self.qmax + 1, device=device).double()
        return self.format.levels().to(device)


@cache
def _integer_limits(scheme: Scheme) -> tuple[int, int]:
    """Return the smallest and the largest integer code in use; cached because every grid needs them."""
    return scheme.qmin, scheme.qmax


@dataclass(frozen=True, slots=True)
class QParams:
    """Quantization parameters of one tensor.

    Attributes:
        scale: Scales, float32, one per channel or group; positive, or of either sign for `Symmetry.SIGN_AWARE`.
        zero_point: Zero points, int32, in the shape of `scale`; all zero for a float format. For `Symmetry.OFFSET`,
            offsets in float32, the values of code 0.
    """

    scale: Tensor
    zero_point: Tensor

    def saturates(self, low: float, high: float, scheme: Scheme) -> bool:
        """Return True if saturation implies a clamp to `[low, high]`, for parameters with a single scale.

        Args:
            low: Smallest real value; can be minus infinity.
            high: Largest real value; can be infinity.
            scheme: Scheme of the codes.
        """
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
        low: Smallest real value, any shape `S`.
        high: Largest real value, shape `S`, `high >= low`.
        scheme: Format, symmetry, and format of scales.

    Returns:
        Parameters of shape `S`. The range `[0, 0]` gets scale 1.

    Raises:
        ValueError: If a bound is NaN or infinite, or `low` is above `high`.

    Source:
        Jacob et al. 2018, section 2.1 (`r = S * (q - Z)`); ONNX Runtime `compute_scale_zp`.
    """
    require_range(low, high)
    return unchecked_affine_qparams(low, high, scheme)


def require_range(
    low: Tensor, high: Tensor, source: str = "", *, inverted: Callable[[str], ValueError] = ValueError
) -> None:
    """Raise `ValueError` if a bound is NaN or infinite, or `inverted` if `low` is above `high`.

    The message ends with `source`.
    """

    def error() -> ValueError:
        finite = bool((torch.isfinite(low) & torch.isfinite(high)).all())
        kind, what = (inverted, "ends below its beginning") if finite else (ValueError, "is not finite")
        return kind(f"the range {what}: low {_show(low)}, high {_show(high)}{source}")

    accelerator.require((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all(), error)


def unchecked_affine_qparams(low: Tensor, high: Tensor, scheme: Scheme) -> QParams:
    """Compute `affine_qparams` for bounds that `require_range` has already checked."""
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if scheme.symmetric:
        symmetric = symmetric_qparams(torch.maximum(-low, high), scheme, high)
        if scheme.symmetry is Symmetry.SIGN_AWARE:
            return QParams(torch.where(high > -low, -symmetric.scale, symmetric.scale), symmetric.zero_point)
        return symmetric
    steps = scheme.qmax - scheme.qmin
    ideal = (high - low) / steps
    scale = scheme.scale.nearest(ideal)
    if scheme.symmetry is Symmetry.OFFSET:
        return QParams(scale, scheme.scale.nearest_offset(low))
    # Use the unrounded scale: rounding to float32 must not decide how a tie between zero points is rounded.
    exact = (scheme.scale == FLOAT32) & (ideal >= torch.finfo(torch.float32).tiny)
    zero_point = (scheme.qmin - low / torch.where(exact, ideal, scale.double())).round().clamp(scheme.qmin, scheme.qmax)
    return QParams(scale, zero_point.to(torch.int32))


def symmetric_qparams(amax: Tensor, scheme: Scheme, high: Tensor | None = None) -> QParams:
    """Map `[-amax, amax]` onto the codes of a symmetric `scheme`.

    Args:
        amax: Largest magnitude, any shape.
        scheme: Symmetric scheme.
        high: Largest nonnegative value; see `ScaleFormat.of_range`.

    Returns:
        Parameters in the shape of `amax`.
    """
    scale = scheme.scale.of_range(amax, scheme, high)
    return QParams(scale, torch.full_like(scale, scheme.middle, dtype=torch.int32))


def _show(bound: Tensor) -> str:
    return str(bound.flatten()[:3].tolist())[1:-1]
