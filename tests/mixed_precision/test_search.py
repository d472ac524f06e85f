"""`search` keeps its budget, chooses as every choice tried would, and says so where one candidate is as good."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import quark_fx as qfx
from quark_fx.analysis.trials import METRICS, Trials, parts_of
from quark_fx.engine.block_walk import relative_error
from quark_fx.errors import CalibrationError, ConfigError, QuarkError
from quark_fx.mixed_precision import latency
from quark_fx.mixed_precision import search as module
from quark_fx.mixed_precision.budget import Budget
from quark_fx.mixed_precision.candidates import FLOAT, candidates_of, mixed
from quark_fx.mixed_precision.groups import groups_of
from quark_fx.mixed_precision.isolated_operators import isolate_operators
from quark_fx.mixed_precision.program import choose
from quark_fx.mixed_precision.result import MIXED, Search
from quark_fx.mixed_precision.space import Space
from quark_fx.mixed_precision.written import written_size
from quark_fx.presets import preset
from quark_fx.session import Session

INT8, INT4 = "int8_weight_only", "int4_weight_only"


class Block(nn.Module):
    """Attention without a softmax, and a gated MLP."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(torch.tanh(self.q(x) * self.k(x)) * self.v(x))
        made: Tensor = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return x + made


class Tied(nn.Module):
    """A language model of two blocks whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 32), nn.Linear(32, 11, bias=False)
        self.layers = nn.Sequential(Block(), Block())
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))  # type: ignore[no-any-return]


class Cross(nn.Module):
    """Two layers that read what one encoder made, and two convolutions that read one image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 3, padding=1)
        self.beside = nn.Conv2d(3, 4, 1)
        self.layers = nn.ModuleList(nn.ModuleDict({"k": nn.Linear(8, 4), "v": nn.Linear(8, 4)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x) + self.beside(x)
        return sum(layer["k"](x) * layer["v"](x) for layer in self.layers)  # type: ignore[index, return-value]


def names(model: nn.Module, batch: Tensor) -> list[tuple[str, ...]]:
    return [group.names for group in groups_of(qfx.capture_graph(model.eval(), batch).module)[1]]


def test_what_a_server_fuses_and_what_shares_a_weight_is_a_group() -> None:
    layers = [
        tuple(f"layers.{i}.{name}" for name in part)
        for i in range(2)
        for part in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    ]
    assert sorted(names(Tied(), tokens()[0])) == sorted([("embed", "head"), *layers])


def test_layers_apart_and_convolutions_that_read_one_value_are_no_group() -> None:
    layers = [(f"layers.{i}.k", f"layers.{i}.v") for i in range(2)]
    assert sorted(names(Cross(), images()[0])) == sorted([("encoder",), ("beside",), *layers])


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = nn.Parameter(torch.zeros(3, 8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.shared(x)[None] @ self.experts
        return made.sum(0)


def test_a_stack_of_experts_is_one_operator() -> None:
    _, groups = groups_of(qfx.capture_graph(seeded(Experts()), rand(4, 8)).module)
    assert [group.weights for group in groups] == [{"shared.weight": 64}, {"experts": 192}]


figures = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=3), min_size=1, max_size=4
)


@settings(deadline=None)
@given(figures, st.integers(0, 150), st.sampled_from(["", "cost", "weight"]))
def test_the_program_finds_what_trying_every_choice_finds(
    rows: list[list[tuple[int, int]]], limit: int, forbidden: str
) -> None:
    never = {"cost": 1, "weight": 2}.get(forbidden, 9)
    costs = [[math.inf if never == 1 == i else c / 7 for i, (c, _) in enumerate(row)] for row in rows]
    weights = [[math.inf if never == 2 == 2 * i else w for i, (_, w) in enumerate(row)] for row in rows]
    best = exhaustive(costs, weights, limit)
    found = choose(costs, weights, limit)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert total(weights, found) <= limit
        assert total(costs, found) == pytest.approx(best, abs=1e-6)


def total(figures: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
    return sum(row[i] for row, i in zip(figures, chosen, strict=True))


def exhaustive(costs: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], limit: float) -> float | None:
    """Return the least cost of all choices that keep the limit."""
    every = itertools.product(*(range(len(row)) for row in costs))
    kept = (total(costs, chosen) for chosen in every if total(weights, chosen) <= limit)
    return min((cost for cost in kept if math.isfinite(cost)), default=None)


def test_bytes_of_large_models_keep_the_limit_to_the_byte() -> None:
    sizes = [[3_000_000_017 + 7 * g, 1_500_000_011 + 3 * g] for g in range(5)]
    errors = [[0.0, 1.0 + g / 100] for g in range(5)]
    best = exhaustive(errors, sizes, limit := sum(a for a, _ in sizes[:2]) + sum(b for _, b in sizes[2:]))
    found = choose(errors, sizes, limit)
    assert found is not None
    assert total(sizes, found) <= limit
    assert total(errors, found) == pytest.approx(best)


def spoiled() -> tuple[nn.Module, list[Tensor]]:
    """Return a network one layer of which has weights that 4 bits are not enough for, and batches."""
    wide, narrow = nn.Linear(32, 32), nn.Linear(32, 8)
    model = seeded(nn.Sequential(Block(), wide, narrow))
    with torch.no_grad():
        wide.weight[:, ::8] *= 40
        narrow.weight /= 40
    return model, [rand(8, 32, seed=i) for i in range(8)]


def run(model: nn.Module, candidates: Sequence[Any], data: Any, **options: Any) -> Search:
    return qfx.search(model, candidates, data=data, **options)


def judged(model: nn.Module, config: Any, batches: list[Tensor]) -> float:
    """Return the error on the last quarter of eight batches after calibration on the others."""
    qmodel = quantize(model, config, batches[:6])
    with torch.no_grad():
        errors = [float(relative_error([qmodel(x)], [model(x)])) for x in batches[6:]]
    return sum(errors) / len(errors)


def counted(report: qfx.QuantizedModel, weights: int) -> float:
    """Return the bits of a weight that a report counts, all of them quantized by some candidate."""
    return float(8 * report.report().totals["bytes_after"] / weights)


@pytest.mark.parametrize("budget", [Budget(bits=5.5), Budget(bits=7.25), Budget(size=9000)], ids=str)
def test_the_really_quantized_model_keeps_the_budget_as_its_report_counts_it(budget: Budget) -> None:
    model, batches = spoiled()
    found = run(model, [INT4, INT8], batches, budget=budget)
    qmodel = quantize(model, found.config, batches[:6])
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert found.found.fits
    assert qmodel.report().totals["bytes_after"] == found.found.size <= (budget.nbytes or math.inf)
    assert counted(qmodel, weights) == found.found.bits <= (budget.bits or math.inf)
    # What each operator got is what the choices say, and no more of the budget could be spent on less error.
    assert {row.name: row.weight for row in qmodel.report()} == {n: c.weight for c in found for n in c.operators}
    assert sum(choice.size for choice in found) == found.found.size


def _files(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("output", ["checkpoint", "onnx", "saved"])
def test_a_size_is_that_of_the_files_that_are_written(output: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, tie_word_embeddings=True)).eval()
    batches = [
        {"input_ids": torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(i))} for i in range(4)
    ]
    candidates = [preset("w4a16_rtn").replace(group_size=32), INT8]

    def write(config: Any, folder: Path) -> int:
        qmodel = qfx.quantize(model, config, batches[:3], progress=False)
        folder.mkdir()
        writers: dict[str, Any] = {
            "checkpoint": qfx.export.huggingface,
            "onnx": qfx.export.onnx,
            "saved": lambda q, path: q.save(path),
        }
        writers[output](qmodel, folder / ("model.onnx" if output == "onnx" else "model"))
        return _files(folder)

    small, large = sorted(write(candidate, tmp_path / f"{i}") for i, candidate in enumerate(candidates))
    limit = (small + large) // 2
    found = run(model, candidates, batches, budget=Budget(size=limit, output=output))
    assert found.found.fits
    assert write(found.config, tmp_path / "found") == found.found.size <= limit
    assert {one.size for one in found.verified} >= ({small, large} if found.winner == MIXED else {small})
    if output == "checkpoint":
        assert found.winner == MIXED
        with pytest.raises(ConfigError, match=r"fits at most 9 bytes as checkpoint: the smallest one written takes"):
            run(model, candidates, batches, budget=Budget(size=9, output=output))


def test_bytes_of_what_no_candidate_quantizes_count_in_a_size_and_not_in_bits() -> None:
    model, batches = spoiled()
    candidates = [preset(name).replace(exclude=("2",)) for name in (INT4, INT8)]
    in_float = 4 * 8 * 32
    found = run(model, candidates, batches, budget=Budget(size=9000 + in_float))
    totals = quantize(model, found.config, batches[:6]).report().totals
    assert 8500 + in_float < totals["bytes_after"] == found.found.size <= 9000 + in_float
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1) - 8 * 32
    assert found.found.bits == 8 * (found.found.size - in_float) / weights
    assert all("2" not in choice.operators for choice in found)


