"""A scaling solver computes the scale of a site from measurements of it; the engine here does everything else.

The engine finds the sites, measures the data of a `Trial` across ranks, searches the solver's grid on calibration data,
and applies the best scale if it is also better on validation data. It reports errors, resumes interrupted runs, and
predicts memory.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.engine.room import with_room
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.plan.placement import Coded
from quark_fx.rescale.planned_sites import PlannedSite, planned_sites
from quark_fx.rescale.scale_sites import apply_scale
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.solvers.proposals import naming_failures

S = TypeVar("S", bound=type)
T = TypeVar("T")

ScaleOf = Callable[[Any], Tensor]
"""Function from the measurements of a site to a scale, shape (components,)."""

Point = tuple[int, ...]
"""Point of a grid, given by its position along each axis."""


_LONG = 10
"""Smallest number of steps of a long axis, which is first tried at every fifth of its length."""


class Trial(ABC, Generic[T]):
    """A site with its measurements, and the quantization errors at it after a scale is applied.

    Args:
        gm: Float graph, with the changes applied so far.
        site: Site of that graph.
        measurements: Measurements of the site.

    Attributes:
        unread: Reason for leaving a site that the trial cannot evaluate.
        gain: Ratio of new to old errors below which a scale is accepted.
        refusal: Reason that no scale can be tried, empty if there is none.
        seen: Measurements that a solver gets, of all calibration data.
    """

    unread: ClassVar[str]
    gain: ClassVar[float] = 1.0
    refusal: str = ""
    seen: Any

    @abstractmethod
    def __init__(self, gm: GraphModule, site: PlannedSite[T], measurements: Any) -> None: ...

    @property
    def seen_on_host(self) -> Any:
        """Measurements with tensors on the host, where the scale to apply is computed."""
        return self.seen

    @classmethod
    @abstractmethod
    def reads(cls, operator: Coded) -> T | None:
        """Return the data needed to evaluate a scale for an operator (`Reader.how`), or `None` if it cannot be."""

    @classmethod
    @abstractmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite[T]], context: Context, label: str
    ) -> Iterator[tuple[int, Any]]:
        """Run the calibration data through a graph, and yield the numbers of sites with their measurements.

        Args:
            gm: Copy of the float graph, without changes.
            sites: Sites to measure, by number.
            context: Context of the run.
            label: Label of the progress bar.
        """

    @classmethod
    @abstractmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return the needs of measuring and trying."""

    @abstractmethod
    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the relative squared error on calibration data for each scale, for the search."""

    def foreseen(self, scales_of: ScaleOf, sizes: Sequence[int]) -> dict[Point, float]:
        """Return `errors` of points that the search is likely to request, if computing them in advance is cheaper.

        Args:
            scales_of: Function that returns the scales of all points of the grid, shape (points, components).
            sizes: Number of positions along each axis of the grid.
        """
        return {}

    @abstractmethod
    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return, for each scale, the errors that must all decrease; the first, on validation data, is reported."""


