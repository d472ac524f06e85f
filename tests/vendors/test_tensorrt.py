"""Files for TensorRT, held to what its documentation says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from tiny import Residual, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.errors import ConfigError, ExportError
from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, target_name
from quark_fx.numbers import formats
from quark_fx.presets import INT8_STATIC, W4A16_RTN
from quark_fx.targets import TENSORRT
from quark_fx.vendors.nvidia.tensorrt import check, offenses

INT8 = qfx.TensorSpec(format=formats.INT8)
STATIC = INT8_STATIC.replace(target="tensorrt", input=INT8, output=INT8, bias=None)


class Branches(nn.Module):
    """A residual block, a transposed weight, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(3)
        self.head = nn.Linear(3, 5)
        self.weight = nn.Parameter(torch.zeros(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.avg_pool2d(self.block(x), 2)
        logits: Tensor = self.head(x.mean((2, 3))) @ self.weight
        return logits


@pytest.mark.parametrize(
    ("model", "data"),
    [(cnn(), images()), (mlp(), tokens()), (seeded(Branches()), images())],
    ids=["cnn", "mlp", "branches"],
)
def test_files_keep_to_the_rules_and_compute_what_torch_computes(
    model: nn.Module, data: list[Tensor], tmp_path: Path
) -> None:
    """ONNX Runtime computes them here."""
    qmodel = quantize(model, STATIC, data)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    graph = ir.load(file)
    assert graph.opset_imports[""] == 20
    assert not list(offenses(graph))
    assert qfx.verify(qmodel, file, data, per_node=True, optimize=False).max_steps <= 1
    coded = [node for node in graph.graph if node.op_type == "DequantizeLinear"]
    assert {node.inputs[0].dtype for node in coded if node.inputs[0] is not None} == {ir.DataType.INT8}


@pytest.mark.parametrize("size", [64, 128])
def test_int4_weights_lie_in_blocks_beside_float_activations(size: int, tmp_path: Path) -> None:
    """The first opset that has them is written; another layer stays in float, a third is int8 throughout."""
    network = seeded(nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 16), nn.Linear(16, 8)))
    wide = qfx.Override(pattern="3", weight=INT8.replace(granularity="channel"), input=INT8)
    config = W4A16_RTN.replace(target="tensorrt", group_size=size, overrides=(wide,), exclude=("2",))
    qmodel, data = quantize(network, config, [rand(4, 256)]), [rand(4, 256)]
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    graph = ir.load(file)
    assert graph.opset_imports[""] == 21
    assert not list(offenses(graph))
    assert qfx.verify(qmodel, file, data, optimize=False).max_steps <= 1
    coded = [node for node in graph.graph if node.op_type == "DequantizeLinear"]
    types = Counter(node.inputs[0].dtype for node in coded if node.inputs[0] is not None)
    assert types == {ir.DataType.INT4: 1, ir.DataType.INT8: 2}
    with pytest.raises(ExportError, match=r"opset 20 is too old for\n.*int4 in blocks needs opset 21"):
        qfx.export.onnx(qmodel, tmp_path / "old.onnx", opset=20)


