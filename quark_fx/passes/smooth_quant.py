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

    Set `rotated=True` if `Rotate(streams=False)` follows. A rotation spreads each channel over all, so `a` and `w` are
    root mean squares then, and the error is what a rotation leaves (`quark_fx.solvers.energy_trial`).

    Args:
        alphas: strengths to choose from; leaving the site alone is always one more.
        rotated: choose the scales that a rotation behind them loses least with.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; floor, search and acceptance are ours. That scales and rotations add up: Sun et
        al. 2024 (FlatQuant), who learn both.
    """

    trial: ClassVar = SampleTrial

    alphas: tuple[Annotated[float, Interval("[0, 1]")], ...] = (0.35, 0.5, 0.65, 0.8)
    rotated: bool = False

    def __post_init__(self) -> None:
        if not self.alphas:
            raise ConfigError("alphas are one or more strengths from 0 to 1; write alphas=(0.5,)")

    @property
    def judge(self) -> type[Trial[Any]]:
        """Samples in codes, or the energy of channels."""
        return EnergyTrial if self.rotated else SampleTrial

    @property
    def grid(self) -> dict[str, list[float]]:
        """The strengths."""
        return {"alpha": sorted(self.alphas)}

    def scale(self, seen: SampledSite | EnergySite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a strength, 1 where the activation or the weights are zero."""
        (alpha,) = values
        if isinstance(seen, EnergySite):
            a, w = seen.activation, seen.weight
        else:
            a, w = seen.largest, seen.largest_weight
        used = (a > 0) & (w > 0)
        if not bool(used.any()):
            return torch.ones_like(a)
        # What a rotation spreads is not clipped where it was small on the calibration data.
        floored = a if self.rotated else a.maximum(a[used].median())
        return torch.where(used, (floored**alpha / w ** (1 - alpha)).clamp(_SMALLEST, _LARGEST), 1.0)


__all__ = ["SmoothQuant"]
