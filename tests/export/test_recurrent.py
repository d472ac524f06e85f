"""Recurrent layers in ONNX: what torch computes from the same codes, in every shape a layer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from processors import needs_emulator, run_here, run_without_vnni
from tiny import quantize, rand, seeded, thinned
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.numbers.formats import INT8, UINT8
from quark_fx.presets import INT8_DYNAMIC, INT8_WEIGHT_ONLY


class Recurrent(nn.Module):
    """A recurrent layer and a linear one; returns the state of the former as well."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer: nn.Module = kind(8, 6, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        given = (state if isinstance(self.layer, nn.LSTM) else state[0]) if state else None
        made, end = self.layer(x, given)
        return self.head(made), end


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"bidirectional": True, "batch_first": True},
    "stacked": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False, "num_layers": 2, "batch_first": True},
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
ASYMMETRIC = QuantConfig(weight=TensorSpec(format=UINT8))
PER_TENSOR = QuantConfig(weight=TensorSpec(format=INT8), input=TensorSpec(format=INT8))


def recurrent(kind: str, shape: str) -> nn.Module:
    layer, options = KINDS[kind]
    return seeded(Recurrent(layer, **SHAPES[shape], **options))


def close(qmodel: qfx.QuantizedModel, file: Path, batch: Any) -> None:
    """Nothing is rounded between layers, so sums of float32 in another order are all that differs."""
    found = qfx.verify(qmodel, file, [batch], per_node=True)
    assert max(d.max_abs for d in found.differences if d.name.startswith("output")) < 1e-5
    assert found.max_steps <= 1


@pytest.mark.parametrize(
    ("kind", "shape"),
    thinned(KINDS, SHAPES, lambda kind, shape: kind == "lstm" or shape in ("stacked", "without biases")),
)
def test_a_layer_of_any_shape_computes_what_torch_does(kind: str, shape: str, tmp_path: Path) -> None:
    model, x = recurrent(kind, shape), rand(4, 5, 8)
    qmodel = quantize(model, "int8_static", [x])
    close(qmodel, qfx.export.onnx(qmodel, tmp_path / "model.onnx"), x)


@pytest.mark.parametrize(
    "config",
    [
        *("int8_weight_only", "int8_dynamic", "int4_weight_only", "fp8_static", "mxfp4", "nvfp4", "w8a8_dynamic"),
        *("fp16", "xint8"),
        pytest.param(ASYMMETRIC, id="zero points"),
        pytest.param(PER_TENSOR, id="one scale"),
    ],
)
def test_weights_of_any_format_are_rearranged_with_their_scales(config: Any, tmp_path: Path) -> None:
    model, x = recurrent("lstm", "both ways"), rand(4, 5, 8)
    qmodel = quantize(model, config, [x])
    close(qmodel, qfx.export.onnx(qmodel, tmp_path / "model.onnx"), x)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_given_state_is_where_every_layer_begins(kind: str, tmp_path: Path) -> None:
    states = [rand(4, 3, 6, seed=seed) for seed in (1, 2)][: 2 if kind == "lstm" else 1]
    batch = (rand(5, 3, 8), *states)
    qmodel = quantize(recurrent(kind, "stacked"), "int8_dynamic", [batch])
    close(qmodel, qfx.export.onnx(qmodel, tmp_path / "model.onnx"), batch)


