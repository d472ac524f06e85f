"""A scaling solver of one file: channels are divided by a power of their standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quark_fx.solvers.sampled_scaling import SampledScaling, SampleStatistics
from quark_fx.solvers.scaling import scaling_solver


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class DeviationScales(SampledScaling):
    """Divide the channels of quantized activations by a power of their standard deviation.

    Args:
        powers: to choose from, in increasing order.
    """

    powers: tuple[float, ...] = (0.25, 0.5, 0.75)

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The powers."""
        return {"power": self.powers}

    def scale(self, statistics: SampleStatistics, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a power; a channel that never varies counts as one that hardly does."""
        (power,) = values
        largest = statistics.deviation.max().clamp_min(1e-20)
        return (statistics.deviation / largest).clamp_min(1e-3) ** power
