"""`fold_batch_norm` folds affine maps by constants in every spelling, and only where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from tiny import calls, cnn, images, quantize, rand
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks import affine_spellings
from benchmarks.affine_spellings import Cell
from quark_fx.graph.nodes import module_path
from quark_fx.graph.pass_manager import run_passes
from quark_fx.passes import fold_batch_norm
from quark_fx.presets import INT8_WEIGHT_ONLY


class Net(nn.Module):
    """Two operators with a function before, between, and after them."""

    v: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Tensor], *, padding: int = 0, linear: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (
            nn.Linear(4, 4) if linear else nn.Conv2d(4, 4, 3, padding=padding),
            nn.Linear(4, 4) if linear else nn.Conv2d(4, 4, 1),
        )
        self.g, self.c, self.one = nn.Parameter(rand(4) - 0.3), nn.Parameter(rand(4, seed=2)), nn.Parameter(rand(1))
        self.row = nn.Parameter(rand(6, seed=3))
        self.register_buffer("v", rand(4, seed=4).abs() + 0.2)
        self.plain = rand(4, 1, 1, seed=5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def shaped(x: Tensor) -> Tensor:
    return x.view(-1, 1, 1)


def folds(
    function: Callable[[Any, Tensor], Tensor], expected: int, shape: tuple[int, ...] = (2, 4, 6, 6), **net: Any
) -> Any:
    """Fold, require the same function and the number of maps, and return the graph."""
    model, x = Net(function, **net).eval(), rand(*shape, seed=9)
    gm, (record,) = run_passes(qfx.capture_graph(model, (x,)).module, [fold_batch_norm])
    with torch.no_grad():
        real, got = model(x), gm(x)[0]
    torch.testing.assert_close(got, real, rtol=0, atol=1e-5 * float(real.abs().max()), equal_nan=True)
    assert record.rewrites == expected
    return gm


@pytest.mark.parametrize(
    "cell",
    [
        Cell("frozen", "conv2d", "operator"),
        Cell("mean and deviation", "conv1d", "residual"),
        Cell("chain", "conv3d", "output"),
        Cell("addcmul", "depthwise", "operator"),
        Cell("expanded", "grouped", "operator"),
        Cell("rsub", "transposed2d", "operator"),
        Cell("channels last", "linear", "operator"),
        Cell("operands swapped", "addmm", "operator"),
        Cell("numbers", "linear", "operator"),
        Cell("two products", "conv2d", "operator"),
        Cell("chunks", "transposed1d", "residual"),
        Cell("groups", "linear", "operator"),
        Cell("where", "none", "before"),
        Cell("alpha", "none", "before"),
    ],
    ids=lambda cell: " ".join(vars(cell).values()),
)
def test_a_spelling_has_the_error_and_the_kernels_of_a_batch_norm(cell: Cell) -> None:
    assert not affine_spellings.fault(cell)


def test_each_spelling_folds() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chosen = [cell for cell in affine_spellings.cells() if cell.producer in ("conv2d", "linear", "none")]
            spellings = affine_spellings.SPELLINGS | affine_spellings.UNIFORM
            chosen = [cell for cell in chosen if cell.consumer in ("operator", "before")]
            self.ranks = [affine_spellings.PRODUCERS[cell.producer][1] for cell in chosen]
            self.nets = nn.ModuleList(affine_spellings.Network(cell, spellings[cell.spelling]) for cell in chosen)

        def forward(self, image: Tensor, row: Tensor) -> list[Tensor]:
            return [net(image if rank else row) for rank, net in zip(self.ranks, self.nets, strict=True)]

    model, inputs = All().eval(), (rand(2, 8, 5, 5), rand(2, 8))
    gm, _ = run_passes(qfx.capture_graph(model, inputs).module, [fold_batch_norm])
    names = {str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"}
    assert names == {"conv2d", "linear", "relu"}
    with torch.no_grad():
        torch.testing.assert_close(list(gm(*inputs)), model(*inputs), rtol=1e-4, atol=1e-4)


def test_what_varies_along_another_dimension_stays() -> None:
    for function in (
        lambda m, x: m.a(x) * m.row[:4],
        lambda m, x: m.a(x) * m.row[:4, None],
        lambda m, x: m.a(x).transpose(1, 3) * shaped(m.g),
        lambda m, x: m.a(x) + m.row[:4].expand(4, 4, 4),
        lambda m, x: m.a(x) * x.mean(),
        lambda m, x: m.a(x) * m.a(x),
        lambda m, x: torch.tensor(1.0) / m.a(x),
        lambda m, x: torch.div(m.a(x), 2, rounding_mode="floor"),
        lambda m, x: m.a(x) * torch.randn_like(m.g).view(-1, 1, 1) * 0,
        lambda m, x: (y := m.a(x)) + y.transpose(2, 3) * shaped(m.g),
        lambda m, x: (y := m.a(x)) + y.flip(1),
        lambda m, x: torch.cat([part * 2 for part in reversed(m.a(x).chunk(2, 1))], 1),
        lambda m, x: torch.cat([part * 2 for part in m.a(x).chunk(2, 2)], 2),
        lambda m, x: m.a(x).reshape(2, 2, -1, 4, 4).mul(m.g[:2, None, None, None, None]).reshape(2, 4, 4, 4),
        lambda m, x: torch.where(m.row[:4] > 0, y := m.a(x), -y),
        lambda m, x: torch.where(x[:, :, :4, :4] > 0, y := m.a(x), -y),
        lambda m, x: torch.addcmul(shaped(m.g), y := m.a(x), y),
        lambda m, x: torch.lerp(shaped(m.g), y := m.a(x), y),
    ):
        folds(function, 0)
    folds(lambda m, x: m.a(x) * m.g[:, None], 0, (2, 4, 4), linear=True)
    folds(lambda m, x: m.a(x)[:, None] * m.row[:4, None], 0, (4, 6, 6))  # rows of an image without a batch


def test_what_something_else_reads_keeps_its_map() -> None:
    folds(lambda m, x: (y := m.a(x)).relu() + y * shaped(m.g), 0)
    folds(lambda m, x: m.b(y := m.a(x).relu() * shaped(m.g)) + y, 0)
    folds(lambda m, x: torch.cat([y := m.a(x), y * shaped(m.g)]), 0)
    folds(lambda m, x: m.a(x) * shaped(m.g) + x[:, :, 1:-1, 1:-1], 1)


def test_before_an_operator_that_pads_a_factor_folds_and_an_offset_stays() -> None:
    gm = folds(lambda m, x: m.a((x.relu() - shaped(m.c)) / shaped(m.v)), 1, padding=1)
    assert len(calls(gm, "aten.sub")) == 1
    folds(lambda m, x: m.a((x.relu() - shaped(m.c)) / shaped(m.v)), 2)
    folds(lambda m, x: m.a(x * shaped(m.v) + shaped(m.c)), 0, padding=1)


def test_the_weight_of_a_normalization_and_numbers_beside_matrix_products_stay() -> None:
    def norm(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.b(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * m.g)
        return out

    for function in (norm, lambda m, x: m.a(x) * 0.5, lambda m, x: m.a(x) * m.one + 1, lambda m, x: m.b(x.tanh() / 3)):
        folds(function, 0, (2, 3, 4), linear=True)
    folds(lambda m, x: m.a(x) * m.g, 1, (2, 3, 4), linear=True)
    folds(lambda m, x: m.a(x) * 0.5, 1)


@pytest.mark.parametrize("value", [0.0, -2.0, 1e30, float("inf"), float("nan")])
def test_odd_factors(value: float) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.a(x) * shaped(m.v)
        return out

    model, x = Net(function).eval(), rand(2, 4, 6, 6)
    model.v[1] = value
    graph = qfx.capture_graph(model, (x,)).module
    if value != value:
        with pytest.raises(qfx.CalibrationError, match=r"%\w+ of aten\.mul\.Tensor .* holds NaN"):
            run_passes(graph, [fold_batch_norm])
        return
    gm, (record,) = run_passes(graph, [fold_batch_norm])
    assert record.rewrites == (value != float("inf"))
    torch.testing.assert_close(gm(x)[0], model(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    masked = Net(lambda m, x: m.a(x) + shaped(m.v)).eval()
    masked.v[1] = -float("inf")
    (record,) = run_passes(qfx.capture_graph(masked, (x,)).module, [fold_batch_norm])[1]
    assert record.rewrites == 0


def test_constants_that_layers_share_fold_into_each() -> None:
    gm = folds(lambda m, x: m.b((m.a(x) * shaped(m.g) + shaped(m.c)).relu()) * shaped(m.g) - shaped(m.c), 4)
    assert not calls(gm, "aten.mul")
    twice = folds(lambda m, x: m.b((m.b(x) * shaped(m.g)).relu()) * shaped(m.v), 2)
    assert len({str(node.args[1]) for node in calls(twice, "aten.conv2d")}) == 2


MAPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "parameters": lambda m, x: m.b((shaped(m.c) + m.a(x) * shaped(m.g)).relu()),
    "numbers": lambda m, x: m.b((m.a(x) * 2 - 1).relu()),
    "computed": lambda m, x: m.b((m.a(x) * shaped(m.g * (m.v + 1e-5).rsqrt()) + shaped(m.c)).relu()),
    "input": lambda m, x: m.a((x - shaped(m.c)) / shaped(m.v)),
    "layer scale": lambda m, x: m.b(m.a(x)) * shaped(m.g) + x[:, :, 1:-1, 1:-1],
    "two products": lambda m, x: m.b(((y := m.a(x)) * shaped(m.g) + y * shaped(m.v) - shaped(m.c)).relu()),
    "parts": lambda m, x: m.b(torch.cat([y * (i + 1.5) for i, y in enumerate(m.a(x).chunk(2, 1))], 1).relu()),
    "groups": lambda m, x: m.b((m.a(x).unflatten(1, (2, 2)) * m.g.view(2, 2, 1, 1)).flatten(1, 2).relu()),
    "attribute": lambda m, x: m.b((m.a(x) + m.plain).relu()),
}


@pytest.mark.parametrize("name", MAPS)
def test_modules_and_stored_models_compute_what_a_folded_graph_does(name: str, tmp_path: Path) -> None:
    model, data = Net(MAPS[name]).eval(), [rand(4, 4, 6, 6, seed=i) for i in range(2)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    qmodel = quantize(model, "int8_static", data)
    assert not [node for kind in ("mul", "sub", "div") for node in calls(qmodel, f"aten.{kind}.")]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    qmodel.save(tmp_path)
    other = Net(MAPS[name]).eval()
    with torch.no_grad():
        for tensor in (*other.parameters(), other.v):
            tensor.add_(1)
        expected = qmodel(data[0])
        step = float(expected.abs().max()) / 127
        for eager in (qmodel.eager(), qfx.load(tmp_path).eager(other)):
            got = eager(data[0])
            # A value that a module's code undoes and applies again may round to the next code.
            assert float((got - expected).abs().max()) <= step
            assert float((got - expected).abs().mean()) <= step / 50
    if name == "attribute":
        other.plain = other.plain + 1
        with pytest.raises(qfx.QuarkError, match="tensor plain"):
            qfx.load(tmp_path).eager(other)


class Functional(nn.Module):
    """Operators outside of modules, with parameters of their own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.head = function, nn.Linear(4, 4)
        for name, size in {"w": (4, 4), "k": (4, 4, 1), "t": (4,), "u": (4,), "bias": (4,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


F = torch.nn.functional
FUNCTIONAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum before": lambda m, x: F.linear(x + m.t, m.w),
    "sum with what is called bias": lambda m, x: F.linear(x + m.bias, m.w),
    "constant sum": lambda m, x: F.linear(x.relu() + (m.t + m.u), m.w),
    "map before and factor after": lambda m, x: m.head(F.relu(F.linear((x + m.t) * m.t.exp(), m.w, m.u) * 2)),
    "factors of zero": lambda m, x: m.head(F.relu(F.linear(x, m.w) * (m.t * 0))),
    "shared weight and table": lambda m, x: F.linear(F.relu(F.linear(x + m.t, m.w)) + m.t, m.w),
    "module and operator": lambda m, x: F.linear(m.head(x * (m.t + m.u)) * m.t - m.u, m.w),
    "convolution": lambda m, x: F.conv1d(x.mT / m.t[:, None], m.k) * 3,
}


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_around_computes_the_maps_that_no_module_can_undo(nested: bool, tmp_path: Path) -> None:
    data = [rand(2, 3, 4, seed=i) for i in range(2)]

    def make(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
        return nn.Sequential(Functional(function), nn.ReLU()).eval() if nested else Functional(function).eval()

    for name, function in FUNCTIONAL.items():
        qmodel = quantize(make(function), "int8_static", data)
        expected = qmodel(data[0])
        torch.testing.assert_close(qmodel.eager()(data[0]), expected, msg=name)
        qmodel.save(tmp_path / name)
        other = make(function)
        with torch.no_grad():
            for tensor in other.parameters():
                tensor.add_(1)
        torch.testing.assert_close(qfx.load(tmp_path / name).eager(other)(data[0]), expected, msg=name)


def test_a_map_that_no_module_can_compute_is_named() -> None:
    class Two(Functional):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            assert y is not None
            return self.function(self, x) + y

    data = [(rand(2, 3, 4), rand(2, 3, 4, seed=1))]
    for name, reason in {
        "map before and factor after": "quantize without fold_batch_norm",
        "sum before": "has none in the float model",
    }.items():
        qmodel = quantize(Two(FUNCTIONAL[name]).eval(), INT8_WEIGHT_ONLY, data)
        with pytest.raises(qfx.QuarkError, match=reason):
            qmodel.eager()
        quantize(Two(FUNCTIONAL[name]).eval(), INT8_WEIGHT_ONLY.replace(passes=()), data).eager()


def test_training_goes_on_from_a_folded_graph() -> None:
    model, data = Net(MAPS["computed"]).eval(), [rand(4, 4, 6, 6, seed=i) for i in range(2)]
    qmodel = quantize(model, "int8_static", data)
    qat = qfx.prepare_qat(qmodel)
    qat(data[0]).square().mean().backward()
    assert all(p.grad is not None for p in qat.parameters())
    torch.testing.assert_close(qat.convert()(data[0]), qmodel(data[0]), rtol=0, atol=0)


def test_a_residual_network_with_frozen_norms_has_the_kernels_of_one_with_batch_norms() -> None:
    plain = affine_spellings.measured(cnn(), images())
    frozen = affine_spellings.measured(affine_spellings.frozen(cnn()), images())
    assert frozen[1:] == plain[1:]
    assert abs(frozen[0] - plain[0]) < 0.5


def test_frozen_norms_of_a_detector_of_transformers_fold_and_its_attention_holds_codes() -> None:
    model = dict(affine_spellings.detectors())["DetrForObjectDetection"]()
    frozen = {name for name, module in model.named_modules() if "FrozenBatchNorm" in type(module).__name__}
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(2, 3, 64, 64)])
    nodes = [node for node in qmodel.graph_module.graph.nodes if node.op == "call_function"]
    assert len(frozen) == 12
    assert frozen.isdisjoint(module_path(node) for node in nodes)
    rows = {row.name: row.weight for row in qmodel.report() if not row.reason}
    assert len(rows) == len(list(qmodel.report()))
    assert {f"detector.model.encoder.layers.0.self_attn.{n}_proj" for n in "qkv"} <= rows.keys()


def test_analyze_measures_a_frozen_norm_as_a_batch_norm() -> None:
    def network(norm: Any) -> nn.Module:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 16, 3, bias=False)
        variance = 10 ** torch.linspace(-3, 3, 16)
        norm.running_var.copy_(variance)
        conv.weight.data *= variance.sqrt().view(-1, 1, 1, 1)
        return nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()

    data = [rand(2, 3, 9, 9, seed=i) for i in range(3)]
    plain, frozen = (
        qfx.analyze(network(norm), "int8_static", data)
        for norm in (nn.BatchNorm2d(16), torchvision.ops.FrozenBatchNorm2d(16))
    )
    assert frozen.error == pytest.approx(plain.error, rel=0.05)
    assert [row.name for row in frozen.rows] == [row.name for row in plain.rows]