def test_a_layer_that_runs_twice_is_stored_once(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x)[0])[0]

    x = rand(4, 5, 8)
    qmodel = quantize(seeded(Twice()), "int8_weight_only", [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    close(qmodel, file, x)
    codes = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert [list(t.dims) for t in codes] == [[24, 8], [24, 8]]


def test_weights_that_a_model_computes_are_rearranged_at_run_time(tmp_path: Path) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 6, batch_first=True)

        def forward(self, x: Tensor, gain: Tensor) -> Any:
            weights = [w * gain for w in self.layer.all_weights[0]]
            return torch.gru(x, x.new_zeros(1, x.shape[0], 6), weights, True, 1, 0.0, False, False, True)[0]

    batch = (rand(4, 5, 8), rand(1, seed=1))
    with pytest.warns(UserWarning, match="nothing was quantized"):
        qmodel = quantize(seeded(Computed()), "int8_weight_only", [batch])
    close(qmodel, qfx.export.onnx(qmodel, tmp_path / "model.onnx"), batch)


def test_a_loaded_model_keeps_the_names_of_its_weights_in_the_file(tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    quantize(recurrent("lstm", "plain"), "int8_static", [x]).save(tmp_path / "stored")
    qmodel = qfx.load(tmp_path / "stored")
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    close(qmodel, file, x)
    assert "layer.weight_ih_l0_codes_onnx" in {t.name for t in onnx.load(file).graph.initializer}


@pytest.mark.parametrize("opset", [18, 25])
def test_a_layer_is_exported_in_other_opsets(opset: int, tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    qmodel = quantize(recurrent("lstm", "both ways"), "int8_static", [x])
    close(qmodel, qfx.export.onnx(qmodel, tmp_path / "model.onnx", opset=opset), x)


@pytest.mark.filterwarnings("ignore:nothing was quantized")
def test_weights_are_bytes_in_the_file_and_known_when_it_is_loaded(tmp_path: Path) -> None:
    x = rand(4, 5, 64)
    model = seeded(nn.Sequential(nn.LSTM(64, 64, 2, batch_first=True)))
    path, sizes = tmp_path / "model.onnx", []
    for exclude in (("*",), ()):
        qmodel = qfx.quantize(model, INT8_WEIGHT_ONLY.replace(exclude=exclude), [x], progress=False)
        sizes.append(qfx.export.onnx(qmodel, path).stat().st_size)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "weight" in name)
    assert sizes[0] - sizes[1] > 0.7 * weights
    assert not [node for node in onnx.load(path).graph.node if node.op_type == "DequantizeLinear"]
    kernels = {node.kernel for node in qfx.export.onnx(quantize(model, "int8_weight_only", [x]), path).report().nodes}
    assert "LSTM" in kernels
    assert not kernels & {"Mul", "Reshape", "Cast"}, "ONNX Runtime computes them when it loads the file"


@pytest.mark.parametrize("shape", ["plain", "both ways", "stacked"])
def test_an_lstm_on_integers_rounds_its_state_as_well(shape: str, tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    qmodel = quantize(recurrent("lstm", shape), INT8_DYNAMIC, [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator")
    layers = SHAPES[shape].get("num_layers", 1)
    kernels = [node.kernel for node in file.report().quantized]
    assert kernels.count("DynamicQuantizeLSTM") == layers
    assert not file.report().saturating
    found = qfx.verify(qmodel, file, [x])
    # The state is within -1 and 1 and rounded to a 255th of its range; a step of each layer adds to the next.
    assert 0 < max(d.max_abs for d in found.differences) < 5 * layers / 255


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("int8_static", "its input is not uint8 with scales measured at run time"),
        (INT8_DYNAMIC.replace(weight=TensorSpec(format=UINT8)), "its weights have zero points"),
    ],
)
def test_other_lstms_stay_in_float_and_say_why(config: Any, reason: str, tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    qmodel = quantize(recurrent("lstm", "both ways"), config, [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator")
    (kept,) = [k for k in file.kept if k.operator == "LSTM"]
    assert reason in kept.reason
    close(qmodel, file, x)


def test_there_is_no_gru_on_integers(tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    qmodel = quantize(recurrent("gru", "plain"), INT8_DYNAMIC, [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator")
    assert [k.reason for k in file.kept if k.operator == "GRU"] == ["ONNX Runtime's CPU provider has no integer GRU"]
    close(qmodel, file, x)


@needs_emulator
def test_an_lstm_on_integers_is_the_same_without_vnni(tmp_path: Path) -> None:
    # Weights that reach their largest code in most columns: pairs of them would saturate.
    model = seeded(nn.Sequential(nn.LSTM(32, 32, batch_first=True)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "weight" in name:
                weight.copy_(torch.where(weight > 0, 0.2, -0.2) + 0.1 * weight)
    x = rand(2, 4, 32).abs()
    files = {}
    for target in ("onnx", "onnx_vnni"):
        qmodel = quantize(model, INT8_DYNAMIC.replace(target=target), [x])
        files[target] = qfx.export.onnx(qmodel, tmp_path / f"{target}.onnx", format="qoperator")
    assert [len(files[target].report().saturating) for target in files] == [0, 1]
    feeds = {Path(file): {"input": x.numpy()} for file in files.values()}
    (tmp_path / "arrays").mkdir()
    emulated = run_without_vnni(feeds, tmp_path / "arrays")
    gaps = {}
    for target, file in files.items():
        here = run_here(file, feeds[Path(file)])
        gaps[target] = float(abs(here[0] - emulated[Path(file)][0]).max())
    # Sums of float32 in another order may round a state to the next of 255 codes.
    assert gaps["onnx"] < 2 / 255
    assert gaps["onnx_vnni"] > 0.1


def test_codes_in_the_file_are_those_of_the_graph_gate_by_gate(tmp_path: Path) -> None:
    x = rand(4, 5, 8)
    qmodel = quantize(recurrent("gru", "plain"), "int8_weight_only", [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}
    codes = torch.from_numpy(stored["layer.weight_hh_l0_codes_onnx"].copy())
    reset, update, new = qmodel.graph_module.get_buffer("layer.weight_hh_l0_codes").split(6)
    assert torch.equal(codes, torch.cat([update, reset, new]))
