"""Gradients of quantizers, and models that are trained with them."""

from __future__ import annotations

import copy
import re
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import on_devices
from networks import Trained, trained
from tiny import Cnn, Mlp, all_but, rand, seeded
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quark_fx as qfx
from quark_fx import ops
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.straight_through import run_with_gradients
from quark_fx.model.fake_quantize import FakeQuantize
from quark_fx.model.qat import QATModel
from quark_fx.numbers.formats import INT4, UINT4, FloatFormat, parse_format
from quark_fx.numbers.layout import Layout
from quark_fx.plan.pair_sums import PairBound
from quark_fx.presets import preset

GRANULARITIES: dict[str, tuple[int | None, int, tuple[int, ...]]] = {
    "tensor": (None, 0, ()),
    "channel": (1, 0, (6,)),
    "channel from the end": (-2, 0, (6,)),
    "token": (2, -1, (3, 6, 1)),
    "group": (2, 4, (3, 6, 3)),
    "group in the middle": (1, 4, (3, 2, 10)),
}
"""Axis, block size and shape of the scale for values of shape (3, 6, 10)."""


def numbers(axis: int | None, block: int, shape: tuple[int, ...]) -> Tensor:
    """Return which of the flat scales each value of shape (3, 6, 10) has, value by value."""
    found = torch.zeros(3, 6, 10, dtype=torch.long)
    for index in [(i, j, k) for i in range(3) for j in range(6) for k in range(10)]:
        if axis is None:
            continue
        if block == 0:
            found[index] = index[axis]
            continue
        place = list(index)
        place[axis] = 0 if block < 0 else index[axis] // block
        for size, at in zip(shape, place, strict=True):
            found[index] = found[index] * size + at
    return found


def by_formula(x: Tensor, scale: Tensor, point: Tensor, format: str) -> Tensor:
    """Return what each value of `x` becomes, differentiable as in Jacob et al. and LSQ; one scale and point a value."""
    fmt = parse_format(format)
    v = x / scale
    if isinstance(fmt, FloatFormat):
        levels = fmt.levels()
        nearest = levels[(v.detach().unsqueeze(-1) - levels).abs().argmin(-1)]
        step = float(levels[-1] - levels[-2])
        inside, end = v.abs() <= fmt.max + step / 2, fmt.max * v.sign()
    else:
        nearest = v.detach().round()
        inside = (nearest + point >= fmt.qmin) & (nearest + point <= fmt.qmax)
        end = (nearest + point).clamp(fmt.qmin, fmt.qmax) - point
    return torch.where(inside, v + (nearest - v).detach(), end.detach()) * scale


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", ["int4", "uint4", "int8", "fp8_e4m3", "fp4_e2m1"])
def test_gradients_are_those_of_the_formula(format: str, granularity: str, device: torch.device) -> None:
    axis, block, shape = GRANULARITIES[granularity]
    fmt = parse_format(format)
    largest = fmt.max if isinstance(fmt, FloatFormat) else fmt.qmax
    scale = (rand(1, *shape, seed=2)[0].abs() + 0.5) / (largest / 2)
    point = torch.full(shape, 5 if format == "uint4" else 0, dtype=torch.int32)
    which = numbers(axis, block, shape)
    x, g = rand(3, 6, 10), rand(3, 6, 10, seed=3)
    expected_x, expected_scale = x.double().requires_grad_(), scale.double().requires_grad_()
    wanted = by_formula(expected_x, expected_scale.flatten()[which], point.flatten()[which], format)
    wanted.backward(g.double())
    x, scale, point, g = (t.to(device) for t in (x, scale, point, g))
    x.requires_grad_()
    scale.requires_grad_()
    y = ops.fake_quantize(x, scale, point, format, axis, block)
    codes = ops.quantize(x.detach(), scale.detach(), point, format, axis, block)
    assert torch.equal(y, ops.dequantize(codes, scale.detach(), point, format, axis, block))
    y.backward(g)
    assert x.grad is not None
    assert scale.grad is not None
    assert expected_scale.grad is not None
    assert expected_x.grad is not None
    inside = (expected_x.grad != 0).float().mean()
    assert 0.5 < float(inside) < 1, "some values saturate, most do not"
    torch.testing.assert_close(x.grad.cpu().double(), expected_x.grad, rtol=1e-6, atol=1e-7)
    factor = (x.numel() / scale.numel() * largest) ** -0.5
    # A position of up to `largest` steps has that many float32 roundings of its last bit.
    error = 4 * largest * torch.finfo(torch.float32).eps * float(g.abs().sum()) * factor
    torch.testing.assert_close(scale.grad.cpu().double(), expected_scale.grad * factor, rtol=0, atol=error)


