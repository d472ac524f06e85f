"""float16 and bfloat16 in ONNX: casts that round as those of PyTorch do, weights of two bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from test_onnx_blocks import MODELS
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import TensorSpec
from quark_fx.export.to_onnx.stored_codes import halve_scales
from quark_fx.numbers.formats import BF16, FP16, FloatFormat, parse_format
from quark_fx.presets import PRESETS, preset

TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
formats = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)


def every_value_and_tie(fmt: FloatFormat) -> Tensor:
    """Return each value of a 16-bit float, what lies half way to the next, and the neighbors of both in float32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(fmt.dtype).float()
    ordered = values[values.isfinite()].sort().values
    ties = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    largest = torch.tensor([fmt.max * (1 + 2.0 ** -(fmt.mantissa + 2)), 3.4e38])
    exact = torch.cat([values, ties, largest, -largest])
    return torch.cat([exact, *(torch.nextafter(exact, torch.tensor(end)) for end in (torch.inf, -torch.inf))])


@formats
@pytest.mark.parametrize("optimize", [True, False])
def test_a_cast_in_the_file_rounds_as_in_torch(fmt: FloatFormat, optimize: bool, tmp_path: Path) -> None:
    model = nn.Conv1d(1, 1, 1, bias=False).eval()  # one product with one: what is cast, as it is
    nn.init.ones_(model.weight)
    x = every_value_and_tie(fmt)[None, None]
    qmodel = quantize(model, PRESETS[str(fmt)], [rand(1, 1, 9)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_array_equal(got, x.to(fmt.dtype).float().numpy())
    assert (x.to(fmt.dtype).float() != x).float().mean() > 0.5


@formats
@pytest.mark.parametrize("name", MODELS)
def test_weights_take_two_bytes_and_outputs_agree(fmt: FloatFormat, name: str, tmp_path: Path) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), PRESETS[str(fmt)], [data(4)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    onnx.checker.check_model(path, full_check=True)
    stored = [t for t in onnx.load(path).graph.initializer if t.name.endswith("weight_codes")]
    assert len(stored) == len(qmodel.report().rows)
    assert all(t.data_type == TYPES[str(fmt)] and len(t.raw_data) == 2 * np.prod(t.dims) for t in stored)
    for optimize in (True, False):
        # Sums of at most 288 products in another order may also fall on the other side of a tie of the next cast.
        found = qfx.verify(qmodel, path, [data(4), data(1)], optimize=optimize)
        assert found.max_steps <= 255 * 2.0 ** -(fmt.mantissa + 1)


@pytest.mark.parametrize(("name", "fmt"), [("float16", FP16), ("bfloat16", BF16)])
def test_the_names_of_the_types_are_names_too(name: str, fmt: FloatFormat) -> None:
    assert parse_format(name) == fmt
    assert TensorSpec.from_dict({"format": name}) == TensorSpec(format=fmt)
    assert preset(name) == PRESETS[str(fmt)]
    model = seeded(nn.Linear(4, 3))
    assert torch.equal(
        quantize(model, name, [rand(2, 4)])(rand(2, 4)), quantize(model, str(fmt), [rand(2, 4)])(rand(2, 4))
    )


def test_scales_are_cast_before_their_first_reader() -> None:
    codes, scales = np.ones((4, 2), np.int8), np.full((2, 2), 0.5, np.float32)
    nodes = [
        onnx.helper.make_node("DequantizeLinear", [f"codes_{i}", "scales"], [f"y_{i}"], axis=0, block_size=2)
        for i in range(2)
    ]
    tensors = [onnx.numpy_helper.from_array(codes, f"codes_{i}") for i in range(2)]
    tensors.append(onnx.numpy_helper.from_array(scales, "scales"))
    results = [onnx.helper.make_tensor_value_info(f"y_{i}", TensorProto.FLOAT, [4, 2]) for i in range(2)]
    made = onnx.helper.make_model(onnx.helper.make_graph(nodes, "scales", [], results, tensors))
    model = ir.from_proto(made)
    assert halve_scales(model) == 1
    assert [node.op_type for node in model.graph] == ["Cast", "DequantizeLinear", "DequantizeLinear"]
