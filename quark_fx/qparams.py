"""From a real range to a scale and a zero point."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.formats import FloatFormat, Format, IntFormat


class Symmetry(StrEnum):
    """How the codes lie around zero."""

    ASYMMETRIC = "asymmetric"
    """A zero point; every code is used."""
    SYMMETRIC = "symmetric"
    """Zero point in the middle and as many codes below it as above: int8 uses -127 … 127, scale `amax / 127`."""
    SYMMETRIC_FULL = "symmetric_full"
    """Zero point in the middle and every code used: int8 uses -128 … 127, scale `amax / 127.5`."""
    SIGN_AWARE = "sign_aware"
    """Zero point 0 and every code used, for weights: the scale is `amax / 128` for int8, and negative where the largest
    magnitude is a positive value, so that it falls on -128, which has no counterpart."""


class ScaleType(StrEnum):
    """Which scales are allowed."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    """Scales that float16 represents exactly (nearest to the ideal one)."""
    POWER_OF_TWO = "power_of_two"
    """The smallest power of two that is not below the ideal scale: rounding up never overflows the range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Everything that decides how a range maps to codes.

    A float format that needs a scale is symmetric whatever `symmetry` says: zero is one of its codes.
    """

    format: Format
    symmetry: Symmetry = Symmetry.SYMMETRIC
    scale_type: ScaleType = ScaleType.FLOAT32

    @property
    def symmetric(self) -> bool:
        return isinstance(self.format, FloatFormat) or self.symmetry is not Symmetry.ASYMMETRIC

    @property
    def qmin(self) -> int:
        """The smallest integer code in use."""
        fmt = self._integer()
        restricted = fmt.signed and self.symmetry is Symmetry.SYMMETRIC
        return -fmt.qmax if restricted else fmt.qmin

    @property
    def qmax(self) -> int:
        """The largest integer code in use."""
        return self._integer().qmax

    @property
    def middle(self) -> int:
        """The zero point of a symmetric scheme: 0, or half way up an unsigned format (128 for uint8)."""
        fmt = self.format
        return 0 if isinstance(fmt, FloatFormat) or fmt.signed else 1 << (fmt.bits - 1)

    @property
    def largest(self) -> float:
        """The code, counted from the zero point, that a symmetric scheme maps the largest magnitude to."""
        if isinstance(self.format, FloatFormat):
            return self.format.max
        return -self.qmin if self.symmetry is Symmetry.SIGN_AWARE else (self.qmax - self.qmin) / 2

    def _integer(self) -> IntFormat:
        if not isinstance(self.format, IntFormat):
            raise ConfigError(f"{self.format} has no integer codes")
        return self.format


@dataclass(frozen=True, slots=True)
class QParams:
    """Quantization parameters of one tensor.

    Attributes:
        scale: float32, one per channel or group, positive; of either sign for `Symmetry.SIGN_AWARE`.
        zero_point: int32, the shape of `scale`; all zero for a float format.
    """

    scale: Tensor
    zero_point: Tensor


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
        ValueError: if a bound is NaN or infinite.

    Source:
        Jacob et al. 2018, section 2.1 (`r = S * (q - Z)`); ONNX Runtime `compute_scale_zp`.
    """
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError(f"the range is not finite: low {_show(low)}, high {_show(high)}")
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if scheme.symmetric:
        found = symmetric_qparams(torch.maximum(-low, high), scheme)
        if scheme.symmetry is Symmetry.SIGN_AWARE:
            return QParams(torch.where(high > -low, -found.scale, found.scale), found.zero_point)
        return found
    steps = scheme.qmax - scheme.qmin
    ideal = (high - low) / steps
    scale = constrain_scale(ideal, scheme.scale_type)
    # A float32 scale is the ideal one but for rounding, which must not decide a zero point that lies on a tie.
    exact = (scheme.scale_type is ScaleType.FLOAT32) & (ideal >= torch.finfo(torch.float32).tiny)
    zero_point = (scheme.qmin - low / torch.where(exact, ideal, scale.double())).round().clamp(scheme.qmin, scheme.qmax)
    return QParams(scale, zero_point.to(torch.int32))


def symmetric_qparams(amax: Tensor, scheme: Scheme) -> QParams:
    """Map `[-amax, amax]` onto the codes of a symmetric `scheme`; shapes and errors as `affine_qparams`."""
    scale = constrain_scale(amax.double() / scheme.largest, scheme.scale_type)
    return QParams(scale, torch.full_like(scale, scheme.middle, dtype=torch.int32))


def constrain_scale(ideal: Tensor, scale_type: ScaleType) -> Tensor:
    """Return the float32 scale of kind `scale_type` for an `ideal` one (float64, non-negative).

    A scale too small for a normal float32 is that of a tensor of zeros, and becomes 1.
    """
    scale = torch.where(ideal < torch.finfo(torch.float32).tiny, 1.0, ideal)
    if scale_type is ScaleType.POWER_OF_TWO:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    elif scale_type is ScaleType.FLOAT16:
        half = torch.finfo(torch.float16)
        scale = scale.clamp(half.smallest_normal, half.max).half().double()
    return scale.float()


def _show(bound: Tensor) -> str:
    return str(bound.flatten()[:3].tolist())[1:-1]
