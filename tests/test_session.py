"""A session: one capture and one reading of the data for several configurations, with the bits of each alone."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny import Cnn, images, quantize, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx import presets
from quark_fx.capture.capture import capture_graph
from quark_fx.graph.nodes import call, set_parameter, stored_tensors, target_name
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers import (
    Adjusted,
    Entropy,
    Histogram,
    HistogramL2,
    MinMax,
    MovingAverage,
    Mse,
    NonOverflow,
    Observer,
    Percentile,
    observer,
)
from quark_fx.passes import AWQ, GPTQ, AdaRound, CrossLayerEqualization, SmoothQuant
from quark_fx.plan.weights import observe_tensor
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC

_CALIBRATE = import_module("quark_fx.passes.calibrate")
"""The module; `passes.calibrate` is the pass in it."""


def observed(seen: Observer, **changes: Any) -> qfx.QuantConfig:
    assert INT8_STATIC.input is not None
    spec = INT8_STATIC.input.replace(observer=seen, **changes)
    return INT8_STATIC.replace(input=spec, output=spec)


def with_passes(*passes: Any, base: qfx.QuantConfig = INT8_STATIC) -> qfx.QuantConfig:
    return base.replace(passes=(*base.passes, *passes))


PER_TENSOR = qfx.TensorSpec(format=qfx.formats.INT8)
GROUPS = INT4_WEIGHT_ONLY.replace(group_size=4)
CONFIGS: dict[str, qfx.QuantConfig] = {
    "min-max": INT8_STATIC,
    "percentile": observed(Percentile(percentile=99.9)),
    "mse": observed(Mse()),
    "entropy": observed(Entropy()),
    "l2": observed(HistogramL2(candidates=8)),
    "moving average": observed(MovingAverage()),
    "shrunk": observed(Adjusted(observer=Percentile(), ratio=0.9)),
    "powers of two": observed(NonOverflow(), scale="power_of_two"),
    "other bins": observed(Mse(bins=512)),
    "peer's bins": observed(Percentile(grid="onnxruntime", percentile=99.0)),
    "per tensor": INT8_STATIC.replace(weight=PER_TENSOR),
    "no bias": INT8_STATIC.replace(bias=None),
    "saturating pairs": INT8_STATIC.replace(target="onnx_vnni"),
    "head in float": INT8_STATIC.replace(exclude=("head",)),
    "overrides": observed(Mse()).replace(overrides=(qfx.Override(pattern="block.*", weight=PER_TENSOR),)),
    "equalized": with_passes(CrossLayerEqualization()),
    "smoothed": with_passes(SmoothQuant()),
    "AdaRound": with_passes(AdaRound(iterations=8)),
    "GPTQ": with_passes(GPTQ(), base=GROUPS),
    "AWQ": with_passes(AWQ(), base=GROUPS),
    **{name: presets.PRESETS[name] for name in ("int8_dynamic", "xint8", "fp8_static", "mxfp8_e4m3", "w4a16_gptq")},
}


@cache
def model() -> nn.Module:
    return seeded(Cnn())


@cache
def batches() -> tuple[Tensor, ...]:
    return tuple(x * scale for x, scale in zip(images(6, 6, 5), (1, 3, 2), strict=True))


@cache
def alone(name: str) -> qfx.QuantizedModel:
    return quantize(model(), CONFIGS[name], batches())


def assert_same(found: qfx.QuantizedModel, expected: qfx.QuantizedModel) -> None:
    tensors = found.state_dict()
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name
    assert found.graph_module.code == expected.graph_module.code
    assert found.report() == expected.report()
    assert found.signature == expected.signature


@pytest.mark.slow
@pytest.mark.parametrize("order", [list(CONFIGS), list(CONFIGS)[::-1]], ids=["forward", "backward"])
def test_every_configuration_has_the_bits_it_has_alone(order: list[str]) -> None:
    with mock.patch("quark_fx.session.capture_graph", capture_graph):  # a capture of its own
        session = qfx.Session(model(), batches())
    for name in order:
        assert_same(quantize(session, CONFIGS[name]), alone(name))


def test_what_runs_have_in_common_is_done_once() -> None:
    captures = mock.patch("quark_fx.session.capture_graph", wraps=qfx.capture_graph)
    passes = mock.patch.object(_CALIBRATE, "run_batches", wraps=_CALIBRATE.run_batches)
    weights = mock.patch("quark_fx.passes.quantize_constants.observe_tensor", wraps=observe_tensor)
    with captures as captured, passes as passed, weights as rounded:
        session = qfx.Session(model(), batches())
        for name in ("min-max", "percentile", "mse", "entropy", "l2", "shrunk", "powers of two", "head in float"):
            quantize(session, CONFIGS[name])
        assert (captured.call_count, passed.call_count, rounded.call_count) == (1, 1, 3)
        quantize(session, CONFIGS["moving average"])
        quantize(session, CONFIGS["moving average"])
        quantize(session, CONFIGS["per tensor"])
    assert (captured.call_count, passed.call_count, rounded.call_count) == (1, 2, 6)


def test_one_value_is_counted_once_for_several_readings_in_one_run_too() -> None:
    signed = qfx.TensorSpec(format=qfx.formats.INT8, observer=Mse())
    config = observed(Percentile()).replace(overrides=(qfx.Override(pattern="both.1", input=signed),), output=None)
    net = seeded(Twice(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])))
    with mock.patch.object(Histogram, "of", wraps=Histogram.of) as count:
        qmodel = quantize(net, config, [rand(5, 4)])
    assert count.call_count == 1
    assert {row.activation for row in qmodel.report()} == {str(config.input), str(signed)}


class Twice(nn.Module):
    def __init__(self, both: nn.ModuleList) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.both[0](x), self.both[1](x)


def memory(tensors: Mapping[str, Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}


def test_results_share_no_memory_and_changing_one_changes_no_other() -> None:
    session = qfx.Session(model(), batches())
    names = ["min-max", "percentile", "GPTQ", "AWQ", "min-max", "no bias", "no bias", "equalized", "equalized"]
    found = [quantize(session, CONFIGS[name]) for name in names]
    places = [memory(stored_tensors(one.graph_module)) for one in found]
    places.append(memory(dict(model().state_dict())))
    assert sum(map(len, places)) == len(set().union(*places))
    for one in found:
        for tensor in one.buffers():
            tensor.zero_()
    for name in names:
        assert_same(quantize(session, CONFIGS[name]), alone(name))


# A model that changes.


def add(net: Cnn) -> None:
    with torch.no_grad():
        net.head.weight.add_(1)


def write_unseen(net: Cnn) -> None:
    net.head.weight.data[0, 0] += 1


def replace_parameter(net: Cnn) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach() * 2)


def widen(net: Cnn) -> None:
    net.head.double()


def load(net: Cnn) -> None:
    net.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()})


@pytest.mark.parametrize("change", [add, write_unseen, replace_parameter, widen, load], ids=lambda f: f.__name__)
def test_a_model_that_was_changed_since_is_refused(change: Callable[[Cnn], None]) -> None:
    net = seeded(Cnn())
    session = qfx.Session(net, batches())
    quantize(session, INT8_STATIC)
    change(net)
    with pytest.raises(qfx.QuarkError, match=r"changed after the Session was created, in .*head\.weight|and \d+ more"):
        quantize(session, INT8_STATIC)
    with pytest.raises(qfx.QuarkError, match="changed after"):
        qfx.predict(session, INT8_STATIC)
    if change is not widen:
        assert_same(quantize(qfx.Session(net, batches()), INT8_STATIC), quantize(net, INT8_STATIC, batches()))


def test_what_the_graph_does_not_read_may_change() -> None:
    net = seeded(Cnn())
    session = qfx.Session(net, batches())
    net.extra = nn.Parameter(torch.ones(3))
    net.train()
    assert_same(quantize(session, INT8_STATIC), alone("min-max"))


# Data, shapes, and arguments.


def test_data_is_read_once_and_copied() -> None:
    buffer, made = torch.empty_like(batches()[0]), list[int]()

    def loader() -> Iterator[Tensor]:
        for batch in batches():
            made.append(len(made))
            yield buffer[: len(batch)].copy_(batch)

    session = qfx.Session(model(), loader())
    assert made == [0, 1, 2]
    buffer.fill_(torch.nan)
    for name in ("min-max", "GPTQ", "moving average"):
        assert_same(quantize(session, CONFIGS[name], verify=True), alone(name))
    assert made == [0, 1, 2]


def test_batches_may_lie_on_disk(tmp_path: Path) -> None:
    session = qfx.Session(
        model(), batches(), resources=qfx.Resources(cache=qfx.CacheBudget(host_bytes=0, directory=tmp_path))
    )
    assert any(tmp_path.rglob("*.safetensors"))
    for name in ("AdaRound", "moving average", "AdaRound"):
        before = len([*tmp_path.rglob("*.safetensors")])
        assert_same(quantize(session, CONFIGS[name]), alone(name))
        assert len([*tmp_path.rglob("*.safetensors")]) == before


@pytest.mark.parametrize(
    "given",
    [
        {"calibration_data": [torch.ones(1)]},
        {"dynamic_shapes": ()},
        {"resources": qfx.Resources(device="cpu")},
        {"resources": qfx.Resources(cache=qfx.CacheBudget())},
        {"resources": qfx.Resources(distributed=True)},
    ],
    ids=["calibration_data", "dynamic_shapes", "device", "cache", "distributed"],
)
def test_what_a_session_has_is_not_given_again(given: dict[str, Any], request: pytest.FixtureRequest) -> None:
    session, name = qfx.Session(model(), batches()), request.node.callspec.id
    verbs: list[Any] = [qfx.quantize]
    verbs += [qfx.predict] * (name not in ("cache", "distributed")) + [qfx.analyze] * (name != "distributed")
    for verb in verbs:
        with pytest.raises(qfx.ConfigError, match=f"{name} cannot be passed together with a Session"):
            verb(session, INT8_STATIC, **given)
    with pytest.raises(qfx.ConfigError, match="already a Session"):
        qfx.Session(session)  # type: ignore[arg-type]


def test_shapes_are_those_of_the_session() -> None:
    session = qfx.Session(model(), batches()[:2], dynamic_shapes=(None,))
    found = quantize(session, INT8_STATIC)
    assert_same(found, quantize(model(), INT8_STATIC, batches()[:2], dynamic_shapes=(None,)))
    with pytest.raises(qfx.QuarkError, match="captured for"):
        found(batches()[0][:2])


def test_an_exported_program_needs_no_data() -> None:
    program = torch.export.export(seeded(nn.Sequential(nn.Linear(8, 4))), (rand(3, 8),))
    session = qfx.Session(program)
    for config in ("int8_weight_only", "int8_dynamic"):
        assert_same(quantize(session, config), qfx.quantize(program, config, progress=False))
    with pytest.raises(qfx.CalibrationError, match="no batch"):
        quantize(session, INT8_STATIC)


@pytest.mark.parametrize("name", ["min-max", "AdaRound"])
def test_options_of_a_run_are_those_of_quantize(name: str, tmp_path: Path) -> None:
    session = qfx.Session(model(), batches())
    quantize(session, CONFIGS["mse"])
    assert_same(quantize(session, CONFIGS[name], resources=qfx.Resources(memory="64GiB"), verify=True), alone(name))
    assert_same(quantize(session, CONFIGS[name], resources=qfx.Resources(checkpoint=tmp_path / "blocks")), alone(name))
    again = quantize(session, CONFIGS[name], resources=qfx.Resources(checkpoint=tmp_path / "blocks"))
    assert_same(
        again, quantize(model(), CONFIGS[name], batches(), resources=qfx.Resources(checkpoint=tmp_path / "blocks"))
    )
    kept = quantize(session, CONFIGS[name], resources=qfx.Resources(output_dir=tmp_path / "result"))
    expected = quantize(model(), CONFIGS[name], batches(), resources=qfx.Resources(output_dir=tmp_path / "expected"))
    for one, other in zip(kept.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)
    assert_same(quantize(session, CONFIGS[name]), alone(name))


# What goes wrong.


@graph_pass(exact=False)
@dataclass(frozen=True)
class WriteAndFail:
    """Write into a tensor that it was given, and fail."""

    name: str

    def __call__(self, gm: GraphModule) -> int:
        """Fail."""
        tensor = next(t for name, t in stored_tensors(gm).items() if name.startswith(self.name))
        tensor.detach().mul_(7)
        raise RuntimeError("half way")


def test_a_run_that_fails_half_way_does_not_spoil_the_next() -> None:
    session = qfx.Session(model(), batches())
    quantize(session, INT8_STATIC)
    folded = {*session.rewritten(session.context(INT8_STATIC))[0].state_dict()} - {*model().state_dict()}
    with pytest.raises(RuntimeError, match="half way"):
        quantize(session, with_passes(WriteAndFail(min(folded))))
    for name in ("min-max", "mse"):
        assert_same(quantize(session, CONFIGS[name]), alone(name))


def test_a_pass_that_writes_into_the_model_is_found_out() -> None:
    session = qfx.Session(seeded(Cnn()), batches())
    with pytest.raises(RuntimeError, match="half way"):
        quantize(session, with_passes(WriteAndFail("head.weight")))
    with pytest.raises(qfx.QuarkError, match=r"changed after the Session was created, in head\.weight"):
        quantize(session, INT8_STATIC)


def test_an_interruption_keeps_nothing_of_what_was_seen() -> None:
    session = qfx.Session(model(), batches())
    runs = _CALIBRATE.run_batches

    def interrupted(*args: Any, **kwargs: Any) -> None:
        runs(*args, **kwargs)
        raise KeyboardInterrupt

    with mock.patch.object(_CALIBRATE, "run_batches", interrupted), pytest.raises(KeyboardInterrupt):
        quantize(session, CONFIGS["mse"])
    assert_same(quantize(session, CONFIGS["mse"]), alone("mse"))


def test_threads_take_turns() -> None:
    session, names = qfx.Session(model(), batches()), ["min-max", "AdaRound", "mse", "GPTQ"]
    found: dict[str, qfx.QuantizedModel] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: quantize(session, CONFIGS[name])}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert_same(found[name], alone(name))


# Observers.


def test_extremes_of_float64_are_not_read_off_a_histogram() -> None:
    net = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).double()
    data = [rand(5, 4).double() * (1 + 1e-9), rand(5, 4, seed=2).double() / 3]
    session = qfx.Session(net, data)
    for config in (CONFIGS["mse"], CONFIGS["min-max"], CONFIGS["percentile"]):
        assert_same(quantize(session, config), quantize(net, config, data))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_value_seen_channel_by_channel_is_not_the_value_seen_whole() -> None:
    net, data = seeded(Attend()), [rand(2, 5, 8), rand(3, 7, 8, seed=2)]
    whole = qfx.TensorSpec(format=qfx.formats.INT8)
    by_channel = whole.replace(granularity=qfx.Granularity.CHANNEL)
    session = qfx.Session(net, data)
    for spec in (whole, by_channel, whole.replace(observer=Percentile()), by_channel.replace(observer=Percentile())):
        config = qfx.QuantConfig(kv_cache=spec)
        found, expected = quantize(session, config), quantize(net, config, data)
        assert_same(found, expected)
        assert any(row.kind == "attention" and not row.reason for row in found.report())


@observer
@dataclass(frozen=True)
class Halved(MinMax):
    """Half of what was seen: it folds as `MinMax` does not."""

    def observe(self, x: Tensor) -> Halved:
        return super().observe(x / 2)


@pytest.mark.parametrize("first", ["min-max", "mse"])
def test_an_observer_that_folds_otherwise_is_not_read_off_another_ones_fold(first: str) -> None:
    session = qfx.Session(model(), batches())
    quantize(session, CONFIGS[first])
    assert_same(quantize(session, observed(Halved())), quantize(model(), observed(Halved()), batches()))
    assert_same(quantize(session, CONFIGS[first]), alone(first))


@graph_pass(stage=Stage.PLANNED)
def plan_something_else(gm: GraphModule, context: Any) -> int:
    """Plan on a graph with other weights."""
    from quark_fx.passes import insert_observers

    set_parameter(gm, "head.weight", stored_tensors(gm)["head.weight"] * 2)
    return insert_observers(gm, context)


def test_a_pass_in_the_place_of_ours_shares_nothing() -> None:
    session, config = qfx.Session(model(), batches()), with_passes(plan_something_else)
    for _ in range(2):
        quantize(session, INT8_STATIC)
        assert_same(quantize(session, config), quantize(model(), config, batches()))
    assert_same(quantize(session, INT8_STATIC), alone("min-max"))


# Verbs.


def test_analyze_predict_and_search_take_a_session() -> None:
    net = seeded(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    data, judged = [rand(8, 8, seed=seed) for seed in (1, 2, 3)], [rand(8, 8, seed=4)]
    session = qfx.Session(net, data)
    assert qfx.analyze(session, INT8_STATIC) == qfx.analyze(net, INT8_STATIC, data)
    expected, found = qfx.predict(net, with_passes(AdaRound()), data), qfx.predict(session, with_passes(AdaRound()))
    assert [name for name, *_ in found.stages] == [name for name, *_ in expected.stages]
    candidates, budget = ["int8_weight_only", "int4_weight_only"], qfx.Budget(bits=9.0)
    together = qfx.search(session, candidates, budget=budget, validation_data=judged)
    assert together.verified == qfx.search(net, candidates, budget=budget, data=data, validation_data=judged).verified
    with pytest.raises(qfx.CalibrationError, match="validation_data"):
        qfx.search(session, candidates, budget=budget)
    with pytest.raises(qfx.ConfigError, match="calibration_data cannot be passed"):
        qfx.search(session, candidates, budget=budget, data=data, validation_data=judged)


class Scaled:
    """A pass whose option can change, which a session cannot see."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, gm: GraphModule) -> int:
        for node in [node for node in gm.graph.nodes if target_name(node) == "aten.relu.default"]:
            with gm.graph.inserting_after(node):
                scaled = call(gm, torch.ops.aten.mul.Tensor, node, self.factor, like=node)
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return 1


