"""What runs is what the configuration says: ONNX Runtime's kernels for presets, exclusions and session options."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tiny import images, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig
from quark_fx.presets import preset


class Net(nn.Module):
    """Convolutions one after another, pooled and flattened, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point, self.pool = nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)
        self.hidden, self.head = nn.Linear(128, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(torch.relu(self.stem(x)))
        x = self.pool(torch.relu(self.point(x)))
        logits: Tensor = self.head(torch.relu(self.hidden(x.reshape(x.shape[0], 128))))
        return logits


KINDS = {"stem": "conv", "deep": "conv", "point": "conv", "hidden": "linear", "head": "linear"}
EXCLUSIONS = [(), ("stem",), ("deep",), ("point", "hidden"), ("hidden",), ("head",), tuple(KINDS)]
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL", None)
INTEGER = {
    "conv": ("QLinearConv", "ConvInteger"),
    "linear": (
        *("QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulNBits"),
    ),
}


@dataclass(frozen=True)
class Runs:
    """How a preset runs in a format of file.

    Attributes:
        integer: kinds of operators that ONNX Runtime has kernels on integers for.
        levels: the optimizations that fuse them.
    """

    integer: tuple[str, ...]
    levels: tuple[str | None, ...] = ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL", None)


PRESETS = {
    "int8_static": Runs(("conv", "linear")),
    "int8_dynamic": Runs(("linear",), LEVELS),  # its products are on integers before they are fused
    "int16_act_int8_weight": Runs(()),
    "int8_weight_only": Runs(()),
    "fp16": Runs(()),
}
OTHERS = {
    ("xint8", "qdq"): Runs(()),  # no kernel takes its biases
    ("xint8", "qoperator"): Runs(("conv", "linear"), LEVELS),
    ("int8_static", "qoperator"): Runs(("conv", "linear"), LEVELS),
    ("int8_dynamic", "qoperator"): Runs(("conv", "linear"), LEVELS),
    ("int8_weight_only", "matmul_nbits"): Runs(("linear",), LEVELS),
    ("int4_weight_only", "matmul_nbits"): Runs(("linear",), LEVELS),
}
"""Presets in the formats that are not the default, and the preset of a DPU: a sample of exclusions is looked at."""
CASES = [
    *((name, "qdq", exclude, runs) for name, runs in PRESETS.items() for exclude in EXCLUSIONS),
    *((*file, exclude, runs) for file, runs in OTHERS.items() for exclude in ((), ("point", "hidden"))),
]


def optimized(path: Path, level: str | None) -> onnx.ModelProto:
    """Return the graph ONNX Runtime runs at a level, by default its own."""
    options = onnxruntime.SessionOptions()
    if level is not None:
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path.with_suffix(".run.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def holds(model: onnx.ModelProto, weight: Tensor) -> bool:
    """Tell whether a float weight is in a graph, in any order of its values, and with zeros that fill it up."""
    values = np.sort(weight.detach().numpy(), axis=None)
    floats = (numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    return any(np.array_equal(np.sort(array[array != 0], axis=None), values) for array in floats)


@pytest.mark.filterwarnings("ignore:nothing was quantized")
@pytest.mark.parametrize(
    ("name", "form", "exclude", "runs"), CASES, ids=["-".join((*case[:2], *case[2])) for case in CASES]
)
def test_the_kernels_on_integers_are_those_of_the_quantized_operators(
    name: str, form: str, exclude: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    model, x = seeded(Net()), images(4, 4)
    config: QuantConfig = preset(name).replace(exclude=exclude)
    qmodel = quantize(model, config, x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=form)
    for level in LEVELS:
        graph = optimized(path, level)
        kernels = Counter(node.op_type for node in graph.graph.node)
        for kind, own in INTEGER.items():
            count = sum(kind == of and layer not in exclude for layer, of in KINDS.items())
            fused = kind in runs.integer and level in runs.levels
            assert sum(kernels[kernel] for kernel in own) == (count if fused else 0), (level, kind, kernels)
        for layer in KINDS:
            assert holds(graph, model.get_parameter(f"{layer}.weight")) == (layer in exclude), (level, layer)
    options = onnxruntime.SessionOptions()
    assert round(qfx.verify(qmodel, path, x, session_options=options).max_steps, 3) <= 1


@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardsigmoid]
)
@pytest.mark.parametrize("exclude", [(), ("2",)])
def test_a_product_of_integers_is_not_fused_with_an_activation_in_float(
    activation: type[nn.Module], exclude: tuple[str, ...], tmp_path: Path
) -> None:
    model, x = seeded(nn.Sequential(nn.Linear(8, 8), activation(), nn.Linear(8, 4))), [rand(6, 8)]
    qmodel = quantize(model, preset("int8_static").replace(exclude=exclude), x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    kernels = Counter(node.op_type for node in optimized(path, None).graph.node)
    assert kernels["QGemm"] == 2 - len(exclude)
    assert kernels["FusedGemm"] == 0
    assert round(qfx.verify(qmodel, path, x).max_steps, 3) <= 1
