"""The power-of-two recipe: where a DPU rounds, the scales it has shifts for, and the arithmetic it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from dpu_rules import violations
from networks import trained
from test_placement import build
from tiny import calls, constant, quantize, rand, record_of
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Override, QuantConfig
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import target_name
from quark_fx.graph.pass_manager import pass_name, run_passes
from quark_fx.passes import AdaRound, AlignShifts, BiasCorrection
from quark_fx.presets import XINT8
from quark_fx.vendors.amd.dpu import continues
from quark_fx.vendors.amd.passes.align_shifts import RULES

UNALIGNED = XINT8.replace(passes=tuple(p for p in XINT8.passes if pass_name(p) != "AlignShifts"))


def image(*sizes: int) -> list[Tensor]:
    return [rand(n, 3, 12, 12, seed=n) for n in (sizes or (6, 6))]


def convs(**shapes: tuple[int, int, int]) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(*shape) for name, shape in shapes.items()}


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "concat": lambda: build(
        lambda m, x: m.c(torch.cat([y := torch.relu(m.a(x)), m.b(y)], 1)),
        **convs(a=(3, 4, 3), b=(4, 4, 1), c=(8, 4, 1)),
    ),
    "pools": lambda: build(
        lambda m, x: m.b(F.max_pool2d(F.avg_pool2d(m.a(x), 3), 2)), **convs(a=(3, 4, 1), b=(4, 4, 1))
    ),
    "global pool": lambda: build(lambda m, x: m.b(m.a(x).mean((2, 3))), a=nn.Conv2d(3, 4, 6), b=nn.Linear(4, 5)),
    "pad": lambda: build(lambda m, x: m.b(F.pad(m.a(x), (1, 0, 2, 1))), **convs(a=(3, 4, 1), b=(4, 4, 3))),
    "pad with a large value": lambda: build(
        lambda m, x: m.b(F.pad(m.a(x), (1, 0, 2, 1), value=20.0)), **convs(a=(3, 4, 1), b=(4, 4, 3))
    ),
    "slice": lambda: build(
        lambda m, x: m.c(torch.cat([m.b((y := m.a(x))[:, :2]), y[:, 2:]], 1)),
        **convs(a=(3, 4, 1), b=(2, 2, 1), c=(4, 3, 1)),
    ),
    "split": lambda: build(
        lambda m, x: m.c(torch.cat([m.b((y := m.a(x).chunk(2, 1))[0]), y[1]], 1)),
        **convs(a=(3, 4, 1), b=(2, 2, 1), c=(4, 3, 1)),
    ),
    "residual": lambda: build(
        lambda m, x: m.c(torch.relu((y := m.a(x)) + m.b(y))), **convs(a=(3, 4, 3), b=(4, 4, 1), c=(4, 4, 1))
    ),
    "difference": lambda: build(
        lambda m, x: m.c((y := m.a(x)) - m.b(y)), **convs(a=(3, 4, 3), b=(4, 4, 1), c=(4, 4, 1))
    ),
    "sum at the end": lambda: build(lambda m, x: (y := m.a(x)) + m.b(y), **convs(a=(3, 4, 3), b=(4, 4, 1))),
    "leaky sum": lambda: build(
        lambda m, x: m.c(F.leaky_relu((y := m.a(x)) + m.b(y))), **convs(a=(3, 4, 3), b=(4, 4, 1), c=(4, 4, 1))
    ),
    "leaky": lambda: build(lambda m, x: m.b(F.leaky_relu(m.a(x), 0.1)), **convs(a=(3, 4, 3), b=(4, 4, 1))),
    "hard swish": lambda: build(lambda m, x: m.b(F.hardswish(m.a(x))), **convs(a=(3, 4, 3), b=(4, 4, 1))),
    "hard swish beside another": lambda: build(
        lambda m, x: m.c(torch.cat([F.hardswish(m.a(x)), m.b(x)], 1)), **convs(a=(3, 4, 3), b=(3, 4, 3), c=(8, 4, 1))
    ),
    "squeeze and excite": lambda: build(
        lambda m, x: m.c((y := m.a(x)) * F.hardsigmoid(m.b(F.adaptive_avg_pool2d(y, 1)))),
        **convs(a=(3, 4, 3), b=(4, 4, 1), c=(4, 4, 1)),
    ),
    "transposed": lambda: build(
        lambda m, x: m.b(m.a(x)), a=nn.Conv2d(3, 4, 3), b=nn.ConvTranspose2d(4, 3, 2, stride=2)
    ),
}


def export(config: Any, model: nn.Module, folder: Path, data: list[Tensor]) -> tuple[qfx.QuantizedModel, Path]:
    qmodel = quantize(model, config, data)
    return qmodel, Path(qfx.export.onnx(qmodel, folder / "model.onnx"))


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: Any, tmp_path_factory: Any) -> tuple[qfx.QuantizedModel, Path]:
    return export("xint8", NETWORKS[request.param](), tmp_path_factory.mktemp("dpu"), image())


def test_onnx_runtime_computes_the_same_bits(network: tuple[qfx.QuantizedModel, Path], tmp_path: Path) -> None:
    qmodel, path = network
    assert qfx.verify(qmodel, path, image(3, 5)).max_steps == 0
    vendor = qfx.export.onnx(qmodel, tmp_path / "vendor.onnx", format="vitis")
    assert qfx.verify(qmodel, vendor, image(3, 5)).max_steps == 0


def test_no_rule_is_broken(network: tuple[qfx.QuantizedModel, Path]) -> None:
    broken, looked = violations(network[1])
    assert broken == []
    assert looked["cut"] == looked["bias"] == len(network[0].report())


def test_everything_a_dpu_computes_is_rounded(network: tuple[qfx.QuantizedModel, Path]) -> None:
    """Every operator but those that move codes, or are fused with the one before, reads codes."""
    graph = onnx.load(network[1]).graph
    made = {o: n.op_type for n in graph.node for o in n.output}
    heavy = ("Conv", "ConvTranspose", "Gemm", "Add", "Sub", "AveragePool", "GlobalAveragePool", "Pad", "HardSigmoid")
    for node in graph.node:
        real = [made[i] for i in node.input if i in made and made[i] != "Constant"] if node.op_type in heavy else []
        assert set(real) <= {"DequantizeLinear"}, node.op_type
    assert made[graph.output[0].name] == "DequantizeLinear"


def scale(model: nn.Module, name: str, weight: float = 1.0, bias: float = 1.0) -> None:
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").mul_(weight)
        model.get_parameter(f"{name}.bias").mul_(bias)


def tiny_weights_beside_a_large_bias(model: nn.Module) -> None:
    scale(model, "a", 2.0**-18, 300)


def large_weights_that_cancel(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("a.weight").copy_(
            torch.tensor([1.0, -1.0, 0.0]).reshape(1, 3, 1, 1).expand(4, 3, 1, 1) * 64
        )


def tiny_swish_beside_large_values(model: nn.Module) -> None:
    scale(model, "a", 2.0**-9, 2.0**-9)
    scale(model, "b", 30, 30)


BINDING: dict[str, tuple[str, str, Callable[[nn.Module], Any]]] = {
    "concat": ("concat", "concat", lambda m: scale(m, "b", 40)),
    "pool": ("global pool", "pool", lambda m: None),
    "pad": ("pad with a large value", "pad", lambda m: None),
    "read": ("residual", "read", lambda m: scale(m, "b", 2.0**-14, 2.0**-14)),
    "read of a difference": ("difference", "read", lambda m: scale(m, "b", 2.0**-14, 2.0**-14)),
    "cut": ("leaky", "cut", tiny_weights_beside_a_large_bias),
    "bias": ("pad", "bias", tiny_weights_beside_a_large_bias),
    "bias before a leaky relu": ("leaky", "bias", lambda m: scale(m, "a", 1, 2.0**-12)),
    "hard sigmoid": ("hard swish", "hard_sigmoid", lambda m: scale(m, "a", 300, 300)),
    "swish": ("hard swish beside another", "swish", tiny_swish_beside_large_values),
}


@pytest.mark.parametrize("case", BINDING)
def test_a_rule_that_would_be_broken_is_kept(case: str, tmp_path: Path) -> None:
    name, rule, disturb = BINDING[case]
    model = NETWORKS[name]()
    disturb(model)
    before, _ = violations(export(UNALIGNED, model, tmp_path, image())[1])
    qmodel, path = export(XINT8, model, tmp_path, image())
    broken, looked = violations(path)
    assert broken == []
    assert rule in [r for r, *_ in before], before
    assert looked[rule]
    assert any(rule in c.what for r in qmodel.report().passes if r.name == "AlignShifts" for c in r.changes)
    assert qfx.verify(qmodel, path, image(4)).max_steps == 0


@pytest.mark.parametrize("case", ["concat", "pool", "cut", "bias"])
def test_weights_are_rounded_with_the_scales_that_are_stored(case: str) -> None:
    """A scale that changes after rounding multiplies the weight by whatever the change was."""
    name, _, disturb = BINDING[case]
    model = NETWORKS[name]()
    disturb(model)
    graph = quantize(model, XINT8, image()).graph_module
    checked = 0
    for node in calls(graph, "quark_fx.dequantize"):
        if node.args[0].op != "get_attr":  # type: ignore[union-attr]
            continue
        codes, step = constant(graph, node.args[0]).float(), float(constant(graph, node.args[1]))
        real = model.get_parameter(str(node.args[0].target).removesuffix("_codes")).detach()  # type: ignore[union-attr]
        assert torch.equal(codes, (real / step).round().clamp(-127, 127))
        checked += 1
    assert checked == 2 * len([m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)])


def test_a_weight_of_two_operators_has_two_scales_if_they_need_them(tmp_path: Path) -> None:
    """One reads values of 1, the other of 2**-12 and makes values of 1 with its bias: no position suits both."""
    shared = nn.Conv2d(3, 3, 1, bias=False)

    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.last(m.shared(x) + F.conv2d(x.clamp(-(2.0**-12), 2.0**-12), m.shared.weight, m.bias))
        return out

    model = build(forward, shared=shared, last=nn.Conv2d(3, 3, 1))
    model.bias = nn.Parameter(torch.tensor([100.0, -50.0, 20.0]))
    qmodel, path = export(XINT8, model, tmp_path, image())
    assert violations(path)[0] == []
    scales = {float(row.scale_min or 0) for row in qmodel.report() if row.parameter == "shared.weight"}
    assert len(scales) == 2
    assert qfx.verify(qmodel, path, image(4)).max_steps == 0


def test_a_difference_may_be_finer_than_what_it_is_of() -> None:
    """`y - 511/512 y` is 9 bits finer, which the compiler minds of sums only."""
    model = NETWORKS["difference"]()
    with torch.no_grad():
        model.get_parameter("b.weight").copy_(torch.eye(4)[:, :, None, None] * (1 - 2.0**-9))
        model.get_parameter("b.bias").zero_()
    report = quantize(model, XINT8, image()).report()
    record = next(r for r in report.passes if r.name == "AlignShifts")
    assert not [c for c in record.changes if "write" in c.what]


def test_rules_can_be_left_out(tmp_path: Path) -> None:
    model = NETWORKS["concat"]()
    scale(model, "b", 40)
    some = UNALIGNED.replace(passes=(*UNALIGNED.passes, AlignShifts(rules=tuple(r for r in RULES if r != "concat"))))
    assert {rule for rule, *_ in violations(export(some, model, tmp_path, image())[1])[0]} == {"concat"}
    assert QuantConfig.from_dict(some.to_dict()) == some


def test_the_changes_are_in_the_report() -> None:
    model = NETWORKS["concat"]()
    scale(model, "b", 40)
    qmodel = quantize(model, XINT8, image())
    record = record_of(qmodel, "AlignShifts")
    assert record.rewrites == len(record.changes) >= 1
    assert ("relu output", True) in [(change.name, change.changed) for change in record.changes]
    assert all(" → 2**" in change.what for change in record.changes)


def test_it_runs_inside_of_quantize_only() -> None:
    graph = qfx.capture_graph(NETWORKS["pad"](), image()[0]).module
    with pytest.raises(ConfigError, match="run it through `quantize`"):
        run_passes(graph, (AlignShifts(),))


def test_learned_codes_keep_the_scales(tmp_path: Path) -> None:
    """Passes on codes move no scale, so that what was settled stays."""
    model = NETWORKS["residual"]()
    config = XINT8.replace(passes=(*XINT8.passes, BiasCorrection(), AdaRound(iterations=0)))
    assert violations(export(config, model, tmp_path, image(6, 6, 6))[1])[0] == []


def test_a_scale_beyond_float32_is_refused() -> None:
    model = NETWORKS["pad"]()
    with torch.no_grad():
        model.get_parameter("a.weight").mul_(2.0**-110)
        model.get_parameter("a.bias").mul_(2.0**60)
    with pytest.raises(qfx.CalibrationError, match=r"a weight needs the scale 2\*\*\d+, which is not a float32"):
        quantize(model, XINT8, [x * 2.0**-100 for x in image()])


def test_what_is_weight_only_has_no_shifts() -> None:
    config = XINT8.replace(overrides=(Override(pattern="*", input=None, output=None),))
    report = quantize(NETWORKS["residual"](), config, image()).report()
    assert next(r for r in report.passes if r.name == "AlignShifts").rewrites == 0


@pytest.mark.parametrize(("name", "before"), [("leaky", "aten.conv2d.default"), ("leaky sum", "aten.add.Tensor")])
def test_a_leaky_relu_is_rounded_once(name: str, before: str) -> None:
    qmodel = quantize(NETWORKS[name](), XINT8, image())
    leaky = calls(qmodel, "aten.leaky_relu")[0]
    assert target_name(leaky.args[0]) == before  # type: ignore[arg-type]
    assert [target_name(user) for user in leaky.users] == ["quark_fx.quantize.default"]


def test_a_convolution_that_two_read_is_rounded_before_the_leaky_relu() -> None:
    model = build(
        lambda m, x: m.c(F.leaky_relu(y := m.a(x), 0.1) + m.b(y)), **convs(a=(3, 4, 3), b=(4, 4, 1), c=(4, 4, 1))
    )
    leaky = calls(quantize(model, XINT8, image()), "aten.leaky_relu")[0]
    assert target_name(leaky.args[0]) == "quark_fx.dequantize.default"  # type: ignore[arg-type]


def test_a_factor_belongs_to_a_hard_sigmoid_that_nothing_else_reads() -> None:
    times = torch.ops.aten.mul.Scalar  # as the factors that the passes for a DPU insert
    alone = build(lambda m, x: times(F.hardsigmoid(m.a(x)), 2), **convs(a=(3, 4, 1)))
    shared = build(lambda m, x: [times(y := F.hardsigmoid(m.a(x)), 2), y], **convs(a=(3, 4, 1)))
    for model, together in ((alone, True), (shared, False)):
        (factor,) = calls(qfx.capture_graph(model, tuple(image(6))).module, "aten.mul.Scalar")
        assert continues(factor.all_input_nodes[0], factor) == together


def test_alignment_costs_a_trained_network_little(tmp_path: Path) -> None:
    """At most one point of 897 images, as without: scales are a little coarser, and most do not change."""
    network = trained("cnn")
    expected = network.accuracy(network.model)
    for config in (UNALIGNED, XINT8):
        qmodel = quantize(network.model, config, network.calibration)
        assert network.accuracy(qmodel) == pytest.approx(expected, abs=1.0)
    path = Path(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    assert violations(path)[0] == []
    assert qfx.verify(qmodel, path, [network.images[:200]]).max_steps == 0