def test_narrower_codes_saturate_earlier() -> None:
    x = torch.tensor([-130.0, -127.4, 0.0, 126.4, 128.0], requires_grad=True)
    y = ops.fake_quantize(x, torch.ones(()), torch.zeros((), dtype=torch.int32), "int8", None, 0, -127, 127)
    y.sum().backward()
    assert y.tolist() == [-127, -127, 0, 126, 127]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_no_value_that_is_no_number_has_a_gradient() -> None:
    x = torch.tensor([1.0, float("nan")], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    y = ops.fake_quantize(x, scale, torch.zeros((), dtype=torch.int32), "int8")
    codes = ops.quantize(x, scale, torch.zeros((), dtype=torch.int32), "int8")
    assert torch.equal(y, ops.dequantize(codes, scale.detach(), torch.zeros((), dtype=torch.int32), "int8"))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 0]


@pytest.mark.parametrize("format", ["int4", "fp8_e4m3"])
def test_codes_have_no_gradient_and_their_values_have_that_of_the_scale(format: str) -> None:
    x, scale = rand(4, 8).requires_grad_(), (rand(4, 2).abs() + 0.1).requires_grad_()
    point = torch.ones(4, 2, dtype=torch.int32)
    codes = ops.quantize(x, scale, point, format, 1, 4)
    assert not codes.requires_grad
    ops.dequantize(codes, scale, point, format, 1, 4).sum().backward()
    shifted = codes.float() - (1 if format == "int4" else 0)
    assert x.grad is None
    torch.testing.assert_close(scale.grad, shifted.unflatten(1, (2, 4)).sum(-1))


def test_the_scales_that_are_measured_are_constants_to_the_gradient() -> None:
    x = rand(4, 8).requires_grad_()
    scale, point = ops.dynamic_qparams(x, "int8", "symmetric", 1, -1)
    assert not scale.requires_grad
    ops.fake_quantize(x, scale, point, "int8", 1, -1).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 8))


def test_the_sum_over_what_shares_a_scale_is_the_adjoint_of_spreading_it() -> None:
    for axis, block, shape in GRANULARITIES.values():
        layout = Layout.of((3, 6, 10), axis, block)
        scale, values = rand(1, *shape)[0].double(), rand(3, 6, 10, seed=2).double()
        total = layout.total(values, shape)
        assert total.shape == shape
        torch.testing.assert_close((layout.spread(scale) * values).sum(), (scale * total).sum())


def test_grouped_products_have_the_gradients_of_their_groups() -> None:
    x, weight = rand(10, 4).requires_grad_(), rand(3, 4, 8).requires_grad_()
    g = rand(10, 8, seed=3)
    apart = torch.cat([x[:2] @ weight[0], x[2:7] @ weight[2], torch.zeros(3, 8)])
    wanted = torch.autograd.grad(apart, (x, weight), g)
    together = ops.grouped_mm(x, weight, torch.tensor([2, 2, 7], dtype=torch.int32))
    torch.testing.assert_close(torch.autograd.grad(together, (x, weight), g), wanted)


def test_where_codes_are_read_by_something_else_a_warning_says_so() -> None:
    graph = Graph()
    x, scale, point = graph.placeholder("x"), graph.get_attr("scale"), graph.get_attr("point")
    codes = graph.call_function(torch.ops.quark_fx.quantize.default, (x, scale, point, "int8"))
    back = graph.call_function(torch.ops.quark_fx.dequantize.default, (codes, scale, point, "int8"))
    graph.output((back, graph.call_function(torch.ops.aten.abs.default, (codes,))))
    gm = GraphModule({"scale": torch.tensor(0.1), "point": torch.zeros((), dtype=torch.int32)}, graph)
    with pytest.warns(
        UserWarning, match=r"no gradient flows through quark_fx\.quantize\.default at %quantize.*aten\.abs"
    ):
        found = run_with_gradients(gm, rand(4).requires_grad_())
    assert not found[0].requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_with_gradients(gm, rand(4))


