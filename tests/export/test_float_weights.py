"""What the configuration leaves in float, ONNX Runtime computes in float, with the optimizations it has by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from tiny import images, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.numbers.formats import BF16, FP16, INT8, INT16, UINT8
from quark_fx.presets import INT8_STATIC


class Between(nn.Module):
    """An operator, `middle`, between two quantized convolutions."""

    def __init__(self, middle: nn.Module, *, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 1), middle, nn.Conv2d(8, 4, 1)
        self.before, self.after = before or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.after(self.middle(self.before(torch.relu(self.first(x))))))
        return out


class Rows(nn.Module):
    """A linear, `middle`, that reads a convolution and is read by another linear."""

    def __init__(self, middle: nn.Module, *, flat: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.flat = nn.Conv2d(3, 8, 1), middle, nn.Linear(6, 5), flat

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        out: Tensor = self.last(self.middle(x.reshape(x.shape[0], 512) if self.flat else x.flatten(2).transpose(1, 2)))
        return out


class AddedVector(nn.Module):
    """A product of matrices, and a vector added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.vector = nn.Parameter(torch.empty(512, 6)), nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.vector


class Turned(nn.Module):
    """An image on its side."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 2)


class Padded(nn.Module):
    """An image with a margin of one value, or of its own ones; then what moves it."""

    def __init__(self, value: float, *then: nn.Module, mode: str = "constant") -> None:
        super().__init__()
        self.value, self.then, self.mode = value, nn.Sequential(*then), mode

    def forward(self, x: Tensor) -> Tensor:
        value = self.value if self.mode == "constant" else None
        out: Tensor = self.then(F.pad(x, (1, 2, 2, 0), mode=self.mode, value=value))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Between(nn.Conv2d(8, 8, 3, padding=1)),
    "no bias": lambda: Between(nn.Conv2d(8, 8, 3, bias=False)),
    "depthwise": lambda: Between(nn.Conv2d(8, 8, 3, groups=8)),
    "relu": lambda: Between(nn.Conv2d(8, 8, 3), after=nn.ReLU()),
    "clamp": lambda: Between(nn.Conv2d(8, 8, 3), after=nn.ReLU6()),
    "pool before": lambda: Between(nn.Conv2d(8, 8, 3), before=nn.MaxPool2d(2)),
    "pool after": lambda: Between(nn.Conv2d(8, 8, 3), after=nn.MaxPool2d(2)),
    "padding before": lambda: Between(nn.Conv2d(8, 8, 3), before=nn.ZeroPad2d((1, 2, 3, 0))),
    "turned before": lambda: Between(nn.Conv2d(8, 8, 3), before=Turned()),
    "turned, then padding": lambda: Between(nn.Conv2d(8, 8, 3), before=nn.Sequential(Turned(), nn.ZeroPad2d(1))),
    "margin": lambda: Between(nn.Conv2d(8, 8, 3), before=Padded(40.3)),
    "margin, then turned": lambda: Between(nn.Conv2d(8, 8, 3), before=Padded(40.3, Turned())),
    "margin, then pool": lambda: Between(nn.Conv2d(8, 8, 3), before=Padded(-40.3, nn.MaxPool2d(3, 1))),
    "padding, then turned": lambda: Between(nn.Conv2d(8, 8, 3), before=Padded(0.0, Turned())),
    "reflected, then turned": lambda: Between(nn.Conv2d(8, 8, 3), before=Padded(0.0, Turned(), mode="reflect")),
    "batch norm": lambda: Between(nn.Conv2d(8, 8, 3), after=nn.BatchNorm2d(8)),
    "transposed": lambda: Between(nn.ConvTranspose2d(8, 8, 2, stride=2)),
    "grouped transposed": lambda: Between(nn.ConvTranspose2d(8, 8, 2, groups=2, bias=False)),
    "linear": lambda: Rows(nn.Linear(512, 6)),
    "linear without bias": lambda: Rows(nn.Linear(512, 6, bias=False)),
    "linear of tokens": lambda: Rows(nn.Linear(8, 6), flat=False),
    "product and vector": lambda: Rows(AddedVector()),
}


def run(path: Path, x: Tensor, *, disabled: tuple[str, ...] = ()) -> tuple[np.ndarray, Counter[str]]:
    """Return what a session with default options computes, and how often each operator is in the graph it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path.with_suffix(".run.onnx"))
    more = {"disabled_optimizers": list(disabled)} if disabled else {}
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], **more)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return result, Counter(node.op_type for node in onnx.load(path.with_suffix(".run.onnx")).graph.node)


