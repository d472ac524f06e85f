"""A scaling solver has a formula for the scale of a site, and measures errors at scales; the engine does the rest.

The engine finds the sites, searches the formula's grid for the smallest error on calibration data, and applies the best
scale if its error on validation data is smaller, too. It reports errors and resumes interrupted runs.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.errors import Declined
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.rescale.planned_sites import Condition, PlannedSite, planned_sites
from quark_fx.rescale.scale_sites import apply_scale
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.solvers.solver import naming_failures
from quark_fx.system import accelerator

S = TypeVar("S", bound=type)

_LONG = 10
"""Largest number of positions along a short axis of a grid; a longer axis is first tried at every fifth of its
length."""

_ROUNDS = 2
"""Number of rounds per step size of a search on a device; the first often finds a better point, the second seldom."""


ScaleOf = Callable[[Any], Tensor]
"""Function from statistics of a site to a scale, shape (components,)."""


class Magnitudes(NamedTuple):
    """Statistics of a site: magnitudes of the activation and of the weights, shape (components,)."""

    activation: Tensor
    weight: Tensor


@dataclass(frozen=True)
class MeasuredSite:
    """Statistics of a site, and the quantization error at it as a function of its scale.

    Both functions get a function from statistics to a scale, so that an error can be computed on one part of the data,
    with a scale that follows from the other parts.

    Attributes:
        statistics: Statistics of all calibration data, from which the applied scale follows.
        error: Function that returns relative squared errors on calibration data, shape (n,); the search minimizes their
            mean.
        validation_errors: Function that returns such errors alternately on validation and on calibration data. The
            means of all must fall; the report shows the first.
        largest_ratio: Exclusive upper limit on the ratio of an error with the scale to the error without it.
        device: Device that computes `error` while the host does not wait; `None` if the host computes it, or waits.
    """

    statistics: Any
    error: Callable[[ScaleOf], Tensor]
    validation_errors: Callable[[ScaleOf], Sequence[Tensor]]
    largest_ratio: float = 1.0
    device: torch.device | None = None


Measured = Iterator[tuple[int, Callable[[], MeasuredSite]]]
"""Numbers of sites, each with a function that returns the measured site, or raises `Declined` without scales to try."""


@dataclass(frozen=True, kw_only=True)
class ScalingSolver(Selective, ABC):
    """Base class of passes that choose a scale for the channels of each site.

    A subclass is a frozen dataclass of options, decorated with `scaling_solver`. It is a pass on the float graph, named
    after its class, and preserves the function that the graph computes.

    Args:
        explicit: Whether to insert a multiplication if nothing before the site can absorb the scale.

    Attributes:
        registered_by: Name of the decorator.
    """

    registered_by: ClassVar[str] = "scaling_solver"
    explicit: bool = False

    @property
    @abstractmethod
    def grid(self) -> Mapping[str, Sequence[float]]:
        """Parameters to choose, by their names in the report, each with its values in increasing order."""

    @abstractmethod
    def scale(self, statistics: Any, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a site, positive, shape (components,).

        Args:
            statistics: Statistics of the site.
            values: Value of each parameter of `grid`; tensors of shape (1,) in a search on a device.
        """

    @property
    @abstractmethod
    def condition(self) -> Condition:
        """Condition on the operators of a site."""

    @abstractmethod
    def measure(
        self, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, before: GraphModule
    ) -> Measured:
        """Run the calibration data, and yield the error of each site.

        Args:
            gm: Float graph, which has the scales of earlier sites when the error of a site is computed.
            sites: Sites to measure, by number.
            context: Context of the run.
            before: Copy of the float graph without changes, to run.
        """

    @abstractmethod
    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run."""

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Scale the sites of `gm` that have quantized readers; return how many sites changed."""
        sites = planned_sites(gm, context, self, self.condition, explicit=self.explicit)

        def choose(pending: Mapping[int, PlannedSite]) -> Iterator[Chosen]:
            # Scales change the values between operators, so the data runs through a copy of the unchanged graph. It is
            # copied here, not in the generator, which starts after the choices of an interrupted run were applied.
            return self._choices(pending, self.measure(gm, pending, context, copy_graph(gm)), context)

        return choose_in_turn(sites, context, choose, lambda site, scale: apply_scale(gm, site.site, scale))

    def _choices(self, sites: Mapping[int, PlannedSite], measured: Measured, context: Context) -> Iterator[Chosen]:
        for number, begin in measured:
            with naming_failures(self, sites[number].name):
                chosen = context.with_room(partial(self._choose, sites[number], begin, context))
            del begin  # before the next site is measured
            # All ranks must apply the same scale, but another processor may break a tie differently.
            yield number, *context.ranks.gather(chosen)[0]

    def _choose(
        self, planned: PlannedSite, begin: Callable[[], MeasuredSite], context: Context
    ) -> tuple[Tensor | None, Change]:
        """Return the scale of a site, or `None` if no scale is better, and the change to report."""
        began, ones = time.perf_counter(), torch.ones(planned.site.channels, dtype=torch.float32)
        try:
            site = begin()
        except Declined as declined:
            return None, Change.skipped(planned.name, declined.reason)
        values = self._best(site)
        best = partial(self.scale, values=values)
        validated = (error for scale in (lambda _: ones, best) for error in site.validation_errors(scale))
        errors = _means(validated, site.device)
        before, after = errors[: len(errors) // 2], errors[len(errors) // 2 :]
        what = ", ".join(f"{name} {value:g}" for name, value in zip(self.grid, values, strict=True))
        change = Change(planned.name, what, before=before[0], after=after[0])
        if is_better := all(a < site.largest_ratio * b for b, a in zip(before, after, strict=True)):
            scale = best(site.statistics).cpu()
        else:
            reason = _refusal(before, after, site.largest_ratio, context)
            change = Change.skipped(planned.name, reason, before[0])
        return scale if is_better else None, replace(change, seconds=time.perf_counter() - began)

    def _best(self, site: MeasuredSite) -> tuple[float, ...]:
        """Return the values of the parameters with the smallest error on calibration data."""
        axes = [*self.grid.values()]

        def values_at(point: Sequence[int]) -> tuple[float, ...]:
            return tuple(axis[place] for axis, place in zip(axes, point, strict=True))

        def errors(points: Tensor) -> Tensor:
            tried = (site.error(partial(self.scale, values=values_at(point))) for point in points.tolist())
            return torch.tensor(_means(tried, site.device), dtype=torch.float64)

        sizes = [len(axis) for axis in axes]
        return values_at(_search(errors, sizes, self._tried_on_device(site, axes)).tolist())

    def _tried_on_device(self, site: MeasuredSite, axes: Sequence[Sequence[float]]) -> Tensor | None:
        """Return the errors at points of a search on the site's device, NaN at others; the host waits once."""
        if site.device is None or site.device.type == "cpu":
            return None
        values_of = [torch.tensor(axis, dtype=torch.float32).to(site.device) for axis in axes]
        table = torch.full([math.prod(map(len, axes))], math.nan, dtype=torch.float32, device=site.device)

        def errors(points: Tensor) -> Tensor:
            on_device: Any = ([v[place] for v, place in zip(values_of, p.split(1), strict=True)] for p in points)
            return torch.stack([site.error(partial(self.scale, values=values)).mean() for values in on_device])

        with accelerator.checked_later() as checks:
            _search(errors, [len(axis) for axis in axes], table, rounds=_ROUNDS)
        flags = [condition.to(table.dtype).view(1) for condition, _ in checks]
        on_host = torch.cat([table, *flags]).cpu()  # one transfer: each one makes the host wait
        is_valid = bool(on_host[len(table) :].all())  # otherwise a search on the host may avoid the invalid point
        return on_host[: len(table)].double() if is_valid else None


def _means(errors: Iterable[Tensor], device: torch.device | None) -> list[float]:
    """Return the mean of each tensor, computed in float64; waits for a device once (`MeasuredSite.device`)."""
    # A deferred check keeps the tensor that its message names.
    later: AbstractContextManager[list[accelerator.Check]]
    later = nullcontext([]) if device is None else accelerator.checked_later()
    with later as checks:
        rows = [error.unbind() for error in errors]
    numbers = iter(accelerator.read([x for row in rows for x in row], checks))
    return [sum(itertools.islice(numbers, len(row))) / len(row) for row in rows]


def _refusal(before: Sequence[float], after: Sequence[float], largest_ratio: float, context: Context) -> str:
    """Return the reason for rejecting a scale, given the validation errors without and with it."""
    pairs = list(enumerate(zip(before, after, strict=True)))
    worse = [(i, a) for i, (b, a) in pairs if not a < b]  # NaN is not better
    if worse:
        place, error = worse[0]
        return f"no better on the calibration data ({error:.3g})" if place % 2 else context.data.refusal(error)
    place, (old, new) = next((i, errors) for i, errors in pairs if not errors[1] < largest_ratio * errors[0])
    where = " on the calibration data" if place % 2 else ""
    return f"less than {1 - largest_ratio:.0%} better{where} ({new:.3g} instead of {old:.3g})"


def _search(
    errors: Callable[[Tensor], Tensor], sizes: Sequence[int], table: Tensor | None = None, *, rounds: int | None = None
) -> Tensor:
    """Return the point of a grid with the smallest error found, by searching along each axis, then in smaller steps.

    A point holds its position along each axis, int64, shape (axes,). A long axis is tried at every fifth of its length,
    then around the best point. A short axis is followed from its middle while the error falls or, with `rounds`, tried
    at every position.

    Args:
        errors: Function from points, shape (points, axes), to their errors, shape (points,). It is called with as many
            points as possible, since a call may wait for the device.
        sizes: Number of positions along each axis.
        table: Error of each point in the order of `itertools.product`, NaN for points that were not tried; the search
            adds to it. Default: no point was tried.
        rounds: Number of rounds per step size, for a device that the host must not wait for; points may be tried twice.
            Default: search until no point is better, and try each point once.
    """
    table = torch.full([math.prod(sizes)], math.nan, dtype=torch.float64) if table is None else table
    device, count = table.device, len(sizes)
    axes = torch.eye(count, dtype=torch.int64, device=device).unbind()
    ends, strides = torch.tensor([sizes, [math.prod(sizes[i + 1 :]) for i in range(count)]], dtype=torch.int64).to(
        device
    )

    def least(points: Sequence[Tensor], tried: int = 1) -> Tensor:
        """Return the first point with the smallest error; the first `tried` points have errors in the table."""
        candidates = torch.stack([*points])
        numbers = (candidates * strides).sum(1)
        new = candidates[tried:] if rounds else candidates[table[numbers].isnan()].unique(dim=0)
        if len(new):
            table.index_copy_(0, (new * strides).sum(1), errors(new).nan_to_num(nan=math.inf, posinf=math.inf))
        return candidates.index_select(0, table[numbers].argmin().view(1))[0]

    def moved(point: Tensor, step: Tensor) -> Tensor:
        """Return the point one step away, or `point` if that is not on the grid."""
        to = point + step
        return torch.where(((to >= 0) & (to < ends)).all(), to, point)

    def descended(point: Tensor, steps: Sequence[Sequence[Tensor]]) -> Tensor:
        for _ in range(rounds or len(table)):
            previous = point
            for choices in steps:
                point = least([point, *(moved(point, step) for step in choices)])
            if rounds is None and torch.equal(point, previous):
                break
        return point

    middles = [(size - 1) // 2 if size <= _LONG else 0 for size in sizes]
    best = torch.tensor(middles, dtype=torch.int64).to(device)
    for axis, size in zip(axes, sizes, strict=True):
        if size > _LONG or rounds:
            places = (*range(0, size - 1, (size - 1) // 5), size - 1) if size > _LONG else range(size)
            best = least([best * (1 - axis) + axis * place for place in places], tried=0)
        else:
            best = descended(descended(best, [[axis]]), [[-axis]])
    reaches = [max(2, (size - 1) // 5) for size in sizes]
    while any(reaches := [reach // 2 for reach in reaches]):
        steps = [axis * reach for axis, reach in zip(axes, reaches, strict=True)]
        steps += [a - b for a, b in itertools.combinations(steps, 2)]  # more of one parameter can offset the other
        best = descended(best, [[-step, step] for step in steps])
    return best


def scaling_solver(cls: S) -> S:
    """Register a `ScalingSolver` as a pass under its name."""
    register: Any = graph_pass(distributed=True, validated=True)
    registered: S = register(cls)
    return registered


__all__ = ["Magnitudes", "Measured", "MeasuredSite", "ScaleOf", "ScalingSolver", "scaling_solver"]