# Models.

TOKENS = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[type[nn.Module], Tensor]] = {
    **dict.fromkeys(("int8_static", "xint8", "mxfp4", "w4a16_rtn"), (Cnn, rand(4, 3, 8, 8))),
    **dict.fromkeys(("int8_dynamic", "int4_weight_only", "fp8_static", "bf16", "nvfp4"), (Mlp, TOKENS)),
}
"""By preset: a model, and its batch."""


@cache
def quantized(name: str) -> tuple[qfx.QuantizedModel, Tensor]:
    model, x = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return qfx.quantize(seeded(model()), name, [x], progress=False), x


def steps(qat: nn.Module, x: Tensor, count: int = 3, rate: float = 1e-2) -> None:
    """Take some steps towards nothing in particular."""
    optimizer = torch.optim.Adam(qat.parameters(), lr=rate)
    for _ in range(count):
        optimizer.zero_grad()
        y = qat(x)
        (y - rand(*y.shape, seed=5)).square().mean().backward()
        assert [n for n, p in qat.named_parameters() if p.grad is None] == []
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_what_is_trained_is_what_is_stored(name: str, tmp_path: Path) -> None:
    qmodel, x = quantized(name)
    qat = qfx.prepare_qat(qmodel, scales=True)
    assert torch.equal(qat(x), qmodel(x))
    for key, tensor in stored_tensors(qat.convert().graph_module).items():
        same = stored_tensors(qmodel.graph_module)[key]
        assert tensor.dtype == same.dtype
        assert torch.equal(tensor.double(), same.double()), key
    before = copy.deepcopy(qmodel)
    steps(qat, x)
    result = qat.convert()
    assert torch.equal(result(x), qat(x))
    assert not torch.equal(result(x), qmodel(x))
    assert torch.equal(before(x), qmodel(x)), "the model that it was made of stays"
    result.save(tmp_path)
    assert torch.equal(qfx.load(tmp_path)(x), qat(x))


@pytest.mark.parametrize("name", ["int8_static", "int8_dynamic", "fp8_static"])
def test_the_original_module_trains_the_same_parameters(name: str) -> None:
    qmodel, x = quantized(name)
    qat = qfx.prepare_qat(qmodel, scales=True)
    module = qat.eager()
    assert type(module) is CASES[name][0]
    assert {id(p) for p in module.parameters()} == {id(p) for p in qat.parameters()}
    steps(module, x)
    assert torch.equal(module(x), qat(x))
    assert torch.equal(qat.convert()(x), qat(x))
    assert not torch.equal(qat(x), qmodel(x))


def test_a_model_that_was_loaded_trains_the_same_parameters(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.register_buffer("positions", torch.arange(8.0))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x).tanh() * self.gain + self.positions
            return y

    x = rand(4, 8)
    qmodel = qfx.quantize(seeded(Positions()), "int8_static", [x], progress=False)
    qmodel.save(tmp_path)
    for which in (qmodel, qfx.load(tmp_path)):
        qat = qfx.prepare_qat(which)
        assert sorted(tuple(p.shape) for p in qat.parameters()) == [(8,), (8,), (8, 8)]
        steps(qat, x)
        assert torch.equal(qat.convert()(x), qat(x))


def test_scales_are_learned_where_any_is_allowed() -> None:
    def learned(qat: QATModel) -> set[str]:
        return {name for name, _ in qat.named_parameters() if name.endswith("scale")}

    static, shifts = quantized("int8_static")[0], quantized("xint8")[0]
    assert not learned(qfx.prepare_qat(static))
    assert not learned(qfx.prepare_qat(shifts, scales=True))
    found = learned(qfx.prepare_qat(static, scales=True))
    assert "graph_module.stem.0.weight_quantizer.scale" in found
    assert any(name.startswith("graph_module.x_quantizer") for name in found)
    assert not any("bias" in name for name in found)


