"""Ranges of whole tensors with the smallest squared error, which is measured, not estimated from a histogram."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark_fx.numbers.ops import rounded
from quark_fx.numbers.qparams import QParams, Scheme, require_range, unchecked_affine_qparams

_Thresholds = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from a fraction of the range, shape (channels,), to the lower and the upper threshold."""

_SIXTEENTHS = ((1.0, 16), (1 / 16, 8))
"""Two rounds of the search for a fraction of the range: distance to search from the best fraction so far, and number of
steps on each side. The first round steps by sixteenths, the second by eighths of a sixteenth."""

_EXPONENTS = (2.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""Fractions to try for 8-bit powers of two as scales: one exponent more than the range needs, up to four less."""

_WIDEST = 1.5
"""Largest fraction to try for floats. Their steps grow with magnitude, so mapping the largest magnitude of a block
to the second largest value of the format can have a smaller error: to 4 instead of 6 in E2M1 (Cook et al. 2025, "Four
Over Six")."""


def smallest_error_qparams(x: Tensor, scheme: Scheme) -> QParams:
    """Return the parameters of each row whose clipping thresholds have the smallest squared error.

    First, both thresholds shrink by the same factor; for floats and power-of-two scales they may also grow. With an
    asymmetric scheme, the upper threshold then moves alone, and then the lower threshold.

    Args:
        x: Tensor of shape (channels, values), finite.
        scheme: Scheme of the quantized tensor.

    Returns:
        Parameters of shape (channels,).

    Raises:
        ValueError: If a value is NaN or infinite.
    """
    x = x.detach().float()
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    # Checked once: a share above 1 may overflow, but its error is then not smaller, so it is not chosen.
    require_range(low, high)
    share = _best_share(x, scheme, lambda share: (low * share, high * share), torch.ones_like(low))
    low, high = low * share, high * share
    if not scheme.symmetric:
        share = _best_share(x, scheme, lambda share: (low, high * share), torch.ones_like(low))
        high = high * share
        share = _best_share(x, scheme, lambda share: (low * share, high), torch.ones_like(low))
        low = low * share
    return unchecked_affine_qparams(low, high, scheme)


def _best_share(x: Tensor, scheme: Scheme, thresholds: _Thresholds, best: Tensor) -> Tensor:
    """Return, per row, the share of the range with the smallest error, or `best` if no share has a smaller error."""
    error = _squared_error(x, scheme, *thresholds(best))
    if scheme.scale.rule:
        for power in _EXPONENTS:
            trial = _squared_error(x, scheme, *thresholds(torch.full_like(best, power)))
            best, error = torch.where(trial < error, power, best), torch.minimum(trial, error)
        return best
    most = 1.0 if scheme.format.is_integer else _WIDEST
    for width, count in _SIXTEENTHS:
        center = best
        for step in range(-count, count + 1):
            share = center + width * step / count
            usable = (share > 0) & (share <= most) & (share != center)
            if not bool(usable.any()):
                continue
            trial = _squared_error(x, scheme, *thresholds(torch.where(usable, share, center)))
            better = usable & (trial < error)
            best, error = torch.where(better, share, best), torch.where(better, trial, error)
    return best


def _squared_error(x: Tensor, scheme: Scheme, low: Tensor, high: Tensor) -> Tensor:
    qparams = unchecked_affine_qparams(low, high, scheme)
    return rounded(x, qparams, scheme, 0).sub_(x).square_().sum(1)
