"""ONNX formats beside pairs of quantizers: what they hold, that they compute the same, what they refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from interruptions import interrupted
from networks import Encoder
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from tiny import cnn, images, quantize, rand, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.export.runtime.report import runtime_report
from quark_fx.export.to_onnx.edit import Kept
from quark_fx.export.to_onnx.formats import FORMATS
from quark_fx.export.to_onnx.matmul_nbits import block_size
from quark_fx.numbers.formats import INT2, INT4, INT8, INT16, INT32, UINT2, UINT4, UINT8, IntFormat
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT16, POWER_OF_TWO
from quark_fx.presets import BFP16 as BFP16_PRESET
from quark_fx.presets import FP8_STATIC, INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, PRESETS, XINT8
from quark_fx.vendors.amd.formats import PREFIXES

ROUNDING = 255 * 128 * 2**-24
"""What sums of 128 terms in another order may differ by, in steps of a 255th of the range."""


class Tied(nn.Module):
    """An embedding that is the head, too; 40 columns are no multiple of a group."""

    def __init__(self, columns: int = 40) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, columns), nn.Linear(columns, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(ids)))
        return logits


def ragged() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(70, 33), nn.ReLU(), nn.Linear(33, 17), nn.Sigmoid(), nn.Linear(17, 5)))


def ids(*sizes: int) -> list[Tensor]:
    return [torch.randint(0, 20, (n, 5), generator=torch.Generator().manual_seed(n)) for n in sizes or (4, 4)]


Data = Callable[..., list[Tensor]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Data]] = {
    "cnn": (cnn, images),
    "encoder": (lambda: seeded(Encoder(32, 4)), lambda *s: [rand(n, 6, 32, seed=n) for n in s or (4, 4)]),
    "ragged": (ragged, lambda *s: [rand(n, 70, seed=n) for n in s or (4, 4)]),
    "embedding": (lambda: seeded(Tied()), ids),
}
BLOCK_PRESETS = ("mxfp4", "nvfp4", "mx9", "mxfp6_e2m3", "bfp16", "mxfp8_e5m2")
CONFIGS = {"qdq": INT8_STATIC, "qoperator": INT8_STATIC, "matmul_nbits": INT4_WEIGHT_ONLY, "vitis": XINT8}


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def run(path: Path, x: Tensor, *, optimize: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_valid_and_agrees_with_torch(format: str, name: str, tmp_path: Path) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), CONFIGS[format], data())
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=format)
    onnx.checker.check_model(path, full_check=True)
    bound = ROUNDING if format == "matmul_nbits" else 1
    for optimize in (True, False):
        assert qfx.verify(qmodel, path, data(3, 1, 7), optimize=optimize).max_steps <= bound
    assert qfx.verify(qmodel, path, data(3), per_node=True).max_steps <= 1


# MatMulNBits ---------------------------------------------------------------------------------------------------------


def linear(spec: TensorSpec, features: int, bias: bool, shape: tuple[int, ...]) -> tuple[qfx.QuantizedModel, Tensor]:
    x = rand(*shape, features)
    return quantize(seeded(nn.Linear(features, 9, bias=bias)), QuantConfig(weight=spec), [x]), x


@pytest.mark.parametrize("fmt", [INT2, UINT2, INT4, UINT4, INT8, UINT8], ids=str)
@pytest.mark.parametrize(("group", "block"), [(None, 128), (16, 16), (32, 32), (48, 16), (64, 64), (512, 128)])
def test_every_width_and_group_size_becomes_one_kernel(
    fmt: IntFormat, group: int | None, block: int, tmp_path: Path
) -> None:
    grouped = {"granularity": Granularity.GROUP if group else Granularity.CHANNEL, "group_size": group}
    qmodel, x = linear(TensorSpec(format=fmt, **grouped), 70, bool(group), (5,))  # type: ignore[arg-type]
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    (node,) = onnx.load(path).graph.node
    attributes = {a.name: a.i for a in node.attribute}
    assert node.op_type == "MatMulNBits"
    assert attributes == {"K": 70, "N": 9, "bits": fmt.bits, "block_size": block}
    stored_zero_points = len(node.input) > 3 and node.input[3] != ""
    assert stored_zero_points == (not fmt.signed)  # the symmetric ones are what the kernel assumes
    expected = qmodel(x).detach()
    # 70 products in another order.
    bound = 70 * 2**-23 * (x.abs() @ torch.full((70, 9), float(expected.abs().max()))).max()
    np.testing.assert_allclose(run(path, x), expected, rtol=0, atol=float(bound))
    assert qfx.verify(qmodel, path, [x]).max_steps <= ROUNDING


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=["matrix", "sequence"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_a_bias_becomes_the_kernels_own(bias: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    qmodel, x = linear(INT4_WEIGHT_ONLY.weight, 70, bias, shape)  # type: ignore[arg-type]
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    (node,) = onnx.load(path).graph.node
    assert len(node.input) == (6 if bias else 3)
    assert qfx.verify(qmodel, path, [x]).max_steps <= ROUNDING


def test_negative_scales_and_asymmetric_signed_codes_are_exact(tmp_path: Path) -> None:
    for symmetry in (Symmetry.SIGN_AWARE, Symmetry.ASYMMETRIC):
        spec = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16, symmetry=symmetry)
        qmodel, x = linear(spec, 40, True, (5,))
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
        assert qfx.verify(qmodel, path, [x]).max_steps <= ROUNDING


def test_the_accuracy_level_is_the_kernels(tmp_path: Path) -> None:
    qmodel, x = linear(INT4_WEIGHT_ONLY.weight, 256, True, (5,))  # type: ignore[arg-type]
    differences = {}
    for level in (0, 4):
        path = qfx.export.onnx(qmodel, tmp_path / f"{level}.onnx", format="matmul_nbits", accuracy_level=level)
        (node,) = onnx.load(path).graph.node
        assert {a.name: a.i for a in node.attribute}.get("accuracy_level", 0) == level
        report = path.report()
        reported, others = (report.quantized, report.floating)[:: 1 if level == 4 else -1]
        assert [node.kernel for node in reported] == ["MatMulNBits"]
        assert not others
        assert ("it dequantizes its weights" in str(report)) == (level == 0)
        differences[level] = float((torch.from_numpy(run(path, x)) - qmodel(x)).abs().max())
    assert differences[0] < 1e-5 < differences[4]  # int8 activations are another 4 decimals off
    table = quantize(seeded(nn.Sequential(nn.Embedding(20, 32), nn.Tanh())), INT4_WEIGHT_ONLY, ids())
    with pytest.raises(qfx.ExportError, match="accuracy_level=4 applies to MatMulNBits, but this model has none"):
        qfx.export.onnx(table, tmp_path / "table.onnx", format="matmul_nbits", accuracy_level=4)
    qfx.export.onnx(table, tmp_path / "table.onnx", format="matmul_nbits")


def test_group_sizes_without_a_kernel_are_refused_with_those_that_have_one(tmp_path: Path) -> None:
    spec = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=24)
    qmodel, _ = linear(spec, 70, True, (5,))
    with pytest.raises(qfx.ExportError, match=r"weight: .* groups of 24; use a group_size of 16, 32, 64, 128, 256"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    qfx.export.onnx(qmodel, tmp_path / "m.onnx")  # as pairs it runs
    assert [block_size(group, 4096) for group in (8, 16, 48, 96, 256, 1024, 4096)] == [None, 16, 16, 32, 256, 256, 256]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "config", "reason", "times"),
    [
        ("qoperator", INT8_STATIC, "(Gemm): the model computes in {}; quantize model.float()", 2),
        ("qoperator", INT8_DYNAMIC, "(Gemm): the model computes in {}; quantize model.float()", 2),
        ("qoperator", INT8_WEIGHT_ONLY, "no activation is quantized", 1),
        ("matmul_nbits", INT8_STATIC, "(Gemm): its activation is quantized", 2),
        ("matmul_nbits", INT8_WEIGHT_ONLY, "(Gemm): the model computes in {}", 2),
    ],
)
def test_a_model_in_half_precision_is_refused_for_what_it_is(
    format: str, config: QuantConfig, reason: str, times: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 8))).to(dtype)
    qmodel = quantize(model, config, [rand(4, 64).to(dtype)])
    with pytest.raises(qfx.ExportError) as refused:
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    assert str(refused.value).count(reason.format(str(dtype).removeprefix("torch."))) == times


class Sums(nn.Module):
    """A table and two matrices whose values are read in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 8)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.table(ids))))
        return y


