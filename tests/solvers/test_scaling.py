"""The search of scaling solvers, and what they see of a site."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.errors import PassError
from quark_fx.passes import AWQ, AdaRound, SmoothQuant
from quark_fx.passes.awq import _TRIES
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC
from quark_fx.rescale.components import largest_per_component, per_element
from quark_fx.solvers.sampled_scaling import SampledScaling, SampleStatistics
from quark_fx.solvers.samples import CALIBRATION, Samples
from quark_fx.solvers.scaling import _ROUNDS, _refusal, _search, scaling_solver
from quark_fx.solvers.solver import Bias, OutputError, Solver, solver
from quark_fx.system.memory import Slabs

Point = tuple[int, ...]
"""Positions along the axes of a grid."""


def found(error: Callable[[Point], float], sizes: Point, calls: list[list[Point]] | None = None) -> Point:
    """Return the point that the search ends at; note the points of each call."""

    def errors(points: Tensor) -> Tensor:
        positions = [tuple(point) for point in points.tolist()]
        if calls is not None:
            calls.append(positions)
        return torch.tensor([error(point) for point in positions], dtype=torch.float64)

    return tuple(_search(errors, sizes).tolist())


@pytest.mark.parametrize("slope", [0.0, 0.9], ids=["bowl", "valley"])
@pytest.mark.parametrize("best", [(7, 13), (0, 0), (20, 1), (4, 0), (11, 14), (20, 20)])
def test_the_search_ends_where_the_error_is_least(best: Point, slope: float) -> None:
    def error(exponents: Point) -> float:
        r, q = (one - other for one, other in zip(exponents, best, strict=True))
        return r * r + q * q + 2 * slope * r * q  # less of one may be more of the other

    calls = list[list[Point]]()
    assert found(error, (21, 21), calls) == best
    asked = [point for call in calls for point in call]
    assert len(asked) == len(set(asked)) <= 1.5 * _TRIES  # each once
    assert [*map(len, calls[:2])] == [6, 5]  # each call waits for the device, so a line is asked at once


@pytest.mark.parametrize("sizes", [(21, 21), (5, 12)])
@pytest.mark.parametrize("best", [(0.1, 0.1), (0.35, 0.6), (0.55, 0.9)])
def test_where_the_search_goes_is_foreseen_without_a_decision_of_the_host(
    best: tuple[float, ...], sizes: Point
) -> None:
    ends = [share * (size - 1) for share, size in zip(best, sizes, strict=True)]

    def errors(points: Tensor) -> Tensor:
        r, q = (points - torch.tensor(ends)).unbind(1)
        return r * r + r * q + q * q

    asked = list[Tensor]()

    def noted(points: Tensor) -> Tensor:
        asked.extend(points)
        return errors(points).double()

    table = torch.full((math.prod(sizes),), torch.nan)
    _search(errors, sizes, table, rounds=_ROUNDS)
    known = ~table.isnan()
    assert int(known.sum()) <= 1.5 * _TRIES
    assert torch.equal(table[known], errors(torch.cartesian_prod(*map(torch.arange, sizes)))[known])
    ahead = _search(noted, sizes, table.double())
    assert len(asked) <= 4  # of a third look around one point
    assert torch.equal(ahead, _search(noted, sizes))


@pytest.mark.parametrize("steps", [2, 4, 9, 10, 17, 32])
def test_the_ends_of_any_grid_are_tried(steps: int) -> None:
    assert found(lambda point: -float(sum(point)), (steps + 1, steps + 1)) == (steps, steps)


def test_a_short_axis_is_followed_from_its_middle() -> None:
    """Of two that are alike the one upwards; what lies beyond a worse one is not asked."""
    calls, errors = list[list[Point]](), (1.0, 0.5, 0.7, 0.5, 0.9, 0.0)
    assert found(lambda point: errors[point[0]], (6,), calls) == (3,)
    assert {point[0] for call in calls for point in call} == {2, 3, 4}


def test_without_decisions_of_the_host_a_short_axis_is_tried_whole_then_around_the_best() -> None:
    asked = list[int]()

    def errors(points: Tensor) -> Tensor:
        asked.extend(points[:, 0].tolist())
        return (points[:, 0] - 3).abs().float()

    assert int(_search(errors, (4,), torch.full((4,), torch.nan), rounds=1)) == 3
    assert asked == [0, 1, 2, 3, 2, 3]


def test_a_long_axis_and_a_short_one_are_searched_together() -> None:
    assert found(lambda point: abs(point[0] - 13) + abs(point[1] - point[0] // 6), (21, 4)) == (13, 2)


@pytest.mark.parametrize("spoiled", [(0, 0), (8, 8), (20, 20)])
def test_a_point_without_an_error_is_never_chosen(spoiled: Point) -> None:
    def error(point: Point) -> float:
        return math.nan if point == spoiled else abs(point[0] - 8) + abs(point[1] - 7)

    calls = list[list[Point]]()
    assert found(error, (21, 21), calls) == (8, 7)
    assert sum(call.count(spoiled) for call in calls) <= 1


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ([0.9, 0.9, 0.9], "less than 15% better (0.9 instead of 1)"),
        ([0.5, 0.9, 0.4], "less than 15% better on the calibration data (0.9 instead of 1)"),
        ([0.5, 1.5, 0.4], "no better on the calibration data (1.5)"),
        ([0.5, 0.4, math.nan], "no better on validation data (nan)"),
    ],
)
def test_a_refusal_gives_the_error_that_is_no_better(after: list[float], reason: str) -> None:
    context = Context(INT8_STATIC, CalibrationData(ActivationCache()), torch.device("cpu"))
    assert _refusal([1.0] * 3, after, 0.85, context) == reason


def sampled(*folds: int) -> Samples:
    """Return samples of a value with two channels, one per fold, as large as its number."""
    statistics, slabs = Samples(1, divisible=True), Slabs()
    for fold in folds:
        x = (fold + 1) * rand(3, 2, seed=fold)
        statistics.widen(fold, x, slabs)
        statistics.samples[CALIBRATION].append((fold, x))
    return statistics


def test_a_single_batch_is_divided_into_folds() -> None:
    samples, x = Samples(1, divisible=True), rand(8, 2)
    samples.observe(x, CALIBRATION, 0, 1, Slabs())
    assert [*samples.ranges] == [fold for fold, _ in samples.samples[CALIBRATION]] == [0, 1, 2, 3]
    for fold, part in enumerate(x.split(2)):
        low, high = samples.ranges[fold].ends
        assert torch.equal(low, part.amin(0))
        assert torch.equal(high, part.amax(0))


def test_parts_of_the_data_merge_to_what_all_of_it_leaves() -> None:
    whole, merged = sampled(0, 0, 1, 2), sampled(0).merge(sampled(0, 1)).merge(sampled(2))
    assert whole.ranges.keys() == merged.ranges.keys()
    for without in (None, 0, 1, 2):
        for a, b in zip(whole.range(without), merged.range(without), strict=True):
            assert torch.equal(a, b)
        pairs = zip(whole.calibration_samples(without), merged.calibration_samples(without), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_fold_is_left_out_by_its_number_though_others_are_empty() -> None:
    """Two batches of one sample are the folds 0 and 2 of four."""
    both = sampled(0, 2)
    for mine, other in ((0, 2), (2, 0)):
        assert all(torch.equal(a, b) for a, b in zip(both.range(mine), sampled(other).range(None), strict=True))
        (sample,) = both.calibration_samples(mine)
        assert torch.equal(sample, sampled(other).samples[CALIBRATION][0][1])
    alone = sampled(3)
    assert all(torch.equal(a, b) for a, b in zip(alone.range(3), alone.range(None), strict=True))


def test_what_is_seen_of_a_site_is_that_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few samples all are remembered but those of validation."""
    model, data = seeded(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))), [rand(2, 16, seed=i) for i in range(8)]
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(0.1, 10, 16))  # type: ignore[operator]
    sites, scale = list[SampleStatistics](), SmoothQuant.scale

    def noted(self: SmoothQuant, seen: SampleStatistics, values: tuple[float, ...]) -> Tensor:
        sites.append(seen)
        return scale(self, seen, values)

    monkeypatch.setattr(SmoothQuant, "scale", noted)
    quantize(model, INT8_STATIC.replace(passes=(SmoothQuant(),)), data)
    seen = next(site for site in sites if site.without is None)
    with torch.no_grad():
        x = torch.cat([model[0](batch) for batch in data[:7]])
    torch.testing.assert_close(seen.deviation, x.std(0, correction=0))
    torch.testing.assert_close(seen.largest, x.abs().amax(0))
    torch.testing.assert_close(seen.largest_weight, model[1].weight.detach().abs().amax(0))  # type: ignore[operator]
    torch.testing.assert_close(next(s for s in sites if s.without == 3).largest, x[:12].abs().amax(0))


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class Fixed(SampledScaling):
    """Divide outliers by the geometric mean of activations and weights."""

    @property
    def grid(self) -> dict[str, list[float]]:
        """Return a grid without parameters."""
        return {}

    def scale(self, statistics: SampleStatistics, values: tuple[float, ...]) -> Tensor:
        """Return the scale."""
        return (statistics.largest.clamp_min(1e-3) / statistics.largest_weight).sqrt()


