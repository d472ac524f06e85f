"""Every rule of ONNX files by itself: what it makes of its pattern, with equal outputs, and why it declines another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.target import OnnxFiles
from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions, write_in_format
from quark_fx.export.to_onnx.rules import FORMATTED, TRANSLATED, OnnxRule, keep_floats

RULES = {rule.name: rule for rule in (*TRANSLATED, *FORMATTED, keep_floats)}

WEIGHT = "int8[4,3] w = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12}"
ROWS = "int8[3,4] w = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12}"
STATIC = "float xs = {0.02}, uint8 xz = {128}"
MATRIX = "float[2,4] x"
IMAGE = "float[1,2,5,5] x"
CODES = "q = QuantizeLinear(x, xs, xz)  a = DequantizeLinear(q, xs, xz)"
MEASURED = "q, xs, xz = DynamicQuantizeLinear(x)  a = DequantizeLinear(q, xs, xz)"


def graph(text: str) -> ir.Model:
    """Return a model of `input | constants | nodes`, with inferred types; `y` is its output."""
    source, constants, nodes = text.split("|")
    head = '<ir_version: 10, opset_import: ["": 21]>'
    proto = onnx.parser.parse_model(f"{head} agraph ({source}) => (float[] y) <{constants}> {{ {nodes} }}")
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def described(model: ir.Model) -> list[str]:
    """Return the nodes of a model with the number of their inputs and the names of their attributes."""
    return [" ".join((f"{node.op_type}:{len(node.inputs)}", *sorted(node.attributes))) for node in model.graph]


def run(model: ir.Model) -> Any:
    """Return what ONNX Runtime makes of values that are not all codes, without fusing anything."""
    shape = model.graph.inputs[0].shape
    assert shape is not None
    x = np.random.default_rng(0).normal(size=shape.numpy()).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(["y"], {"x": x})[0]


CASES = [
    (
        "fold_initializer_cast",
        f"{MATRIX} | int32[3] z = {{1, 2, 3}}, {WEIGHT}, float[3] s = {{0.1, 0.2, 0.3}} |"
        "zero = Cast<to=3>(z)  again = Cast<to=3>(z)  b = DequantizeLinear(w, s, zero)"
        "c = DequantizeLinear(w, s, again)  sum = Add(b, c)  y = MatMul(x, sum)",
        ["DequantizeLinear:3", "DequantizeLinear:3", "Add:2", "MatMul:2"],
    ),
    ("fold_cast_like", f"{MATRIX} | double b = {{0.25}} | c = CastLike(b, x)  y = Max(x, c)", ["Max:2"]),
    (
        "drop_zero_bias",
        f"{IMAGE} | float[1,2,1,1] w = {{1, 2}}, float zero = {{0}}, int64[1] n = {{1}} |"
        "b = Expand(zero, n)  y = Conv(x, w, b)",
        ["Conv:2"],
    ),
    (
        "drop_idle_transpose",
        f"{MATRIX} | | t = Transpose<perm=[0, 1]>(x)  back = Transpose<perm=[1, 0]>(t)  y = Relu(back)",
        ["Transpose:1 perm", "Relu:1"],
    ),
    (
        "transpose_weight",
        f"{MATRIX} | {ROWS}, float[3] s = {{0.1, 0.2, 0.3}} |"
        "d = DequantizeLinear<axis=0>(w, s)  t = Transpose<perm=[1, 0]>(d)  y = MatMul(x, t)",
        ["DequantizeLinear:2 axis", "MatMul:2"],
    ),
    (
        "settle_zero_point",
        f"{MATRIX} | uint8[4,3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, float[3] s = {{0.1, 0.2, 0.3}},"
        "uint8[3] z = {0, 0, 0} | d = DequantizeLinear(w, s, z)  y = MatMul(x, d)",
        ["DequantizeLinear:2", "MatMul:2"],
    ),
    (
        "split_dynamic_gemm",
        f"{MATRIX} | {ROWS}, float s = {{0.1}}, float[3] c = {{1, 2, 3}} |"
        f"{MEASURED}  b = DequantizeLinear(w, s)  y = Gemm<transB=1>(a, b, c)",
        ["DynamicQuantizeLinear:1", "DequantizeLinear:3", "DequantizeLinear:2", "MatMul:2", "Add:2"],
    ),
    (
        "fuse_dynamic_quantization",
        f"{MATRIX} | | unread, xs, xz = DynamicQuantizeLinear(x)  {CODES}  y = Relu(a)",
        ["DynamicQuantizeLinear:1", "DequantizeLinear:3", "Relu:1"],
    ),
    (
        "multiply_integers",
        f"{MATRIX} | {WEIGHT}, float[3] s = {{0.1, 0.2, 0.3}} |"
        f"{MEASURED}  b = DequantizeLinear<axis=1>(w, s)  y = MatMul(a, b)",
        ["DynamicQuantizeLinear:1", "MatMulInteger:3", "Cast:1 to", "Mul:2", "Mul:2"],
    ),
    (
        "spell_out_row_scales",
        f"{MATRIX} | {STATIC}, {WEIGHT}, float[4] s = {{0.1, 0.2, 0.3, 0.4}} |"
        f"{CODES}  b = DequantizeLinear<axis=0>(w, s)  y = MatMul(a, b)",
        ["QuantizeLinear:3", "DequantizeLinear:3", "Cast:1 to", "Mul:2", "MatMul:2"],
    ),
    (
        "settle_average_pool",
        f"{IMAGE} | | p = AveragePool<ceil_mode=1, count_include_pad=1, kernel_shape=[2, 2], pads=[1, 1, 1, 1],"
        "strides=[2, 2]>(x)  y = Relu(p)",
        ["AveragePool:1 ceil_mode count_include_pad kernel_shape pads strides", "Max:1", "Relu:1"],
    ),
    (
        "repeat_moved_pair",
        f"{MATRIX} | float xs = {{0.02}}, int8 xz = {{3}} | {CODES}  t = Transpose(a)  u = Flatten(t)  y = Relu(u)",
        [
            *("QuantizeLinear:3", "DequantizeLinear:3", "Transpose:1", "QuantizeLinear:3", "DequantizeLinear:3"),
            *("Flatten:1", "QuantizeLinear:3", "DequantizeLinear:3", "Relu:1"),
        ],
    ),
    (
        "drop_default_attributes",
        f"{MATRIX} | {STATIC} | q = QuantizeLinear<axis=0, saturate=1>(x, xs, xz)"
        "y = DequantizeLinear<block_size=0>(q, xs, xz)",
        ["QuantizeLinear:3", "DequantizeLinear:3"],
    ),
    (
        "keep_sum_from_norm",
        f"{MATRIX} | float[4] one = {{1, 1, 1, 1}} | s = Add(x, one)  y = LayerNormalization(s, one)",
        ["Sum:2", "LayerNormalization:2"],
    ),
    (
        "keep_product_from_activation",
        f"{MATRIX} | {STATIC}, {WEIGHT}, float s = {{0.1}} |"
        f"{CODES}  b = DequantizeLinear(w, s)  p = Gemm(a, b)  r = Sigmoid(p)  c = Gemm(a, b, r)  y = Relu(c)",
        [
            *("QuantizeLinear:3", "DequantizeLinear:3", "DequantizeLinear:2", "Gemm:2", "Max:1", "Sigmoid:1"),
            *("Gemm:2", "Add:2", "Relu:1"),
        ],
    ),
    (
        "keep_padding_from_pool",
        f"{IMAGE} | int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}} |p = Pad(x, pads)  y = MaxPool<kernel_shape=[2, 2]>(p)",
        ["Pad:2", "Max:1", "MaxPool:1 kernel_shape"],
    ),
    (
        "dequantize_once",
        "float[2,1,4] x | uint8[2,4] w = {1, 2, 3, 4, 5, 6, 7, 8}, uint8[2] z = {3, 4}, float[2] s = {0.1, 0.2},"
        "int8[2,2] r = {1, 2, 3, -4}, float t = {0.1}, int64[3] n = {1, 2, 4}, int64[3] m = {1, 2, 2} |"
        "d = DequantizeLinear<axis=0>(w, s, z)  u = Reshape(d, n)  e = DequantizeLinear(r, t)  v = Reshape(e, m)"
        "y = RNN<hidden_size=2>(x, u, v)",
        [
            *("Cast:1 to", "Sub:2", "Mul:2", "Reshape:2", "Cast:1 to", "Mul:2", "Reshape:2"),
            "RNN:3 hidden_size",
        ],
    ),
    (
        "give_every_convolution_a_bias",
        f"{IMAGE} | float[2,2,1,1] w = {{1, 2, 3, 4}}, float[2] z = {{0, 0}}, float[2] o = {{0, 1}} |"
        "c = Conv(x, w)  d = Conv(x, w, z)  e = Add(c, d)  g = Conv(e, w, o)  y = Add(e, g)",
        ["Conv:3", "Conv:3", "Add:2", "Conv:3", "Add:2"],
    ),
    (
        "keep_floats",
        f"{IMAGE} | {STATIC}, float[1,2,1,1] w = {{1, 2}} | {CODES}  y = Conv(a, w)",
        ["QuantizeLinear:3", "DequantizeLinear:3 axis", "Conv:2"],
    ),
    (
        "keep_transpose_from_resize",
        f'{IMAGE} | float[4] s = {{1, 1, 0.6, 0.6}} | y = Resize<mode="cubic">(x, , s)',
        ["Einsum:1 equation", "Resize:3 mode"],
    ),
    (
        "keep_product_from_sum",
        f"float[2,4] x | float xs = {{0.02}}, int8 xz = {{3}}, {WEIGHT}, float s = {{0.1}}, float[3] c = {{1, 2, 3}}"
        f"| {CODES}  b = DequantizeLinear(w, s)  p = MatMul(a, b)  y = Add(p, c)",
        ["QuantizeLinear:3", "DequantizeLinear:3", "DequantizeLinear:2", "MatMul:2", "Max:1", "Add:2"],
    ),
    (
        "spell_out_circular_pad",
        f'{IMAGE} | int64[8] pads = {{0, 0, 1, 0, 0, 0, 1, 2}} | p = Pad<mode="wrap">(x, pads)  y = Relu(p)',
        ["Slice:4", "Slice:4", "Concat:3 axis", "Slice:4", "Concat:2 axis", "Relu:1"],
    ),
    (
        "keep_resize_from_concat",
        f"{IMAGE} | {STATIC} | {CODES}  p = AveragePool<kernel_shape=[2, 2]>(x)  n = Shape(x)"
        "r = Resize(p, , , n)  y = Concat<axis=1>(a, r)",
        [
            *("QuantizeLinear:3", "DequantizeLinear:3", "AveragePool:1 kernel_shape", "Shape:1", "Resize:4"),
            *("MaxPool:1 kernel_shape", "Concat:2 axis"),
        ],
    ),
]


def test_every_rule_has_a_case() -> None:
    elsewhere = {"type_codes", "store_convolution_inputs_unsigned", "compute_bfloat16_in_float"}
    assert {name for name, *_ in CASES} | elsewhere == set(RULES)


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_rewrites_its_pattern_to_what_computes_the_same(name: str, text: str, expected: list[str]) -> None:
    model = graph(text)
    before = run(model)
    assert described(model) != expected
    assert RULES[name](model) == ()
    assert described(model) == expected
    np.testing.assert_allclose(run(model), before, rtol=1e-6, atol=1e-6)
    read = {value for node in model.graph for value in node.inputs}
    assert all(value in read for value in model.graph.initializers.values())
    assert RULES[name](model) == ()
    assert described(model) == expected, "a rule leaves what it made"


def test_codes_get_the_type_of_their_zero_point() -> None:
    model = graph(
        f"{MATRIX} | float s = {{0.5}}, int4 z = {{0}} | q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s)"
    )
    codes = model.graph[0].outputs[0]
    codes.dtype = ir.DataType.INT8  # as torch's exporter has it
    RULES["type_codes"](model)
    assert codes.dtype == ir.DataType.INT4


@pytest.mark.parametrize(
    ("reader", "expected"),
    [("m = MaxPool<kernel_shape=[2, 2]>(a)  y = Conv(m, w)", "UINT8"), ("y = MatMul(a, a)", "INT8")],
)
def test_signed_codes_that_a_convolution_reads_are_stored_as_unsigned_ones(reader: str, expected: str) -> None:
    model = graph(
        f"{IMAGE} | float xs = {{0.02}}, int8 xz = {{3}}, float[2,2,1,1] w = {{1, 2, 3, 4}} | {CODES}  {reader}"
    )
    before = run(model)
    assert RULES["store_convolution_inputs_unsigned"](model) == ()
    codes = model.graph[0].outputs[0]
    assert codes.dtype is not None
    assert codes.dtype.name == expected
    np.testing.assert_array_equal(run(model), before)


def test_arithmetic_of_bfloat16_rounds_as_in_torch(tmp_path: Path) -> None:
    class Biases(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            slopes = x[:, :1].bfloat16()
            steep = slopes / 3 - (slopes * torch.arange(4)).abs().sqrt()
            return x + steep.to(x.dtype), torch.where(steep < slopes, x, -x)

    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    config = qfx.presets.INT8_STATIC.replace(exclude=("*",))
    qmodel = qfx.quantize(Biases().eval(), config, [x], progress=False)
    session = onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    for made, expected in zip(session.run(None, {session.get_inputs()[0].name: x.numpy()}), Biases()(x), strict=True):
        assert torch.equal(torch.from_numpy(made), expected)


DECLINED = [
    (
        "fold_initializer_cast",
        f"{MATRIX} | float16[4] h = {{1, 2, 3, 4}} | f = Cast<to=1>(h)  y = Add(x, f)",
        "a float16 weight would become a float32 one",
    ),
    (
        "transpose_weight",
        f"{MATRIX} | {ROWS}, float s = {{0.1}} |"
        "d = DequantizeLinear(w, s)  t = Transpose<perm=[1, 0]>(d)  p = MatMul(x, t)  y = MatMul(p, d)",
        "something else reads the weight as it is",
    ),
    (
        "split_dynamic_gemm",
        f"{MATRIX} | {WEIGHT}, float s = {{0.1}} |{MEASURED}  b = DequantizeLinear(w, s)  y = Gemm<alpha=2.0>(a, b)",
        "it transposes its activation, or multiplies the product or the bias by a number",
    ),
    (
        "multiply_integers",
        f"{MATRIX} | {WEIGHT}, float[4] s = {{0.1, 0.2, 0.3, 0.4}} |"
        f"{MEASURED}  b = DequantizeLinear<axis=0>(w, s)  y = MatMul(a, b)",
        "its weight has scales along the axis that is summed over",
    ),
    (
        "settle_average_pool",
        f"{IMAGE} | | y = AveragePool<ceil_mode=1, count_include_pad=1, kernel_shape=[2, 2], pads=[1, 1, 1, 1]>(x)",
        "nothing reads the averages, so that they are not fused with a quantizer",
    ),
    (
        "store_convolution_inputs_unsigned",
        f"{IMAGE} | float xs = {{0.02}}, int8 xz = {{3}}, int8 other = {{4}}, float[2,2,1,1] w = {{1, 2, 3, 4}} |"
        "q = QuantizeLinear(x, xs, xz)  a = DequantizeLinear(q, xs, other)  y = Conv(a, w)",
        "something else than its own dequantizer reads its codes",
    ),
    (
        "keep_sum_from_norm",
        f"{MATRIX} | float[4] one = {{1, 1, 1, 1}} | s = Add(x, one)  n = LayerNormalization(s, one)  y = Add(s, n)",
        "something else reads the sum",
    ),
]


@pytest.mark.parametrize(("name", "text", "reason"), DECLINED, ids=[case[0] for case in DECLINED])
def test_a_rule_that_declines_says_why_and_changes_nothing(
    name: str, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = graph(text)
    before = ir.to_proto(model).SerializeToString()
    with caplog.at_level(logging.DEBUG):
        (left,) = RULES[name](model)
    assert (left.reason, left.rule) == (reason, name)
    assert f"{name} declines {left.name} ({left.operator}): {reason}" in caplog.messages
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize(("runtime", "kind"), [("onnxruntime", "Sum"), ("", "Add"), ("another", "Add")])
def test_mistakes_of_a_runtime_are_worked_around_for_that_runtime_alone(runtime: str, kind: str) -> None:
    model = graph(f"{MATRIX} | float[4] one = {{1, 1, 1, 1}} | s = Add(x, one)  y = LayerNormalization(s, one)")
    write_in_format(model, FORMATS["qdq"], FormatOptions(), OnnxFiles(runtime=runtime))
    assert [node.op_type for node in model.graph] == [kind, "LayerNormalization"]


def test_what_all_targets_need_works_around_nothing() -> None:
    general = [rule for rule in RULES.values() if not rule.runtime]
    assert isinstance(general[0], OnnxRule)
    assert {rule.name for rule in RULES.values()} - {rule.name for rule in general} == {
        *("spell_out_row_scales", "settle_average_pool", "repeat_moved_pair", "keep_sum_from_norm"),
        *("keep_product_from_activation", "keep_padding_from_pool", "dequantize_once", "keep_floats"),
        *("give_every_convolution_a_bias", "store_convolution_inputs_unsigned", "keep_transpose_from_resize"),
        *("keep_product_from_sum", "spell_out_circular_pad", "keep_resize_from_concat", "compute_bfloat16_in_float"),
    }