@pytest.mark.parametrize("factor", [1.0, 1e-4])
@pytest.mark.parametrize("format", ["qdq", "matmul_nbits"])
def test_float16_scales_of_groups_take_two_bytes_and_no_other_kernel(
    format: str, factor: float, tmp_path: Path
) -> None:
    """Scales of the smaller weights are subnormal in float16."""
    model, x = seeded(Sums()), torch.arange(24).reshape(4, 6)
    with torch.no_grad():
        model.up.weight.mul_(factor)
    weight = INT4_WEIGHT_ONLY.weight
    assert weight is not None
    kernels, nbytes = {}, {}
    for kind in ("float32", "float16"):
        spec = weight.replace(scale=kind, group_size=16)
        qmodel = quantize(model, QuantConfig(weight=spec), [x])
        path = qfx.export.onnx(qmodel, tmp_path / f"{kind}.onnx", format=format)
        for optimize in (True, False):
            assert qfx.verify(qmodel, path, [x], optimize=optimize).max_steps <= ROUNDING
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        kernels[kind] = operators(tmp_path / "optimized.onnx")
        stored = [t for t in onnx.load(path).graph.initializer if "scale" in t.name]
        nbytes[kind] = sorted(len(t.raw_data) for t in stored)
        assert {t.data_type for t in stored} == {TensorProto.FLOAT16 if kind == "float16" else TensorProto.FLOAT}
    assert kernels["float16"] == kernels["float32"]
    assert kernels["float16"]["MatMulNBits"] == 2
    assert nbytes["float16"] == [count // 2 for count in nbytes["float32"]]


def test_a_model_in_half_precision_takes_scales_in_half_precision(tmp_path: Path) -> None:
    model, x = seeded(nn.Linear(64, 3)).half(), rand(6, 64).half()
    weight = INT4_WEIGHT_ONLY.weight
    assert weight is not None
    with pytest.raises(qfx.ExportError, match=r"weight \(MatMul|Gemm\): .* set scale='float16'"):
        qfx.export.onnx(quantize(model, QuantConfig(weight=weight), [x]), tmp_path / "m.onnx", format="matmul_nbits")
    qmodel = quantize(model, QuantConfig(weight=weight.replace(scale=FLOAT16)), [x])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    assert operators(path)["MatMulNBits"] == 1
    # float16 sums of 64 products, in two orders.
    np.testing.assert_allclose(run(path, x), qmodel(x).detach(), rtol=0, atol=64 * 2**-11)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("fmt", [INT4, UINT4, INT8, UINT8], ids=str)
def test_embeddings_are_looked_up_in_codes(fmt: IntFormat, granularity: str, tmp_path: Path) -> None:
    spec = TensorSpec(
        format=fmt,
        granularity=Granularity(granularity),
        group_size=16 if granularity == "group" else None,
    )
    qmodel = quantize(seeded(nn.Embedding(20, 40)), QuantConfig(weight=spec), ids())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    assert dict(operators(path)) == {"GatherBlockQuantized": 1}
    assert path.stat().st_size < 20 * 40 * fmt.bits / 8 + 20 * 3 * 4 + 20 * 3 + 700  # codes, scales, zero points, graph
    (x,) = ids(3)
    np.testing.assert_array_equal(run(path, x), qmodel(x).detach())


def test_a_weight_that_is_embedding_and_head_serves_both(tmp_path: Path) -> None:
    for config in (INT8_WEIGHT_ONLY, INT4_WEIGHT_ONLY.replace(overrides=())):
        qmodel = quantize(seeded(Tied()), config, ids())
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
        assert operators(path).keys() == {"GatherBlockQuantized", "Tanh", "MatMulNBits"}
        assert qfx.verify(qmodel, path, ids(3)).max_steps <= ROUNDING


def test_what_stays_in_pairs_is_listed_with_the_reason(tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(cnn(), INT4_WEIGHT_ONLY, images()), tmp_path / "m.onnx", format="matmul_nbits")
    assert [(k.name, k.operator) for k in path.kept] == [("stem.0.weight", "Conv"), ("block.conv.weight", "Conv")]
    assert all("no weight-only kernel for Conv" in k.reason for k in path.kept)
    assert "left in pairs: stem.0.weight (Conv): " in str(path.report())


# Operators on integers -----------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Convolutions with everything between them that has an integer kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=groups) for groups in (1, 4, 1, 2, 1))
        self.last, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = self.convs
        x = F.max_pool2d(torch.relu(a(x)), 2)
        x = torch.sigmoid(b(x)) * F.leaky_relu(c(x), 0.1)
        x = F.avg_pool2d(d(x) + e(x), 2)
        x = self.last(torch.cat([x, x * x], 1))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


@pytest.mark.parametrize("fmt", [UINT8, INT8], ids=str)
def test_a_convolutional_network_is_all_integer_operators(fmt: IntFormat, tmp_path: Path) -> None:
    activation = TensorSpec(format=fmt)
    config = INT8_STATIC.replace(input=activation, output=activation)
    data = [rand(4, 4, 8, 8, seed=i) for i in range(2)]
    qmodel = quantize(seeded(Zoo()), config, data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    written = operators(path)
    assert written["QLinearConv"] == 6
    assert written["QLinearAdd"] == written["QLinearAveragePool"] == written["QGemm"] == written["MaxPool"] == 1
    assert written["Conv"] + written["Add"] + written["AveragePool"] + written["Gemm"] + written["Relu"] == 0
    assert written["QLinearConcat"] + written["Concat"] == 1
    assert written["Clip"] == (fmt is INT8)  # a symmetric grid has no zero point that performs the relu
    assert qfx.verify(qmodel, path, data, per_node=True).max_steps <= 1
    pairs = qfx.export.onnx(qmodel, tmp_path / "pairs.onnx")
    step = float(abs(run(pairs, data[0])).max()) / 127
    for optimize in (True, False):
        np.testing.assert_allclose(run(path, data[0]), run(pairs, data[0], optimize=optimize), rtol=0, atol=step)


class Between(nn.Module):
    """An operator between two convolutions."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator, self.a, self.b = operator, nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.operator(self.a(x)))
        return out


BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sigmoid": (torch.sigmoid, "QLinearSigmoid"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), "QLinearLeakyRelu"),
    "softmax": (lambda x: torch.softmax(x, -1), "QLinearSoftmax"),
    "average": (lambda x: F.avg_pool2d(x, 2), "QLinearAveragePool"),
    "global_average": (lambda x: F.adaptive_avg_pool2d(x, 1), "QLinearGlobalAveragePool"),
    "add": (lambda x: x + x.flip(-1), "QLinearAdd"),
    "mul": (lambda x: x * x, "QLinearMul"),
    "relu6": (F.relu6, "Clip"),
    "transpose": (lambda x: x.transpose(2, 3), "Transpose"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_every_integer_form_computes_what_its_pairs_do(name: str, tmp_path: Path) -> None:
    operator, integer = BETWEEN[name]
    activation = TensorSpec(format=INT8)
    config = INT8_STATIC.replace(input=activation, output=activation)
    qmodel = quantize(seeded(Between(operator)), config, images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    written = operators(path)
    assert written[integer] == 1
    assert written["QuantizeLinear"] == written["DequantizeLinear"] == 1  # of input and output
    assert not path.kept
    assert qfx.verify(qmodel, path, images(3), per_node=True).max_steps <= 1


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"padding": 1, "count_include_pad": False}], ids=str)
@pytest.mark.parametrize("side", [8, 9])
def test_windows_beyond_the_rim_are_averaged_as_in_torch(side: int, options: dict[str, Any], tmp_path: Path) -> None:
    """ONNX Runtime's integer kernel counts them wrongly where padding counts: 30 to 60 codes off."""
    data = [rand(4, 3, side, side, seed=i) for i in range(2)]
    model = Between(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, **options))
    qmodel = quantize(seeded(model), INT8_STATIC, data)
    integer = options.get("padding", 0) == 0 or not options.get("count_include_pad", True)
    for format in ("qdq", "qoperator"):
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
        assert qfx.verify(qmodel, path, data, per_node=True).max_steps <= 1, format
        assert any(node.kernel == "QLinearAveragePool" for node in path.report().nodes) == integer, format


PADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: F.max_pool2d(F.pad(x, (1, 2, 2, 0)), 3),
    "maximum, a window of padding": lambda x: F.max_pool2d(F.pad(x, (1, 2, 3, 0)), 3),
    "maximum of ones": lambda x: F.max_pool2d(F.pad(x, (1, 2, 2, 0), value=1.0), 3),
    "average": lambda x: F.avg_pool2d(F.pad(x, (1, 2, 2, 0)), 3),
    "average, a window of padding": lambda x: F.avg_pool2d(F.pad(x, (1, 2, 3, 0)), 3),
    "average beyond the rim": lambda x: F.avg_pool2d(F.pad(x, (1, 2, 2, 0)), 3, 2, ceil_mode=True),
}