class Turned(nn.Module):
    """A product whose weight has its inputs along dimension 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


INT4 = INT8.replace(format=formats.INT4, granularity="group", group_size=64)
UNFIT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[Tensor]]] = {
    "0: TensorRT supports int4 weights only in matrix products": (
        lambda: nn.Sequential(nn.Conv2d(64, 4, 1)),
        {"input": None},
        [rand(2, 64, 4, 4)],
    ),
    "0: TensorRT multiplies int4 weights by activations in float; set input=None": (
        lambda: nn.Sequential(nn.Linear(64, 4)),
        {},
        [rand(2, 64)],
    ),
    "0: TensorRT needs the scales of a transposed convolution along its inputs; set granularity='tensor'": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2)),
        {"weight": INT8.replace(granularity="channel")},
        [rand(2, 4, 4, 4)],
    ),
    "0: TensorRT supports int4 weights only in matrix products; set weight=None for it, or int8 with an input": (
        lambda: nn.Sequential(nn.ConvTranspose2d(64, 4, 2)),
        {"input": None},
        [rand(2, 64, 4, 4)],
    ),
    "0: 96 inputs are not a multiple of the group size 64; set weight=None for it": (
        lambda: nn.Sequential(nn.Linear(96, 4)),
        {"input": None},
        [rand(2, 96)],
    ),
    "0: 192 inputs are not a multiple of the group size 128; set group_size=64 for it": (
        lambda: nn.Sequential(Turned(192, 128)),
        {"weight": INT4.replace(group_size=128), "input": None},
        [rand(2, 192)],
    ),
    "0: TensorRT multiplies int8 weights by int8 activations only; set an input in int8, or weight=None": (
        lambda: nn.Sequential(nn.Linear(64, 4)),
        {"weight": INT8.replace(granularity="channel"), "input": None},
        [rand(2, 64)],
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_weights_that_tensorrt_has_no_kernel_for_are_refused_by_operator(message: str) -> None:
    make, changes, data = UNFIT[message]
    with pytest.raises(ConfigError, match=message):
        quantize(seeded(make()), STATIC.replace(**{"weight": INT4, "output": None, **changes}), data)


def test_a_file_for_onnx_runtime_breaks_the_rules_by_node(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    found = list(offenses(ir.load(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))))
    assert any("codes of UINT8" in line for line in found)
    assert any("codes of INT32" in line for line in found), "biases"


def test_embeddings_and_recurrent_layers_stay_in_float() -> None:
    nodes = quantize(mlp(), STATIC, tokens()).graph_module.graph.nodes
    assert not any(target_name(node) == "aten.embedding.default" and _is_coded(node) for node in nodes)
    rows = quantize(seeded(nn.LSTM(4, 3)), STATIC, [rand(2, 5, 4)]).report()
    assert all(row.reason for row in rows)


def _is_coded(node: Any) -> bool:
    return any(target_name(user) == DEQUANTIZE for user in (*node.users, *node.all_input_nodes))


def test_what_convolutions_make_is_not_rounded_before_an_addition() -> None:
    """The documentation calls it suboptimal: a pair between them keeps them from being one kernel."""
    network = seeded(nn.Sequential(Residual(3), nn.Conv2d(3, 4, 1)))
    graph = quantize(network, STATIC, images()).graph_module.graph
    (added,) = (node for node in graph.nodes if target_name(node) == "aten.add.Tensor")
    assert "aten.conv2d.default" in {target_name(node) for node in added.all_input_nodes}
    rounded = {target_name(node.all_input_nodes[0]) for node in graph.nodes if target_name(node) == QUANTIZE}
    assert rounded == {"placeholder", "aten.relu.default"}


REFUSED: dict[str, dict[str, Any]] = {
    "for weights, not int4; set": {"input": INT8.replace(format=formats.INT4)},
    "for weights, not int3; set": {"weight": INT4.replace(format=formats.INT3)},
    "int4 weights in blocks of 64 or 128": {"weight": INT4.replace(group_size=32)},
    "in blocks of 64 or 128; set granularity": {"weight": INT8.replace(format=formats.INT4, granularity="channel")},
    "scales in float16 are cast": {"weight": INT4.replace(scale="float16")},
    "for weights, not uint8; set": {"input": qfx.TensorSpec(format=formats.UINT8)},
    "not support zero points": {"weight": INT8.replace(symmetry="asymmetric")},
    "not support negative scales": {"weight": INT8.replace(symmetry="sign_aware")},
    "biases in float": {"bias": qfx.TensorSpec(format=formats.INT32)},
    "not per group": {"weight": INT8.replace(granularity="group", group_size=8)},
    "not per token": {"input": INT8.replace(granularity="token", dynamic=True), "output": None},
    "drop dynamic": {"input": INT8.replace(dynamic=True), "output": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_specs_that_it_does_not_read_are_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        STATIC.replace(**REFUSED[message])


# The rules, each broken ----------------------------------------------------------------------------------------------


def value(name: str, *shape: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def constant(array: Any, name: str = "constant") -> ir.Value:
    tensor = ir.tensor(np.asarray(array), name=name)
    return ir.Value(name=name, const_value=tensor, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype))


def pair(x: ir.Value, scale: Any = 0.5, zeros: Any = None, dtype: Any = np.int8, **attributes: Any) -> list[ir.Node]:
    """Return a quantizer and a dequantizer."""
    scales = constant(np.float32(scale), "scale")
    points = constant(np.zeros(np.shape(scale), dtype) if zeros is None else np.asarray(zeros, dtype), "points")
    quantizer = ir.node("QuantizeLinear", [x, scales, points], attributes, name="q")
    quantizer.outputs[0].dtype = points.dtype
    return [quantizer, ir.node("DequantizeLinear", [quantizer.outputs[0], scales, points], attributes, name="dq")]


def weight(*shape: int, axis: int, dtype: Any = np.int8) -> ir.Node:
    """Return the dequantizer of a constant with a scale for each channel."""
    scales = constant(np.ones(shape[axis], np.float32), "scales")
    return ir.node("DequantizeLinear", [constant(np.ones(shape, dtype), "codes"), scales], {"axis": axis}, name="w")


def product(
    operator: str, of_weight: ir.Node, activation: list[ir.Node] | None = None, **attributes: Any
) -> list[ir.Node]:
    """Return a product of an activation and a dequantized weight."""
    before = pair(value("x", 2, 3, 4, 4)) if activation is None else activation
    x = before[-1].outputs[0] if before else value("x", 2, 3, 4, 4)
    return [*before, of_weight, ir.node(operator, [x, of_weight.outputs[0]], attributes, name="product")]


def int4(*shape: int, axis: int, size: int = 64, of: Any = None) -> ir.Node:
    """Return the dequantizer of a constant in blocks along an axis."""
    blocks = [-(-n // size) if i == axis else n for i, n in enumerate(shape)]
    codes = constant(np.ones(shape, ml_dtypes.int4), "codes") if of is None else of
    scales = constant(np.ones(blocks, np.float32), "scales")
    return ir.node("DequantizeLinear", [codes, scales], {"axis": axis, "block_size": size}, name="w")


def alone(operator: str, of_weight: ir.Node, **attributes: Any) -> list[ir.Node]:
    """Return a product of a float activation and a dequantized weight."""
    return product(operator, of_weight, [], **attributes)


def turned(of_weight: ir.Node) -> list[ir.Node]:
    """Return a product with the transpose of a dequantized matrix."""
    turn = ir.node("Transpose", of_weight.outputs, {"perm": [1, 0]}, name="turn")
    before = pair(value("x", 2, 4))
    return [*before, of_weight, turn, ir.node("MatMul", [before[-1].outputs[0], turn.outputs[0]], name="product")]


def flattened() -> list[ir.Node]:
    """Return a quantized activation that is flattened."""
    nodes = pair(value("x", 2, 3, 4, 4))
    return [*nodes, ir.node("Flatten", nodes[-1].outputs, name="flat")]


X = value("x", 2, 3, 4, 4)
KEPT: dict[str, Callable[[], list[ir.Node]]] = {
    "codes that are flattened": lambda: product("Gemm", weight(4, 48, axis=0), flattened(), transB=1),
    "a pair": lambda: pair(value("x", 2, 3)),
    "a convolution": lambda: product("Conv", weight(4, 3, 1, 1, axis=0)),
    "a transposed convolution": lambda: product("ConvTranspose", weight(3, 4, 1, 1, axis=0)),
    "a product": lambda: product("MatMul", weight(4, 5, axis=1)),
    "a product with a transpose": lambda: turned(weight(5, 4, axis=0)),
    "a transposed Gemm": lambda: product("Gemm", weight(5, 4, axis=0), transB=1),
    "an int4 product": lambda: alone("MatMul", int4(128, 5, axis=0)),
    "an int4 product in blocks of 128": lambda: alone("MatMul", int4(5, 256, axis=1, size=128)),
    "an int4 Gemm": lambda: alone("Gemm", int4(5, 128, axis=1), transB=1),
    "a pool": lambda: [ir.node("MaxPool", [value("x", 1, 3, 4, 4)], {"dilations": [1, 1]}, name="pool")],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_documentation_allows_is_no_offense(name: str) -> None:
    assert not list(offenses(model(KEPT[name]())))


BROKEN: dict[str, Callable[[], list[ir.Node]]] = {
    "QLinearConv bad: its parser does not have this operator": lambda: [ir.node("QLinearConv", [X], name="bad")],
    "MatMulNBits bad: an operator of com.microsoft, not of ONNX": lambda: [
        ir.node("MatMulNBits", [X], domain="com.microsoft", name="bad")
    ],
    "TopK bad: sorted=0; it supports 1": lambda: [ir.node("TopK", [X], {"sorted": 0}, name="bad")],
    "Resize bad: mode=cubic; it supports nearest or linear": lambda: [
        ir.node("Resize", [X], {"mode": "cubic"}, name="bad")
    ],
    "MaxPool bad: a pool with dilations": lambda: [ir.node("MaxPool", [X], {"dilations": [2, 1]}, name="bad")],
    "QuantizeLinear q: codes of UINT8": lambda: pair(value("x", 2), dtype=np.uint8),
    "DequantizeLinear dq: codes of INT32": lambda: [
        ir.node("DequantizeLinear", [constant(np.ones(2, np.int32)), constant(np.float32(1))], name="dq")
    ],
    "QuantizeLinear q: zero points that are not": lambda: pair(value("x", 2), zeros=1),
    "QuantizeLinear q: scales that are not positive": lambda: pair(value("x", 2), 0.0),
    "QuantizeLinear bad: a scale that is not a constant": lambda: [
        ir.node("QuantizeLinear", [X, value("scale"), constant(np.int8(0))], name="bad")
    ],
    "QuantizeLinear bad: codes of UINT8; ": lambda: [
        ir.node("QuantizeLinear", [X, constant(np.float32(1))], name="bad")
    ],
    "QuantizeLinear q: INT8 in blocks": lambda: pair(value("x", 2, 4), np.ones((2, 2)), axis=1, block_size=2),
    "DequantizeLinear w: INT4 with blocks of 32; it supports blocks of 64 or 128": lambda: alone(
        "MatMul", int4(128, 5, axis=0, size=32)
    ),
    "DequantizeLinear w: INT4 with no blocks; it supports": lambda: alone(
        "MatMul", weight(4, 5, axis=1, dtype=ml_dtypes.int4)
    ),
    "DequantizeLinear w: INT4 in blocks along another dimension than the last two": lambda: alone(
        "MatMul", int4(64, 2, 3, axis=0)
    ),
    "DequantizeLinear w: INT4 in blocks of 64, which do not divide 96": lambda: alone("MatMul", int4(96, 5, axis=0)),
    "DequantizeLinear w: an activation in INT4, which it supports only for weights": lambda: [
        int4(64, 2, axis=0, of=value("x", 64, 2, dtype=ir.DataType.INT4))
    ],
    "Conv product: an int4 weight, which it supports for Gemm and MatMul": lambda: alone(
        "Conv", int4(4, 3, 64, 1, axis=2)
    ),
    "MatMul product: an int4 weight with a quantized activation": lambda: product("MatMul", int4(64, 5, axis=0)),
    "QuantizeLinear q: an activation with a scale per channel": lambda: pair(value("x", 2, 3), np.ones(3), axis=1),
    "Conv product: an int8 weight with a float activation": lambda: product(
        "Conv", weight(4, 3, 1, 1, axis=0), activation=[]
    ),
    "Conv product: a weight with scales along axis 1; its kernels need scales per output channel": lambda: product(
        "Conv", weight(4, 3, 1, 1, axis=1)
    ),
    "ConvTranspose product: a weight with scales along axis 1; its kernels need scales per input channel": lambda: (
        product("ConvTranspose", weight(3, 4, 1, 1, axis=1))
    ),
    "MatMul product: a weight with scales along axis 0": lambda: product("MatMul", weight(4, 5, axis=0)),
    "MatMul product: a weight with scales along axis 0;": lambda: turned(weight(5, 4, axis=1)),
    "Gemm product: a weight with scales along axis 1": lambda: product("Gemm", weight(5, 4, axis=1), transB=1),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_node_that_breaks_a_rule_is_named(message: str) -> None:
    found = list(offenses(model(BROKEN[message]())))
    assert any(line.startswith(message) for line in found), found


def model(nodes: list[ir.Node], opset: int = 20) -> ir.Model:
    """Return a model of some nodes."""
    return ir.Model(ir.Graph([], nodes[-1].outputs, nodes=nodes, opset_imports={"": opset}), ir_version=10)


def test_every_offense_of_a_file_is_in_one_error() -> None:
    nodes = [ir.node("Det", [X], name="one"), ir.node("Bernoulli", [X], name="two")]
    check = TENSORRT.onnx.check
    assert check is not None
    with pytest.raises(
        ExportError, match=r"TensorRT does not support\n  opset 25: (?s:.*)\n  Det one: (?s:.*)Bernoulli two"
    ):
        check(model(nodes, opset=25))


def test_a_transposed_convolution_takes_one_scale(tmp_path: Path) -> None:
    network, data = seeded(nn.ConvTranspose2d(3, 4, 2)), images()
    by_output = quantize(network, STATIC.replace(target="onnx_vnni"), data)
    file = ir.load(qfx.export.onnx(by_output, tmp_path / "model.onnx"))
    with pytest.raises(
        ExportError, match=r"ConvTranspose (?s:.*)its kernels need scales per input channel, along axis 0"
    ):
        check(file)
    qfx.export.onnx(quantize(network, STATIC.replace(weight=INT8), data), tmp_path / "model.onnx")


@pytest.mark.parametrize("make", [lambda: nn.ConvTranspose2d(4, 4, 2, groups=4), lambda: nn.ConvTranspose2d(8, 1, 2)])
def test_transposed_convolutions_with_scales_that_are_read_are_written(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """A depthwise one has its channels along the inputs' dimension, one of a single output has a single scale."""
    network = seeded(make())
    data = [rand(2, network.get_parameter("weight").shape[0], 4, 4)]
    config = STATIC.replace(weight=INT8.replace(granularity="channel"))
    qfx.export.onnx(quantize(network, config, data), tmp_path / "model.onnx")