class FunctionalHead(Tied):
    """The head multiplies by the embedding's weight in the model's own code: both go by the embedding's name."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.layers = nn.Sequential(Block())

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.layers(self.embed(ids)), self.embed.weight)


def test_formats_by_kind_are_not_chosen_for_operators_that_only_their_kind_tells_apart() -> None:
    model, batches = seeded(FunctionalHead()), tokens(8, 8, 8)
    found = run(model, [INT4, INT8], batches, budget=Budget(bits=6.0))
    (embed,) = (choice for choice in found if "embed" in choice.operators)
    assert embed.errors[0] == math.inf
    assert (found.winner, embed.candidate) == (MIXED, INT8)
    report = quantize(model, found.config, batches).report()
    assert {row.weight for row in report if row.name == "embed"} == {"int8 channel"}
    assert run(model, [INT4, INT8], batches, budget=Budget(error=0.1)).found.fits
    every = [preset(INT4), preset(INT4).replace(group_size=16)]
    with pytest.raises(ConfigError, match="share the name 'embed'"):
        run(model, every, batches, budget=Budget(bits=6.0))


def test_a_candidate_is_a_number_format_of_any_size() -> None:
    specs = [candidate.config.weight for candidate in candidates_of(["int12", "fp7_e3m3", qfx.formats.INT4, INT8])]
    assert [str(spec.format) for spec in specs if spec is not None] == ["int12", "fp7_e3m3", "int4", "int8"]


def test_estimates_are_near_what_operators_add_alone_even_at_two_bits() -> None:
    model, batches = spoiled()
    session = Session(model, batches)
    context = session.context(preset(INT8))
    trials = Trials(session, context, METRICS["error"], *parts_of(context, 32, divisible=True))
    candidates = candidates_of([INT8, "int2"])
    space = Space.measure(trials, candidates)
    for i, candidate in enumerate(candidates):
        others = [tuple(op.name for op in space.operators if op.name not in group.names) for group in space.groups]
        alone = [trials.error(candidate.config.replace(exclude=names)) for names in others]
        assert sum(alone) / 2 <= sum(row[i] for row in space.errors) <= 2 * sum(alone)
        # Each that matters, too: by the slope at the end of the way they are up to four times as large.
        for row, one in zip(space.errors, alone, strict=True):
            assert one < 0.1 * sum(alone) or one / 2.5 <= row[i] <= 2.5 * one


def test_the_choice_is_the_one_of_least_estimated_error() -> None:
    model, batches = spoiled()
    session = Session(model, batches)
    context = session.context(preset(INT8))
    trials = Trials(session, context, METRICS["error"], *parts_of(context, 32, divisible=True))
    space = Space.measure(trials, candidates_of([INT4, INT8, "float"]))
    for share in (0.2, 0.5, 0.9):
        limit = sum(map(min, space.sizes)) * (1 - share) + sum(map(max, space.sizes)) * share
        found = choose(space.errors, space.sizes, limit)
        assert found is not None
        assert space.error(found) == pytest.approx(exhaustive(space.errors, space.sizes, limit))
    assert all(row[2] == 0 for row in space.errors)  # float


def test_a_mixture_wins_where_one_layer_needs_more_bits_and_its_error_is_what_is_measured() -> None:
    model, batches = spoiled()
    found = run(model, [INT4, INT8], batches, budget=Budget(bits=6.0))
    assert found.winner == MIXED
    assert not found.uniform
    assert {name: c.candidate for c in found for name in c.operators}["1"] == INT8
    assert {v.name for v in found.verified} == {MIXED, INT4}
    assert found.found.error < 0.5 * found.verified[1].error
    for one, config in zip(found.verified, (found.config, INT4), strict=True):
        assert one.error == pytest.approx(judged(model, config, batches), rel=1e-3)


class Wide(nn.Module):
    """A layer that takes most of the time, and small ones that make most of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(32, 512), nn.Linear(512, 2048), nn.Linear(2048, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


def test_latencies_of_operators_add_up_to_those_of_models_and_decide_what_fits() -> None:
    pytest.importorskip("onnxruntime")
    model, batches = seeded(Wide()), [rand(64, 32, seed=i) for i in range(4)]
    candidates, threads = ["int8_static", FLOAT], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = run(model, candidates, batches, budget=Budget(latency="10s"), timed_batch=batches[0][:32])
    finally:
        torch.set_num_threads(threads)
    assert {v.name for v in found.verified} >= {*candidates}
    assert found.float_latency is not None
    for one in found.verified:
        assert one.latency is not None
        assert one.fits == (one.latency <= 10_000)
    whole = {one.name: one.latency for one in found.verified}
    # What operators take adds up to what the candidates take whole, the winner the first time it was timed.
    for i, name in enumerate(candidates):
        if name != found.winner:
            assert sum(choice.latencies[i] for choice in found) == pytest.approx(whole[name])
    points = found.to_rows()
    assert points == sorted(points, key=lambda p: p["latency"]) == sorted(points, key=lambda p: -p["error"])
    assert "of float" in str(found)
    assert len(found.tables()[1].header) == len(found.tables()[1].rows[0])


def test_operators_that_do_the_same_are_timed_once_and_a_mixture_that_is_too_slow_is_followed_by_a_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is replaced: a byte takes a millisecond, and mixtures take more than their parts say."""
    pytest.importorskip("onnxruntime")
    timed: list[Sequence[float]] = []

    def time_interleaved(calls: Sequence[Any]) -> list[list[float]]:
        timed.append(calls)
        return [[call] for call in calls]

    def whole(qmodel: qfx.QuantizedModel, leaves: Any) -> float:
        report = qmodel.report()
        return float(report.totals["bytes_after"]) * (1.3 if len({row.weight for row in report}) > 1 else 1.0)

    monkeypatch.setattr(latency, "call_of", whole)
    monkeypatch.setattr(latency, "time_interleaved", time_interleaved)
    model, batches = spoiled()
    of_float = 4.0 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
    found = run(model, [INT4, INT8, FLOAT], batches, budget=Budget(latency=0.5))
    assert found.float_latency == of_float
    assert found.winner == MIXED
    assert found.found.latency is not None
    assert 0.45 * of_float < found.found.latency <= 0.5 * of_float
    # q, k, v, o; gate, up; down; wide (which is as large as o); narrow
    assert len([calls for calls in timed if len(calls) == 3]) == 4
    with pytest.raises(ConfigError, match=r"the fastest one measured takes [\d.]+ ms \(int4"):
        run(model, [INT4, INT8], batches, budget=Budget(latency="1us"))


def replace_clock(monkeypatch: pytest.MonkeyPatch, *, first: float, later: float) -> list[float]:
    """Let a byte take a millisecond, in a mixture `first` of one and then `later`; return the sizes of mixtures."""
    seen: list[float] = []

    def whole(qmodel: qfx.QuantizedModel, leaves: Any) -> float:
        report = qmodel.report()
        size = float(report.totals["bytes_after"])
        if len({row.weight for row in report}) == 1:
            return size
        seen.append(size)
        return size * (later if seen.count(size) > 1 else first)

    monkeypatch.setattr(latency, "call_of", whole)
    monkeypatch.setattr(latency, "time_interleaved", lambda calls: [[call] for call in calls])
    return seen


def test_a_mixture_that_fits_by_luck_is_timed_again_and_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced: a byte takes a millisecond, and a mixture half of that the first time."""
    pytest.importorskip("onnxruntime")
    lucky_sizes = replace_clock(monkeypatch, first=0.5, later=1.0)
    model, batches = spoiled()
    found = run(model, [INT4, INT8, FLOAT], batches, budget=Budget(latency=0.4))
    limit = 0.4 * (found.float_latency or math.nan)
    assert any(limit < size <= 2 * limit for size in lucky_sizes)  # one that fits by luck alone was tried
    assert found.found.fits
    assert found.found.latency == pytest.approx(found.found.size)
    assert found.found.size <= limit


def test_a_faster_mixture_follows_one_that_fits_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced: a mixture takes a little less than its parts the first time, and a little more later."""
    pytest.importorskip("onnxruntime")
    seen = replace_clock(monkeypatch, first=0.95, later=1.05)
    model, batches = spoiled()
    found = run(model, [INT4, INT8, FLOAT], batches, budget=Budget(latency=0.5))
    assert len(set(seen)) > 1  # the first one did not fit the second time
    assert found.winner == MIXED
    assert found.found.fits
    assert found.found.latency == pytest.approx(1.05 * found.found.size)


def test_operators_that_do_the_same_are_one_model_with_the_inputs_of_the_first() -> None:
    captured = qfx.capture_graph(seeded(Tied()), tokens()[0])
    operators, _ = groups_of(captured.module)
    nodes = {op.name: op.node for op in operators if op.name != "embed"}
    found = isolate_operators(captured.module, nodes.values(), tokens()[:1])
    # q, k, v and o of both blocks; gate and up; down; head
    assert len({id(one) for one in found.values()}) == 4
    assert found[nodes["layers.1.down"]] is found[nodes["layers.0.down"]]
    (x,) = found[nodes["layers.0.down"]].inputs
    made = found[nodes["layers.0.down"]].module(x)
    torch.testing.assert_close(made, seeded(Tied()).get_submodule("layers.0.down")(x))


@pytest.mark.parametrize(
    ("given", "expected"), [(0.6, 6.0), ("12ms", 12.0), ("1.5 s", 1500.0), (".5us", 0.0005), (None, math.inf)]
)
def test_a_latency_is_a_share_of_float_or_a_time(given: Any, expected: float) -> None:
    budget = Budget(bits=4.5) if given is None else Budget(latency=given)
    assert budget.milliseconds(10.0) == pytest.approx(expected)


@pytest.mark.parametrize("given", ["12", "fast", "0ms", "-1ms", 0.0, -0.5, math.inf, math.nan])
def test_what_is_no_latency_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"latency (of Budget must be|must be positive|must be a fraction)"):
        Budget(latency=given)


@pytest.mark.parametrize("given", [12, 12.0])
def test_a_latency_without_a_unit_is_not_many_times_that_of_float(given: float) -> None:
    with pytest.raises(
        ConfigError, match=r"latency=12 is 12 times the float model's latency; for milliseconds, write \"12ms\""
    ):
        Budget(latency=given)
    assert Budget(latency=1).milliseconds(10.0) == 10.0


def test_latency_is_measured_only_where_the_target_runs_and_with_a_budget_of_it() -> None:
    model, batches = spoiled()
    weight_only = preset(INT8).replace(target=qfx.Target.TENSORRT)
    with pytest.raises(
        ConfigError, match="cannot measure latency for target 'tensorrt' on this machine; use a budget of bits"
    ):
        run(model, [weight_only, FLOAT], batches, budget=Budget(latency=0.5))
    with pytest.raises(ConfigError, match="timed_batch= applies only to a latency budget"):
        run(model, [INT4, INT8], batches, budget=Budget(bits=6.0), timed_batch=batches[0])


def test_a_group_has_one_format() -> None:
    model, batches = spoiled()
    found = run(model, ["int3", "int4", INT8], batches, budget=Budget(bits=5.0))
    report = {row.name: row.weight for row in quantize(model, found.config, batches).report()}
    assert len({*report.values()}) > 1
    for group in (("0.q", "0.k", "0.v"), ("0.gate", "0.up")):
        assert len({report[name] for name in group}) == 1


def test_a_candidate_that_fits_everywhere_and_loses_nothing_is_returned_and_named() -> None:
    model, batches = spoiled()
    found = run(model, [INT4, INT8], batches, budget=Budget(bits=40.0))
    assert (found.winner, found.uniform, found.config) == (INT8, True, preset(INT8))
    assert found.to_yaml() == f"preset: {INT8}\n"
    assert str(found).startswith(f"{INT8}, which no tried mixture outperforms")


def test_progress_is_shown_unless_it_is_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    small = seeded(nn.Linear(8, 4)), [INT4, INT8], [rand(4, 8), rand(4, 8)]
    for shown in (True, False):
        run(*small, budget=Budget(bits=40.0), progress=shown)
        assert ("search: 0 configurations measured" in capfd.readouterr().err) == shown


def test_a_mixture_that_is_not_clearly_better_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = spoiled()
    monkeypatch.setattr(module, "_BETTER", 1e-6)
    found = run(model, [INT4, INT8], batches, budget=Budget(bits=6.0))
    assert [one.name for one in found.verified] == [INT4, MIXED]
    assert (found.winner, found.config) == (INT4, preset(INT4))
    assert {choice.candidate for choice in found} == {INT4}


def test_a_ceiling_of_the_error_is_kept_on_other_data_by_fewer_bytes_than_a_candidate_takes() -> None:
    model, batches = spoiled()
    least = judged(model, INT8, batches)
    found = run(model, [INT4, INT8], batches, budget=Budget(error=20 * least))
    assert found.winner == MIXED
    assert judged(model, found.config, batches) <= 20 * least
    bits = [counted(quantize(model, config, batches), 1) for config in (INT4, found.config, INT8)]
    assert bits[0] < bits[1] < bits[2]
    loose = run(model, [INT4, INT8], batches, budget=Budget(error=1.0))
    assert (loose.winner, loose.uniform) == (INT4, True)  # the smallest there is
    with pytest.raises(ConfigError, match=r"the smallest error measured is .* raise the budget"):
        run(model, [INT4, INT8], batches, budget=Budget(error=least / 100))


def test_what_a_candidate_leaves_in_float_another_may_quantize() -> None:
    model, batches = seeded(Tied()), tokens(8, 8, 8)
    candidates = [preset("w4a16_rtn").replace(group_size=32), INT8]
    found = run(model, candidates, batches, budget=Budget(bits=6.5), metric="kl")
    assert found.winner == MIXED
    report = {(row.name, row.kind): row.weight for row in quantize(model, found.config, batches).report()}
    assert report["embed", "embedding"] == report["head", "linear"] == "int8 channel"
    assert "int4 group 32" in report.values()
    assert qfx.QuantConfig.from_yaml(found.to_yaml()) == found.config
    assert found.found.bits <= 6.5


def test_activations_come_with_the_candidate_and_their_ranges_not_from_what_judges() -> None:
    static = preset("int8_static")
    coarse = static.replace(weight=static.weight.replace(format="int4"))  # type: ignore[union-attr]
    batches = images(8, 8, 8, 8)
    batches[3] = 4 * batches[3]
    found = run(cnn(), [static, coarse, FLOAT], batches, budget=Budget(bits=7.0))
    qmodel = quantize(cnn(), found.config, batches[:3])
    with torch.no_grad():
        error = float(relative_error([qmodel(batches[3])], [cnn()(batches[3])]))
    assert found.found.error == pytest.approx(error, rel=0.1)
    assert {row.activation for row in qmodel.report() if row.weight} == {"uint8"}


class Odd(nn.Module):
    """Modules whose names are patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a*", "ab", "[c]", "c")})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.mark.parametrize("chosen", [(0, 0, 1, 1), (0, 1, 0, 1), (2, 0, 2, 0), (1, 2, 2, 0), (2, 2, 2, 1)])
def test_a_mixture_gives_each_operator_its_candidate_whatever_its_name(chosen: tuple[int, ...]) -> None:
    candidates = candidates_of([INT8, "int4", FLOAT])
    operators, _ = groups_of(qfx.capture_graph(seeded(Odd()), rand(4, 8)).module)
    report = quantize(seeded(Odd()), mixed(candidates, operators, chosen), [rand(4, 8)]).report()
    assert [row.weight for row in report] == [("int8 channel", "int4 channel", "")[i] for i in chosen]


def test_modules_that_differ_in_numbers_alone_share_a_pattern() -> None:
    candidates = candidates_of([INT8, "int4", FLOAT])
    operators, groups = groups_of(qfx.capture_graph(seeded(Tied()), tokens()[0]).module)
    downs = [next(g for g in groups if g.names == (f"layers.{i}.down",)).places for i in range(2)]
    chosen = [1 if (i,) in downs else 2 if (i + 1,) in downs[:1] else 0 for i in range(len(operators))]
    config = mixed(candidates, operators, chosen)
    assert [override.pattern for override in config.overrides] == ["layers.*.down"]
    assert config.exclude == ("layers.0.up",)  # the other one is quantized


def test_formats_and_specs_take_the_place_of_the_first_configurations_weights() -> None:
    spec = qfx.TensorSpec(format="int3", granularity="group", group_size=16)  # type: ignore[arg-type]
    found = candidates_of(["w4a16_rtn", "int8", qfx.formats.INT2, spec, FLOAT])
    names = ["w4a16_rtn", "int8 group 128", "int2 group 128", "int3 group 16", FLOAT]
    assert [candidate.name for candidate in found] == names
    assert {candidate.config.passes for candidate in found} == {preset("w4a16_rtn").passes}
    assert [str(c.config.weight) for c in candidates_of(["int8", "int4"])] == ["int8 channel", "int4 channel"]


def test_the_result_is_a_table_data_and_a_page(tmp_path: Any) -> None:
    model, batches = spoiled()
    found = run(model, [INT4, INT8], batches, budget=Budget(bits=6.0))
    text = str(found)
    assert text.startswith("mixed: error ")
    assert text.endswith(found.to_yaml().rstrip())
    assert max(map(len, text.splitlines())) <= 140
    points = found.to_rows()
    assert points == sorted(points, key=lambda p: p["size"]) == sorted(points, key=lambda p: -p["error"])
    assert points[0]["size"] < found.found.size < points[-1]["size"]
    assert qfx.QuantConfig.from_dict(found.to_dict()["config"]) == found.config
    found.html(tmp_path / "search.html")
    page = (tmp_path / "search.html").read_text(encoding="utf-8")
    assert "Bits by operator" in page
    assert "The least error by bits" in page
    quantize(model, found.config, batches).report().html(tmp_path / "both.html", found)


class Through(nn.Module):
    """A linear and a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.c, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.c(x))


def rows() -> list[Tensor]:
    return [rand(4, 8, seed=i) for i in range(4)]


@pytest.mark.parametrize("budget", [Budget(bits=32.0), Budget(error=0.1)], ids=str)
def test_what_overflows_never_fits_and_comes_last(budget: Budget) -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    found = run(model, ["fp16", INT8], rows(), budget=budget, validation_data=[1e6 * x for x in rows()])
    assert (found.winner, found.found.fits) == (INT8, True)
    assert all(math.isfinite(one.error) or not one.fits for one in found.verified)
    if budget.bits:
        assert [(one.name, one.error, one.fits) for one in found.verified[1:]] == [("fp16", math.inf, False)]
        assert found.figures()


def masked(x: Tensor) -> Tensor:
    return torch.where(torch.arange(8, dtype=torch.int64) < 3, -math.inf, x)


@pytest.mark.parametrize("metric", METRICS)
def test_a_mask_of_logits_counts_as_nothing(metric: str) -> None:
    found = run(seeded(Through(masked)), [INT4, INT8], rows(), budget=Budget(bits=20.0), metric=metric)
    assert found.winner == INT8
    assert 0 < found.found.error < found.verified[1].error < math.inf
    assert all(0 < error < math.inf for choice in found for error in choice.errors)


def test_the_smallest_choice_that_is_named_is_one_that_can_be_made() -> None:
    candidates = [INT4, INT8, preset(INT8).replace(exclude=("*",))]
    batches = tokens(8, 8, 8)
    with pytest.raises(ConfigError, match="no combination") as error:
        run(seeded(FunctionalHead()), candidates, batches, budget=Budget(size=1))
    size = int(str(error.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    assert run(seeded(FunctionalHead()), candidates, batches, budget=Budget(size=size)).found.size == size
    with pytest.raises(ConfigError, match="no combination"):
        run(seeded(FunctionalHead()), candidates, batches, budget=Budget(size=size - 1))


def test_a_candidate_whose_estimate_is_unknown_is_measured_for_all_operators() -> None:
    model = seeded(Through(lambda x: (0 * x).sqrt() + x))
    found = run(model, [INT4, INT8, FLOAT], rows(), budget=Budget(bits=8.0))
    assert (found.winner, found.found.fits) == (INT4, True)
    assert {choice.errors[:2] for choice in found} == {(math.inf, math.inf)}


def test_what_measured_data_did_is_said() -> None:
    found = run(seeded(Through(torch.relu)), [INT4, INT8], rows(), budget=Budget(error=0.5))
    what = "validation data, which calibrates nothing and decides among the configurations tried"
    assert what in str(found)
    assert what in found.tables()[0].title


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "an impossible budget": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=Budget(bits=2.0)),
        ConfigError,
        r"no combination .* fits at most 2 bits per weight: the smallest takes [\d.]+ bits per weight \([\d,]+ bytes",
    ),
    "an impossible size": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=Budget(size=10)),
        ConfigError,
        r"no combination .* fits at most 10 bytes",
    ),
    "no budget": (Budget, ConfigError, "pass one of them"),
    "an output without a size": (
        lambda: Budget(bits=4.0, output="onnx"),
        ConfigError,
        "applies only to a budget with size=",
    ),
    "two budgets": (lambda: Budget(bits=4.0, size="1MiB"), ConfigError, "pass one of them"),
    "a number for a budget": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=4.5),
        ConfigError,
        r"budget must be Budget\(bits=4.5\)",
    ),
    "other passes": (
        lambda: candidates_of(["w4a16_rtn", "w4a16_gptq"]),
        ConfigError,
        r"'w4a16_rtn' and 'w4a16_gptq' differ in `passes`",
    ),
    "other biases": (
        lambda: candidates_of(["int8_static", INT8]),
        ConfigError,
        r"'int8_static' and 'int8_weight_only' differ in `bias`",
    ),
    "another target": (
        lambda: candidates_of([INT4, preset(INT8).replace(target="torch")]),
        ConfigError,
        "differ in `target`",
    ),
    "another cache": (
        lambda: candidates_of([INT4, preset(INT8).replace(kv_cache=qfx.TensorSpec(format=qfx.formats.INT8))]),
        ConfigError,
        "differ in `kv_cache`",
    ),
    "one candidate": (lambda: candidates_of([INT8]), ConfigError, "at least two"),
    "twice the same": (lambda: candidates_of([INT8, preset(INT8)]), ConfigError, "listed twice"),
    "no list": (lambda: candidates_of(INT8), ConfigError, "candidates must be a list"),
    "an unknown format": (
        lambda: candidates_of(["int1", INT8]),
        ConfigError,
        r"or number format 'int1'; choose one of .* int2, ",
    ),
    "an unknown preset": (lambda: candidates_of([INT8, "int4_weights"]), ConfigError, "unknown preset"),
    "a misspelt format": (lambda: candidates_of([INT8, "int44"]), ConfigError, r"'int44'; .*did you mean 'int4'"),
    "nothing to quantize": (
        lambda: run(
            mlp(),
            [FLOAT, preset(INT8).replace(exclude=("*", "op:x"))],
            tokens(4, 4),
            budget=Budget(bits=4.0),
        ),
        ConfigError,
        "no candidate quantizes",
    ),
    "no data": (
        lambda: run(mlp(), [INT4, INT8], [], budget=Budget(bits=8.0)),
        CalibrationError,
        "pass batches of real inputs as data",
    ),
    "one batch": (
        lambda: run(mlp(), [INT4, INT8], tokens(4), budget=Budget(bits=8.0)),
        CalibrationError,
        "two batches or more, or validation_data",
    ),
    "a metric": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=Budget(bits=8.0), metric="mse"),
        ConfigError,
        "error, kl",
    ),
    "a list of metrics": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=Budget(bits=8.0), metric=["kl"]),
        ConfigError,
        r"unknown metric \['kl'\]",
    ),
    "validation data that is None": (
        lambda: run(mlp(), [INT4, INT8], tokens(4), budget=Budget(bits=8.0), validation_data=[None]),
        CalibrationError,
        "validation batch 0 is None",
    ),
    "a validation batch that does not fit": (
        lambda: run(cnn(), [INT4, INT8], images(2), budget=Budget(bits=8.0), validation_data=[*images(2), rand(2, 3)]),
        CalibrationError,
        "^validation batch 1 does not fit",
    ),
    "NaN that judges": (
        lambda: run(cnn(), [INT4, INT8], [*images(2, 2), images(2)[0] * math.nan], budget=Budget(bits=8.0)),
        CalibrationError,
        "^validation batch 0: input .* holds NaN",
    ),
    "a float model that makes NaN": (
        lambda: run(seeded(Through(torch.log)), [INT4, INT8], rows(), budget=Budget(bits=20.0)),
        CalibrationError,
        "the float model's output is not finite on validation batch 0",
    ),
    "a float model that makes NaN of what calibrates": (
        lambda: run(
            seeded(Through(torch.exp)),
            [INT4, INT8],
            [1e4 * x for x in rows()],
            budget=Budget(bits=9.0),
            validation_data=rows(),
        ),
        CalibrationError,
        r"the float model's output is not finite on calibration batch \d",
    ),
    "outputs too large to square": (
        lambda: run(seeded(Through(lambda x: x * 1e30)), [INT4, INT8], rows(), budget=Budget(bits=20.0)),
        CalibrationError,
        "too large to square",
    ),
    "nothing finite": (
        lambda: run(
            seeded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))),
            ["fp16", preset("fp16").replace(exclude=("1",))],
            rows(),
            budget=Budget(bits=32.0),
            validation_data=[1e6 * x for x in rows()],
        ),
        ConfigError,
        "has finite outputs on the validation data",
    ),
    "a derivative that is NaN": (
        lambda: run(seeded(Through(lambda x: (0 * x).sqrt() + x)), [INT4, INT8], rows(), budget=Budget(bits=20.0)),
        ConfigError,
        "gives finite outputs and derivatives",
    ),
    "classes": (
        lambda: run(seeded(Through(lambda x: x.argmax(1))), [INT4, INT8], rows(), budget=Budget(bits=20.0)),
        ConfigError,
        "return logits instead",
    ),
    "samples": (
        lambda: run(mlp(), [INT4, INT8], tokens(4, 4), budget=Budget(bits=8.0), samples=0),
        ConfigError,
        "at least 1",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        call()


def test_a_full_disk_for_temporary_files_is_named_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(size: str) -> None:
        run(mlp(), [INT4, INT8], [], budget=Budget(size=size, output="onnx"))

    said = r"cannot be written to the temporary directory .*{}.*; free space there, or set TMPDIR"
    with pytest.raises(QuarkError, match=said.format("bytes are free, 1,.* needed")):
        asked("1000000GiB")
    with pytest.raises(QuarkError, match="search compares outputs on data"):
        asked("1KiB")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(QuarkError, match=said.format("missing")):
        asked("1KiB")
    with pytest.raises(QuarkError, match=said.format("missing")):
        written_size(quantize(mlp(), "int8_weight_only", tokens(4)), "saved")
