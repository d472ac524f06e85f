"""Formats that ONNX has no type for in its files: activations in bytes, weights in a wider type, codes as in torch."""

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
from quark_fx import Granularity, QuantConfig, Symmetry, Target, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import (
    INT3,
    INT4,
    INT6,
    INT7,
    UINT3,
    UINT5,
    UINT7,
    UINT8,
    IntFormat,
    parse_format,
)
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
    kind = ir.DataType[str(fmt.onnx_container).upper()]
    stored = {n.inputs[0].dtype for n in model.graph if n.op_type == "DequantizeLinear" and n.inputs[0].const_value}
    assert stored - {ir.DataType.INT32} == {kind}
    assert qfx.verify(qmodel, tmp_path / "model.onnx", images()).max_steps < ANOTHER_ORDER


@pytest.mark.parametrize("fmt", [*NARROW, INT3, UINT3], ids=str)
def test_weight_only_kernels_take_them(fmt: IntFormat, tmp_path: Path) -> None:
    weight = TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=16)
    qmodel = quantize(mlp(), QuantConfig(weight=weight), tokens())
    file = written(qmodel, tmp_path, format="matmul_nbits")
    kernels = [node for node in ir.load(file).graph if node.op_type == "MatMulNBits"]
    assert {node.attributes["bits"].as_int() for node in kernels} == {fmt.onnx_container.bits}
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


@pytest.mark.parametrize(
    ("weight", "activation"), [("int3", "int3"), ("int8", "uint4"), ("int5", "uint8"), ("int4", "int7")]
)
@pytest.mark.parametrize("model", ["linear", "conv"])
def test_biases_in_float_stay_so(model: str, weight: str, activation: str, tmp_path: Path) -> None:
    layers = {
        "linear": [nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)],
        "conv": [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)],
    }
    shape = {"linear": (8, 32), "conv": (2, 3, 8, 8)}[model]
    batches = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    rows = TensorSpec(format=parse_format(weight), granularity=Granularity.CHANNEL)
    config = QuantConfig(weight=rows, input=TensorSpec(format=parse_format(activation)))
    qmodel = quantize(seeded(nn.Sequential(*layers[model])), config, batches)
    assert qfx.verify(qmodel, written(qmodel, tmp_path), batches).max_steps < ANOTHER_ORDER


def test_the_vendors_nodes_hold_them_and_a_dpu_does_not(tmp_path: Path) -> None:
    shifts: dict[str, Any] = {"scale": "power_of_two", "symmetry": Symmetry.SYMMETRIC}
    spec = TensorSpec(format=INT6, **shifts)
    qmodel = quantize(cnn(), QuantConfig(weight=spec, input=spec, output=spec), images())
    file = written(qmodel, tmp_path, format="vitis")
    assert qfx.verify(qmodel, file, [*images(), *beyond()]).max_steps == 0
    with pytest.raises(ConfigError, match="a DPU scales by bit shifts"):
        QuantConfig(weight=spec, input=spec, output=spec, target=Target.DPU)


OTHERS = ["int9", "uint12", "sm7", "fp3_e1m1", "fp5_e1m3", "fp7_e3m3", "fp6_e4m1"]


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL, Granularity.GROUP])
@pytest.mark.parametrize("fmt", OTHERS)
def test_weights_of_any_format(fmt: str, granularity: Granularity, tmp_path: Path) -> None:
    size = 16 if granularity is Granularity.GROUP else None
    weight = TensorSpec(format=parse_format(fmt), granularity=granularity, group_size=size)
    qmodel = quantize(mlp(), QuantConfig(weight=weight), tokens())
    assert qfx.verify(qmodel, written(qmodel, tmp_path), tokens()).max_steps < ANOTHER_ORDER
    qmodel.save(tmp_path / "saved")
    assert all(torch.equal(qfx.load(tmp_path / "saved")(batch), qmodel(batch)) for batch in tokens())


@pytest.mark.parametrize("fmt", ["int12", "uint9", "fp7_e3m3", "sm4"])
def test_activations_of_formats_that_no_file_holds_are_refused(fmt: str) -> None:
    config = {"weight": TensorSpec(format=INT7), "input": TensorSpec(format=parse_format(fmt))}
    with pytest.raises(
        ConfigError,
        match=f"{fmt} has no ONNX type; use an integer or float format with 2 to 8 or 16 bits, or target='torch'",
    ):
        QuantConfig(**config)  # type: ignore[arg-type]
    quantize(mlp(), QuantConfig(**config, target=Target.TORCH), tokens())  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["int17", "int31"])
def test_weights_of_more_than_16_bits_are_refused(fmt: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{fmt} has no ONNX type; use an integer or float format with 2 to 8 or 16 bits, or target='torch'",
    ):
        QuantConfig(weight=TensorSpec(format=parse_format(fmt)))


def test_zero_points_that_no_file_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="int24 has no ONNX type"):
        QuantConfig(weight=TensorSpec(format=IntFormat(24), symmetry=Symmetry.ASYMMETRIC))
    with pytest.raises(
        ConfigError, match=r"unsigned codes have at most 16 bits, .*use uint16, or int20 with target='torch'"
    ):
        TensorSpec(format=IntFormat(20, signed=False))


def test_an_older_opset_holds_them(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), static(INT7, UINT7), images())
    file = written(qmodel, tmp_path, opset=14)
    assert qfx.verify(qmodel, file, [*images(), *beyond()]).max_steps < ANOTHER_ORDER
