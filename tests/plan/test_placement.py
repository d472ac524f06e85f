"""Where quantized values live: the rules of placement, seen in the quantized graph and in the report."""

from __future__ import annotations

import operator
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import Cnn, Mlp, calls, constant, images, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.config.quant_config import INHERIT, Granularity, Override, QuantConfig, TensorSpec
from quark_fx.config.target import Placement
from quark_fx.graph.nodes import call, target_name
from quark_fx.numbers.formats import INT4, INT8, INT16, UINT8
from quark_fx.passes import CrossLayerEqualization
from quark_fx.plan.placement import plan_quantization
from quark_fx.plan.report import Row
from quark_fx.plan.siblings import siblings
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8

QUANTIZE, DEQUANTIZE = "quark_fx.quantize", "quark_fx.dequantize"
SYMMETRIC = INT8_STATIC.replace(input=TensorSpec(format=INT8), output=TensorSpec(format=INT8))


class Apply(nn.Module):
    """Modules by name, and the function that calls them."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def build(function: Callable[..., Any], **modules: nn.Module) -> nn.Module:
    return seeded(Apply(function, **modules))


def is_quantized(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith(DEQUANTIZE)


def qparams(qmodel: qfx.QuantizedModel, dequantize: Any) -> tuple[float, int]:
    assert is_quantized(dequantize), dequantize
    return float(constant(qmodel, dequantize.args[1])), int(constant(qmodel, dequantize.args[2]))


def only(nodes: list[Node]) -> Node:
    assert len(nodes) == 1, nodes
    return nodes[0]


def row(qmodel: qfx.QuantizedModel, name: str) -> Row:
    return next(r for r in qmodel.report() if r.name == name)


def test_the_residual_add_of_a_convolutional_network_is_quantized_on_both_sides() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        out: Tensor = m.c(torch.relu(m.b(y) + y))
        return out

    model = build(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(4, 4, 1))
    qmodel = quantize(model, "int8_static", images())
    add = only(calls(qmodel, "aten.add"))
    assert all(is_quantized(a) for a in add.args)
    assert all(str(user.target).startswith(QUANTIZE) for user in add.users)  # the relu is saturation


def test_the_residual_add_of_a_transformer_stays_in_float() -> None:
    qmodel = quantize(seeded(Mlp()), "int8_static", tokens())
    add = next(n for n in calls(qmodel, "aten.add") if n.args[1] is not None and isinstance(n.args[1], Node))
    users = list(add.users)
    assert [str(u.target).split(".")[1] for u in users] == ["layer_norm"]


def test_an_add_of_something_that_is_not_quantized_stays_in_float() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.b(m.a(x) + torch.sin(x))
        return out

    qmodel = quantize(build(forward, a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1)), "int8_static", images())
    add = only(calls(qmodel, "aten.add"))
    assert not is_quantized(add.args[1])
    assert row(qmodel, "b").activation == "uint8"


def conv(activation: nn.Module, after: nn.Module | None = None) -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(3, 4, 3), activation, *([after] if after is not None else [])))


@pytest.mark.parametrize("relu", [torch.relu, lambda y: y.clip(0), lambda y: y.clamp_min(0)])
def test_a_convolution_and_its_relu_share_one_quantizer(relu: Any) -> None:
    model = build(lambda m, x: m.b(relu(m.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1))
    qmodel = quantize(model, "int8_static", images())
    assert not any(calls(qmodel, f"aten.{name}") for name in ("relu", "clip", "clamp"))
    first = calls(qmodel, "aten.conv2d")[0]
    assert [str(user.target).startswith(QUANTIZE) for user in first.users] == [True]
    assert qparams(qmodel, calls(qmodel, "aten.conv2d")[1].args[0])[1] == 0
    assert len(calls(qmodel, QUANTIZE)) == 3  # input, hidden, output


@pytest.mark.parametrize("config", [SYMMETRIC, XINT8], ids=["int8", "xint8"])
def test_a_relu_stays_where_the_zero_point_cannot_cut_it(config: QuantConfig) -> None:
    qmodel = quantize(conv(nn.ReLU(), nn.Conv2d(4, 4, 1)), config, images())
    relu = only(calls(qmodel, "aten.relu"))
    assert str(only(list(relu.users)).target).startswith(QUANTIZE)
    assert not is_quantized(relu.args[0])  # one quantizer, after it


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_a_relu6_is_absorbed_only_if_the_last_code_reaches_no_further_than_six(largest: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.ReLU6(), nn.Conv2d(3, 3, 1, bias=False)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            nn.init.dirac_(layer.weight)  # type: ignore[arg-type]
    data = [rand(4, 3, 5, 5).clamp(-1, 1) * largest]
    qmodel = quantize(model, "int8_static", data)
    # Up to 0.5 the codes end at 0.5 and saturate sooner than the bound would; from 6 on they end at 6.
    assert (
        len(calls(qmodel, "aten.hardtanh")) + len(calls(qmodel, "aten.relu6")) + len(calls(qmodel, "aten.clamp")) == 0
    )
    x = torch.full((1, 3, 5, 5), 50.0)
    assert float(qmodel(x).max()) <= 6.0 * (1 + 2 / 255)


def test_a_clamp_that_saturation_does_not_perform_stays() -> None:
    """The range is widened to zero, so the codes below `low` exist and only the clamp forbids them."""
    qmodel = quantize(conv(nn.Hardtanh(0.5, 2.0), nn.Conv2d(4, 4, 1)), "int8_static", images())
    clamp = only([*calls(qmodel, "aten.hardtanh"), *calls(qmodel, "aten.clamp")])
    assert not is_quantized(clamp.args[0])


@pytest.mark.parametrize("activation", [nn.Hardswish(), nn.SiLU(), nn.Sigmoid(), nn.LeakyReLU()])
def test_a_curved_activation_is_computed_in_float_between_quantizers(activation: nn.Module) -> None:
    qmodel = quantize(conv(activation, nn.Conv2d(4, 4, 1)), "int8_static", images())
    first, second = calls(qmodel, "aten.conv2d")
    curve = only([n for n in calls(qmodel, "aten.") if n not in (first, second)])
    assert is_quantized(curve.args[0])
    assert str(only(list(curve.users)).target).startswith(QUANTIZE)
    assert qparams(qmodel, curve.args[0]) != qparams(qmodel, second.args[0])


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool": lambda y: nn.functional.max_pool2d(y, 2),
    "reshape": lambda y: y.reshape(y.shape[0], 4, 6, 6),
    "transpose": lambda y: y.transpose(2, 3),
    "slice": lambda y: y[:, :, 1:, :-1],
    "rearranged": lambda y: F.pixel_unshuffle(F.pad(y.rot90(1, (2, 3)).fliplr(), (1, 1, 1, 1), "reflect"), 2)[:, 2:6],
    "repeated": lambda y: y[:, :, :1].expand_as(y).repeat_interleave(2, 2).tile(1, 1, 2, 1),
    "looked up": lambda y: y[:, torch.tensor([3, 0, 0, 1])].gather(2, (y[:, :, :2] > 0).long()),
    "split": lambda y: F.adaptive_max_pool2d(y, 4).tensor_split(2, 3)[1].vsplit(2)[0],
    "several": lambda y: nn.functional.max_pool2d(y.transpose(2, 3).contiguous(), 2)[:, :, 1:],
    "upsample": lambda y: nn.functional.interpolate(y, scale_factor=2.0, mode="nearest"),
}


@pytest.mark.parametrize("move", MOVES)
def test_data_movement_keeps_the_parameters_of_its_input(move: str) -> None:
    model = build(lambda m, x: m.b(MOVES[move](m.a(x))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 1))
    qmodel = quantize(model, "int8_static", images())
    first, second = calls(qmodel, "aten.conv2d")
    before = only(list(only(list(first.users)).users))  # quantize, dequantize
    assert qparams(qmodel, before) == qparams(qmodel, second.args[0])


def test_an_average_is_not_data_movement() -> None:
    model = build(lambda m, x: m.b(nn.functional.avg_pool2d(m.a(x), 2)), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 1))
    qmodel = quantize(model, "int8_static", images())
    pool = only(calls(qmodel, "aten.avg_pool2d"))
    assert is_quantized(pool.args[0])
    assert qparams(qmodel, pool.args[0]) != qparams(qmodel, calls(qmodel, "aten.conv2d")[1].args[0])


def test_the_inputs_of_a_concatenation_share_the_parameters_of_its_output() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.c(torch.cat([torch.relu(m.a(x)), m.b(x)], 1))
        return out

    model = build(forward, a=nn.Conv2d(3, 2, 1), b=nn.Conv2d(3, 2, 1), c=nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        model.get_parameter("b.weight").mul_(7)
    qmodel = quantize(model, "int8_static", images())
    cat = only(calls(qmodel, "aten.cat"))
    parts = [qparams(qmodel, part) for part in cat.args[0]]  # type: ignore[union-attr]
    assert parts[0] == parts[1] == qparams(qmodel, calls(qmodel, "aten.conv2d")[2].args[0])
    # The observer of the output saw both: nothing of the larger branch is cut off.
    data, scale = images()[0], parts[0][0]
    with torch.no_grad():
        span = model.b(data)  # type: ignore[operator]
        span = span.max().clamp(min=0) - span.min().clamp(max=0)
    assert scale * 255 >= float(span) * 0.999


def test_a_concatenation_whose_input_is_read_elsewhere_has_parameters_of_its_own() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x)
        return m.c(torch.cat([y, m.b(x)], 1)), m.d(y)

    layers = {n: nn.Conv2d(3, 2, 1) for n in "ab"} | {"c": nn.Conv2d(4, 4, 1), "d": nn.Conv2d(2, 2, 1)}
    model = build(forward, **layers)
    with torch.no_grad():
        layers["b"].weight.mul_(7)
    qmodel = quantize(model, "int8_static", images())
    cat = only(calls(qmodel, "aten.cat"))
    parts = [qparams(qmodel, part) for part in cat.args[0]]  # type: ignore[union-attr]
    assert parts[0] != parts[1]


def test_one_value_read_by_several_operators_is_quantized_once() -> None:
    layers = {n: nn.Linear(4, 4) for n in "qkv"}
    model = build(lambda m, x: m.q(x) + m.k(x) * m.v(x), **layers)
    for config in (INT8_STATIC, INT8_DYNAMIC):
        qmodel = quantize(model, config, [rand(6, 4)])
        reads = {node.args[0] for node in calls(qmodel, "aten.linear")}
        assert len(reads) == 1


def attention(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(m.q(x) @ m.k(x).transpose(-1, -2), -1)
    out: Tensor = weights @ m.v(x)
    return out


def attention_model() -> nn.Module:
    return build(attention, **{n: nn.Linear(4, 4) for n in "qkv"})


def test_products_of_activations_stay_in_float_unless_asked_for() -> None:
    data = [rand(2, 3, 4)]
    qmodel = quantize(attention_model(), "int8_static", data)
    assert not any(is_quantized(a) for node in calls(qmodel, "aten.matmul") for a in node.args)
    reasons = {r.reason for r in qmodel.report() if r.kind == "matmul"}
    assert reasons == {"products of activations stay in float unless an override selects them"}

    asked = INT8_STATIC.replace(overrides=(Override(pattern="op:matmul"),))
    qmodel = quantize(attention_model(), asked, data)
    assert all(is_quantized(a) for node in calls(qmodel, "aten.matmul") for a in node.args)
    assert {(r.activation, r.reason) for r in qmodel.report() if r.kind == "matmul"} == {("uint8", "")}


class Deep(nn.Module):
    """Two blocks of two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("encoder.*", {"encoder.0", "encoder.2"}),
        ("*.2", {"encoder.2", "decoder.2"}),
        ("decoder.0", {"decoder.0"}),
        ("op:linear", {"encoder.0", "encoder.2", "decoder.0", "decoder.2"}),
        ("op:lin*", {"encoder.0", "encoder.2", "decoder.0", "decoder.2"}),
    ],
)
def test_what_a_pattern_excludes_stays_in_float_and_says_so(pattern: str, excluded: set[str]) -> None:
    qmodel = quantize(seeded(Deep()), INT8_STATIC.replace(exclude=(pattern,)), [rand(6, 4)])
    assert {r.name for r in qmodel.report() if r.reason} == excluded
    assert {r.reason for r in qmodel.report() if r.reason} == {f"excluded by {pattern!r}"}
    for node in calls(qmodel, "aten.linear"):
        weight = node.args[1]
        assert isinstance(weight, Node)
        assert is_quantized(weight) == is_quantized(node.args[0]) == (weight.op != "get_attr")


