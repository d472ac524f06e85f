"""Block formats in ONNX: what the file computes is what the operators of PyTorch compute, and it is as small."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from networks import Encoder
from onnx import TensorProto
from test_block_formats import CASES, rows
from tiny import cnn, images, quantize, rand, seeded, thinned
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.block_formats import BFP16, BLOCK_FORMATS, MX6, MX9, MXFP4, MXINT8, NVFP4
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.export.runtime.session import may_optimize, open_session, session_options
from quark_fx.export.to_onnx.block_functions import DOMAIN
from quark_fx.export.to_onnx.blocks import stored_weight
from quark_fx.export.to_onnx.export_onnx import _lowered
from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT8, UINT8, parse_format
from quark_fx.numbers.ops import dequantize, dynamic_qparams
from quark_fx.numbers.ops import quantize as to_codes
from quark_fx.numbers.scales import E8M0_FLOOR, FLOAT32
from quark_fx.plan.weights import quantize_tensor, stored_bytes
from quark_fx.presets import PRESETS

SPECS = {
    **{name: spec for name, (spec, _) in CASES.items()},
    "nvfp4": NVFP4,
    "int8 float scales": TensorSpec(format=INT8, granularity=Granularity.GROUP, group_size=16),
    "uint8 float scales": TensorSpec(
        format=UINT8, granularity=Granularity.GROUP, group_size=16, symmetry=qfx.Symmetry.SYMMETRIC
    ),
    "int8 full": TensorSpec(
        format=INT8, granularity=Granularity.GROUP, group_size=16, symmetry=qfx.Symmetry.SYMMETRIC_FULL
    ),
    "mxint8 full ceil": MXINT8.replace(symmetry="symmetric_full", scale="e8m0_ceil"),
    "fp4 float scales": MXFP4.replace(scale="float32"),
    "fp8 two levels": NVFP4.replace(format=FP8_E4M3),
}
specs = pytest.mark.parametrize("case", SPECS)


class Rounded(nn.Module):
    """A value in blocks, as the graph of a quantized model has it."""

    def __init__(self, spec: TensorSpec, axis: int) -> None:
        super().__init__()
        self.spec, self.axis = spec.replace(dynamic=True), axis

    def forward(self, x: Tensor) -> Tensor:
        fmt, symmetry, axis, block, *rest = self.spec.measurement(self.axis % x.dim())
        scale, zero_point = dynamic_qparams(x, fmt, symmetry, axis, block, *rest)
        value: Tensor = dequantize(
            to_codes(x, scale, zero_point, fmt, axis, block), scale, zero_point, fmt, axis, block
        )
        return value


def session(path: Path | bytes, *, optimize: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def lowered(module: nn.Module, x: Tensor, shapes: Any = ({},)) -> ir.Model:
    captured = qfx.capture_graph(module.eval(), x, dynamic_shapes=shapes)
    return _lowered(captured.module, ["x"], ["y"], FORMATS["qdq"], FormatOptions(), 21, qfx.Target.ONNX.onnx)[0]


def rounded_by_the_file(spec: TensorSpec, x: Tensor, folder: Path, axis: int = -1, shapes: Any = ({},)) -> Tensor:
    path = folder / "rounded.onnx"
    ir.save(lowered(Rounded(spec, axis), x, shapes), path)
    onnx.checker.check_model(path, full_check=True)
    results = [session(path, optimize=optimize).run(None, {"x": x.numpy()})[0] for optimize in (True, False)]
    np.testing.assert_array_equal(*results)
    return torch.from_numpy(results[0])


@cache
def sessions_of(case: str, *shape: int) -> list[onnxruntime.InferenceSession]:
    """Return sessions of one file that rounds the last dimension, with and without optimizations; tests share them."""
    model = ir.to_proto(lowered(Rounded(SPECS[case], -1), torch.zeros(shape)))
    onnx.checker.check_model(model, full_check=True)
    return [session(model.SerializeToString(), optimize=optimize) for optimize in (True, False)]


def rounded(case: str, x: Tensor) -> Tensor:
    results = [session.run(None, {"x": x.numpy()})[0] for session in sessions_of(case, *x.shape)]
    np.testing.assert_array_equal(*results)
    return torch.from_numpy(results[0])


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def every_binade() -> Tensor:
    """One block of 32 per float of 4 mantissa bits, and its neighbors in float32: the largest first, less behind."""
    patterns = torch.arange(1 << 13, dtype=torch.int64) << 19
    patterns = torch.cat([patterns, patterns + 1, patterns - 1])
    largest = patterns[(patterns & 0x7F800000) != 0x7F800000].to(torch.int32).view(torch.float32)
    largest = largest[torch.isfinite(largest)]
    return largest[:, None] * torch.cat([torch.ones(1), rand(31).clamp(-1, 1)])


@specs
def test_the_file_rounds_as_the_operator_does(case: str) -> None:
    x = rows()
    for some in (x, x[-1:], x[:, :7], x[:, :64]):
        assert_same(rounded(case, some), Rounded(SPECS[case], -1)(some))


@specs
def test_exponents_are_exact_in_every_binade(case: str) -> None:
    x = every_binade()
    assert_same(rounded(case, x), Rounded(SPECS[case], -1)(x))


@specs
def test_what_is_not_finite_spoils_its_block_in_the_file_too(case: str) -> None:
    x = rows()
    x[0, 3], x[1, 40], x[2, 74], x[3, 20:22] = torch.nan, torch.inf, -torch.inf, torch.nan
    expected = Rounded(SPECS[case], -1)(x)
    assert expected.isnan().any()
    if SPECS[case].scale == FLOAT32:
        pytest.skip("float scales of what is not finite are no promise of the operator's")
    assert_same(rounded(case, x), expected)


@pytest.mark.parametrize("case", ["nvfp4", "fp8 two levels"])
def test_two_levels_follow_the_largest_value_of_the_tensor(case: str, tmp_path: Path) -> None:
    rounded_by_the_file(SPECS[case], rand(1, 75), tmp_path)
    run = session(tmp_path / "rounded.onnx")
    for power in range(-145, 120):
        x = rand(1, 75, seed=power + 200) * 2.0**power
        assert_same(torch.from_numpy(run.run(None, {"x": x.numpy()})[0]), Rounded(SPECS[case], -1)(x))


@pytest.mark.parametrize("shape", [(2, 6, 5, 8), (3, 40, 4), (7, 64), (16,)], ids=str)
@pytest.mark.parametrize("spec", [MXFP4, MX9, NVFP4], ids=str)
def test_blocks_may_lie_along_any_dimension(spec: TensorSpec, shape: tuple[int, ...], tmp_path: Path) -> None:
    x = rand(*shape)
    for axis in range(len(shape)):
        assert_same(rounded_by_the_file(spec, x, tmp_path, axis), Rounded(spec, axis)(x))


@pytest.mark.parametrize("spec", [MXFP4, MX9], ids=str)
def test_the_length_of_blocks_need_not_be_known(spec: TensorSpec, tmp_path: Path) -> None:
    for axis in (1, 2):
        x = rand(2, 37, 33)
        shapes = ({axis: torch.export.Dim.DYNAMIC},)
        got = rounded_by_the_file(spec, x, tmp_path, axis, shapes)
        assert_same(got, Rounded(spec, axis)(x))
        for length in (1, 16, 64, 70):
            x = rand(*[length if dim == axis else size for dim, size in enumerate((2, 37, 33))])
            (y,) = session(tmp_path / "rounded.onnx").run(None, {"x": x.numpy()})
            assert_same(torch.from_numpy(y), Rounded(spec, axis)(x))


# Models --------------------------------------------------------------------------------------------------------------


def ragged() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(70, 33), nn.ReLU(), nn.Linear(33, 17), nn.Sigmoid(), nn.Linear(17, 5)))


MODELS: dict[str, Any] = {
    "cnn": (cnn, lambda n: images(n)[0]),
    "ragged": (ragged, lambda n: rand(n, 70, seed=n)),
    "encoder": (lambda: seeded(Encoder(32, 4)), lambda n: rand(n, 6, 32, seed=n)),
}
BLOCK_PRESETS = [name for name in PRESETS if name.removesuffix("_weight_only") in BLOCK_FORMATS]


@cache
def whole(preset: str) -> QuantConfig:
    return PRESETS[preset].replace(exclude=())


# Every preset in one model; every kind of shared scale, and weights alone, in all.
@pytest.mark.parametrize(
    ("preset", "name"),
    thinned(
        [*BLOCK_PRESETS, "nvfp4_best"],
        MODELS,
        lambda preset, name: name == "ragged" or preset in ("bfp16", "mx9", "mxfp4", "nvfp4", "nvfp4_weight_only"),
    ),
)
def test_every_preset_rounds_every_value_to_the_same_codes(preset: str, name: str, tmp_path: Path) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), whole(preset), [data(4)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    onnx.checker.check_model(path, full_check=True)
    assert may_optimize(ir.load(path).graph)
    for optimize in (True, False):
        found = qfx.verify(qmodel, path, [data(4), data(1), data(7)], per_node=True, optimize=optimize)
        *values, output = found.differences
        assert len(values) == (0 if "weight_only" in preset else {"cnn": 3, "ragged": 3, "encoder": 4}[name])
        # What is measured may differ by the order of sums, which moves a scale that is no power of two by its last bit.
        bound = 12 * 2**-19 if "nvfp4" in preset else 0
        assert all(value.steps <= (bound if i else 0) for i, value in enumerate(values))
        # Sums of at most 288 products in another order, in a 255th of the range.
        assert output.steps <= 255 * 288 * 2**-24


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4"])
def test_square_blocks_are_standard_operators(fmt: str, tmp_path: Path) -> None:
    """The last block of 48 outputs is not full; `MatMulNBits` has no 8-bit floats."""
    weight = TensorSpec(format=parse_format(fmt), granularity=Granularity.GROUP, group_size=32, group_rows=32)
    qmodel = quantize(seeded(nn.Linear(96, 48)), QuantConfig(weight=weight), [rand(2, 96)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert {(node.domain, node.op_type) for node in onnx.load(path).graph.node} == {
        ("", "DequantizeLinear"),
        ("", "Gemm"),
    }
    assert qfx.verify(qmodel, path, [rand(3, 96)]).max_steps <= 255 * 96 * 2**-24
    if fmt == "fp8_e4m3":
        with pytest.raises(qfx.ExportError, match="its codes are float8e4m3fn"):
            qfx.check(seeded(nn.Linear(96, 48)), QuantConfig(weight=weight), [rand(2, 96)], export="matmul_nbits")


def stored(path: Path) -> int:
    """Return the bytes of the tensors of a file."""
    return sum(
        len(t.raw_data) or 4 * len(t.int32_data) for t in onnx.load(path).graph.initializer if "integers" not in t.name
    )


@pytest.mark.parametrize("preset", BLOCK_PRESETS)
@pytest.mark.parametrize("width", [64, 70])
def test_weights_take_the_space_of_their_bits(preset: str, width: int, tmp_path: Path) -> None:
    model = seeded(nn.Linear(width, 48, bias=False))
    qmodel = quantize(model, whole(preset), [rand(2, width)])
    spec = whole(preset).weight
    assert spec is not None
    filled = width + -width % ((spec.group_size or 1) * (spec.scale.group_size or 1))
    weight = torch.nn.functional.pad(model.weight.detach(), (0, filled - width))
    expected = stored_bytes(quantize_tensor(weight, spec), spec)
    assert stored(qfx.export.onnx(qmodel, tmp_path / "model.onnx")) == expected


@pytest.mark.parametrize("preset", BLOCK_PRESETS)
def test_a_depthwise_weight_has_a_scale_for_each_value_and_no_more(preset: str, tmp_path: Path) -> None:
    x = rand(2, 8, 6, 6)
    qmodel = quantize(seeded(nn.Conv2d(8, 8, 3, groups=8, bias=False)), whole(preset), [x])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    # A global scale, and a byte at most for each code and each scale.
    assert stored(path) <= 2 * 8 * 9 + 4
    assert qfx.verify(qmodel, path, [x]).max_steps <= 255 * 9 * 2**-24


@pytest.mark.parametrize("preset", ["mxfp4", "mxint8", "mxfp8_e4m3", "nvfp4", "mx9"])
def test_weights_are_turned_into_floats_when_the_file_is_loaded(preset: str, tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(70, 48)), whole(preset).replace(input=None), [rand(2, 70)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    assert [node.op_type for node in optimized.node] == ["Gemm"]
    assert not any(t.data_type == TensorProto.UINT8 for t in optimized.initializer)


@pytest.mark.parametrize("spec", [MXFP4, NVFP4, MXINT8, MX6, BFP16.replace(format=qfx.formats.SM8)], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_weights_of_rare_codes_need_no_blocks(spec: TensorSpec, granularity: str, tmp_path: Path) -> None:
    scale = E8M0_FLOOR if spec.scale.rule else FLOAT32
    weight = TensorSpec(format=spec.format, granularity=Granularity(granularity), scale=scale)
    qmodel = quantize(seeded(nn.Conv2d(3, 6, 3)), QuantConfig(weight=weight), [rand(2, 3, 8, 8)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, path, [rand(2, 3, 8, 8)]).max_steps <= 255 * 27 * 2**-24


def test_a_weight_that_two_operators_read_is_stored_once(tmp_path: Path) -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    qmodel = quantize(seeded(nn.Sequential(first, nn.ReLU(), second)), whole("mxfp4"), [rand(2, 64)])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert sum(t.data_type == TensorProto.UINT4 for t in onnx.load(path).graph.initializer) == 1
    assert qfx.verify(qmodel, path, [rand(2, 64)], per_node=True).max_steps <= 255 * 64 * 2**-24


def test_a_model_of_halves_rounds_its_values_in_float(tmp_path: Path) -> None:
    x = rand(3, 70).half()
    qmodel = quantize(ragged().half(), whole("mxfp4"), [x])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    *values, output = qfx.verify(qmodel, path, [x], per_node=True).differences
    assert len(values) == 3
    assert all(value.max_abs == 0 for value in values)
    assert output.max_abs <= 2**-10


class Scores(nn.Module):
    """A product of two activations, with a sum of any length."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)