class PooledNegatives(nn.Module):
    """Values below -1, padded and pooled between two convolutions."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pool = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), pool

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.pool(-torch.relu(self.first(x)) - 1))
        return out


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.filterwarnings("ignore:nothing was quantized")
def test_padding_before_a_pool_keeps_its_values(name: str, tmp_path: Path) -> None:
    """ONNX Runtime makes it padding of the pool: -inf for a maximum, another count for an average."""
    session = qfx.Session(seeded(PooledNegatives(PADDED[name])), images())
    for exclude, formats in (((), ("qdq", "qoperator")), (("*",), ("qdq",))):
        qmodel = quantize(session, INT8_STATIC.replace(exclude=exclude))
        for format in formats:
            path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
            assert qfx.verify(qmodel, path, images()).max_steps <= 1 + ROUNDING, (format, exclude)
            assert ("Max" in operators(path)) == (name != "average"), (format, exclude)


class Twice(nn.Module):
    """A weight that is multiplied by both ways: its scales are those of columns for one of them only."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T) @ self.weight


@pytest.mark.parametrize("format", ["qdq", "qoperator"])
@pytest.mark.parametrize("config", [INT8_STATIC, INT8_DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("rows", [30, 40])
def test_scales_along_the_axis_that_is_summed_are_not_taken_for_those_of_columns(
    rows: int, config: QuantConfig, format: str, tmp_path: Path
) -> None:
    """ONNX Runtime fuses them into an integer product: an error for 30 rows, 67 steps for 40."""
    x = rand(2, 5, 40)
    qmodel = quantize(seeded(Twice(rows)), config, [x])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    assert qfx.verify(qmodel, path, [x]).max_steps <= 1


def test_a_chain_of_products_stays_in_integers(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 8, bias=False)), rand(2, 5, 40)
    qmodel = quantize(seeded(model), INT8_STATIC, [x])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    assert dict(operators(path)) == {"QuantizeLinear": 1, "QLinearMatMul": 1, "MatMulIntegerToFloat": 1}
    assert qfx.verify(qmodel, path, [x], per_node=True).max_steps <= 1


def test_asymmetric_weights_keep_their_zero_points(tmp_path: Path) -> None:
    config = INT8_STATIC.replace(weight=TensorSpec(format=UINT8, granularity=Granularity.CHANNEL))
    for name in ("cnn", "ragged", "encoder"):
        model, data = MODELS[name]
        qmodel = quantize(model(), config, data())
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
        assert qfx.verify(qmodel, path, data(3), per_node=True).max_steps <= 1


def test_a_vector_that_is_broadcast_or_no_vector_is_added_by_itself(tmp_path: Path) -> None:
    class Added(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight, self.added = nn.Parameter(torch.zeros(40, 7)), nn.Parameter(torch.zeros(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.added

    x = rand(2, 5, 40)
    for shape in ((1,), (5, 7), (5, 1)):
        for config, format in ((INT4_WEIGHT_ONLY, "matmul_nbits"), (INT8_STATIC, "qoperator")):
            qmodel = quantize(seeded(Added(*shape)), config, [x])
            path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
            assert operators(path)["Add"] == 1
            assert qfx.verify(qmodel, path, [x]).max_steps <= ROUNDING


def test_products_of_activations_are_integer_products(tmp_path: Path) -> None:
    config = INT8_STATIC.replace(overrides=(Override(pattern="op:matmul", input=TensorSpec(format=UINT8)),))

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.transpose(1, 2)

    x = rand(2, 5, 8)
    qmodel = quantize(Product().eval(), config, [x])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    assert operators(path)["MatMulIntegerToFloat"] == 1
    assert qfx.verify(qmodel, path, [x]).max_steps <= ROUNDING


def test_dynamic_activations_are_integer_products_and_convolutions(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), INT8_DYNAMIC, images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    written = operators(path)
    assert (written["ConvInteger"], written["MatMulInteger"], written["DynamicQuantizeLinear"]) == (2, 1, 3)
    assert written["Conv"] + written["Gemm"] + written["DequantizeLinear"] == 0
    assert qfx.verify(qmodel, path, images(3)).max_steps <= ROUNDING


def test_a_bias_on_another_grid_is_moved_to_the_products_only_if_that_is_exact(tmp_path: Path) -> None:
    exact = quantize(cnn(), XINT8, images())  # powers of two: a coarser bias is a multiple of the product's step
    path = qfx.export.onnx(exact, tmp_path / "m.onnx", format="qoperator")
    assert operators(path)["QLinearConv"] == 2
    assert qfx.verify(exact, path, images(3), per_node=True).max_steps == 0
    assert qfx.verify(exact, path, images(3)).max_steps == 0
    assert XINT8.bias is not None
    finer = quantize(cnn(), XINT8.replace(bias=XINT8.bias.replace(format=INT16)), images())
    path = qfx.export.onnx(finer, tmp_path / "m.onnx", format="qoperator")
    assert any("its bias has a finer scale than the product" in k.reason for k in path.kept)
    assert qfx.verify(finer, path, images(3), per_node=True).max_steps <= 1
    floating = quantize(cnn(), INT8_STATIC.replace(bias=None), images())
    path = qfx.export.onnx(floating, tmp_path / "m.onnx", format="qoperator")
    assert operators(path)["Conv"] == 2
    assert any("set bias=TensorSpec(format='int32')" in k.reason for k in path.kept)


class Biasless(nn.Module):
    """Two convolutions without a bias, or a convolution and a transposed one."""

    def __init__(self, rank: int, *, groups: int = 1, transposed: bool = False) -> None:
        super().__init__()
        conv: Any = getattr(nn, f"Conv{rank}d")
        last: Any = getattr(nn, f"ConvTranspose{rank}d") if transposed else conv
        self.a = conv(3, 8, 3, padding=1, bias=False)
        self.b = last(8, 8, 3, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)))
        return out


BIASLESS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one dimension": (lambda: Biasless(1), 1),
    "two dimensions": (lambda: Biasless(2), 2),
    "three dimensions": (lambda: Biasless(3), 3),
    "groups": (lambda: Biasless(2, groups=4), 2),
    "depthwise": (lambda: Biasless(2, groups=8), 2),
    "transposed": (lambda: Biasless(2, transposed=True), 2),
}


@pytest.mark.parametrize("name", BIASLESS)
@pytest.mark.parametrize(("format", "config"), [("qdq", INT8_STATIC), ("vitis", XINT8), ("vitis", BFP16_PRESET)])
def test_a_convolution_without_a_bias_is_written_without_one(
    format: str, config: QuantConfig, name: str, tmp_path: Path
) -> None:
    model, rank = BIASLESS[name]
    data = [rand(2, 3, *[6] * rank, seed=i) for i in range(2)]
    qmodel = quantize(seeded(model()), config, data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    nodes = onnx.load(path).graph.node
    assert not {"Shape", "Expand", "Constant"} & {n.op_type for n in nodes}
    assert [len(n.input) for n in nodes if n.op_type.startswith("Conv")] == [2, 2]
    assert qfx.verify(qmodel, path, data, per_node=True).max_steps <= 1


@pytest.mark.parametrize("name", BIASLESS)
@pytest.mark.parametrize(
    ("config", "operator"), [(INT8_STATIC, "QLinearConv"), (INT8_DYNAMIC, "ConvInteger"), (XINT8, "QLinearConv")]
)
def test_a_convolution_without_a_bias_is_an_integer_one(
    config: QuantConfig, operator: str, name: str, tmp_path: Path
) -> None:
    model, rank = BIASLESS[name]
    data = [rand(2, 3, *[6] * rank, seed=i) for i in range(2)]
    qmodel = quantize(seeded(model()), config, data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="qoperator")
    transposed = int(name == "transposed")  # has no integer form
    assert operators(path)[operator] == 2 - transposed
    assert [k.operator for k in path.kept] == ["ConvTranspose"] * transposed
    assert qfx.verify(qmodel, path, data).max_steps <= 1


def test_who_asks_for_a_shape_is_not_listed_as_left_in_pairs(tmp_path: Path) -> None:
    class Like(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.conv(x)
            return self.conv(x), torch.full_like(y, 0.5)

    path = qfx.export.onnx(quantize(seeded(Like()), INT8_STATIC, images()), tmp_path / "m.onnx", format="qoperator")
    assert operators(path)["Shape"]
    assert not path.kept


# The vendor's nodes --------------------------------------------------------------------------------------------------


def vendor_kernels(domain: str) -> list[type[OpRun]]:
    """Return reference kernels of the vendor's operators, written from their description."""
    prefix = PREFIXES[domain]

    def shaped(parameter: Any, x: Any, axis: int) -> Any:
        return (
            parameter.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]) if parameter.ndim else parameter
        )

    # Scales lie along dimension 0 unless an attribute says otherwise, and a zero point is always read.
    def quantize_(self: Any, x: Any, scale: Any, zero_point: Any, axis: int = 0) -> tuple[Any]:
        if not np.issubdtype(zero_point.dtype, np.integer):
            return (x.astype(zero_point.dtype),)
        info = np.iinfo(zero_point.dtype)
        codes = np.rint(x / shaped(scale, x, axis)) + shaped(zero_point, x, axis).astype(np.float32)
        return (np.clip(codes, info.min, info.max).astype(zero_point.dtype),)

    def dequantize_(self: Any, codes: Any, scale: Any, zero_point: Any, axis: int = 0) -> tuple[Any]:
        zero = zero_point.astype(np.float32)
        return ((codes.astype(np.float32) - shaped(zero, codes, axis)) * shaped(scale, codes, axis),)

    kinds = {"QuantizeLinear": quantize_, "DequantizeLinear": dequantize_}
    return [type(f"{prefix}{name}", (OpRun,), {"op_domain": domain, "_run": body}) for name, body in kinds.items()]


@pytest.mark.parametrize("domain", PREFIXES)
@pytest.mark.parametrize("name", ["cnn", "ragged"])
def test_the_vendors_nodes_compute_what_torch_does(name: str, domain: str, tmp_path: Path) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), XINT8, data())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", domain=domain, opset=17)
    stored = onnx.load(path)
    assert {o.domain: o.version for o in stored.opset_import} == {"": 17, domain: 1}
    assert not stored.functions
    assert {n.op_type for n in stored.graph.node if "Quant" in n.op_type or "quant" in n.op_type} == {
        f"{PREFIXES[domain]}{kind}" for kind in ("QuantizeLinear", "DequantizeLinear")
    }
    assert all(n.domain == domain for n in stored.graph.node if n.op_type.startswith(PREFIXES[domain]))
    (x,) = data(3)
    # Every value is a multiple of a power of two that float32 holds: reference, ONNX Runtime and torch are equal.
    got = ReferenceEvaluator(stored, new_ops=vendor_kernels(domain)).run(None, {stored.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(np.asarray(got[0]), qmodel(x).detach(), rtol=1e-6, atol=1e-6)
    assert qfx.verify(qmodel, path, data(3)).max_steps <= ROUNDING


@pytest.mark.parametrize("domain", PREFIXES)
@pytest.mark.parametrize("preset", ["int8_static", "int16_act_int8_weight", "int8_weight_only", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["cnn", "transposed"])
def test_the_vendors_nodes_take_float_scales_and_half_precision(
    name: str, preset: str, domain: str, tmp_path: Path
) -> None:
    model = seeded(nn.Sequential(nn.ConvTranspose2d(3, 6, 3), nn.Conv2d(6, 4, 3))) if name == "transposed" else cnn()
    qmodel = quantize(model, preset, images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", domain=domain)
    stored = onnx.load(path)
    assert "Cast" not in {node.op_type for node in stored.graph.node}
    assert all(len(node.input) == 3 for node in stored.graph.node if node.domain == domain)
    # Sums in another order may round to the neighboring code.
    assert qfx.verify(qmodel, path, images(3)).max_steps <= 1 + ROUNDING
    (x,) = images(3)
    evaluator = ReferenceEvaluator(stored, new_ops=vendor_kernels(domain))
    (got,) = evaluator.run(None, {stored.graph.input[0].name: x.numpy()})
    expected = qmodel(x).detach().numpy()
    # Sums in another order, and a value between two codes of 8 bits that they round another way.
    assert np.abs(got - expected).max() <= (expected.max() - expected.min()) / 255


@pytest.mark.parametrize("fmt", [INT2, INT4, UINT4, INT32], ids=str)
def test_the_vendors_codes_are_torchs_at_and_beyond_the_limits(fmt: IntFormat, tmp_path: Path) -> None:
    spec = TensorSpec(format=fmt, symmetry=Symmetry.SYMMETRIC)
    qmodel = quantize(cnn(), QuantConfig(weight=spec, input=spec, output=spec), images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    types = {t.data_type for t in onnx.load(path).graph.initializer if "codes" in t.name or "zero_point" in t.name}
    assert types <= {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32}  # what its kernels have
    (x,) = images(3)
    found = qfx.verify(qmodel, path, [x, 4 * x], per_node=True)
    assert found.differences
    # Codes of 32 bits show the last bits of float32 sums: those of 128 terms in another order.
    tolerance = 2.0**31 * 128 * 2**-24 if fmt == INT32 else 0
    assert all(d.max_abs <= tolerance for d in found.differences if d.name != "output")


def test_codes_of_32_bits_are_the_vendors_alone(tmp_path: Path) -> None:
    spec = TensorSpec(format=INT32)
    qmodel = quantize(cnn(), QuantConfig(weight=spec, input=spec), images())
    with pytest.raises(qfx.ExportError, match=r"int32, which only format='vitis' supports: quark_fx\.quantize"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    with pytest.raises(qfx.ConfigError, match="int32 has no ONNX type"):
        QuantConfig(weight=TensorSpec(format=INT32, symmetry=Symmetry.ASYMMETRIC))


@pytest.mark.parametrize(
    ("fmt", "opset"), [(INT16, 14), (INT16, 17), (INT16, 20), (INT4, 17), (INT2, 17), (INT2, 21)], ids=str
)
def test_the_vendors_nodes_have_every_width_in_every_opset(fmt: IntFormat, opset: int, tmp_path: Path) -> None:
    spec = TensorSpec(format=fmt, scale=POWER_OF_TWO)
    data = [rand(4, 70)]
    qmodel = quantize(ragged(), QuantConfig(weight=spec, input=spec.replace(format=INT16)), data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", opset=opset)
    assert {o.domain: o.version for o in onnx.load(path).opset_import} == {"": opset, "com.amd.quark": 1}
    assert qfx.verify(qmodel, path, data, per_node=True).max_steps <= 1


@pytest.mark.parametrize("opset", [18, 21])
def test_a_group_norm_between_the_vendors_nodes_runs(opset: int, tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)))
    qmodel = quantize(model, XINT8, images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", opset=opset)
    assert qfx.verify(qmodel, path, images(3)).max_steps <= 1


def test_the_report_of_the_vendors_nodes_is_the_vendors(tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(cnn(), XINT8, images()), tmp_path / "m.onnx", format="vitis")
    report = path.report()
    assert not report.nodes
    assert "not run in ONNX Runtime: it has no kernels for com.amd.quark; use the vendor's tools" in str(report)
    with pytest.raises(qfx.ExportError, match=r"no kernels for com\.amd\.quark"):
        runtime_report(path)


# Opsets and domains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [14, 17, 18, 19, 20, 21, 23, 25])
def test_every_opset_agrees_with_torch(opset: int, tmp_path: Path) -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", opset=opset)
    onnx.checker.check_model(path, full_check=True)
    assert {o.domain: o.version for o in onnx.load(path).opset_import} == {"": opset}
    assert qfx.verify(qmodel, path, images(3)).max_steps <= 1
    assert path.report().opset == opset


def test_wide_codes_are_in_old_opsets_in_the_contributed_domain(tmp_path: Path) -> None:
    wide = INT8_STATIC.replace(input=TensorSpec(format=INT16), output=TensorSpec(format=INT16))
    four = INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL))
    for config, code_type in ((wide, TensorProto.INT16), (four, TensorProto.INT4)):
        qmodel = quantize(cnn(), config, images())
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", opset=17, domain="com.microsoft")
        model = onnx.load(path)
        assert {o.domain: o.version for o in model.opset_import} == {"": 17, "com.microsoft": 1}
        assert code_type in {t.data_type for t in model.graph.initializer}
        assert qfx.verify(qmodel, path, images(3)).max_steps <= 1


def test_two_bits_need_the_newest_opset(tmp_path: Path) -> None:
    spec = TensorSpec(format=INT2, granularity=Granularity.GROUP, group_size=16)
    qmodel, x = linear(spec, 64, True, (5,))
    with pytest.raises(qfx.ExportError, match=r"int2 in blocks needs opset 25\nUse opset=25"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", opset=25)
    assert qfx.verify(qmodel, path, [x], optimize=False).max_steps <= ROUNDING


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (INT8_STATIC, {"format": "tflite"}, "choose one of qdq, qoperator, matmul_nbits, vitis"),
        (INT8_STATIC, {"accuracy_level": 4}, r"format='qdq' has no accuracy_level; .* of 'matmul_nbits'"),
        (INT8_STATIC, {"format": "qoperator", "domain": "com.microsoft"}, "'qoperator' has no domain"),
        (INT8_STATIC, {"domain": "com.amd.quark"}, "choose one of .*'com.microsoft'"),
        (INT4_WEIGHT_ONLY, {"format": "matmul_nbits", "accuracy_level": 5}, "choose one of"),
        (INT8_STATIC, {"opset": 13}, "choose one from 14 to 25"),
        (INT8_STATIC, {"opset": 26}, "choose one from 14 to 25"),
        *((INT8_STATIC, {"opset": opset}, "opset of onnx must be an integer") for opset in ("17", 17.0, True)),
        (
            INT4_WEIGHT_ONLY,
            {"format": "matmul_nbits", "accuracy_level": True},
            "accuracy_level of onnx must be an integer or None, not True",
        ),
        (INT8_STATIC, {"input_names": "x"}, "input_names must be a list of names, not 'x'"),
        (INT8_STATIC, {"input_names": [""]}, r"input_names must be a list of names, not \[''\]"),
        (INT8_STATIC, {"output_names": [1]}, r"output_names must be a list of names, not \[1\]"),
        (INT8_STATIC, {"input_names": ["x", "y"]}, r"input_names has 2 name\(s\), but the model has 1: x"),
        (INT8_STATIC, {"input_names": ["a"], "output_names": ["a"]}, "two inputs or outputs are called a; set"),
        (INT4_WEIGHT_ONLY, {"opset": 20}, r"int4 in blocks needs opset 21\nUse opset=21"),
        (INT4_WEIGHT_ONLY, {"domain": "com.microsoft"}, "scales in blocks"),
        (
            PRESETS["mxfp4"],
            {"format": "matmul_nbits"},
            r"stem.0.weight \(Conv\): it is in blocks of fp4_e2m1\n(.*\n)*Use",
        ),
        (
            PRESETS["fp16"],
            {"format": "matmul_nbits"},
            r"none: no weight is quantized to integers \(see qmodel.report\(\)\)\nUse",
        ),
        *(
            (
                PRESETS[name],
                {"domain": "com.microsoft"},
                "applies to QDQ pairs, but this model has none; drop domain=",
            )
            for name in ("mxfp4", "bf16")
        ),
        (INT8_STATIC, {"format": "matmul_nbits"}, r"\.weight \(Conv\).*\n.*head.weight \(Gemm\): its activation is"),
        (INT8_WEIGHT_ONLY, {"format": "qoperator"}, "one of its inputs is not quantized"),
        (FP8_STATIC, {"format": "vitis"}, r"static scales.*\n(.*\n)*  \S+ has codes of float8e4m3fn"),
        (INT8_DYNAMIC, {"format": "vitis"}, "measures its scale at run time"),
        (INT8_STATIC.replace(input=TensorSpec(format=INT16), output=None), {"opset": 17}, "or domain='com.microsoft'"),
    ],
)
def test_what_does_not_go_together_is_refused_and_leaves_the_file_there(
    config: QuantConfig, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"what was there")
    with pytest.raises((qfx.ExportError, qfx.ConfigError), match=message):
        qfx.export.onnx(quantize(cnn(), config, images()), path, **options)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_what_has_no_older_form_is_sent_to_the_opset_it_is_translated_at(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3)))
    qmodel = quantize(model, INT8_STATIC, images())
    with pytest.raises(
        qfx.ExportError, match=r"opset 17 cannot express the model: No Adapter [^/]* for Pad; use opset=18$"
    ):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", opset=17)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", opset=18)
    assert qfx.verify(qmodel, path, images(3)).max_steps <= 1


