"""Move outliers from activations into the weights that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

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
    that read it. `a` counts as no smaller than its median over the site's channels: a channel that hardly fired would
    be blown up until it is clipped when it does, and only outliers have to move. A site's strength is the one whose
    quantized outputs are nearest to the float ones on calibration samples, each quarter of them with scales and ranges
    of the others: what equalizes channels to their extremes clips every one of them on data it has not seen. It is
    chosen by a few samples, and kept if all that are remembered, of the calibration batches and of the validation ones,
    agree that a good part of the error is gone.

    With `rms=True`, `a` and `w` are root mean squares, and the error assumes that rounding errors have the same size in
    every channel (`quark_fx.solvers.energy_trial`). Behind a rotation they do, and roughly so where the range of each
    token or small group is measured at run time.

    Args:
        alphas: strengths to choose from; leaving the site alone is always one more.
        rms: scale by root mean squares instead of largest magnitudes; for ranges that are measured at run time, and
            before `Rotate(streams=False)`.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; floor, search and acceptance are ours. That scales and rotations add up: Sun et
        al. 2024 (FlatQuant), who learn both.
    """

    trial: ClassVar = SampleTrial

    alphas: tuple[Annotated[float, Interval("[0, 1]")], ...] = (0.35, 0.5, 0.65, 0.8)
    rms: bool = False

    def __post_init__(self) -> None:
        if not self.alphas:
            raise ConfigError("alphas are one or more strengths from 0 to 1; write alphas=(0.5,)")

    @property
    def judge(self) -> type[Trial[Any]]:
        """Samples in codes, or with `rms` the energy of channels."""
        return EnergyTrial if self.rms else self.trial

    @property
    def grid(self) -> dict[str, list[float]]:
        """The strengths."""
        return {"alpha": sorted(self.alphas)}

    def scale(self, seen: SampledSite | EnergySite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a strength, 1 where the activation or, but with `rms`, the weights are zero."""
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
