"""Integers of 2 to 7 bits in ONNX files: activations in bytes, weights in the next wider type, codes as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from tiny import cnn, images, mlp, quantize, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, ScaleType, Symmetry, Target, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT3, INT4, INT6, INT7, UINT3, UINT5, UINT7, UINT8, IntFormat, onnx_container
from quark_fx.presets import INT8_STATIC

ANOTHER_ORDER = 0.01
"""Steps by which an output in float may differ: its sums, and those of float products, are taken in another order."""

NARROW = [IntFormat(bits, signed) for bits in (5, 6, 7) for signed in (True, False)]
ACTIVATIONS = [IntFormat(bits, signed) for bits in (2, 3, 4) for signed in (True, False)] + NARROW


def static(weight: IntFormat, activation: IntFormat, **changes: Any) -> QuantConfig:
    spec = TensorSpec(format=activation)
    rows = TensorSpec(format=weight, granularity=Granularity.CHANNEL, symmetry=Symmetry.SYMMETRIC)
    return INT8_STATIC.replace(weight=rows, input=spec, output=spec, **changes)


def beyond() -> list[Tensor]:
    """Images whose values leave the calibrated range."""
    return [4 * batch for batch in images()]


def written(qmodel: qfx.QuantizedModel, folder: Path, **options: Any) -> Path:
    return qfx.export.onnx(qmodel, folder / "model.onnx", **options)


@pytest.mark.parametrize("fmt", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_every_code_of_a_file_is_torchs_in_and_beyond_the_range(fmt: IntFormat, form: str, tmp_path: Path) -> None:
    qmodel = quantize(cnn(), static(INT7, fmt), images())
    file = written(qmodel, tmp_path, format=form)
    found = qfx.verify(qmodel, file, [*images(), *beyond()], per_node=True)
    assert len(found.differences) > 4
    assert not found.skipped
    assert all(d.max_abs == 0 for d in found.differences if d.name != "output")
    assert found.max_steps < ANOTHER_ORDER
    onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])  # with its default optimizations
    # The wider type would hold more: some values have been clipped to the narrow limits.
    (first, *_) = (n for n in qmodel.graph_module.graph.nodes if "quantize.default" in str(n.target))
    codes = torch.ops.quark_fx.quantize(beyond()[0], *_parameters(qmodel, first))
    assert (int(codes.min()), int(codes.max())) == (fmt.qmin, fmt.qmax)


def _parameters(qmodel: qfx.QuantizedModel, node: torch.fx.Node) -> list[Any]:
    state = qmodel.graph_module
    return [
        state.get_buffer(str(a.target)) if isinstance(a, torch.fx.Node) else a  # scale and zero point
        for a in node.args[1:]
    ]


@pytest.mark.parametrize("fmt", [*NARROW, INT3, UINT3], ids=str)
def test_a_weight_is_held_by_the_next_wider_type(fmt: IntFormat, tmp_path: Path) -> None:
    qmodel = quantize(cnn(), static(fmt, UINT8), images())
    model = ir.load(written(qmodel, tmp_path))
    kind = ir.DataType[str(onnx_container(fmt)).upper()]
    stored = {n.inputs[0].dtype for n in model.graph if n.op_type == "DequantizeLinear" and n.inputs[0].const_value}
    assert stored - {ir.DataType.INT32} == {kind}
    assert qfx.verify(qmodel, tmp_path / "model.onnx", images()).max_steps < ANOTHER_ORDER


@pytest.mark.parametrize("fmt", [*NARROW, INT3, UINT3], ids=str)
def test_weight_only_kernels_take_them(fmt: IntFormat, tmp_path: Path) -> None:
    weight = TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=16)
    qmodel = quantize(mlp(), QuantConfig(weight=weight), tokens())
    file = written(qmodel, tmp_path, format="matmul_nbits")
    kernels = [node for node in ir.load(file).graph if node.op_type == "MatMulNBits"]
    assert {node.attributes["bits"].as_int() for node in kernels} == {onnx_container(fmt).bits}
    assert qfx.verify(qmodel, file, tokens()).max_steps < ANOTHER_ORDER


@pytest.mark.parametrize("fmt", [INT6, UINT5, UINT7, INT4, UINT3], ids=str)
@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.TOKEN])
def test_ranges_measured_at_run_time(fmt: IntFormat, granularity: Granularity, tmp_path: Path) -> None:
    spec = TensorSpec(format=fmt, dynamic=True, granularity=granularity)
    model = seeded(nn.Sequential(nn.Linear(16, 16)))
    batches = [torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    config = QuantConfig(weight=TensorSpec(format=INT7, granularity=Granularity.CHANNEL), input=spec)
    qmodel = quantize(model, config, batches)
    assert qfx.verify(qmodel, written(qmodel, tmp_path), batches).max_steps < ANOTHER_ORDER


def test_the_vendors_nodes_hold_them_and_a_dpu_does_not(tmp_path: Path) -> None:
    shifts: dict[str, Any] = {"scale_type": ScaleType.POWER_OF_TWO, "symmetry": Symmetry.SYMMETRIC}
    spec = TensorSpec(format=INT6, **shifts)
    qmodel = quantize(cnn(), QuantConfig(weight=spec, input=spec, output=spec), images())
    file = written(qmodel, tmp_path, format="vitis")
    assert qfx.verify(qmodel, file, [*images(), *beyond()]).max_steps == 0
    with pytest.raises(ConfigError, match="a DPU multiplies by shifts"):
        QuantConfig(weight=spec, input=spec, output=spec, target=Target.DPU)


def test_an_older_opset_holds_them(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), static(INT7, UINT7), images())
    file = written(qmodel, tmp_path, opset=14)
    assert qfx.verify(qmodel, file, [*images(), *beyond()]).max_steps < ANOTHER_ORDER
