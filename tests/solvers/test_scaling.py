"""The search of scaling solvers, and what they see of a site."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

from quark_fx.errors import PassError
from quark_fx.passes import AWQ, AdaRound, SmoothQuant
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC
from quark_fx.rescale.components import largest_per_component, per_element
from quark_fx.solvers.hessian_trial import _TRIES
from quark_fx.solvers.sample_trial import SampledSite
from quark_fx.solvers.samples import CALIBRATION, Remembered
from quark_fx.solvers.scaling import foresee, scaling_solver, search
from quark_fx.solvers.solver import Bias, OutputError, Solver, solver
from quark_fx.system.memory import Slabs


def each(error: Callable[[tuple[int, ...]], float]) -> Callable[[Sequence[tuple[int, ...]]], list[float]]:
    """Return the errors of points, as `search` asks for them."""
    return lambda points: [error(point) for point in points]


@pytest.mark.parametrize("slope", [0.0, 0.9], ids=["bowl", "valley"])
@pytest.mark.parametrize("best", [(7, 13), (0, 0), (20, 1), (4, 0), (11, 14), (20, 20)])
def test_the_search_ends_where_the_error_is_least(best: tuple[int, int], slope: float) -> None:
    asked = set()

    def error(exponents: tuple[int, ...]) -> float:
        asked.add(exponents)
        r, q = (one - other for one, other in zip(exponents, best, strict=True))
        return r * r + q * q + 2 * slope * r * q  # less of one may be more of the other

    calls: list[int] = []

    def errors(points: Sequence[tuple[int, ...]]) -> list[float]:
        calls.append(len(points))
        return [error(point) for point in points]

    assert search(errors, (21, 21)) == best
    assert sum(calls) == len(asked) <= 1.5 * _TRIES  # each once
    assert calls[:2] == [6, 5]  # each call waits for the device, so a line is asked at once


@pytest.mark.parametrize("sizes", [(21, 21), (5, 12)])
@pytest.mark.parametrize("best", [(0.1, 0.1), (0.35, 0.6), (0.55, 0.9)])
def test_where_the_search_goes_is_foreseen_without_a_decision_of_the_host(
    best: tuple[float, float], sizes: tuple[int, int]
) -> None:
    ends = [share * (size - 1) for share, size in zip(best, sizes, strict=True)]

    def parts(number: Tensor) -> Tensor:
        r, q = number // sizes[1] - ends[0], number % sizes[1] - ends[1]
        return torch.stack((r * r + r * q, q * q))

    found = foresee(parts, 2, sizes, torch.device("cpu"))
    points = [*itertools.product(*map(range, sizes))]
    known = {p: sum(row) for p, row in zip(points, found.tolist(), strict=True) if row[0] == row[0]}
    assert len(known) <= 1.5 * _TRIES
    errors = {p: sum(parts(torch.tensor(i)).tolist()) for i, p in enumerate(points)}
    assert known == {p: errors[p] for p in known}
    asked = list[tuple[int, ...]]()
    assert search(each(lambda p: asked.append(p) or errors[p]), sizes, known) == search(each(errors.get), sizes)  # type: ignore[func-returns-value, arg-type]
    assert len(asked) <= 4  # of a third look around one point


@pytest.mark.parametrize("steps", [2, 4, 9, 10, 17, 32])
def test_the_ends_of_any_grid_are_tried(steps: int) -> None:
    assert search(each(lambda point: -float(sum(point))), (steps + 1, steps + 1)) == (steps, steps)


def test_a_short_axis_is_followed_from_its_middle() -> None:
    """Of two that are alike the one upwards; what lies beyond a worse one is not asked."""
    asked = []

    def error(point: tuple[int, ...]) -> float:
        asked.append(point[0])
        return (1.0, 0.5, 0.7, 0.5, 0.9, 0.0)[point[0]]

    assert search(each(error), [6]) == (3,)
    assert set(asked) == {2, 3, 4}


def test_a_long_axis_and_a_short_one_are_searched_together() -> None:
    assert search(each(lambda point: abs(point[0] - 13) + abs(point[1] - point[0] // 6)), (21, 4)) == (13, 2)


def remembered(*folds: int) -> Remembered:
    """Return what is remembered of a value with two channels, a sample a fold; magnitudes are those of the fold."""
    found, slabs = Remembered(1, divisible=True), Slabs()
    for fold in folds:
        x = (fold + 1) * rand(3, 2, seed=fold)
        found.widen(fold, x, slabs)
        found.samples[CALIBRATION].append((fold, x))
    return found


def test_parts_of_the_data_merge_to_what_all_of_it_leaves() -> None:
    whole, merged = remembered(0, 0, 1, 2), remembered(0).merge(remembered(0, 1)).merge(remembered(2))
    assert whole.ranges.keys() == merged.ranges.keys()
    for without in (None, 0, 1, 2):
        for a, b in zip(whole.range(without), merged.range(without), strict=True):
            assert torch.equal(a, b)
        pairs = zip(whole.calibration_samples(without), merged.calibration_samples(without), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_what_is_sent_to_other_ranks_is_no_larger_than_its_values() -> None:
    assert all(end.untyped_storage().nbytes() > 1 << 20 for end in remembered(0).range(None))
    ours = remembered(0).to("cpu", copy=True)
    assert all(end.untyped_storage().nbytes() == 8 for end in ours.range(None))


def test_a_fold_is_left_out_by_its_number_though_others_are_empty() -> None:
    """Two batches of one sample are the folds 0 and 2 of four."""
    found = remembered(0, 2)
    for mine, other in ((0, 2), (2, 0)):
        assert all(torch.equal(a, b) for a, b in zip(found.range(mine), remembered(other).range(None), strict=True))
        (sample,) = found.calibration_samples(mine)
        assert torch.equal(sample, remembered(other).samples[CALIBRATION][0][1])
    alone = remembered(3)
    assert all(torch.equal(a, b) for a, b in zip(alone.range(3), alone.range(None), strict=True))


def test_what_is_seen_of_a_site_is_that_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few samples all are remembered but those of validation."""
    model, data = seeded(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))), [rand(2, 16, seed=i) for i in range(8)]
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(0.1, 10, 16))  # type: ignore[operator]
    found, scale = list[SampledSite](), SmoothQuant.scale

    def noted(self: SmoothQuant, seen: SampledSite, values: tuple[float, ...]) -> Tensor:
        found.append(seen)
        return scale(self, seen, values)

    monkeypatch.setattr(SmoothQuant, "scale", noted)
    quantize(model, INT8_STATIC.replace(passes=(SmoothQuant(),)), data)
    seen = next(site for site in found if site.without is None)
    with torch.no_grad():
        x = torch.cat([model[0](batch) for batch in data[:7]])
    torch.testing.assert_close(seen.deviation, x.std(0, correction=0))
    torch.testing.assert_close(seen.largest, x.abs().amax(0))
    torch.testing.assert_close(seen.largest_weight, model[1].weight.detach().abs().amax(0))  # type: ignore[operator]
    torch.testing.assert_close(next(s for s in found if s.without == 3).largest, x[:12].abs().amax(0))


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