def test_products_of_activations_are_rounded_along_a_sum_of_any_length(tmp_path: Path) -> None:
    spec = MXFP4.replace(dynamic=True)
    config = QuantConfig(weight=None, input=None, overrides=(qfx.Override(pattern="op:matmul", input=spec),))
    qmodel = quantize(
        Scores().eval(),
        config,
        [rand(2, 40, 24)],
        dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},),
    )
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    for length in (40, 1, 64, 75):
        *values, output = qfx.verify(qmodel, path, [rand(2, length, 24)], per_node=True).differences
        assert len(values) == 4
        assert all(value.max_abs == 0 for value in values)
        assert output.steps < 1e-3


def test_verify_tells_the_value_that_a_file_rounds_otherwise(tmp_path: Path) -> None:
    config = whole("mxfp4")
    assert config.input is not None
    other = qfx.Override(pattern="0", input=config.input.replace(scale="e8m0_ceil"))
    x = [rand(4, 70)]
    path = qfx.export.onnx(quantize(ragged(), config.replace(overrides=(other,)), x), tmp_path / "model.onnx")
    first, *rest, output = qfx.verify(quantize(ragged(), config, x), path, x, per_node=True).differences
    assert first.steps >= 0.5
    assert first.share > 0
    # What comes after is computed from the file's own values.
    assert [value.max_abs for value in rest] == [0, 0]
    assert output.steps <= 255 * 70 * 2**-24