def test_a_formula_without_parameters_needs_no_search() -> None:
    assert found(lambda point: 1.0, ()) == ()
    norm = nn.LayerNorm(16)
    model = seeded(nn.Sequential(norm, nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    with torch.no_grad():
        norm.weight[3] = 50.0
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, Fixed()))
    qmodel = quantize(model, config, [rand(8, 16, seed=i) for i in range(6)])
    (changes,) = [one.changes for one in qmodel.report().passes if one.name == "Fixed"]
    assert [change.before is not None for change in changes] == [True, True]


def test_components_go_to_elements_and_back() -> None:
    labels = torch.tensor([[1], [-1], [0]])
    assert per_element(labels, torch.tensor([2.0, 3.0])).tolist() == [[3.0], [1.0], [2.0]]
    assert largest_per_component(labels, torch.tensor([[1.0, 5], [9, 9], [4, 2]]), 3).tolist() == [4.0, 5.0, 0.0]
    assert largest_per_component(torch.tensor([[0, 1, 0]]), torch.tensor([[1.0], [7.0]]), 2).tolist() == [7.0, 7.0]


def test_the_report_says_where_awq_could_multiply() -> None:
    model = seeded(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)))
    for explicit, said in ((False, True), (True, False)):
        config = INT4_WEIGHT_ONLY.replace(passes=(AWQ(explicit=explicit),), exclude=())
        report = str(quantize(model, config, [rand(8, 16, seed=i) for i in range(2)]).report())
        assert ("explicit=True could multiply for 2 more" in report) == said


