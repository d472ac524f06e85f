"""Every rule of ONNX files by itself: what it makes of its pattern, with equal outputs, and why it declines another."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from quark_fx.export.to_onnx.rules import TRANSLATED

RULES = {rule.name: rule for rule in TRANSLATED}

WEIGHT = "int8[4,3] w = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12}"
ROWS = "int8[3,4] w = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12}"
STATIC = "float xs = {0.02}, uint8 xz = {128}"
MATRIX = "float[2,4] x"
IMAGE = "float[1,2,5,5] x"
CODES = "q = QuantizeLinear(x, xs, xz)  a = DequantizeLinear(q, xs, xz)"


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
        "fold_initializer_transpose",
        f"{MATRIX} | {ROWS}, float s = {{0.1}} |"
        "t = Transpose<perm=[1, 0]>(w)  d = DequantizeLinear(t, s)  y = MatMul(x, d)",
        ["DequantizeLinear:2", "MatMul:2"],
    ),
    (
        "transpose_weight",
        f"{MATRIX} | {ROWS}, float[3] s = {{0.1, 0.2, 0.3}} |"
        "d = DequantizeLinear<axis=0>(w, s)  t = Transpose<perm=[1, 0]>(d)  y = MatMul(x, t)",
        ["DequantizeLinear:2 axis", "MatMul:2"],
    ),
    (
        "drop_default_attributes",
        f"{MATRIX} | {STATIC} | q = QuantizeLinear<axis=0, saturate=1>(x, xs, xz)"
        "y = DequantizeLinear<block_size=0>(q, xs, xz)",
        ["QuantizeLinear:3", "DequantizeLinear:3"],
    ),
]


def test_every_rule_has_a_case() -> None:
    assert {name for name, *_ in CASES} | {"type_codes"} == set(RULES)


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


DECLINED = [
    (
        "fold_initializer_cast",
        f"{MATRIX} | float16[4] h = {{1, 2, 3, 4}} | f = Cast<to=1>(h)  y = Add(x, f)",
        "a float16 weight would become a float32 one",
    ),
    (
        "fold_initializer_transpose",
        f"{MATRIX} | {ROWS}, float s = {{0.1}} |"
        "t = Transpose<perm=[1, 0]>(w)  d = DequantizeLinear(t, s)  p = MatMul(x, d)"
        "e = DequantizeLinear(w, s)  y = MatMul(p, e)",
        "another node also reads the codes",
    ),
    (
        "transpose_weight",
        f"{MATRIX} | {ROWS}, float s = {{0.1}} |"
        "d = DequantizeLinear(w, s)  t = Transpose<perm=[1, 0]>(d)  p = MatMul(x, t)  y = MatMul(p, d)",
        "another node also reads the weight",
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