def test_a_learned_scale_stays_above_a_tenth_of_the_one_it_started_at() -> None:
    qmodel, x = quantized("int8_static")
    qat = qfx.prepare_qat(qmodel, scales=True)
    quantizer: Any = qat.get_submodule("graph_module.x_quantizer")
    with torch.no_grad():
        start = quantizer.scale.clone()
        quantizer.scale.fill_(-1.0)
    qat(x).sum().backward()
    assert quantizer.scale.grad is not None
    assert float(quantizer.scale.grad) != 0, "so it finds back"
    scale = stored_tensors(qat.convert().graph_module)["x_quantizer_scale"]
    torch.testing.assert_close(scale, start / 10)


def test_an_integer_bias_follows_the_scales_that_are_learned() -> None:
    qmodel, x = quantized("int8_static")
    qat = qfx.prepare_qat(qmodel, scales=True)
    steps(qat, x)
    tensors = stored_tensors(qat.convert().graph_module)
    was = stored_tensors(qmodel.graph_module)
    assert not torch.equal(tensors["stem.0.bias_scale"], was["stem.0.bias_scale"])
    product = tensors["x_quantizer_scale"] * tensors["stem.0.weight_scale"]
    assert torch.equal(tensors["stem.0.bias_scale"], product)


@pytest.mark.parametrize("target", ["onnx", "onnx_vnni"])
def test_pairs_of_codes_are_kept_within_16_bits(target: str) -> None:
    model, x = seeded(nn.Sequential(nn.Linear(8, 4))), rand(4, 8)
    qmodel = qfx.quantize(model, preset("int8_static").replace(target=target), [x], progress=False)
    qat = qfx.prepare_qat(qmodel)
    with torch.no_grad():
        dict(qat.named_parameters())["graph_module.0.weight"].fill_(100.0)
    result = qat.convert()
    assert torch.equal(result(x), qat(x))
    codes = stored_tensors(result.graph_module)["0.weight_codes"]
    bound = PairBound.of_product(128, 2, 1)
    assert bool(bound.exceeded(codes).any()) == (target == "onnx_vnni")
    assert int(codes.max()) == (64 if target == "onnx" else 127)
    qat(x).sum().backward()
    assert all(p.grad is not None for p in qat.parameters())


def test_symmetric_codes_stay_symmetric() -> None:
    qmodel, _ = quantized("int8_dynamic")
    qat = qfx.prepare_qat(qmodel)
    with torch.no_grad():
        dict(qat.named_parameters())["graph_module.down.weight"].fill_(-100.0)
    codes = stored_tensors(qat.convert().graph_module)["down.weight_codes"]
    assert int(codes.min()) >= -127


def test_a_tied_table_is_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(ids))
            return y

    ids = torch.arange(6).reshape(2, 3)
    qmodel = qfx.quantize(seeded(Tied()), "int8_weight_only", [ids], progress=False)
    qat = qfx.prepare_qat(qmodel, scales=True)
    assert sorted(tuple(p.shape) for p in qat.parameters()) == [(12,), (12, 8)]
    steps(qat, ids)
    assert torch.equal(qat.convert()(ids), qat(ids))


def test_a_table_that_is_cast_for_one_reader_and_not_for_another_is_one_parameter() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.table(ids)
            y: Tensor = self.head((rows + rows.float().square()).to(rows.dtype))
            return y

    ids = torch.arange(6).reshape(2, 3)
    config = preset("int8_dynamic").replace(exclude=("table",))
    qat = qfx.prepare_qat(qfx.quantize(seeded(Half()).to(torch.bfloat16), config, [ids], progress=False))
    assert sorted(tuple(p.shape) for p in qat.parameters()) == [(12,), (12, 8), (12, 8)]
    steps(qat, ids)
    assert torch.equal(qat.convert()(ids), qat(ids))


