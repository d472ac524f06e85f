"""Files that OpenVINO reads, run by it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
from processors import needs_emulator, run_without_vnni
from tiny import Residual, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
import quark_fx.vendors.intel.workarounds
from quark_fx.export.to_onnx.workarounds import WORKAROUNDS
from quark_fx.graph.nodes import QUANTIZE, target_name
from quark_fx.numbers.formats import INT8
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, PRESETS
from quark_fx.vendors.intel.openvino import OPENVINO
from quark_fx.vendors.intel.runner import OpenVinoRunner

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
STATIC = INT8_STATIC.replace(target="openvino")
GROUPS_OF_16 = INT4_WEIGHT_ONLY.replace(group_size=16)


class Network(nn.Module):
    """Convolutions, a depthwise one, a residual block and a linear layer, wide enough for kernels in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.block = Residual(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.depthwise(torch.relu(self.stem(x)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def exported(
    model: nn.Module, config: qfx.QuantConfig, data: list[Tensor], folder: Path
) -> tuple[qfx.QuantizedModel, Path]:
    qmodel = quantize(model, config, data)
    path = folder / "model.onnx"
    qfx.export.onnx(qmodel, path)
    return qmodel, path


@needs_openvino
@pytest.mark.parametrize("target", ["openvino", "onnx"])
def test_a_network_computes_in_integers_what_torch_computes(target: str, tmp_path: Path) -> None:
    data = images(4, 2)
    qmodel, path = exported(seeded(Network()), INT8_STATIC.replace(target=target), data, tmp_path)
    assert qfx.verify(qmodel, path, data, runtime="openvino").max_steps <= 1
    runner = OpenVinoRunner(path, profile=True)
    runner.run_in_order(data[:1])
    kernels = [kernel for kernel in runner.kernels() if kernel.kind in ("Convolution", "GroupConvolution")]
    assert len(kernels) == 3
    assert all(kernel.in_integers for kernel in kernels)


@needs_openvino
@pytest.mark.parametrize("config", [INT8_WEIGHT_ONLY, GROUPS_OF_16], ids=["int8", "int4"])
def test_coded_weights_are_multiplied_as_they_are_stored(config: qfx.QuantConfig, tmp_path: Path) -> None:
    qmodel, path = exported(mlp(), config.replace(target="openvino"), tokens(), tmp_path)
    assert qfx.verify(qmodel, path, tokens(), runtime="openvino").max_steps <= 0.01


def test_groups_that_it_does_not_read_are_refused() -> None:
    with pytest.raises(qfx.ConfigError, match=r"48 inputs are not a multiple of the group size 32; set group_size=16"):
        quantize(mlp(), INT4_WEIGHT_ONLY.replace(target="openvino"), tokens())


def test_a_file_of_other_groups_is_refused(tmp_path: Path) -> None:
    _, path = exported(mlp(), INT4_WEIGHT_ONLY, tokens(), tmp_path)
    with pytest.raises(qfx.ExportError, match=r"groups that do not divide(?s:.*)48 values in groups of 32"):
        OPENVINO.onnx.check(onnx_ir.load(path))  # type: ignore[misc]  # which it has


@pytest.mark.parametrize(
    ("model", "expected"), [(seeded(Network()), (5, 4)), (seeded(nn.Conv2d(3, 4, 3)), (2, 1))], ids=["residual", "conv"]
)
def test_additions_and_what_convolutions_make_have_no_codes(model: nn.Module, expected: tuple[int, int]) -> None:
    found = []
    for target in ("onnx", "openvino"):
        graph = quantize(model, INT8_STATIC.replace(target=target), images(4, 2)).graph_module.graph
        found.append(sum(target_name(node) == QUANTIZE for node in graph.nodes))
    assert tuple(found) == expected


class Shared(nn.Module):
    """A convolution without a bias, or one of zeros, whose result is read in several ways."""

    def __init__(self, readers: str) -> None:
        super().__init__()
        zeros = readers == "residual of zeros"
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1, bias=zeros), nn.Conv2d(16, 16, 3, padding=1)
        self.readers = readers

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.readers == "twice":
            return x + x
        if self.readers == "after a factor":
            x = x * 0.7
            return torch.maximum(x, x)
        return torch.maximum(x, x) * x if self.readers == "thrice" else x + self.second(x)


@needs_openvino
@pytest.mark.parametrize("readers", ["residual", "residual of zeros", "twice", "thrice", "after a factor"])
def test_a_convolution_without_a_bias_keeps_its_scale_for_every_reader(readers: str, tmp_path: Path) -> None:
    model = seeded(Shared(readers))
    if readers == "residual of zeros":
        assert model.first.bias is not None
        nn.init.zeros_(model.first.bias)  # as a folded batch norm may leave them
    data = [rand(2, 16, 8, 8), rand(2, 16, 8, 8, seed=2)]
    qmodel, path = exported(model, STATIC, data, tmp_path)
    assert qfx.verify(qmodel, path, data).max_steps <= 1
    assert qfx.verify(qmodel, path, data, runtime="openvino").max_steps <= 1


class Joined(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.last = nn.Conv2d(8 if how == "along rows" else 16, 8, 3)

    def forward(self, x: Tensor) -> Any:
        first, second = self.first(x), self.second(x)
        if self.how == "of halves":
            first, second = first[..., ::2], nn.functional.max_pool2d(second, (1, 2))
        joined = torch.cat((first, second), 2 if self.how == "along rows" else 1)
        return self.last(torch.relu(joined) if self.how == "before a function" else joined)


@needs_openvino
@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("how", ["of channels", "along rows", "of halves", "before a function"])
def test_signed_codes_of_a_concatenation_are_read_right(how: str, symmetry: str, tmp_path: Path) -> None:
    spec = qfx.TensorSpec(format=INT8, symmetry=qfx.Symmetry(symmetry))
    data = images(4, 2)
    qmodel, path = exported(seeded(Joined(how)), STATIC.replace(input=spec, output=None), data, tmp_path)
    found = qfx.verify(qmodel, path, data, per_node=True)
    assert found.max_steps <= 1
    assert len(found.differences) > 1, "codes are compared, although the file has them unsigned"
    assert qfx.verify(qmodel, path, data, runtime="openvino").max_steps <= 1


@needs_openvino
def test_recurrent_layers_stay_in_float_and_are_read(tmp_path: Path) -> None:
    class Lasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.layer(x)[0])
            return y

    qmodel, path = exported(seeded(Lasting()), STATIC, [rand(2, 5, 8)], tmp_path)
    assert {row.kind: bool(row.reason) for row in qmodel.report()} == {"lstm": True, "linear": False}
    assert qfx.verify(qmodel, path, [rand(2, 5, 8)], runtime="openvino").max_steps <= 1


@needs_openvino
def test_outputs_have_their_names(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"plain": y, "doubled": 2 * y, "shifted": y + 1}

    qmodel, path = exported(seeded(Several()), STATIC, [rand(2, 4)], tmp_path)
    found = qfx.verify(qmodel, path, [rand(2, 4)], runtime="openvino")
    assert [d.name for d in found.differences] == ["plain", "doubled", "shifted"]
    assert found.max_steps <= 1


def test_activations_measured_at_run_time_are_refused() -> None:
    with pytest.raises(qfx.ConfigError, match="activations in float; calibrate them"):
        INT8_DYNAMIC.replace(target="openvino")


@pytest.mark.parametrize("preset", ["fp8_static", "mxfp4_weight_only", "mxint8", "nvfp4"])
def test_small_floats_and_blocks_are_refused(preset: str) -> None:
    with pytest.raises(qfx.ConfigError, match="use integers with float32 scales"):
        PRESETS[preset].replace(target="openvino")


@needs_openvino
def test_what_is_onnx_runtimes_alone_is_refused(tmp_path: Path) -> None:
    qmodel, path = exported(seeded(nn.Linear(4, 4)), STATIC, [rand(2, 4)], tmp_path)
    for options in ({"per_node": True}, {"optimize": False}, {"session_options": object()}):
        with pytest.raises(qfx.ExportError, match="only apply to ONNX Runtime; drop them"):
            qfx.verify(qmodel, path, [rand(2, 4)], runtime="openvino", **options)
    with pytest.raises(qfx.QuarkError, match=r"'open_vino'.*'openvino'"):
        qfx.verify(qmodel, path, [rand(2, 4)], runtime="open_vino")
    with pytest.raises(qfx.ExportError, match=r"shape \(any, 4\), .* shape \(2, 6\): the file is from another model"):
        qfx.verify(quantize(seeded(nn.Linear(6, 4)), STATIC, [rand(2, 6)]), path, [rand(2, 6)], runtime="openvino")


def test_without_openvino_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, path = exported(seeded(nn.Linear(4, 4)), STATIC, [rand(2, 4)], tmp_path)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(qfx.ExportError, match=r"pip install 'quark_fx\[openvino\]'"):
        qfx.verify(qmodel, path, [rand(2, 4)], runtime="openvino")


@needs_openvino
@needs_emulator
def test_sums_of_pairs_are_exact_without_vnni(tmp_path: Path) -> None:
    """Weights of one sign and the largest activations, which `vpmaddubsw` saturates if all codes are used."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 4, 8)).eval()
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() > 1):
            weight.copy_(rand(*weight.shape).abs() * 0.01 + 1)
    data = [torch.ones(1, 16, 4, 4) - 0.01 * rand(1, 16, 4, 4).abs(), torch.zeros(1, 16, 4, 4)]
    files: dict[str, Path] = {}
    expected: dict[str, Tensor] = {}
    for target in ("openvino", "onnx_vnni"):
        (tmp_path / target).mkdir()
        qmodel, files[target] = exported(model, INT8_STATIC.replace(target=target), data, tmp_path / target)
        expected[target] = qmodel(data[0])
    feeds = {"input": data[0].numpy()}
    emulated = run_without_vnni(dict.fromkeys(files.values(), feeds), tmp_path, "openvino")
    wrong = {
        target: float(((torch.from_numpy(emulated[files[target]][0]) - right) / right).abs().max())
        for target, right in expected.items()
    }
    assert wrong["openvino"] < 0.01
    assert wrong["onnx_vnni"] > 0.2  # the emulated processor does saturate


class Pyramid(nn.Module):
    """A step of a U-Net or a feature pyramid: what was made smaller is resized and joined with what it was made of."""

    def __init__(self, smaller: str, mode: str, channels: int, rank: int = 2) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.last = convolution(3, 8, 3, padding=1), convolution(channels, 2, 1)
        self.down, self.one = convolution(8, 8, 3, 2, 1), convolution(8, 8, 1)
        self.smaller, self.mode = smaller, mode

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        sizes = y.shape[2:]
        if self.smaller == "pool":
            parts = [nn.functional.max_pool2d(y, 2)]
        elif self.smaller == "pyramid":
            half = torch.relu(self.down(y))
            parts = [half, torch.relu(self.down(half))]
        elif self.smaller == "mean":
            parts = [torch.relu(self.one(nn.functional.adaptive_avg_pool2d(y, 1)))]
        else:
            parts = [torch.relu(self.down(y))]
        resized = [nn.functional.interpolate(part, size=sizes, mode=self.mode) for part in parts]
        if self.smaller == "cut":
            resized = [part[:, :, : sizes[0]] for part in resized]
        joined: Tensor = self.last(torch.cat([y, *resized], 1))
        return joined


@needs_openvino
def test_resized_values_of_free_sizes_are_joined_as_in_torch(tmp_path: Path) -> None:
    """OpenVINO adds the bias of the first channel to every channel of a convolution that such a `Concat` reads."""
    auto = torch.export.Dim.AUTO
    cases: list[tuple[Any, ...]] = [
        *(("convolution", mode, 16) for mode in ("nearest", "bilinear")),
        *(("pool", "nearest", 16), ("pyramid", "nearest", 24), ("mean", "bilinear", 16), ("cut", "nearest", 16)),
        *(("convolution", "linear", 16, 1), ("convolution", "nearest", 16, 3)),
    ]
    for case in cases:
        rank = case[3] if len(case) > 3 else 2
        batches = [rand(4, 3, *(8,) * rank, seed=i) for i in range(2)]
        free = {"x": {0: auto, **dict.fromkeys(range(2, rank + 2), auto)}}
        qmodel = quantize(seeded(Pyramid(*case)), STATIC, batches, dynamic_shapes=free)
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        others = [rand(3, 3, *(10,) * rank)]
        assert qfx.verify(qmodel, file, others, runtime="openvino").max_steps <= 1, case
        assert qfx.verify(qmodel, file, others).max_steps <= 1, case


@needs_openvino
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_circular_padding_is_written_as_slices(rank: int, tmp_path: Path) -> None:
    convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    options = {"padding_mode": "circular"}
    layers = [convolution(3, 4, 3, padding=1, **options), nn.ReLU(), convolution(4, 4, 3, padding=2, **options)]
    model, x = seeded(nn.Sequential(*layers)), rand(2, 3, *(5, 6, 7)[:rank])
    for preset in ("int8_static", "int8_weight_only"):
        qmodel = quantize(model, PRESETS[preset].replace(target="openvino"), [x])
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        assert {qfx.verify(qmodel, file, [x], runtime=one).max_steps < 1 for one in ("openvino", "onnxruntime")} == {
            True
        }


class Rolls(nn.Module):
    """Codes of a convolution that are rolled along dimensions of free sizes, which a file measures."""

    def __init__(self, rank: int, dims: tuple[int, ...]) -> None:
        super().__init__()
        convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.last, self.dims = convolution(3, 8, 3, padding=1), convolution(16, 2, 1), dims

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        result: Tensor = self.last(torch.cat([y.roll([1] * len(self.dims), self.dims), y], 1))
        return result


@needs_openvino
@pytest.mark.parametrize(("rank", "dims"), [(1, (2,)), (2, (2,)), (2, (2, 3)), (3, (4,))])
def test_codes_whose_sizes_are_measured_are_as_in_torch(rank: int, dims: tuple[int, ...], tmp_path: Path) -> None:
    auto = torch.export.Dim.AUTO
    batches = [rand(4, 3, *(8,) * rank, seed=i) for i in range(2)]
    free = {"x": {0: auto, **dict.fromkeys(range(2, rank + 2), auto)}}
    qmodel = quantize(seeded(Rolls(rank, dims)), STATIC, batches, dynamic_shapes=free)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    others = [rand(3, 3, *(10,) * rank)]
    assert qfx.verify(qmodel, file, others, runtime="openvino").max_steps <= 1
    assert qfx.verify(qmodel, file, others).max_steps <= 1


class Sized(nn.Module):
    """The result of a convolution, joined with an operator on it that reads free sizes."""

    def __init__(self, first: str, reader: str = "windows") -> None:
        super().__init__()
        transposed = first == "transposed"
        self.first = nn.ConvTranspose2d(3, 8, 1) if transposed else nn.Conv2d(3, 8, 3, padding=1)
        self.other, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 2, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8).view(8, 1, 1))
        self.kind, self.reader = first, reader

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.kind == "scaled":
            y = y * self.scale + self.scale
        elif self.kind == "sum":
            y = y + self.other(x)
        elif self.kind == "clipped":
            y = nn.functional.relu6(y)
        elif self.kind != "signed":
            y = torch.relu(y)
        n, c, h, w = y.shape
        if self.reader == "windows":
            other = y.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 2, 4, 3, 5).reshape(n, c, h, w)
        else:
            other = nn.functional.adaptive_avg_pool2d(y, (4, 4))
            if self.reader == "pool":
                y = nn.functional.adaptive_avg_pool2d(y.flip(1), (4, 4))
            else:
                other = nn.functional.interpolate(other, size=(h, w))
        result: Tensor = self.last(torch.cat([other, y], 1))
        return result


@needs_openvino
@pytest.mark.parametrize(
    ("first", "reader"),
    [
        *((first, "windows") for first in ("rectified", "signed", "clipped", "scaled", "sum", "transposed")),
        *(("rectified", reader) for reader in ("pool", "resized pool")),
    ],
)
def test_every_channel_keeps_its_bias_where_sizes_are_measured(first: str, reader: str, tmp_path: Path) -> None:
    auto = torch.export.Dim.AUTO
    batches = [rand(4, 3, 8, 8, seed=i) for i in range(2)]
    qmodel = quantize(
        seeded(Sized(first, reader)), STATIC, batches, dynamic_shapes={"x": dict.fromkeys((0, 2, 3), auto)}
    )
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    others = [rand(3, 3, 12, 16)]
    assert qfx.verify(qmodel, file, others, runtime="openvino").max_steps <= 1
    assert qfx.verify(qmodel, file, others).max_steps <= 1


class Tied(nn.Module):
    """A layer whose weight is also read as a matrix, as a table, or by a second layer."""

    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, size)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        if "table" in self.how:
            x = nn.functional.embedding(x, weight)
        x = self.first(x)
        if self.how in ("tied", "tied table"):
            x = nn.functional.linear(x, weight.t())
        elif self.how == "multiplied":
            x = torch.relu(x) @ weight
        elif self.how == "thrice":
            x = self.first(x @ weight)
        elif self.how == "in one direction":
            x = self.first(torch.relu(x)[:, :32])
        return x


WEIGHT = INT8_WEIGHT_ONLY.weight
assert WEIGHT is not None
READ_IN_OPENVINO = {
    "int8": INT8_WEIGHT_ONLY,
    "int8 per tensor": INT8_WEIGHT_ONLY.replace(weight=WEIGHT.replace(granularity="tensor")),
    "int8 asymmetric": INT8_WEIGHT_ONLY.replace(weight=WEIGHT.replace(symmetry="asymmetric")),
    "int4 groups": GROUPS_OF_16,
    "int8 static": INT8_STATIC,
    "float": INT8_STATIC.replace(exclude=("*",)),
}


@needs_openvino
@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("how", ["tied", "multiplied", "thrice", "in one direction", "table", "tied table"])
@pytest.mark.parametrize("scales", READ_IN_OPENVINO)
def test_a_weight_is_read_in_every_direction(scales: str, how: str, size: int, tmp_path: Path) -> None:
    data = [torch.arange(12) if "table" in how else rand(4, 32)]
    config = READ_IN_OPENVINO[scales].replace(target="openvino")
    qmodel, path = exported(seeded(Tied(how, size)), config, data, tmp_path)
    assert qfx.verify(qmodel, path, data, runtime="openvino").max_steps <= (1 if scales == "int8 static" else 0.01)
    if how == "in one direction":  # as in ordinary layers, which keep their integer kernels
        assert "LeakyRelu" not in {node.op_type for node in onnx_ir.load(path).graph}


@needs_openvino
def test_a_table_keeps_the_scales_of_its_columns(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[3] i) => (float[3,4] y)'
        "<int8[4,4] w = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12, 13, 14, -15, 16}, float[4] s = {0.1, 0.2, 0.3, 0.4}>"
        "{ d = DequantizeLinear<axis=1>(w, s)  y = Gather(d, i) }"
    )
    model = onnx_ir.from_onnx_text(text)
    WORKAROUNDS["scales along another axis"](model)
    onnx_ir.save(model, tmp_path / "model.onnx")
    (found,) = OpenVinoRunner(tmp_path / "model.onnx").run_in_order([torch.tensor([0, 3, 1])]).values()
    rows = torch.tensor([[1, -2, 3, 4], [13, 14, -15, 16], [5, -6, 7, 8]])
    torch.testing.assert_close(torch.as_tensor(found), rows * torch.tensor([0.1, 0.2, 0.3, 0.4]))
