"""Move outliers from activations into their readers' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.solvers.energy_trial import EnergySite, EnergyTrial
from quark_fx.solvers.sample_trial import SampledSite, SampleTrial
from quark_fx.solvers.scaling import ScalingSolver, Trial, scaling_solver
from quark_fx.system.options import Interval

_SMALLEST, _LARGEST = 1e-4, 1e4


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class SmoothQuant(ScalingSolver):
    """Divide the channels of quantized activations by `s = a ** alpha / w ** (1 - alpha)` and multiply weights by `s`.

    `a` and `w` are the largest magnitudes, per channel, of the activation over the calibration data and of the weights
    of its readers. `a` is raised to at least its median over the site's channels: a channel that is almost always near
    zero would be scaled up until it clips when it is not, and only outliers have to move. Each site gets the strength
    that brings its quantized outputs closest to the float ones on calibration samples; each quarter of the samples is
    evaluated with scales and ranges measured on the others, because scales that equalize channels to their extremes
    clip all of them on new data. The strength is chosen on a few samples, and accepted if all samples, both of
    calibration and of validation batches, show that a good part of the error is gone.

    With `rms=True`, `a` and `w` are root mean squares, and rounding errors are assumed to have the same size in every
    channel (`quark_fx.solvers.energy_trial`). After a rotation this holds; with ranges per token or small group,
    measured at run time, it holds approximately.

    Args:
        alphas: Strengths to choose from; the site may also stay unchanged.
        rms: Scale by root mean squares instead of largest magnitudes; for ranges that are measured at run time, and
            before `Rotate(streams=False)`.
        explicit: Insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; lower limit, search, and acceptance are ours. Combining scales and rotations: Sun
        et al. 2024 (FlatQuant), who learn both.
    """

    trial: ClassVar = SampleTrial

    alphas: tuple[Annotated[float, Interval("[0, 1]")], ...] = (0.35, 0.5, 0.65, 0.8)
    rms: bool = False

    def __post_init__(self) -> None:
        if not self.alphas:
            raise ConfigError("alphas are one or more strengths from 0 to 1; write alphas=(0.5,)")

    @property
    def judge(self) -> type[Trial]:
        """Trial on quantized samples, or on the energy of channels with `rms`."""
        return EnergyTrial if self.rms else self.trial

    @property
    def grid(self) -> dict[str, list[float]]:
        """Strengths to try."""
        return {"alpha": sorted(self.alphas)}

    def scale(self, seen: SampledSite | EnergySite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a strength; 1 where the activation is zero, or, without `rms`, the weights are."""
        (alpha,) = values
        a, w = (seen.activation, seen.weight) if isinstance(seen, EnergySite) else (seen.largest, seen.largest_weight)
        used = (a > 0) & (w > 0)
        if not bool(used.any()):
            return torch.ones_like(a)
        floored = a if self.rms else a.maximum(a[used].median())
        scale = floored**alpha / w ** (1 - alpha)
        if self.rms:
            # A common factor does not matter. A channel that no weight reads adds energy, so it is made small.
            scale = torch.where(w > 0, scale, scale[used].max()) / scale[used].median()
            used = a > 0
        return torch.where(used, scale.clamp(_SMALLEST, _LARGEST), 1.0)


__all__ = ["SmoothQuant"]