@dataclass(frozen=True, kw_only=True)
class ScalingSolver(Selective, ABC):
    """Base class of passes that choose a scale for the channels of each site.

    A subclass is a frozen dataclass of options with `trial`, `grid`, and `scale`, decorated with `scaling_solver`. It
    is a pass on the float graph, named after its class, and preserves the function that the graph computes.

    Args:
        explicit: Insert a multiplication if nothing before the site can absorb the scale.
    """

    trial: ClassVar[type[Trial[Any]]]
    """Measurements to make and error to minimize."""

    explicit: bool = False

    @property
    def judge(self) -> type[Trial[Any]]:
        """The trial; an option may select another one."""
        return self.trial

    @property
    @abstractmethod
    def grid(self) -> Mapping[str, Sequence[float]]:
        """Parameters to choose, by their name in the report, each with its values in increasing order."""

    @abstractmethod
    def scale(self, seen: Any, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a site, positive, shape (components,).

        Args:
            seen: Measurements of the site from `trial`.
            values: Value of each parameter of `grid`.
        """

    def scales(self, seen: Any) -> Tensor:
        """Return the scales of all points of `grid`, shape (points, components); the last axis varies fastest.

        Each is bit-identical to the result of `scale`; a subclass may compute them together.
        """
        return torch.stack([self.scale(seen, values) for values in itertools.product(*self.grid.values())])

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Scale the sites of `gm` that have quantized readers; return how many changed."""
        sites = planned_sites(
            gm, context, self, explicit=self.explicit, reads=self.judge.reads, unread=self.judge.unread
        )

        def chosen(pending: Mapping[int, PlannedSite[Any]]) -> Iterator[Chosen]:
            # Scales change the values between operators, so the data runs through the unchanged graph.
            measured = self.judge.measured(copy_graph(gm), pending, context, type(self).__name__)
            return self._settled(gm, measured, pending, context)

        return choose_in_turn(sites, context, chosen, lambda site, scale: apply_scale(gm, site.site, scale))

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run."""
        return self.judge.needs(sizes)

    def _settled(
        self,
        gm: GraphModule,
        measured: Iterator[tuple[int, Any]],
        sites: Mapping[int, PlannedSite[Any]],
        context: Context,
    ) -> Iterator[Chosen]:
        for number, measurements in measured:
            with naming_failures(self, sites[number].name):
                settled = with_room(context, partial(self._settled_site, gm, sites[number], measurements, context))
            del measurements  # before the next site is measured
            # All ranks must apply the same scale, but another processor may break a tie differently.
            yield number, *context.ranks.gather(settled)[0]

    def _settled_site(
        self, gm: GraphModule, site: PlannedSite[Any], measurements: Any, context: Context
    ) -> tuple[Tensor | None, Change]:
        """Return the scale of a site, or `None` if no scale is better, and the change to report."""
        began, grid, trial = time.perf_counter(), self.grid, self.judge(gm, site, measurements)
        if trial.refusal:
            return None, Change.skipped(site.name, trial.refusal)

        def scale_of(point: Point) -> ScaleOf:
            values = tuple(axis[i] for axis, i in zip(grid.values(), point, strict=True))
            return lambda seen: self.scale(seen, values)

        sizes = [len(axis) for axis in grid.values()]
        best = search(lambda points: trial.errors([*map(scale_of, points)]), sizes, trial.foreseen(self.scales, sizes))
        ones = torch.ones(site.site.channels, dtype=torch.float32)
        before, after = trial.verdicts([lambda seen: ones, scale_of(best)])
        seconds = time.perf_counter() - began
        if not all(a < trial.gain * b for b, a in zip(before, after, strict=True)):
            refusal = Change.skipped(site.name, _refusal(before, after, trial.gain, context), before[0])
            return None, replace(refusal, seconds=seconds)
        what = ", ".join(f"{name} {axis[i]:g}" for (name, axis), i in zip(grid.items(), best, strict=True))
        change = Change(site.name, what, before=before[0], after=after[0], seconds=seconds)
        return scale_of(best)(trial.seen_on_host).cpu(), change


def _refusal(before: Sequence[float], after: Sequence[float], gain: float, context: Context) -> str:
    """Return the reason for rejecting a scale; the error on validation data comes first."""
    if all(a < b for b, a in zip(before, after, strict=True)):
        return f"less than {1 - gain:.0%} better ({after[0]:.3g})"
    if after[0] < before[0]:
        return f"no better on the calibration data ({after[-1]:.3g})"
    return context.data.refusal(after[0])


def search(
    errors: Callable[[Sequence[Point]], Sequence[float]],
    sizes: Sequence[int],
    foreseen: Mapping[Point, float] | None = None,
) -> Point:
    """Return the point with the smallest error found, by searching along each axis, then with decreasing steps.

    Args:
        errors: Function that returns the errors of points. It is called once per point, with as many points at a time
            as possible, since each call waits for the device.
        sizes: Number of positions along each axis. A long axis is tried at every fifth of its length, then around the
            best point; a short axis is followed from its middle while the error decreases.
        foreseen: Errors that are already available.
    """
    by_point, lasts = dict(foreseen or {}), [size - 1 for size in sizes]

    def least(points: Sequence[Point]) -> Point:
        if new := [point for point in dict.fromkeys(points) if point not in by_point]:
            by_point.update(zip(new, errors(new), strict=True))
        return min(points, key=by_point.__getitem__)

    best: Point = tuple(0 if last >= _LONG else last // 2 for last in lasts)
    for axis, last in enumerate(lasts):
        if last >= _LONG:
            best = least([_moved(best, axis, i) for i in (*range(0, last, last // 5), last)])
            continue
        for step in (1, -1):
            while 0 <= best[axis] + step <= last:
                # The current point comes first, so a tie does not move it.
                if best == (best := least([best, _moved(best, axis, best[axis] + step)])):
                    break
    reaches = [max(2, last // 5) for last in lasts]
    while any(reaches := [reach // 2 for reach in reaches]):
        previous: Point | None = None
        while previous != best:
            previous = best
            for steps in _steps(reaches):
                best = least([best, *_beside(best, steps, lasts)])
    return best


_PASSES = 2
"""Rounds of `foresee` per step size; the first often finds a better point, the next seldom does."""


def foresee(errors: Callable[[Tensor], Tensor], parts: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Follow `search` on a device for a fixed number of steps, without waiting for the device.

    Args:
        errors: Function that returns the errors, shape (parts,), of a point, given by its number, int64, shape (), in
            the order of `itertools.product`.
        parts: Number of summands of the error.
        sizes: Number of positions along each axis.
        device: Device of the errors.

    Returns:
        The errors of all points, shape (points, parts), NaN for points that were not tried.
    """
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    table = torch.full((math.prod(sizes), parts), math.nan, dtype=torch.float32, device=device)

    def along(point: Tensor, axis: int) -> Tensor:
        return point // strides[axis] % sizes[axis]

    def beside(point: Tensor, step: Point) -> Tensor:
        moved, inside = point, torch.ones((), dtype=torch.bool, device=device)
        for axis, (by, stride) in enumerate(zip(step, strides, strict=True)):
            place = along(point, axis) + by
            moved, inside = moved + by * stride, inside & (place >= 0) & (place < sizes[axis])
        return torch.where(inside, moved, point)

    def least(points: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
        for point in new:
            table.index_copy_(0, point.view(1), errors(point).view(1, -1))
        numbers = torch.stack([*points, *new])
        return numbers[table[numbers].sum(-1).argmin().view(1)].view(())

    lasts = [size - 1 for size in sizes]
    start = sum((0 if last >= _LONG else last // 2) * stride for last, stride in zip(lasts, strides, strict=True))
    best = torch.full((), start, dtype=torch.int64, device=device)
    for axis, last in enumerate(lasts):
        places = (*range(0, last, max(1, last // 5)), last) if last >= _LONG else range(last + 1)
        best = least([], [best + (i - along(best, axis)) * strides[axis] for i in places])
    reaches = [max(2, last // 5) for last in lasts]
    while any(reaches := [reach // 2 for reach in reaches]):
        for steps in [*_steps(reaches)] * _PASSES:
            best = least([best], [beside(best, tuple(sign * s for s in steps)) for sign in (-1, 1)])
    return table


def _moved(point: Point, axis: int, position: int) -> Point:
    return (*point[:axis], position, *point[axis + 1 :])


def _beside(point: Point, step: Point, lasts: Sequence[int]) -> Iterator[Point]:
    """Yield the points one step back and one step ahead that are on the grid."""
    near = (tuple(p + sign * s for p, s in zip(point, step, strict=True)) for sign in (-1, 1))
    yield from (p for p in near if all(0 <= i <= last for i, last in zip(p, lasts, strict=True)))


def _steps(reaches: Sequence[int]) -> Iterator[Point]:
    """Yield a step along each axis, then along two axes in opposite directions, since one can offset the other."""
    steps = [tuple(reach if i == axis else 0 for i in range(len(reaches))) for axis, reach in enumerate(reaches)]
    yield from steps
    yield from (tuple(a - b for a, b in zip(*pair, strict=True)) for pair in itertools.combinations(steps, 2))


def scaling_solver(cls: S) -> S:
    """Register a `ScalingSolver` as a pass under its name."""
    register: Any = graph_pass(distributed=True, validated=True)
    registered: S = register(cls)
    return registered


__all__ = ["Point", "ScaleOf", "ScalingSolver", "Trial", "scaling_solver", "search"]