class UnexpectedError(Exception):
    pass


@solver
@dataclass(frozen=True, kw_only=True)
class FailingSolver(Solver):
    def solve(self, weight: Any, seen: Any) -> Any:
        raise UnexpectedError("no luck")


@solver
@dataclass(frozen=True, kw_only=True)
class FailingBiases(Solver):
    chooses = Bias

    @property
    def reads(self) -> OutputError:
        return OutputError()

    def solve(self, bias: Any, seen: Any) -> Any:
        raise UnexpectedError("no luck")


@solver
@dataclass(frozen=True, kw_only=True)
class FailingCodes(AdaRound):
    def begin(self, *args: Any) -> Any:
        raise UnexpectedError("no luck")


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class FailingScales(SmoothQuant):
    def scale(self, seen: Any, values: Any) -> Any:
        raise UnexpectedError("no luck")


@pytest.mark.parametrize("failing", [FailingSolver(), FailingBiases(), FailingCodes(iterations=2), FailingScales()])
def test_an_unexpected_error_names_the_solver_and_the_operator(failing: Any) -> None:
    model = seeded(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    config = INT8_STATIC.replace(passes=(failing,))
    message = rf"^{type(failing).__name__} failed on [13](, [13])*: UnexpectedError: no luck\n"
    with pytest.raises(PassError, match=message) as error:
        quantize(model, config, [rand(8, 8, seed=i) for i in range(3)])
    assert isinstance(error.value.__cause__, UnexpectedError)
