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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.errors import Declined
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.plan.placement import Coded
from quark_fx.rescale.planned_sites import PlannedSite, planned_sites
from quark_fx.rescale.scale_sites import apply_scale
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.solvers.solver import naming_failures

S = TypeVar("S", bound=type)

ScaleOf = Callable[[Any], Tensor]
"""Function from the measurements of a site to a scale, shape (components,)."""


class Trial(ABC):
    """A site with its measurements, and the quantization errors at it after a scale is applied.

    Args:
        gm: Float graph, with the changes applied so far.
        site: Site of that graph.
        measurements: Measurements of the site.

    Attributes:
        unread: Reason for leaving a site that the trial cannot evaluate.
        gain: Ratio of new to old errors below which a scale is accepted.
        seen: Measurements of all calibration data, on the host, from which a solver computes the scale to apply.

    Raises:
        Declined: If no scale can be tried.
    """

    unread: ClassVar[str]
    gain: ClassVar[float] = 1.0
    seen: Any

    @abstractmethod
    def __init__(self, gm: GraphModule, site: PlannedSite, measurements: Any) -> None: ...

    @classmethod
    @abstractmethod
    def reads(cls, operator: Coded) -> bool:
        """Tell whether the trial can evaluate a scale for an operator."""

    @classmethod
    @abstractmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, label: str
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

    @abstractmethod
    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return, for each scale, the errors that must all decrease, on validation and calibration data in turn.

        The report shows the first.
        """

    def foreseen(self, scales_of: ScaleOf, sizes: Sequence[int]) -> Tensor | None:
        """Return `errors` of points that `search` is likely to request, if computing them in advance is cheaper.

        Args:
            scales_of: Function that returns the scales of all points of the grid, shape (points, components).
            sizes: Number of positions along each axis of the grid.

        Returns:
            The errors, float64, shape (points, 1), NaN for other points.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class ScalingSolver(Selective, ABC):
    """Base class of passes that choose a scale for the channels of each site.

    A subclass is a frozen dataclass of options with `trial`, `grid`, and `scale`, decorated with `scaling_solver`. It
    is a pass on the float graph, named after its class, and preserves the function that the graph computes.

    Args:
        explicit: Insert a multiplication if nothing before the site can absorb the scale.
    """

    trial: ClassVar[type[Trial]]
    """Measurements to make and error to minimize."""

    explicit: bool = False

    @property
    def judge(self) -> type[Trial]:
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

        def choose(pending: Mapping[int, PlannedSite]) -> Iterator[Chosen]:
            # Scales change the values between operators, so the data runs through a copy of the unchanged graph. It is
            # copied here, not in the generator, which starts after the choices of an interrupted run were applied.
            measured = self.judge.measured(copy_graph(gm), pending, context, type(self).__name__)
            return self._choices(gm, pending, measured, context)

        return choose_in_turn(sites, context, choose, lambda site, scale: apply_scale(gm, site.site, scale))

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run."""
        return self.judge.needs(sizes)

    def _choices(
        self, gm: GraphModule, sites: Mapping[int, PlannedSite], measured: Iterable[tuple[int, Any]], context: Context
    ) -> Iterator[Chosen]:
        for number, measurements in measured:
            with naming_failures(self, sites[number].name):
                chosen = context.with_room(partial(self._choose, gm, sites[number], measurements, context))
            del measurements  # before the next site is measured
            # All ranks must apply the same scale, but another processor may break a tie differently.
            yield number, *context.ranks.gather(chosen)[0]

    def _choose(
        self, gm: GraphModule, site: PlannedSite, measurements: Any, context: Context
    ) -> tuple[Tensor | None, Change]:
        """Return the scale of a site, or `None` if no scale is better, and the change to report."""
        began, grid = time.perf_counter(), self.grid
        try:
            trial = self.judge(gm, site, measurements)
        except Declined as declined:
            return None, Change.skipped(site.name, declined.reason)
        points, sizes = [*itertools.product(*grid.values())], [len(axis) for axis in grid.values()]
        scales: list[ScaleOf] = [partial(self.scale, values=values) for values in points]

        def errors(numbers: Tensor) -> Tensor:
            by_point = trial.errors([scales[number] for number in numbers.tolist()])
            return torch.tensor(by_point, dtype=torch.float64).unsqueeze(1)

        best = int(search(errors, sizes, trial.foreseen(self.scales, sizes)))
        ones = torch.ones(site.site.channels, dtype=torch.float32)
        before, after = trial.verdicts([lambda seen: ones, scales[best]])
        what = ", ".join(f"{name} {value:g}" for name, value in zip(grid, points[best], strict=True))
        change = Change(site.name, what, before=before[0], after=after[0])
        if is_better := all(a < trial.gain * b for b, a in zip(before, after, strict=True)):
            scale = scales[best](trial.seen).cpu()
        else:
            change = Change.skipped(site.name, _refusal(before, after, trial.gain, context), before[0])
        return scale if is_better else None, replace(change, seconds=time.perf_counter() - began)


def _refusal(before: Sequence[float], after: Sequence[float], gain: float, context: Context) -> str:
    """Return the reason for rejecting a scale, given `Trial.verdicts` without and with it."""
    worse = [(i, a) for i, (b, a) in enumerate(zip(before, after, strict=True)) if not a < b]  # NaN is not better
    if not worse:
        return f"less than {1 - gain:.0%} better ({after[0]:.3g})"
    place, error = worse[0]
    return f"no better on the calibration data ({error:.3g})" if place % 2 else context.data.refusal(error)


_LONG = 10
"""Smallest number of steps of a long axis, which is first tried at every fifth of its length."""


def search(
    errors: Callable[[Tensor], Tensor], sizes: Sequence[int], table: Tensor | None = None, *, rounds: int | None = None
) -> Tensor:
    """Return the point with the smallest error found, by searching along each axis, then with decreasing steps.

    A point is its number in the order of `itertools.product`, int64, shape ().

    Args:
        errors: Function from points, shape (points,), to their errors, shape (points, summands). It is called with as
            many points as possible, since a call may wait for the device.
        sizes: Number of positions along each axis. A long axis is tried at every fifth of its length, then around the
            best point; a short axis is followed from its middle while the error decreases, or tried whole with
            `rounds`.
        table: Errors of all points, shape (points, summands), NaN for points that were not tried; the search adds to
            it. Default: no point was tried.
        rounds: Number of rounds per step size, for a device that the host must not wait for; points may be tried twice.
            Default: search until no point is better, and try each point once.
    """
    table = torch.full((math.prod(sizes), 1), math.nan, dtype=torch.float64) if table is None else table
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]

    def moved(point: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the point so many steps away along each axis, or `point` if that is not on the grid."""
        to, inside = point, point >= 0
        for stride, size, step in zip(strides, sizes, steps, strict=True):
            place = point // stride % size + step
            to, inside = to + step * stride, inside & (place >= 0) & (place < size)
        return torch.where(inside, to, point)

    def least(points: Sequence[Tensor], tried: int) -> Tensor:
        """Return the point with the smallest error, of equal ones the first; so many were tried before."""
        numbers = torch.stack([*points])
        new = numbers[tried:] if rounds else numbers[table[numbers, 0].isnan()].unique()
        if len(new):
            table.index_copy_(0, new, errors(new).nan_to_num(nan=math.inf, posinf=math.inf))
        return numbers[table[numbers].sum(-1).argmin().view(1)].view(())

    def descended(point: Tensor, neighbors: Sequence[Sequence[Sequence[int]]], most: int, tried: int) -> Tensor:
        for _ in range(most):
            previous = point
            for steps in neighbors:
                point = least([point, *(moved(point, step) for step in steps)], tried)
            if rounds is None and bool(point == previous):
                break
        return point

    middles = (stride * ((size - 1) // 2) for stride, size in zip(strides, sizes, strict=True) if size <= _LONG)
    best = torch.full((), sum(middles), dtype=torch.int64, device=table.device)
    for axis, (stride, size) in enumerate(zip(strides, sizes, strict=True)):
        if size > _LONG or rounds:
            places = (*range(0, size - 1, (size - 1) // 5), size - 1) if size > _LONG else range(size)
            start = best - best // stride % size * stride
            best = least([start + i * stride for i in places], 0)
            continue
        for sign in (1, -1):
            best = descended(best, [[[sign * (i == axis) for i in range(len(sizes))]]], size - 1, tried=0)
    reaches = [max(2, (size - 1) // 5) for size in sizes]
    while any(reaches := [reach // 2 for reach in reaches]):
        both_ways = [[[sign * step for step in steps] for sign in (-1, 1)] for steps in _steps(reaches)]
        best = descended(best, both_ways, rounds or len(table), tried=1)
    return best


def _steps(reaches: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield a step along each axis, then along two axes in opposite directions, since one can offset the other."""
    steps = [tuple(reach if i == axis else 0 for i in range(len(reaches))) for axis, reach in enumerate(reaches)]
    yield from steps
    yield from (tuple(a - b for a, b in zip(*pair, strict=True)) for pair in itertools.combinations(steps, 2))


def scaling_solver(cls: S) -> S:
    """Register a `ScalingSolver` as a pass under its name."""
    register: Any = graph_pass(distributed=True, validated=True)
    registered: S = register(cls)
    return registered


__all__ = ["ScaleOf", "ScalingSolver", "Trial", "scaling_solver", "search"]
