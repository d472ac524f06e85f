"""Scales and zero points of weights that are robust to outliers, without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.numbers.quantized_tensor import decode
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.observers.base import observer
from quark_fx.observers.minmax import MinMax
from quark_fx.system.options import Interval, PositiveInt

_GROWTH = 1.01
"""Growth of the penalty per iteration."""


@observer
@dataclass(frozen=True, kw_only=True)
class Hqq(MinMax):
    """Scale and zero point of half-quadratic quantization, for asymmetric weights.

    It minimizes the sum of `|w - q(w)| ** norm`, which is robust to outliers, by alternating two steps: shrink the
    errors, then fit scale and zero point to the rest by least squares. The paper fits only the zero point and keeps it
    as a real number; here it is rounded to the integer that files store, and the scale compensates. The best iterate is
    returned.

    Args:
        norm: Exponent of the errors, above 0, and below 1 for robustness.
        penalty: Initial weight of the penalty.
        iterations: Maximum number of iterations; the search ends when the error no longer falls.

    Raises:
        ConfigError: For a value out of range.

    Source:
        Badri and Shaji 2023 (HQQ), equations 3 to 7.
    """

    norm: Annotated[float, Interval("(0, 1]")] = 0.7
    penalty: Annotated[float, Interval("(0, inf)")] = 10.0
    iterations: PositiveInt = 20

    weights_only: ClassVar[bool] = True

    def of_constant(self, x: Tensor, scheme: Scheme) -> QParams:
        if scheme.symmetric:
            raise ConfigError("observer 'hqq' chooses zero points; use symmetry='asymmetric'")
        if scheme.scale == POWER_OF_TWO:
            raise ConfigError("observer 'hqq' fits scales, which powers of two are too coarse for; drop scale")
        x = x.detach().float()
        start = affine_qparams(x.amin(1), x.amax(1), scheme)
        scale, zero = start.scale.unsqueeze(1), start.zero_point.float().unsqueeze(1)
        limits = scheme.qmin, scheme.qmax
        best, penalty, least = (scale, zero), self.penalty, self._error(x, scale, zero, limits)
        for _ in range(self.iterations):
            codes = (x / scale + zero).round_().clamp_(*limits)
            lost = x - decode(codes, scale, zero)
            size = lost.abs()
            shrunk = lost.sign() * (size - size.clamp_min(1e-12) ** (self.norm - 1) / penalty).clamp_min_(0)
            target = x - shrunk
            zero = (codes - target / scale).mean(1, keepdim=True).round_().clamp_(*limits)
            steps = codes - zero
            fitted = (target * steps).sum(1, keepdim=True) / steps.square().sum(1, keepdim=True).clamp_min(1e-12)
            scale = torch.where(fitted > 0, fitted, scale)
            penalty *= _GROWTH
            error = self._error(x, scale, zero, limits)
            better = error < least
            if not bool(better.any()):
                break
            best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
            least = torch.where(better, error, least)
        scale, zero = (p.squeeze(1) for p in best)
        return QParams(scheme.scale.nearest(scale.double()), zero.to(torch.int32))

    def _error(self, x: Tensor, scale: Tensor, zero: Tensor, limits: tuple[int, int]) -> Tensor:
        codes = (x / scale + zero).round_().clamp_(*limits)
        return (decode(codes, scale, zero) - x).abs().pow(self.norm).sum(1, keepdim=True)


__all__ = ["Hqq"]
