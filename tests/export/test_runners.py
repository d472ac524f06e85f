"""One interface for a model in every runtime, and the fusions that ONNX Runtime implements."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from tiny import mlp, quantize, tokens

import quark_fx as qfx
from quark_fx.evaluation import Embedding, compare, evaluate, runner_of
from quark_fx.export.runtime.runners import FileRunner
from quark_fx.export.runtime.session import may_optimize

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")


@pytest.mark.parametrize("runtime", [None, "onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def test_a_file_is_evaluated_and_compared_in_its_runtime(runtime: str | None, tmp_path: Path) -> None:
    qmodel = quantize(mlp(), "int8_static", tokens())
    runner = runner_of(str(qfx.export.onnx(qmodel, tmp_path / "model.onnx")), runtime)
    assert isinstance(runner, FileRunner)
    assert runner.runtime == (runtime or "onnxruntime")
    batch = tokens()[0]
    own = qmodel(batch)
    (found,) = runner(batch).values()
    assert torch.equal(found, next(iter(runner.run_in_order([batch]).values())))
    assert [value.name for value in runner.inputs] == list(qmodel.signature.input_names)
    (distance,) = compare(qmodel, runner, tokens())
    assert distance.sqnr > 30
    assert evaluate(runner, Embedding([batch], reference=mlp()))["cosine"] > 0.99
    assert found.shape == own.shape


def test_other_runtimes_open_no_file(tmp_path: Path) -> None:
    with pytest.raises(qfx.QuarkError, match=r"runtime='torch' does not open .*'onnxruntime' or 'openvino'"):
        runner_of(tmp_path / "model.onnx", "torch")
    with pytest.raises(qfx.QuarkError, match=r"runtime='openvino' does not open .*give the path of a file"):
        runner_of(mlp(), "openvino")
    with pytest.raises(qfx.ExportError, match=r"gone\.onnx cannot be loaded"):
        runner_of(str(tmp_path / "gone.onnx"))


@pytest.mark.parametrize(
    ("operator", "dtype", "block", "expected"),
    [
        ("QuantizeLinear", ir.DataType.UINT8, 0, True),
        ("QuantizeLinear", ir.DataType.INT16, 0, True),
        ("QuantizeLinear", ir.DataType.UINT4, 0, False),
        ("QuantizeLinear", ir.DataType.INT32, 0, False),
        ("QuantizeLinear", ir.DataType.FLOAT8E4M3FN, 0, False),
        ("QuantizeLinear", ir.DataType.FLOAT8E4M3FN, 16, True),
        ("DequantizeLinear", ir.DataType.INT32, 0, True),
        ("DequantizeLinear", ir.DataType.INT4, 0, True),
        ("DequantizeLinear", ir.DataType.FLOAT8E4M3FN, 0, False),
        ("Cast", ir.DataType.FLOAT8E4M3FN, 0, True),
    ],
)
@pytest.mark.parametrize("spelling", ["zero point", "output_dtype"])
def test_fusions_that_have_no_kernels_are_off(
    operator: str, dtype: ir.DataType, block: int, expected: bool, spelling: str
) -> None:
    x, scale = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "scale"))
    zero_point = ir.Value(name="zero_point", type=ir.TensorType(dtype))
    if operator == "DequantizeLinear":
        x.dtype = dtype
    given = [x, scale, zero_point] if spelling == "zero point" or operator != "QuantizeLinear" else [x, scale]
    attributes = {"block_size": block} | ({"output_dtype": int(dtype)} if len(given) == 2 else {})
    node = ir.node(operator, given, attributes)
    graph = ir.Graph(given, node.outputs, nodes=[node], opset_imports={"": 25})
    assert may_optimize(graph) == expected