def test_an_excluded_addition_stays_in_float() -> None:
    layers = {n: nn.Conv2d(3, 3, 1) for n in "abd"}

    def added(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.d((m.a(x) + m.b(x)) + m.a(x))
        return out

    # Two additions in a row: quantized, there is a quantizer between them.
    for exclude, between in (((), True), (("op:add",), False)):
        qmodel = quantize(build(added, **layers), INT8_STATIC.replace(exclude=exclude), images())
        assert is_quantized(calls(qmodel, "aten.add")[1].args[0]) is between


def test_a_pattern_that_selects_nothing_is_reported_with_near_names() -> None:
    config = INT8_STATIC.replace(exclude=("encodr.0", "op:linaer"))
    with pytest.warns(UserWarning, match="selects no operator") as caught:
        qfx.quantize(seeded(Deep()), config, [rand(6, 4)], progress=False)
    messages = [str(w.message) for w in caught if "selects no operator" in str(w.message)]
    assert len(messages) == 2
    assert "'encodr.0'" in messages[0]
    assert "encoder.0" in messages[0]
    assert "op:linear" in messages[1]


@pytest.mark.parametrize("preset", ["int4_weight_only", "int8_static"])
def test_a_preset_does_not_warn_about_its_own_patterns(preset: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        qfx.quantize(seeded(Deep()), preset, [rand(6, 4)], progress=False)


def test_an_override_changes_one_operator_and_the_last_one_wins() -> None:
    wide = TensorSpec(format=INT16)
    config = INT8_STATIC.replace(
        overrides=(
            Override(pattern="encoder.*", weight=None),
            Override(pattern="*.0", input=wide, output=wide),
            Override(pattern="encoder.2", weight=TensorSpec(format=INT8)),
        )
    )
    qmodel = quantize(seeded(Deep()), config, [rand(6, 4)])
    assert row(qmodel, "encoder.0").reason == "the configuration keeps its weight in float"
    assert row(qmodel, "encoder.2").weight == "int8"  # per tensor
    assert row(qmodel, "decoder.0").activation == "int16"
    assert row(qmodel, "decoder.0").weight == "int8 channel"
    assert row(qmodel, "decoder.2").activation == "uint8"
    assert Override(pattern="x").weight is INHERIT


class Tied(nn.Module):
    """An embedding whose table is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(ids)))
        return out


def test_a_tied_embedding_is_stored_once() -> None:
    qmodel = quantize(seeded(Tied()), INT8_WEIGHT_ONLY, tokens())
    stored = {str(n.target) for n in qmodel.graph_module.graph.nodes if n.op == "get_attr" and "codes" in str(n.target)}
    assert len(stored) == 1
    embedding, linear = calls(qmodel, "aten.embedding")[0], only(calls(qmodel, "aten.linear"))
    assert embedding.args[0] is linear.args[1].args[0]  # type: ignore[union-attr]


class Experts(nn.Module):
    """Three experts of one stacked weight, as Mixture-of-Experts models hold them."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 6, 4) if transposed else torch.empty(3, 4, 6))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.transpose(1, 2) if self.transposed else self.weight)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("config", [INT8_WEIGHT_ONLY, INT4_WEIGHT_ONLY.replace(group_size=2, overrides=())])
def test_each_expert_and_output_channel_has_its_own_scales(transposed: bool, config: QuantConfig) -> None:
    model = seeded(Experts(transposed))
    assert isinstance(model.weight, Tensor)
    with torch.no_grad():
        model.weight[1] *= 100
        model.weight.select(1 if transposed else 2, 3).mul_(100)
    qmodel = quantize(model, config, [rand(3, 5, 4)])
    assert row(qmodel, "weight").reason == ""
    dequantize = only(calls(qmodel, DEQUANTIZE))
    codes, scale = constant(qmodel, dequantize.args[0]), constant(qmodel, dequantize.args[1])
    assert codes.shape == model.weight.shape
    blocks = 2 if config is not INT8_WEIGHT_ONLY else 1
    axis, largest = (2 if transposed else 1), (7 if blocks == 2 else 127)
    split = torch.unflatten(model.weight.detach().abs(), axis, (blocks, -1))
    grouped = split.amax(axis + 1)
    torch.testing.assert_close(scale, grouped / largest)
    x = rand(3, 5, 4, seed=4)
    with torch.no_grad():
        got, expected = qmodel(x), model(x)
    # Half a step of every weight times the input.
    steps = (scale / 2).repeat_interleave(4 // blocks, axis)
    bound = x.abs() @ (steps.transpose(1, 2) if transposed else steps)
    assert bool(((got - expected).abs() <= bound * (1 + 1e-4)).all())


class Tables(nn.Module):
    """Parameters that are no weights: positions, a class token, a mean and a mask; and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.empty(1, 5, 4)), nn.Parameter(torch.empty(1, 1, 4))
        self.mean = nn.Parameter(torch.empty(1, 1, 4))
        self.mask = nn.Buffer(torch.ones(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x - self.mean], 1) + self.positions
        y: Tensor = self.head(torch.where(self.mask > 0, x, 0.0))
        return y


def test_tables_are_not_weighted_operators() -> None:
    (found,) = quantize(seeded(Tables()), INT8_WEIGHT_ONLY, [rand(2, 4, 4)]).report()
    assert (found.name, found.reason) == ("head", "")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.bilinear(x, x, m.cube), "no quantization rule for aten.bilinear.default; write it as"),
        (lambda m, x: torch.mv(m.table, x[0]), "no quantization rule for aten.mv.default; write it as"),
        (lambda m, x: m.table[x.argmax(-1)], "use torch.nn.functional.embedding"),
        (lambda m, x: torch.bmm(x[:, None], m.cube[x.argmax(-1)]), "set_experts_implementation('grouped_mm')"),
        (
            lambda m, x: F.linear(x, m.table * x.mean()),
            "combined with a value computed from the input before aten.linear",
        ),
    ],
    ids=["bilinear", "vector", "rows", "experts", "modulated"],
)
def test_a_weight_that_no_rule_covers_is_in_the_report(function: Callable[..., Any], reason: str) -> None:
    model = build(function)
    model.table, model.cube = nn.Parameter(rand(4, 4)), nn.Parameter(rand(4, 4, 4))
    found = next(iter(quantize(model, INT8_WEIGHT_ONLY, [rand(3, 4)]).report()))
    assert reason in found.reason
    assert found.bytes_before == found.bytes_after > 0


def test_a_weight_that_is_too_large_to_fold_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["quark_fx.passes.fold_constants"], "LARGEST", 100)
    model = build(lambda m, x: F.linear(x, m.one.expand(9, 4)) + F.linear(x, m.two.repeat(2, 1).repeat(1, 1))[:, :1])
    model.one, model.two = nn.Parameter(rand(1, 4)), nn.Parameter(rand(16, 4))
    found = quantize(model, INT8_WEIGHT_ONLY, [rand(3, 4)]).report()
    assert [row.reason.partition(";")[0] for row in found] == [
        "this operand is computed from parameters in the graph",
        "",
    ]


def test_without_the_pass_that_folds_a_computed_weight_has_a_reason() -> None:
    model = build(lambda m, x: F.linear(x, m.table * 2) + x @ (m.table / 3))
    model.table = nn.Parameter(rand(4, 4))
    reasons = [r.reason for r in quantize(model, INT8_WEIGHT_ONLY.replace(passes=()), [rand(3, 4)]).report()]
    assert len(reasons) == 2
    assert all("add quark_fx.passes.fold_constants to the passes" in reason for reason in reasons)


def test_operators_that_read_one_value_in_the_same_order_are_siblings() -> None:
    model = build(
        lambda m, x: m.q(x.flatten(0, 1)) + m.k(x.reshape(-1, 4)) + m.v(x.mT.flatten(0, 1)),
        q=nn.Linear(4, 3),
        k=nn.Linear(4, 3),
        v=nn.Linear(4, 3),
    )
    gm = qfx.capture_graph(model, rand(2, 4, 4)).module
    groups = siblings(plan_quantization(gm, INT8_WEIGHT_ONLY, quiet=True).operators)
    assert [[op.name for op in group] for group in groups] == [["q", "k"]]


def test_every_weighted_operator_has_a_row_in_graph_order() -> None:
    names = ["stem.0", "block.conv", "head"]
    qmodel = quantize(seeded(Cnn()), "int8_static", images())
    assert [r.name for r in qmodel.report()] == names
    plan = plan_quantization(qfx.capture_graph(seeded(Cnn()), images()[0]).module, INT8_STATIC)
    assert [op.name for op in plan.operators] == names
    assert [op.kind for op in plan.operators] == ["conv", "conv", "linear"]


def test_a_linear_keeps_a_float_output_unless_an_operator_reads_it_in_integers() -> None:
    one = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(6, 4)])
    assert [str(u.op) for u in only(calls(one, "aten.linear")).users] == ["output"]
    two = quantize(seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))), "int8_static", [rand(6, 4)])
    first, second = calls(two, "aten.linear")
    assert str(only(list(first.users)).target).startswith(QUANTIZE)
    assert not calls(two, "aten.relu")
    assert [str(u.op) for u in second.users] == ["output"]


def test_a_value_that_is_also_read_in_float_stays_in_float_for_that_reader() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x)
        return m.b(y), y

    qmodel = quantize(build(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), "int8_static", [rand(6, 4)])
    first, second = calls(qmodel, "aten.linear")
    assert is_quantized(second.args[0])
    output = next(iter(reversed(qmodel.graph_module.graph.nodes)))
    assert output.args[0] == (second, first)


def test_per_channel_activations_of_a_weight_only_configuration_stay_in_float() -> None:
    spec = TensorSpec(format=UINT8, granularity=Granularity.CHANNEL)
    qmodel = quantize(seeded(Cnn()), QuantConfig(weight=spec), images())
    assert not calls(qmodel, QUANTIZE)
    assert {r.activation for r in qmodel.report()} == {""}


def test_a_weight_on_the_left_of_a_product_is_listed_with_its_bytes() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.queries @ x

    (row,) = quantize(seeded(Left()), INT8_WEIGHT_ONLY, [rand(2, 4, 5)]).report()
    assert (row.name, row.bytes_before, row.weight) == ("queries", 48, "")
    assert "write `weight @ x` as `(x.mT @ weight.mT).mT`" in row.reason


def test_the_bounds_of_a_clamp_are_no_weights() -> None:
    """Equalization makes those of ReLU6 one per channel."""
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 3, 1)))
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, CrossLayerEqualization()))
    qmodel = quantize(model, config, [20 * rand(2, 3, 4, 4)])
    assert calls(qmodel, "aten.clamp.Tensor")
    assert [row.name for row in qmodel.report()] == ["0", "2"]


def chosen(model: Any, score: Tensor) -> Any:
    return model.table[score.topk(2, dim=-1).indices].sum(-2)


def steps(score: Tensor) -> Tensor:
    """Take each of many paths, two more with every step."""
    for _ in range(600):
        score = score + score * 0.001
    return score


ROUTING: dict[str, tuple[bool, Callable[[Any, Tensor, Tensor], Any]]] = {
    "scores": (True, lambda m, score, y: chosen(m, score) + y),
    "shares": (True, lambda m, score, y: chosen(m, torch.softmax(score.half(), -1)) + y),
    "in another shape": (True, lambda m, score, y: chosen(m, score.unflatten(0, (2, 4))).flatten(0, 1) + y),
    "a root": (True, lambda m, score, y: chosen(m, torch.nn.functional.softplus(score).sqrt()) + y),
    "sorted": (True, lambda m, score, y: m.table[score.sort(-1).indices[:, -1]] + y),
    "the place": (True, lambda m, score, y: m.table[score.argmax(-1)] + y),
    "after many steps": (True, lambda m, score, y: chosen(m, steps(score)) + y),
    "shifted": (True, lambda m, score, y: chosen(m, torch.sigmoid(score) + m.shift) + y),
    "groups masked": (True, lambda m, score, y: chosen(m, score.masked_fill(score < 0, 0.0)) + y),
    "the largest": (True, lambda m, score, y: m.table[score.max(-1).indices] + y),
    "how large": (False, lambda m, score, y: score.topk(2, dim=-1).values.sum(-1, keepdim=True) + y),
    "a maximum": (False, lambda m, score, y: score.amax(-1, keepdim=True) + score.max(-1, keepdim=True).values + y),
    "through an operator": (False, lambda m, score, y: chosen(m, m.after(score)) + y),
}


@pytest.mark.parametrize("name", ROUTING)
def test_what_sends_rows_elsewhere_is_a_router(name: str) -> None:
    """Whose largest outputs are looked for, not only how large they are."""
    routes, function = ROUTING[name]
    model = build(
        lambda m, x: function(m, m.route(x), m.body(x)),
        route=nn.Linear(16, 4),
        body=nn.Linear(16, 16),
        after=nn.Conv1d(1, 1, 1) if name != "through an operator" else nn.Linear(4, 4),
    )
    model.table, model.shift = nn.Parameter(rand(4, 16)), nn.Parameter(rand(4))
    sizes: Any = ({},) if name == "after many steps" else None  # 1200 operators are traced in half the time
    config = INT8_WEIGHT_ONLY.replace(exclude=("op:router",))
    qmodel = quantize(model, config, [rand(8, 16)], dynamic_shapes=sizes)
    reasons = {r.name: r.reason for r in qmodel.report()}
    assert reasons["route"] == ("excluded by 'op:router'" if routes else "")
    assert reasons["body"] == ""
    if name == "through an operator":
        assert reasons["after"] == "excluded by 'op:router'"


@pytest.mark.parametrize(
    ("conv", "depthwise"),
    [
        (nn.Conv1d(4, 4, 3, groups=4), True),
        (nn.Conv1d(4, 8, 3, groups=4), True),
        (nn.Conv1d(4, 4, 3, groups=2), False),
        (nn.Conv1d(4, 4, 3), False),
        (nn.Conv1d(1, 4, 3), False),
    ],
    ids=["depthwise", "two of each", "groups", "dense", "one channel"],
)
def test_a_convolution_of_each_channel_by_itself_is_depthwise(conv: nn.Conv1d, depthwise: bool) -> None:
    model = seeded(nn.Sequential(conv, nn.ReLU()))
    (found,) = quantize(
        model, INT8_WEIGHT_ONLY.replace(exclude=("op:depthwise",)), [rand(2, conv.in_channels, 9)]
    ).report()
    assert found.reason == ("excluded by 'op:depthwise'" if depthwise else "")


def test_a_depthwise_convolution_can_be_the_head() -> None:
    model = seeded(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3, groups=4)))
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(exclude=("op:head",)), [rand(2, 4, 9)])
    assert [r.reason for r in qmodel.report()] == ["", "excluded by 'op:head'"]


class Lends(nn.Module):
    """A depthwise convolution whose kernel a function gets as a matrix, as in state-space layers."""

    def __init__(self, matrix: bool = True) -> None:
        super().__init__()
        self.into, self.conv, self.matrix = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, groups=4), matrix

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.conv.weight.squeeze(1).unsqueeze(1) if self.matrix else self.conv.weight
        return nn.functional.conv1d(self.into(x).mT, kernel, self.conv.bias, groups=4)


@pytest.mark.parametrize("preset", ["int8_static", "int8_dynamic", "int8_weight_only"])
def test_a_kernel_that_is_lent_to_a_function_stays_in_float(preset: str) -> None:
    qmodel = quantize(seeded(nn.Sequential(Lends())), preset, [rand(2, 9, 4)])
    assert "stay in float unless an override" in row(qmodel, "0.conv").reason
    assert not row(qmodel, "0.into").reason
    assert not any(map(is_quantized, only(calls(qmodel, "aten.conv1d")).args))


class Applies(nn.Module):
    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        return nn.functional.conv1d(x, kernel.unsqueeze(1), groups=4)


class LendsToAnother(nn.Module):
    """A kernel that another module gets as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.applies = nn.Conv1d(4, 4, 3, groups=4), Applies()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.applies(x, self.conv.weight.squeeze(1))
        return found


def test_a_kernel_that_is_lent_to_another_module_stays_in_float() -> None:
    qmodel = quantize(seeded(LendsToAnother()), INT8_DYNAMIC, [rand(2, 4, 9)])
    assert "stay in float unless an override" in row(qmodel, "applies").reason
    qmodel.eager()


def test_an_override_quantizes_a_kernel_that_is_lent() -> None:
    config = INT8_DYNAMIC.replace(overrides=(Override(pattern="op:depthwise"),))
    qmodel = quantize(seeded(Lends()), config, [rand(2, 9, 4)])
    assert not row(qmodel, "conv").reason
    assert [is_quantized(a) for a in only(calls(qmodel, "aten.conv1d")).args[:2]] == [True, True]


class Owns(nn.Conv1d):
    """A convolution that reshapes its own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.mT, self.weight.squeeze(1).unsqueeze(1), self.bias, groups=4)


@pytest.mark.parametrize(
    "conv", [lambda: Owns(4, 4, 3, groups=4), lambda: Lends(matrix=False)], ids=["its own", "as it is"]
)
def test_a_kernel_that_is_not_lent_as_a_matrix_has_codes(conv: Callable[[], nn.Module]) -> None:
    qmodel = quantize(seeded(nn.Sequential(conv())), INT8_DYNAMIC, [rand(2, 9, 4)])
    assert [is_quantized(a) for a in only(calls(qmodel, "aten.conv1d")).args[:2]] == [True, True]


def test_a_router_of_its_own_format() -> None:
    model = build(lambda m, x: chosen(m, m.route(x)) + m.body(x), route=nn.Linear(16, 4), body=nn.Linear(16, 16))
    model.table = nn.Parameter(rand(4, 16))
    config = INT4_WEIGHT_ONLY.replace(overrides=(Override(pattern="op:router", weight=TensorSpec(format=INT8)),))
    qmodel = quantize(model, config, [rand(8, 16)])
    assert (row(qmodel, "route").weight[:4], row(qmodel, "body").weight[:4]) == ("int8", "int4")


class Shared(nn.Module):
    """Two modules with one weight, one module under two names, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.a = nn.Linear(8, 8)
        self.again = self.a
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.b(self.again(self.a(self.embed(ids)).relu()).relu())
        return self.head(x)


def test_operators_that_share_a_weight_go_by_the_names_of_their_own_modules() -> None:
    ids = torch.arange(10).reshape(2, 5)
    rows = quantize(Shared().eval(), INT8_WEIGHT_ONLY, [ids]).report().rows
    assert [row.name for row in rows] == ["embed", "a", "again", "b", "head"]
    assert len({row.parameter for row in rows}) == 2


@pytest.mark.parametrize("name", ["embed", "a", "again", "b", "head"])
def test_a_pattern_reaches_each_operator_that_shares_a_weight(name: str) -> None:
    ids = torch.arange(10).reshape(2, 5)
    excluded = quantize(Shared().eval(), INT8_WEIGHT_ONLY.replace(exclude=(name,)), [ids])
    assert {row.name for row in excluded.report() if row.reason} == {name}
    overridden = INT8_WEIGHT_ONLY.replace(overrides=(qfx.Override(pattern=name, weight=None),))
    assert {row.name for row in quantize(Shared().eval(), overridden, [ids]).report() if row.reason} == {name}


def test_a_weight_of_an_inner_module_keeps_its_name_where_the_outer_one_computes() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own_table = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Any:
            return nn.functional.linear(nn.functional.linear(x, self.inner.weight), self.own_table)

    rows = quantize(nn.Sequential(Outer()).eval(), INT8_WEIGHT_ONLY, [torch.ones(2, 8)]).report().rows
    assert [row.name for row in rows] == ["0.inner", "0.own_table"]


class Adapted(nn.Module):
    """An attention, and a pair of products of low rank behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up, self.last = (nn.Linear(*s) for s in ((8, 8), (8, 4), (4, 8), (8, 8)))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(self.up(self.down((x @ x.mT).softmax(-1) @ x)))


Step = Callable[[Callable[..., Node], dict[str, Any], Node], Node]


def chunks(add: Callable[..., Node], weights: dict[str, Any], x: Node) -> Node:
    """Chunks whose consumers double with each step, and a sum behind them."""
    parts = add("chunk.default", x, 2, -1)
    y = add("cat.default", [add(operator.getitem, parts, i) for i in (1, 0)], -1)
    return add("add.Tensor", y, y)


def shuffle(add: Callable[..., Node], weights: dict[str, Any], x: Node) -> Node:
    """A channel shuffle that an operator reads."""
    y = add("flatten.using_ints", add("transpose.int", add("unflatten.int", x, -1, [2, 4]), -1, -2), -2)
    add("linear.default", y, *weights["first"])
    return y


def head(add: Callable[..., Node], weights: dict[str, Any], x: Node) -> Node:
    """A product that data movement brings to the end of the model."""
    row = add("narrow.default", x, 0, 0, 1)
    return add("cat.default", [row, add("linear.default", row, *weights["first"])])


def adapter(add: Callable[..., Node], weights: dict[str, Any], x: Node) -> Node:
    """A branch of low rank around a residual stream."""
    return add("add.Tensor", x, add("linear.default", add("linear.default", x, *weights["down"]), *weights["up"]))


def diamond(add: Callable[..., Node], weights: dict[str, Any], x: Node) -> Node:
    """A sum of a value and its function."""
    return add("add.Tensor", x, add("tanh.default", x))


@pytest.mark.parametrize(
    ("step", "behind"),
    [
        *((chunks, "linear"), (shuffle, "linear"), (head, "linear_3"), (adapter, "linear")),
        *((diamond, "matmul"), (diamond, "softmax")),
    ],
)
def test_a_plan_visits_each_node_equally_often_in_graphs_of_any_size(step: Step, behind: str) -> None:
    gm = qfx.capture_graph(seeded(Adapted()), rand(2, 8, 8)).module
    nodes = {node.name: node for node in gm.graph.nodes}
    names = dict(zip(("first", "down", "up"), ("linear", "linear_1", "linear_2"), strict=True))
    weights = {name: nodes[node].args[1:] for name, node in names.items()}
    value, config, counts = nodes[behind], INT8_STATIC.replace(kv_cache=TensorSpec(format=INT8)), list[int]()

    def add(name: Any, *args: Any) -> Node:
        return call(gm, operator.attrgetter(name)(torch.ops.aten) if isinstance(name, str) else name, *args)

    def see(frame: Any, event: str, _: Any) -> None:
        counts[-1] += event == "call" and "quark_fx" in frame.f_code.co_filename

    for steps in (4, 4, 8):
        end = value
        users = list(end.users)
        with gm.graph.inserting_before(value.next):
            for _ in range(steps):
                end = step(add, weights, end)
        for user in users:
            user.replace_input_with(value, end)
        value = end
        counts.append(0)
        before = sys.getprofile()
        sys.setprofile(see)
        try:
            plan_quantization(gm, config, quiet=True)
        finally:
            sys.setprofile(before)
    # Twice the steps take twice the visits; the order in which they settle varies by a few.
    assert counts[2] - counts[1] <= 2.02 * (counts[1] - counts[0])


class Gates(nn.Module):
    """Two layers of an LSTM, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(x)[0])


def test_every_weight_of_a_recurrent_layer_has_a_row() -> None:
    model = seeded(Gates())
    rows = quantize(model, INT8_STATIC, [rand(3, 5, 4)]).report()
    wanted = [name for name, p in model.named_parameters() if p.dim() == 2]
    assert [row.parameter for row in rows] == wanted
    assert {(row.name, row.kind, row.weight) for row in rows if row.name != "head"} == {
        ("cells", "lstm", "int8 channel")
    }
    for row in rows:
        weight = model.get_parameter(row.parameter)
        assert (row.bytes_before, row.bytes_after) == (weight.nbytes, weight.numel() + 4 * len(weight))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (INT8_STATIC.replace(exclude=("op:lstm",)), "excluded by 'op:lstm'"),
        (INT8_STATIC.replace(exclude=("cells",)), "excluded by 'cells'"),
        (XINT8, "target='dpu' does not support lstm with quantized weights"),
    ],
)
def test_a_recurrent_layer_in_float_has_a_reason_for_each_weight(config: QuantConfig, reason: str) -> None:
    rows = [row for row in quantize(seeded(Gates()), config, [rand(3, 5, 4)]).report() if row.kind == "lstm"]
    assert [row.reason for row in rows] == [reason] * 8
    assert all(row.bytes_before == row.bytes_after > 0 for row in rows)


