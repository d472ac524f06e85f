"""One interface for a model in every runtime, and the fusions that ONNX Runtime implements."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
import torch
from tiny import mlp, quantize, tokens

import quark_fx as qfx
from quark_fx.config.target import OnnxFiles, register_target
from quark_fx.evaluation import Embedding, compare, evaluate, runner_of
from quark_fx.export.runtime.runners import FileRunner, OnnxRuntimeRunner, register_runner
from quark_fx.export.runtime.session import may_optimize
from quark_fx.export.runtime.trial import run_once

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


class AnotherRunner(OnnxRuntimeRunner):
    """ONNX Runtime under another name."""

    runtime, title, workarounds = "another_runtime", "Another Runtime", ""
    fails = False

    def run_arrays(self, feed: Any) -> list[Any]:
        if self.fails:
            raise RuntimeError("no kernel")
        return super().run_arrays(feed)


@pytest.mark.parametrize("version", [{}, {"__version__": "3.1-dev"}], ids=["no version", "3.1"])
def test_a_runner_from_outside_checks_the_files_of_its_target(
    version: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_runner(AnotherRunner)
    target = replace(qfx.Target.ONNX, name="another", onnx=OnnxFiles(runtime="another_runtime"))
    config = qfx.presets.INT8_STATIC.replace(target=register_target(target))
    qmodel = quantize(mlp(), config, tokens())
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert "Another Runtime: it is not installed; pip install another_runtime" in str(file.report())
    package = ModuleType("another_runtime")
    vars(package).update(version)
    monkeypatch.setitem(sys.modules, "another_runtime", package)
    assert run_once(Path(file), ir.load(file), qmodel) == ()
    assert qfx.verify(qmodel, file, tokens(), runtime="another_runtime").max_steps < 1
    monkeypatch.setattr(AnotherRunner, "fails", True)
    with pytest.raises(qfx.ExportError, match=f"fails in Another Runtime {'3.1' if version else 'of an unknown'}"):
        run_once(Path(file), ir.load(file), qmodel)


def test_other_runtimes_open_no_file(tmp_path: Path) -> None:
    with pytest.raises(qfx.QuarkError, match=r"runtime='torch' cannot open .*'onnxruntime' or 'openvino'"):
        runner_of(tmp_path / "model.onnx", "torch")
    with pytest.raises(
        qfx.QuarkError, match=r"unknown runtime 'onxruntime'; .*register_runner; did you mean 'onnxruntime'"
    ):
        runner_of("m.onnx", "onxruntime")
    with pytest.raises(qfx.QuarkError, match=r"runtime='openvino' cannot open .*pass the path of a file"):
        runner_of(mlp(), "openvino")
    with pytest.raises(
        qfx.ExportError, match=r"gone\.onnx cannot be loaded.*; pass a file that qfx\.export\.onnx wrote"
    ):
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
