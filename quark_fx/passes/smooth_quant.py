"""Move outliers from activations into their readers' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.calibration_data import without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.errors import ConfigError, Declined
from quark_fx.graph.linear import Linear
from quark_fx.plan.placement import Coded
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import NOT_WHOLE, SHARED_SCALE, PlannedSite, reads_whole
from quark_fx.solvers.sample_trial import (
    CALIBRATION,
    VALIDATION,
    InputWatch,
    Part,
    SampledSite,
    SampleTrial,
    Value,
    watch_inputs,
)
from quark_fx.solvers.scaling import ScaleOf, ScalingSolver, Trial, scaling_solver
from quark_fx.system.options import Interval

_SMALLEST, _LARGEST = 1e-4, 1e4


class _EnergyTrial(Trial):
    """A site and the sums of squares of its channels, in activations `x` and weights `w`.

    Suppose rounding adds an error of the same size to every channel, proportional to the root mean square over all
    channels. With scales `s`, the squared error of the output is then proportional to `sum (s w)**2 * sum (x / s)**2`,
    whether activations or weights are rounded. After a rotation this holds; with a range per token or small group it
    holds approximately. The error here is that product over `n * sum (w x)**2`, for n channels. For one operator, it is
    smallest at `s = sqrt(x / w)`: 1 if all channels contribute equally, less otherwise. Padding is excluded.

    Source:
        Ours; Chen et al. 2025 (WUSH) minimize the same error over all matrices, and this is the diagonal case.
    """

    unread = NOT_WHOLE

    def __init__(self, gm: GraphModule, site: PlannedSite, measurements: Mapping[Value, Tensor]) -> None:
        self.readers = [
            (r.scaled.labels, measurements[r.scaled.value, r.scaled.axis].cpu(), r.columns(gm).square().sum(1).cpu())
            for r in site.readers
        ]
        if not all(bool(x.isfinite().all()) for _, x, _ in self.readers):
            raise Declined("its input is too large to be squared")
        if site.shares_scale:
            raise Declined(SHARED_SCALE)
        activation, weight = (Means.of_none(site.site.channels) for _ in range(2))
        for labels, x, w in self.readers:
            activation.add(labels, x[0])
            weight.add(labels, w)
        self.seen = _EnergySite(activation.means.sqrt(), weight.means.sqrt())

    @classmethod
    def reads(cls, operator: Coded) -> bool:
        """Tell whether an operator's weight is quantized and reads all channels."""
        return reads_whole(operator)

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, label: str
    ) -> Iterator[tuple[int, Mapping[Value, Tensor]]]:
        """Sum squares in one forward pass."""
        inputs = (reader.scaled for site in sites.values() for reader in site.readers)
        watches = watch_inputs(gm, inputs, context, partial(_SquareWatch, context))
        del gm  # a scaled site replaces tensors, and `gm` would keep the old ones alive
        for watch in watches.values():
            context.ranks.add(watch.squares)
        yield from ((number, {key: watch.squares for key, watch in watches.items()}) for number in sites)

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return the needs of a run: one forward pass, and the squares of a weight."""
        tried = max((2 * FLOAT32 * m.values for m in sizes.matrices.values()), default=0)
        working = max(sizes.forward, sizes.weight_bytes + tried)
        return Need((Moment(working),), held=sizes.weight_bytes, operations=sizes.forward_operations)

    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the errors on calibration data, averaged over the readers."""
        return [self._error(scale_of(self.seen), 0) for scale_of in scales]

    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return the errors on validation data, averaged over the readers."""
        validated = any(bool(x[1].any()) for _, x, _ in self.readers)
        return [[self._error(scale_of(self.seen), int(validated))] for scale_of in scales]

    def _error(self, scale: Tensor, part: int) -> float:
        errors = []
        for labels, squares, w in self.readers:
            x, w, s = squares[part].double(), w.double(), per_element(labels, scale).double().square()
            alike = len(x) * (w * x).sum()
            errors.append(float((w * s).sum() * (x / s).sum() / alike.clamp_min(torch.finfo(torch.float32).tiny)))
        return sum(errors) / len(errors)


@dataclass(frozen=True, eq=False)
class _EnergySite:
    """Measurements of a site from sums of squares, on the host, each up to a common factor.

    Attributes:
        activation: Root mean square of the activation, shape (components,).
        weight: Root mean square of the weights, shape (components,).
    """

    activation: Tensor
    weight: Tensor


class _SquareWatch(InputWatch):
    """Sums the squares of each channel.

    Args:
        context: Context of the run.
        value: Value to watch.
        readers: Operators that read it.
        parts: Parts of the data.

    Attributes:
        squares: Sums over calibration and over validation data, float32, shape (2, channels).
    """

    def __init__(self, context: Context, value: Value, readers: Sequence[Linear], parts: Mapping[str, Part]) -> None:
        super().__init__(parts)
        node, self.axis = value
        channels = int(node.meta["val"].shape[self.axis])
        self.context, self.squares = context, torch.zeros(2, channels, dtype=torch.float32, device=context.device)

    def observe(self, x: Tensor, part: str, batch: int) -> None:
        rows = without_padding(x.movedim(self.axis, -1), self.context.data.kept_positions(batch))
        self.squares[(CALIBRATION, VALIDATION).index(part)] += rows.float().square().sum(0)


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
    channel. After a rotation this holds; with ranges per token or small group, measured at run time, it holds
    approximately.

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
        return _EnergyTrial if self.rms else self.trial

    @property
    def grid(self) -> dict[str, list[float]]:
        """Strengths to try."""
        return {"alpha": sorted(self.alphas)}

    def scale(self, seen: SampledSite | _EnergySite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a strength; 1 where the activation is zero, or, without `rms`, the weights are."""
        (alpha,) = values
        a, w = (seen.activation, seen.weight) if isinstance(seen, _EnergySite) else (seen.largest, seen.largest_weight)
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