def test_a_recurrent_layer_reads_codes_and_what_reads_it_rounds_its_result() -> None:
    target = qfx.Target(name="integers everywhere", placement=Placement())
    qmodel = quantize(seeded(Gates()), INT8_STATIC.replace(target=target), [rand(3, 5, 4)])
    layer = only(calls(qmodel, "aten.lstm"))
    assert target_name(layer.args[0]) == "quark_fx.dequantize.default"  # type: ignore[arg-type]
    weights: Any = layer.args[2]
    assert sum(target_name(weight) == "quark_fx.dequantize.default" for weight in weights) == 8
    linear = only(calls(qmodel, "aten.linear"))
    assert target_name(linear.args[0]) == "quark_fx.dequantize.default"  # type: ignore[arg-type]
    assert len(calls(qmodel, "quark_fx.quantize")) == 2


@pytest.mark.parametrize(
    ("layer", "config", "activation"),
    [
        (nn.LSTM, INT8_DYNAMIC, "uint8 dynamic"),
        (nn.LSTM, INT8_STATIC, ""),
        (nn.LSTM, "w8a8_dynamic", ""),
        (nn.GRU, INT8_DYNAMIC, ""),
    ],
)
def test_what_a_recurrent_layer_reads_is_rounded_for_kernels_of_integers_alone(
    layer: Any, config: Any, activation: str
) -> None:
    qmodel = quantize(seeded(layer(4, 4, batch_first=True)), config, [rand(3, 5, 4)])
    assert [(row.weight, row.activation) for row in qmodel.report()] == [("int8 channel", activation)] * 2
    assert bool(calls(qmodel, "quark_fx.quantize")) == bool(activation)