def test_ordinary_groups_keep_their_pairs(tmp_path: Path) -> None:
    qmodel = quantize(ragged(), "int4_weight_only", [rand(2, 70)])
    graph = onnx.load(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    assert sum(node.op_type == "DequantizeLinear" for node in graph.graph.node) == 3
    assert not graph.functions


@pytest.mark.parametrize("format", ["qoperator", "matmul_nbits"])
def test_formats_of_integers_refuse_blocks(format: str, tmp_path: Path) -> None:
    qmodel = quantize(ragged(), whole("mxfp4"), [rand(2, 70)])
    with pytest.raises(qfx.ExportError, match=f"format='{format}'"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=format)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(format=UINT8, granularity=Granularity.GROUP, group_size=16, dynamic=True),
        MXINT8.replace(granularity="token", group_size=None, dynamic=True),
        TensorSpec(format=FP4_E2M1),
    ],
    ids=str,
)
def test_activations_that_no_operators_build_are_refused(spec: TensorSpec, tmp_path: Path) -> None:
    config = QuantConfig(weight=TensorSpec(format=INT8), input=spec, target=qfx.Target.TORCH)
    with pytest.raises(qfx.ExportError, match="without an ONNX type"):
        qfx.export.onnx(quantize(ragged(), config, [rand(2, 70)]), tmp_path / "model.onnx")