def test_the_report_has_what_training_left() -> None:
    qmodel, x = quantized("int8_static")
    qat = qfx.prepare_qat(qmodel, scales=True)
    steps(qat, x)
    report = qat.convert().report()
    tensors = stored_tensors(qat.convert().graph_module)
    row = next(row for row in report if row.name == "stem.0")
    assert row.scale_max == float(tensors["stem.0.weight_scale"].max())
    real = dict(qat.named_parameters())["graph_module.stem.0.weight"].detach()
    shape = (-1, 1, 1, 1)
    stored = tensors["stem.0.weight_codes"] * tensors["stem.0.weight_scale"].reshape(shape)
    assert row.sqnr == pytest.approx(20 * float((real.norm() / (real - stored).norm()).log10()), rel=1e-4)
    assert report.passes[-1].name == "QAT"
    assert {change.name for change in report.passes[-1].changes} >= {"stem.0.weight", "head.weight"}


def test_copies_and_state_dicts_continue_the_training() -> None:
    qmodel, x = quantized("int8_static")
    qat = qfx.prepare_qat(qmodel, scales=True)
    steps(qat, x)
    copied, again = copy.deepcopy(qat), qfx.prepare_qat(qmodel, scales=True)
    again.load_state_dict(qat.state_dict())
    for other in (copied, again):
        assert torch.equal(other(x), qat(x))
        assert torch.equal(other.convert()(x), qat(x))
    steps(copied, x)
    assert not torch.equal(copied(x), qat(x))
    with pytest.raises(RuntimeError, match="float32"):
        qat.half()