def test_a_recurrent_layer_whose_result_is_the_models_is_no_head() -> None:
    rows = quantize(seeded(nn.LSTM(4, 4, batch_first=True)), "w4a16_rtn", [rand(3, 5, 4)]).report()
    assert [row.reason for row in rows] == ["", ""]


def test_a_sum_of_what_a_recurrent_layer_makes_stays_in_float() -> None:
    class Sum(Gates):
        def forward(self, x: Tensor) -> Any:
            made, _ = self.cells(x)
            return self.head(made + made.flip(1))

    qmodel = quantize(seeded(Sum()), INT8_STATIC, [rand(3, 5, 4)])
    (add,) = calls(qmodel, "aten.add")
    assert all(target_name(node) != "quark_fx.dequantize.default" for node in add.all_input_nodes)


@pytest.mark.parametrize("pattern", ["0", "op:linear", "*"])
def test_exclude_wins_over_overrides_and_says_so(pattern: str) -> None:
    """An override that changes nothing is a mistake; one that selects other operators as well is a choice."""
    spec = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
    model, data = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [rand(3, 4)]
    config = INT8_STATIC.replace(exclude=("0",), overrides=(Override(pattern=pattern, weight=spec),))
    only = f"override '{pattern}' changes nothing: 0 is excluded by '0', which takes precedence over override"
    with pytest.warns(UserWarning, match=re.escape(only)) if pattern == "0" else nullcontext():
        rows = list(quantize(seeded(model), config, data).report())
    assert rows[0].reason == f"excluded by '0', which takes precedence over override '{pattern}'"
    assert rows[1].weight == ("int8 channel" if pattern == "0" else "int4 channel")
    kept = config.replace(overrides=(Override(pattern=pattern, weight=None),))
    assert next(iter(quantize(seeded(model), kept, data).report())).reason == "excluded by '0'"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(seeded(model), config.replace(overrides=(Override(pattern="*", weight=spec),)), data)
