"""Move outliers from activations into their readers' weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.calibration_data import without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.errors import ConfigError, Declined
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import READS_WHOLE, Condition, PlannedSite
from quark_fx.solvers.sampled_scaling import SampledScaling, SampleStatistics
from quark_fx.solvers.samples import Value, watch_inputs
from quark_fx.solvers.scaling import Magnitudes, Measured, MeasuredSite, ScaleOf, scaling_solver
from quark_fx.system.options import Interval

_SMALLEST, _LARGEST = 1e-4, 1e4


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class SmoothQuant(SampledScaling):
    """Divide the channels of quantized activations by `s = a ** alpha / w ** (1 - alpha)` and multiply weights by `s`.

    `a` and `w` are the largest magnitudes, per channel, of the activation over the calibration data and of the weights
    of its readers. `a` is raised to at least its median over the site's channels: only outliers have to shrink, and a
    channel that is almost always near zero would otherwise be scaled up so much that its rare large values clip. Each
    site gets the strength that brings its quantized outputs closest to its float outputs on calibration samples. Each
    quarter of the samples is evaluated with scales and ranges measured on the other quarters, because scales that
    equalize the extremes of channels clip all channels on new data. The strength is chosen on a few samples, and
    accepted if all samples, of calibration and of validation batches, show that a good part of the error is gone.

    With `rms=True`, `a` and `w` are root mean squares, and rounding errors are assumed to have the same size in every
    channel, proportional to the root mean square over all channels. Then the squared error of the output is
    proportional to `sum (s w)**2 * sum (a / s)**2`, whether activations or weights are rounded. For one operator, it is
    smallest at `s = sqrt(a / w)`. The assumption holds after a rotation. It holds approximately for ranges per token or
    per small group that are measured at run time. Padding is excluded.

    Args:
        alphas: Strengths to choose from; a site may also stay unchanged.
        rms: Whether to scale by root mean squares instead of largest magnitudes; for ranges that are measured at run
            time, and before `Rotate(streams=False)`.
        explicit: Whether to insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; the lower limit of `a`, the search, and the acceptance are ours. Combining scales
        and rotations: Sun et al. 2024 (FlatQuant), who learn both. `rms` is ours; it is the diagonal case of Chen et
        al. 2025 (WUSH), who minimize the same error over all matrices.
    """

    alphas: tuple[Annotated[float, Interval("[0, 1]")], ...] = (0.35, 0.5, 0.65, 0.8)
    rms: bool = False

    def __post_init__(self) -> None:
        if not self.alphas:
            raise ConfigError("alphas is empty; pass one or more strengths from 0 to 1, such as alphas=(0.5,)")

    @property
    def grid(self) -> dict[str, list[float]]:
        """Strengths to try."""
        return {"alpha": sorted(self.alphas)}

    def scale(self, statistics: SampleStatistics | Magnitudes, values: tuple[float, ...]) -> Tensor:
        """Return the scale for a strength; 1 where the activation or, without `rms`, the weights are zero."""
        (alpha,) = values
        if isinstance(statistics, SampleStatistics):
            a, w = statistics.largest, statistics.largest_weight
        else:
            a, w = statistics
        used = (a > 0) & (w > 0)
        if not bool(used.any()):
            return torch.ones_like(a)
        floored = a if self.rms else a.maximum(a[used].median())
        scale = floored**alpha / w ** (1 - alpha)
        if self.rms:
            # A common factor does not matter. A channel that no weight reads only adds to the error: divide it most.
            scale = torch.where(w > 0, scale, scale[used].max()) / scale[used].median()
            used = a > 0
        return torch.where(used, scale.clamp(_SMALLEST, _LARGEST), 1.0)

    @property
    def condition(self) -> Condition:
        """Condition that inputs are quantized or, with `rms`, that weights have codes and read all channels."""
        return READS_WHOLE if self.rms else super().condition

    def measure(
        self, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, before: GraphModule
    ) -> Measured:
        """Sample the inputs of all sites' readers, or sum their squares, in one forward pass."""
        return (_squared if self.rms else super().measure)(gm, sites, context, before)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: with `rms`, a forward pass and memory for the squares of a weight."""
        if not self.rms:
            return super().needs(sizes)
        squared = max((2 * FLOAT32 * m.values for m in sizes.matrices.values()), default=0)
        working = max(sizes.forward, sizes.weight_bytes + squared)
        return Need((Moment(working),), held=sizes.weight_bytes, operations=sizes.forward_operations)


def _squared(gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, before: GraphModule) -> Measured:
    """Sum the squares of the inputs of all sites' readers in one forward pass; yield the error of each site."""
    squares: dict[Value, Tensor] = {}  # sums over calibration and validation data, shape (2, channels)

    def observe(value: Value, x: Tensor, part: int, batch: int) -> None:
        rows = without_padding(x.movedim(value[1], -1), context.data.kept_positions(batch))
        if value not in squares:
            squares[value] = torch.zeros(2, rows.shape[1], dtype=torch.float32, device=context.device)
        squares[value][part] += rows.float().square().sum(0)

    watch_inputs(before, sites.values(), context, observe)
    del before  # a scaled site replaces tensors, and `before` would keep the old ones alive
    for sums in squares.values():
        context.ranks.add(sums)
    yield from ((number, partial(_energy, gm, site, squares)) for number, site in sites.items())


def _energy(gm: GraphModule, site: PlannedSite, squares: Mapping[Value, Tensor]) -> MeasuredSite:
    """Return the error of a site's operators if rounding errors have the same size in every channel.

    The error is divided by its value for channels that all contribute equally. So it is 1 for such channels, and its
    minimum is at most 1.

    Raises:
        Declined: If the site cannot be scaled.
    """
    readers = [
        (r.scaled.labels, squares[r.scaled.value, r.scaled.axis].cpu(), r.columns(gm).square().sum(1).cpu())
        for r in site.readers
    ]
    if not all(bool(x.isfinite().all()) for _, x, _ in readers):
        raise Declined("its input is infinite or too large to be squared; check the calibration data")
    site.require_own_scales()
    activation, weight = (Means.of_none(site.site.channels) for _ in range(2))
    for labels, x, w in readers:
        activation.add(labels, x[0])
        weight.add(labels, w)
    statistics = Magnitudes(activation.means.sqrt(), weight.means.sqrt())

    def error(scale: ScaleOf, part: int) -> Tensor:
        errors, scales = [], scale(statistics)
        for labels, sums, w in readers:
            x, w, s = sums[part].double(), w.double(), per_element(labels, scales).double().square()
            equal = (len(x) * (w * x).sum()).clamp_min(torch.finfo(torch.float32).tiny)
            errors.append((w * s).sum() * (x / s).sum() / equal)
        return torch.stack(errors)

    validated = any(bool(x[1].any()) for _, x, _ in readers)
    return MeasuredSite(statistics, lambda scale: error(scale, 0), lambda scale: [error(scale, int(validated))])


__all__ = ["SmoothQuant"]