@pytest.mark.parametrize(
    ("preset", "format", "message"),
    [
        *((p, "qoperator", r"node_linear \(Gemm\): its activation is in blocks\n") for p in BLOCK_PRESETS),
        ("mxfp4", "matmul_nbits", r"  0.weight \(Gemm\): it is in blocks of fp4_e2m1\nUse format='qdq'"),
        ("nvfp4", "matmul_nbits", r"  0.weight \(Gemm\): it is in blocks of fp4_e2m1\nUse format='qdq'"),
        ("mx9", "matmul_nbits", r"  0.weight \(Gemm\): it is in blocks of sm8\nUse format='qdq'"),
        ("mxfp6_e2m3", "matmul_nbits", r"  0.weight \(Gemm\): it is in blocks of fp6_e2m3\nUse format='qdq'"),
        ("int4_weight_only", "vitis", r"  \S+ has scales in blocks\n(.*\n)*Use the preset 'xint8'"),
    ],
)
def test_a_refusal_says_what_is_true_and_what_works(preset: str, format: str, message: str, tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))), preset, [rand(4, 64)])
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    qfx.export.onnx(qmodel, tmp_path / "m.onnx")  # the format that works


def test_products_of_activations_measured_at_run_time_are_listed(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 32)))
    qmodel = quantize(model, INT8_DYNAMIC, [torch.arange(10).view(2, 5)])
    kept = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits").kept
    assert kept == tuple(Kept(f"{i}.weight", "MatMulInteger", "its activation is quantized") for i in (1, 2))