class _Normalized(nn.Module):
    """Has a batch norm that nothing folds, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last((self.norm(x) + self.shift).relu())
        return y


FREE_POINTS = qfx.QuantConfig(
    weight=qfx.TensorSpec(format=UINT4, granularity=qfx.Granularity.CHANNEL, symmetry=qfx.Symmetry.ASYMMETRIC),
    input=qfx.TensorSpec(format=qfx.formats.UINT8, symmetry=qfx.Symmetry.ASYMMETRIC),
).replace(target="torch")


@pytest.mark.parametrize("scales", [False, True])
def test_an_average_a_loaded_state_and_a_copy_are_converted_with_their_own_state(scales: bool) -> None:
    x, other = rand(32, 8), 3 * rand(32, 8, seed=7) + 1
    model = seeded(_Normalized())
    qat = qfx.prepare_qat(qfx.quantize(model, FREE_POINTS, [x], progress=False), scales=scales)
    average = AveragedModel(qat, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    points = {name: b.clone() for name, b in average.named_buffers() if name.endswith("zero_point")}
    for _ in range(9):
        steps(qat, x, 1, 0.05)
        average.update_parameters(qat)
    assert len(points) == 2
    assert all(torch.equal(b, points[name]) for name, b in average.named_buffers() if name in points), "they stay"
    elsewhere = qfx.prepare_qat(qfx.quantize(_Normalized().eval(), FREE_POINTS, [other], progress=False), scales=scales)
    loaded = qfx.prepare_qat(qfx.quantize(model, FREE_POINTS, [x], progress=False), scales=scales)
    loaded.load_state_dict(elsewhere.state_dict())
    assert torch.equal(loaded(x), elsewhere(x))
    written = copy.deepcopy(qat)
    with torch.no_grad():
        for buffer in written.buffers():
            buffer += 1 if buffer.dim() == 0 else 0.25 * buffer.abs()
    averaged: Any = average.module
    for other_model in (averaged, loaded, written):
        result = other_model.convert()
        assert torch.equal(result(x), other_model(x))
        assert torch.equal(other_model.eager()(x), other_model(x))
        assert torch.equal(result.eager()(x), other_model(x))
        assert not torch.equal(result(x), qat.convert()(x))


def test_statistics_that_the_original_module_updates_are_those_of_the_graph() -> None:
    x = rand(32, 8)
    qat = qfx.prepare_qat(qfx.quantize(seeded(_Normalized()), FREE_POINTS, [x], progress=False))
    module, before = qat.eager().train(), qat(x)
    module(3 * x + 1)
    assert torch.equal(module.eval()(x), qat(x))
    assert torch.equal(qat.convert()(x), qat(x))
    assert not torch.equal(qat(x), before)
    assert torch.equal(qat.quantized(x), before)


def test_a_compiled_model_has_the_same_gradients() -> None:
    qmodel, x = quantized("int8_dynamic")
    qat = qfx.prepare_qat(qmodel)
    qat(x).square().sum().backward()
    plain = [p.grad for p in qat.parameters()]
    qat.zero_grad(set_to_none=True)
    torch.compile(qat, backend="aot_eager")(x).square().sum().backward()
    for ours, wanted in zip((p.grad for p in qat.parameters()), plain, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_gradients_reach_parameters_of_the_original_module_through_its_rounding() -> None:
    module = quantized("int8_dynamic")[0].eager()
    module(TOKENS).square().sum().backward()
    found: Any = module
    assert found.norm.weight.grad is not None
    assert float(found.up.bias.grad.abs().sum()) > 0, "which is read before an activation is rounded"


@on_devices
def test_rounding_waits_for_no_device(device: torch.device) -> None:
    x = rand(8, 16).to(device).requires_grad_()
    point = torch.zeros((), dtype=torch.int32, device=device)
    quantizer = FakeQuantize(
        nn.Parameter(torch.full((8,), 0.01, device=device)),
        point,
        preset("int8_static").weight.scheme,  # type: ignore[union-attr]
        0,
        pairs=PairBound.of_product(128, 2, 1),
    )
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        quantizer(x).sum().backward()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None


# What it is for.

FOUR_BITS = qfx.QuantConfig(
    weight=qfx.TensorSpec(format=INT4, granularity=qfx.Granularity.CHANNEL),
    input=qfx.TensorSpec(format=UINT4),
    output=qfx.TensorSpec(format=UINT4),
)


def distilled(network: Trained, qmodel: qfx.QuantizedModel, *, scales: bool, epochs: int = 4) -> QATModel:
    """Train towards the outputs of the float model for the calibration images."""
    images = torch.cat(network.calibration)
    qat = qfx.prepare_qat(qmodel, scales=scales)
    steps_, others = ([p for n, p in qat.named_parameters() if n.endswith("scale") == is_scale] for is_scale in (1, 0))
    groups = [{"params": others, "lr": 1e-3}, {"params": steps_, "lr": 1e-4}]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    with torch.no_grad():
        wanted = network.model(images).softmax(1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(images) // 60)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(60):
            optimizer.zero_grad()
            F.cross_entropy(qat(images[batch]), wanted[batch]).backward()
            optimizer.step()
            decay.step()
    return qat


@pytest.mark.parametrize("scales", all_but([False, True], [False]))
def test_training_wins_back_most_of_what_4_bits_lose(scales: bool, tmp_path: Path) -> None:
    network = trained("mobilenet")
    qmodel = qfx.quantize(network.model, FOUR_BITS, network.calibration, progress=False)
    real, rounded = network.accuracy(network.model), network.accuracy(qmodel)
    assert rounded < real - 5, "worth training"
    qat = distilled(network, qmodel, scales=scales)
    result = qat.convert()
    assert network.accuracy(result) > (real + rounded) / 2
    images = network.images[:64]
    with torch.no_grad():
        assert torch.equal(result(images), qat(images))
    file = qfx.export.onnx(result, tmp_path / "model.onnx")
    assert qfx.verify(result, file, [images], per_node=True).max_steps <= 1


def test_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "qat.md").read_text(encoding="utf-8")
    module = ModuleType("qat_page")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/qat.md", "exec"), module.__dict__)
    real, rounded, after = (float(share) for share in re.findall(r"([\d.]+)%", capsys.readouterr().out))
    assert rounded < after
    assert real > 85


def test_a_parameter_that_diverged_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    trained = qfx.prepare_qat(qfx.quantize(model, "int8_weight_only", [torch.ones(2, 4)], progress=False))
    with torch.no_grad():
        next(p for name, p in trained.named_parameters() if name.endswith("weight"))[0, 0] = torch.nan
    with pytest.raises(qfx.CalibrationError, match=r"parameter .*weight holds NaN or infinity: training diverged"):
        trained.convert()