def test_codes_that_go_elsewhere_are_refused() -> None:
    class Codes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero_point = dynamic_qparams(x, "int8", "symmetric", 1, 16, "e8m0_floor", 0)
            codes: Tensor = to_codes(x, scale, zero_point, "int8", 1, 16)
            return codes

    with pytest.raises(
        qfx.ExportError, match=r"read by operators other than dequantize(.|\n)*dequantize them first, or"
    ):
        lowered(Codes(), rand(2, 32))


class Twice(nn.Module):
    """Codes that are turned into values twice, both of which leave the graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero_point = dynamic_qparams(x, "int8", "symmetric", 1, 16, "e8m0_floor", 0)
        codes = to_codes(x, scale, zero_point, "int8", 1, 16)
        first = dequantize(codes, scale, zero_point, "int8", 1, 16)
        second = dequantize(codes, scale, zero_point, "int8", 1, 16)
        return first, second, first + 2 * second


@pytest.mark.parametrize("format", ["qdq", "vitis"])
def test_codes_may_be_turned_into_values_twice(format: str, tmp_path: Path) -> None:
    x, path = rand(3, 40), tmp_path / "twice.onnx"
    captured = qfx.capture_graph(Twice().eval(), x, dynamic_shapes=({},))
    options = FormatOptions(domain="com.amd.quark" if format == "vitis" else None)
    model = _lowered(
        captured.module, ["x"], ["first", "second", "sum"], FORMATS[format], options, 21, qfx.Target.ONNX.onnx
    )[0]
    assert sum(node.op_type in ("Round_int8_e8m0_floor", "MXQuantizeDequantize") for node in model.graph) == 1
    ir.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    got = open_session(path, session_options(optimize=True)).run(None, {"x": x.numpy()})
    for ours, theirs in zip(got, Twice()(x), strict=True):
        assert_same(torch.from_numpy(ours), theirs)


def test_codes_measured_by_another_scale_are_not_fused() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero_point = dynamic_qparams(x, "int8", "symmetric", 1, 16, "e8m0_floor", 0)
            ceil, _ = dynamic_qparams(x, "int8", "symmetric", 1, 16, "e8m0_ceil", 0)
            value: Tensor = dequantize(to_codes(x, scale, zero_point, "int8", 1, 16), ceil, zero_point, "int8", 1, 16)
            return value

    with pytest.raises(qfx.ExportError, match="read by operators other than dequantize"):
        lowered(Other(), rand(2, 32))


def test_codes_that_are_computed_are_refused_with_what_to_do() -> None:
    graph_codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.FLOAT8E4M3FN), shape=ir.Shape([2, 32]))
    scale = ir.Value(name="scale", const_value=ir.tensor(np.ones((2, 1), np.float32)))
    attributes = {"format": "fp4_e2m1", "axis": 1, "block_size": 32}
    node = ir.node("DequantizeBlocks", [graph_codes, scale], attributes, domain=DOMAIN, name="values")
    with pytest.raises(qfx.ExportError, match=r"values reads codes .* not constant; quantize that weight to 2, 4, 8"):
        stored_weight(node)


@pytest.mark.parametrize("opset", [17, 20])
def test_blocks_need_opset_21(opset: int, tmp_path: Path) -> None:
    qmodel = quantize(ragged(), whole("mx6"), [rand(2, 70)])
    with pytest.raises(qfx.ExportError, match=rf"opset {opset} is too old(.|\n)*Use opset=21"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", opset=opset)


@pytest.mark.parametrize("opset", [22, 24, 25])
def test_newer_opsets_compute_the_same(opset: int, tmp_path: Path) -> None:
    for preset in ("mxfp4", "mx6", "nvfp4", "mxfp8_e5m2"):
        qmodel = quantize(ragged(), whole(preset), [rand(2, 70)])
        path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", opset=opset)
        assert qfx.verify(qmodel, path, [rand(2, 70)], per_node=True).max_steps <= 255 * 70 * 2**-24