def test_a_file_that_fails_its_check_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = quantize(ragged(), INT8_STATIC, [rand(4, 70)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", external_data=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert before.keys() == {"model.onnx", "model.onnx.data"}
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime, "InferenceSession", lambda *_, **__: 1 / 0)
        with pytest.raises(qfx.ExportError, match="does not load in ONNX Runtime"):
            qfx.export.onnx(qmodel, path, format="qoperator", external_data=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    qfx.export.onnx(qmodel, path, format="qoperator", external_data=True)
    assert path.read_bytes() != before["model.onnx"]
    assert qfx.verify(qmodel, path, [rand(3, 70)]).max_steps <= 1


def test_a_file_is_replaced_with_its_data_or_not_at_all(tmp_path: Path) -> None:
    data, path = [rand(4, 70)], tmp_path / "model.onnx"
    old = quantize(ragged(), INT8_STATIC, data)
    new = quantize(seeded(ragged(), 1), INT8_STATIC, data)
    expected = []
    for qmodel in (old, new):
        qfx.export.onnx(qmodel, path, external_data=True)
        expected.append(run(path, data[0]))
    seen = set()
    for moment in range(32):
        qfx.export.onnx(old, path, external_data=True)
        with interrupted(moment) as steps:
            qfx.export.onnx(new, path, external_data=True)
        seen.add([bool((run(path, data[0]) == y).all()) for y in expected].index(True))
        if not steps.exceeded:
            break
    assert seen == {0, 1}
    assert moment > 4
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}


def test_data_that_the_new_file_does_not_read_go(tmp_path: Path) -> None:
    data, path = [rand(4, 70)], tmp_path / "model [1].onnx"
    old, new = (quantize(seeded(ragged(), seed), INT8_STATIC, data) for seed in (0, 1))
    expected: list[Any] = []
    for qmodel, beside in ((new, False), (old, True)):
        file = qfx.export.onnx(qmodel, path, external_data=beside)
        expected.insert(0, run(path, data[0]))
        assert file.report().bytes == sum(place.stat().st_size for place in tmp_path.iterdir())
    seen = set()
    for moment in range(32):
        qfx.export.onnx(old, path, external_data=True)
        with interrupted(moment) as steps:
            file = qfx.export.onnx(new, path, external_data=False)
        seen.add([bool((run(path, data[0]) == y).all()) for y in expected].index(True))
        if not steps.exceeded:
            break
    assert seen == {0, 1}
    assert [place.name for place in tmp_path.iterdir()] == [path.name]
    assert file.report().bytes == path.stat().st_size


def test_a_first_export_may_be_interrupted(tmp_path: Path) -> None:
    qmodel = quantize(ragged(), INT8_STATIC, [rand(4, 70)])
    for moment in range(32):
        path = tmp_path / str(moment) / "model.onnx"
        path.parent.mkdir()
        with interrupted(moment) as steps:
            qfx.export.onnx(qmodel, path, external_data=True)
        qfx.export.onnx(qmodel, path, external_data=True)
        assert {file.name for file in path.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
        assert qfx.verify(qmodel, path, [rand(3, 70)]).max_steps <= 1
        if not steps.exceeded:
            break
    assert moment > 3


@pytest.mark.parametrize("graph", [None, b"no graph", "other"])
def test_a_file_that_is_no_data_of_the_graphs_stays(graph: bytes | str | None, tmp_path: Path) -> None:
    qmodel, path, notes = quantize(ragged(), INT8_STATIC, [rand(4, 70)]), tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    if isinstance(graph, bytes):
        path.write_bytes(graph)
    elif graph:
        qfx.export.onnx(qmodel, path)
    before = path.read_bytes() if path.exists() else None
    notes.write_text("mine")
    with pytest.raises(qfx.ExportError, match=r"m\.onnx\.data does not belong to m\.onnx, but would be replaced; move"):
        qfx.export.onnx(qmodel, path, external_data=True)
    assert before == (path.read_bytes() if path.exists() else None)
    file = qfx.export.onnx(qmodel, path, external_data=False)
    assert notes.read_text() == "mine"
    assert file.report().bytes == path.stat().st_size
    assert {place.name for place in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(there: bool, tmp_path: Path) -> None:
    link, target = tmp_path / "link.onnx", tmp_path / "elsewhere" / "model.onnx"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"old")
    link.symlink_to(target)
    qmodel = quantize(ragged(), INT8_STATIC, [rand(4, 70)])
    file = qfx.export.onnx(qmodel, link, external_data=True)
    assert link.is_symlink()
    assert file == target
    assert {place.name for place in target.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert qfx.verify(qmodel, file, [rand(3, 70)]).max_steps <= 1
    assert qfx.verify(qmodel, link, [rand(3, 70)], per_node=True).max_steps <= 1


def test_odd_and_repeated_names_are_exported(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a/b ü", nn.Linear(32, 32))
            self.add_module("weight_codes", nn.Linear(32, 32))
            self.weight_blocks = nn.Parameter(torch.zeros(32))
            self.weight = nn.Parameter(torch.zeros(32, 32))

        def forward(self, weight_codes: Tensor) -> Tensor:
            x = getattr(self, "a/b ü")(weight_codes) + self.weight_blocks
            out: Tensor = F.linear(torch.tanh(self.get_submodule("weight_codes")(x)), self.weight)
            return out

    for config, format in ((INT4_WEIGHT_ONLY, "matmul_nbits"), (INT8_STATIC, "qoperator"), (XINT8, "vitis")):
        qmodel = quantize(seeded(Odd()), config, [rand(4, 32)])
        path = qfx.export.onnx(qmodel, tmp_path / "a b.onnx", format=format, input_names=["weight_blocks"])
        assert qfx.verify(qmodel, path, [rand(3, 32)]).max_steps <= 1


@pytest.mark.parametrize("bits", [INT4, INT8], ids=str)
@pytest.mark.parametrize("columns", [64, 40])
def test_the_look_up_of_a_tied_table_reads_the_bytes_of_the_head(bits: IntFormat, columns: int, tmp_path: Path) -> None:
    """Unless the last block of a row has to be filled up, which products want and look-ups do not."""
    config = INT4_WEIGHT_ONLY.replace(
        weight=TensorSpec(format=bits, granularity=Granularity.GROUP, group_size=16), overrides=()
    )
    qmodel = quantize(seeded(Tied(columns)), config, ids())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    assert operators(path)["MatMulNBits"] == operators(path)["GatherBlockQuantized"] == 1
    tables = [t for t in onnx.load(path).graph.initializer if t.data_type == TensorProto.UINT8]
    assert len(tables) == (1 if columns == 64 else 2)
    assert not path.report().quantized  # both kernels compute in float
    for optimize in (True, False):
        assert qfx.verify(qmodel, path, ids(3), optimize=optimize).max_steps <= ROUNDING


def test_a_four_bit_weight_that_two_operators_read_is_stored_once(tmp_path: Path) -> None:
    qmodel = quantize(seeded(Tied()), INT4_WEIGHT_ONLY.replace(overrides=()), ids())
    model = onnx.load(qfx.export.onnx(qmodel, tmp_path / "m.onnx"))
    assert sum(tuple(t.dims) == (20, 40) for t in model.graph.initializer) == 1


# The report ----------------------------------------------------------------------------------------------------------


def test_the_report_says_what_runs_in_integers_and_why_not(tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(cnn(), INT8_STATIC, images()), tmp_path / "model.onnx")
    report = path.report()
    kernels = Counter(node.kernel for node in report.quantized)
    assert kernels["QLinearConv"] == 2
    assert kernels["QGemm"] == 1
    assert sum("MaxPool" in node.kernel for node in report.quantized) == 1  # of codes, which have no type there
    reasons = {node.kernel: node.reason for node in report.floating}
    assert reasons["Add"] == "its output is not quantized"
    assert reasons["ReduceMean"] == "ONNX Runtime has no integer ReduceMean"
    assert report.bytes == path.stat().st_size
    assert report.opset == 21
    assert str(report).splitlines()[-1] == f"opset 21, {report.bytes / 1024:.1f} KiB"


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        (INT8_WEIGHT_ONLY, "Conv", "not all of its inputs are quantized"),
        (INT8_STATIC.replace(input=TensorSpec(format=INT16), output=TensorSpec(format=INT16)), "Conv", "int16"),
        (INT8_STATIC.replace(output=None), "Conv", "its output is not quantized"),
        (INT8_STATIC.replace(exclude=("stem.0",)), "Conv", "none of its inputs is quantized"),
    ],
)
def test_a_convolution_in_float_has_its_reason(config: QuantConfig, kernel: str, reason: str, tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(cnn(), config, images()), tmp_path / "model.onnx")
    floating = [node for node in path.report().floating if kernel in node.kernel]
    assert floating
    assert reason in floating[0].reason


def test_the_report_lists_what_onnx_runtime_makes_of_functions(tmp_path: Path) -> None:
    """It writes no types for those values, and a node of unknown type is still a kernel that runs."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Hardswish(), nn.Conv2d(8, 4, 1))
    report = qfx.export.onnx(quantize(seeded(model), INT8_STATIC, images()), tmp_path / "model.onnx").report()
    kernels = Counter(node.kernel for node in report.floating)
    assert kernels["HardSigmoid"] + kernels["HardSwish"] == 1
    assert kernels["Sqrt"] + kernels["InstanceNormalization"] + kernels["GroupNormalization"] == 1
    assert kernels["Shape"] == kernels["Gather"] == 0


def test_the_report_says_that_a_default_session_rounds_the_inputs_of_fused_products(tmp_path: Path) -> None:
    qmodel, _ = linear(INT4_WEIGHT_ONLY.weight, 256, True, (5,))  # type: ignore[arg-type]
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    (node,) = path.report().nodes
    assert node.kernel == "MatMulNBits"
    assert not node.quantized
    assert "session.qdq_matmulnbits_accuracy_level='0'; by default, it rounds activations to int8" in node.reason


def test_weights_beside_the_file_count(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(512, 64)), INT8_STATIC, [rand(4, 512)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator", external_data=True)
    report = path.report()
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) > 512 * 64 > path.stat().st_size
    assert [node.kernel for node in report.quantized] == ["QGemm"]


def test_what_is_returned_is_a_path(tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(nn.Linear(4, 3).eval(), INT8_STATIC, [rand(4, 4)]), tmp_path / "model.onnx")
    assert isinstance(path, Path)
    assert path == tmp_path / "model.onnx"
    assert path.with_suffix(".data") == tmp_path / "model.data"
    assert not path.kept


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_token_of_zeros_is_divided_by_one_in_the_file(symmetric: bool, tmp_path: Path) -> None:
    """The scale is what the file divides by: 1, as in torch, where it would be 0."""
    symmetry = Symmetry.SYMMETRIC if symmetric else Symmetry.ASYMMETRIC
    token = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True, symmetry=symmetry)
    config = QuantConfig(weight=TensorSpec(format=INT8), input=token)
    path = qfx.export.onnx(quantize(seeded(nn.Linear(4, 2)), config, [rand(3, 4)]), tmp_path / "m.onnx")
    model = onnx.load(path)
    (divided,) = {node.input[1] for node in model.graph.node if node.op_type == "Div" and node.input[0] == "input"}
    model.graph.output.append(onnx.helper.make_tensor_value_info(divided, TensorProto.FLOAT, None))
    x = torch.cat((torch.zeros(1, 4), rand(2, 4)))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    _, scale = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert float(scale[0, 0]) == 1.0
    assert bool((scale[1:] > 0).all())
    assert bool((scale[1:] < 0.1).all())


def test_the_advice_about_a_grouped_transposed_convolution_is_one_that_the_format_takes(tmp_path: Path) -> None:
    model, batch = nn.Sequential(nn.ConvTranspose2d(8, 8, 3, groups=2)).eval(), rand(2, 8, 6, 6)
    config = qfx.presets.INT8_STATIC
    with pytest.raises(qfx.ExportError, match=r"each group of a ConvTranspose: use one scale") as caught:
        qfx.export.onnx(quantize(model, config, [batch]), tmp_path / "a.onnx", format="vitis")
    assert "'int8_static'" not in str(caught.value)
    assert "Override(pattern='op:conv_transpose*', weight=config.weight.replace(granularity='tensor'))" in str(
        caught.value
    )
    assert config.weight is not None
    override = qfx.Override(pattern="op:conv_transpose*", weight=config.weight.replace(granularity="tensor"))
    qmodel = quantize(model, config.replace(overrides=(override,)), [batch])
    qfx.export.onnx(qmodel, tmp_path / "a.onnx", format="vitis")
    qfx.check(model, config.replace(overrides=(override,)), [batch], export="vitis")
    with pytest.raises(qfx.ExportError, match="ConvTranspose"):
        qfx.check(model, config, [batch], export="vitis")


def test_a_gated_recurrent_model_is_exported_and_runs(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cells(x)[0])

    batches = [rand(2, 5, 8)]
    qmodel = quantize(Recurrent().eval(), qfx.presets.INT8_STATIC, batches)
    qfx.export.onnx(qmodel, tmp_path / "gru.onnx")
    assert qfx.verify(qmodel, tmp_path / "gru.onnx", batches).max_steps <= 1