def holds_floats(path: Path, x: Tensor) -> Counter[str]:
    """Check that the rewrite which rounds floats changes nothing; return the kernels."""
    result, kernels = run(path, x)
    expected, without = run(path, x, disabled=("WeightBiasQuantization",))
    assert kernels == without
    np.testing.assert_array_equal(result, expected)
    return kernels


FLOAT_KERNELS = ("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")


@pytest.mark.parametrize("format", ["qdq", "qoperator"])
@pytest.mark.parametrize("name", MODELS)
def test_an_excluded_operator_runs_in_float(name: str, format: str, tmp_path: Path) -> None:
    x = images(4)
    excluded = quantize(seeded(MODELS[name]()), INT8_STATIC.replace(exclude=("middle", "middle.*")), x)
    path = qfx.export.onnx(excluded, tmp_path / "model.onnx", format=format)
    kernels = holds_floats(path, x[0])
    assert sum(kernels[kernel] for kernel in FLOAT_KERNELS) == 1
    assert round(qfx.verify(excluded, path, x).max_steps, 3) <= 1


HALVES = {
    "float16 weights": (FP16, UINT8),
    "bfloat16 weights": (BF16, UINT8),
    "float16 weights, int16 activations": (FP16, INT16),
}


@pytest.mark.parametrize("precision", HALVES)
def test_weights_in_half_precision_stay_in_it_beside_integer_activations(precision: str, tmp_path: Path) -> None:
    weight, activation = HALVES[precision]
    spec = TensorSpec(format=activation)
    config = QuantConfig(weight=TensorSpec(format=weight), input=spec, output=spec)
    model, x = seeded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))), images(4)
    qmodel = quantize(model, config, x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    kernels = holds_floats(path, x[0])
    assert not {kernel for kernel in kernels if kernel.startswith("Q") and kernel != "QuantizeLinear"}
    assert qfx.verify(qmodel, path, x).max_steps < 0.01


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
def test_a_float_bias_that_int32_does_not_hold_is_not_rounded_to_it(granularity: Granularity, tmp_path: Path) -> None:
    first = seeded(nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        first.weight[0 if granularity == Granularity.CHANNEL else slice(None)] *= 1e-9
        assert first.bias is not None
        first.bias.fill_(0.5)
    weight, activation = TensorSpec(format=INT8, granularity=granularity), TensorSpec(format=UINT8)
    model, x = nn.Sequential(first, nn.Conv2d(4, 4, 1)).eval(), images(4)
    qmodel = quantize(model, QuantConfig(weight=weight, input=activation, output=activation), x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert round(qfx.verify(qmodel, path, x).max_steps, 3) <= 1


def test_a_float_bias_that_int32_holds_costs_no_integer_kernel(tmp_path: Path) -> None:
    weight, activation = TensorSpec(format=INT8, granularity=Granularity.CHANNEL), TensorSpec(format=UINT8)
    model, x = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))), images(4)
    qmodel = quantize(model, QuantConfig(weight=weight, input=activation, output=activation), x)
    _, kernels = run(qfx.export.onnx(qmodel, tmp_path / "model.onnx"), x[0])
    assert kernels["QLinearConv"] >= 1


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_the_float_bias_of_a_transposed_convolution_is_not_clipped(level: str, tmp_path: Path) -> None:
    first = seeded(nn.ConvTranspose2d(3, 4, 2, stride=2))
    with torch.no_grad():
        first.weight[:, 0] *= 1e-7
        assert first.bias is not None
        first.bias.fill_(0.5)
    model, x = nn.Sequential(first, nn.Conv2d(4, 4, 1)).eval(), images(4)
    qmodel = quantize(model, "int8_static", x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    result = qfx.verify(qmodel, path, x, per_node=True, session_options=options)
    assert result["quantize_default_1"].steps == 0


def test_the_vendors_nodes_have_one_scale_for_an_activation(tmp_path: Path) -> None:
    x = [rand(4, 3, 8, 8)]
    model = seeded(Between(nn.Conv2d(8, 8, 3, padding=1)))
    qmodel = quantize(model, qfx.presets.XINT8.replace(exclude=("middle",)), x)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="vitis")
    scales = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    pairs = [node for node in onnx.load(path).graph.node if node.op_type.endswith("QuantizeLinear")]
    assert all(scales[node.input[1]] in ((), (1,)) for node in pairs)
    assert qfx.verify(qmodel, path, x).max_steps < 0.01