def test_a_pass_that_can_change_is_run_every_time() -> None:
    model, data, p = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))), [torch.randn(16, 8)], Scaled()
    session, config = qfx.Session(model, data), INT8_STATIC.replace(passes=(p,))
    quantize(session, config)
    p.factor = 100.0
    assert torch.equal(quantize(session, config)(data[0]), quantize(model, config, data)(data[0]))


FACTOR = 1.0
"""What passes and observers below read while a session runs them."""


def scale_activation(gm: GraphModule) -> int:
    scaled = Scaled()
    scaled.factor = FACTOR
    return scaled(gm)


@graph_pass
@dataclass(frozen=True)
class ScaleActivation:
    """The same as a pass with an option."""

    power: float = 1.0

    def __call__(self, gm: GraphModule) -> int:
        return scale_activation(gm) if self.power else 0


@observer
@dataclass(frozen=True, kw_only=True)
class ScaledMinMax(MinMax):
    """A range that depends on a global, too."""

    def range(self, scheme: Scheme) -> Any:
        low, high = super().range(scheme)
        return low * FACTOR, high * FACTOR


def _scaled(spec: qfx.TensorSpec | None) -> qfx.TensorSpec:
    assert spec is not None
    return spec.replace(observer=ScaledMinMax())


CODE_THAT_READS_A_GLOBAL: dict[str, Callable[[], qfx.QuantConfig]] = {
    "function": lambda: with_passes(scale_activation),
    "registered function": lambda: with_passes(graph_pass(exact=False)(scale_activation)),
    "lambda": lambda: with_passes(lambda gm: scale_activation(gm)),
    "partial": lambda: with_passes(functools.partial(scale_activation)),
    "dataclass": lambda: with_passes(ScaleActivation()),
    "observer of activations": lambda: observed(ScaledMinMax()),
    "observer in one of ours": lambda: observed(Adjusted(observer=ScaledMinMax(), ratio=0.9)),
    "observer of weights": lambda: INT8_STATIC.replace(weight=_scaled(INT8_STATIC.weight)),
}


@pytest.mark.parametrize("name", CODE_THAT_READS_A_GLOBAL)
def test_code_of_the_user_sees_globals_that_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CODE_THAT_READS_A_GLOBAL[name]()
    net, data = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))), [rand(16, 8)]
    session, results = qfx.Session(net, data), list[Tensor]()
    for factor in (0.5, 4.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        results.append(quantize(session, config)(data[0]))
        assert torch.equal(results[-1], quantize(net, config, data)(data[0]))
    assert not torch.equal(*results)


def test_a_pass_of_ours_that_was_replaced_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))), [rand(16, 8)]
    session = qfx.Session(net, data)
    for factor in (0.5, 4.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setattr(CrossLayerEqualization, "__call__", lambda self, gm: scale_activation(gm))
        config = with_passes(CrossLayerEqualization())
        assert torch.equal(quantize(session, config)(data[0]), quantize(net, config, data)(data[0]))


def test_what_else_takes_a_session_and_what_does_not() -> None:
    model, data = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))), [torch.randn(16, 8)] * 2
    session = qfx.Session(model, data)
    qfx.check(session, INT8_STATIC, export="qdq")
    qfx.check(session, INT8_STATIC, export="pt2e")
    with pytest.raises(qfx.QuarkError, match="expected the result of quantize\\(\\), not Session"):
        qfx.prepare_qat(session)  # type: ignore[arg-type]
    with pytest.raises(qfx.QuarkError, match="a Session cannot be copied or pickled"):
        pickle.dumps(session)
    with pytest.raises(
        qfx.CalibrationError, match="a Session uses all of its data for calibration, so pass validation_data"
    ):
        qfx.search(session, ["int8_weight_only", "float"], budget=qfx.Budget(bits=8))
