"""Every workaround by itself: the fault that a runtime has without it, and that it is gone with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, NotImplemented, RuntimeException
from test_onnx_rules import CODES, IMAGE, MATRIX, STATIC, WEIGHT, described, graph, run
from test_openvino import STATIC as OPENVINO
from test_openvino import Joined, Shared, Sized, Tied, needs_openvino
from tiny import images, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
import quark_fx.vendors.intel.workarounds
from quark_fx.config.target import OnnxFiles
from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions, write_in_format
from quark_fx.export.to_onnx.rules import onnx_rule
from quark_fx.export.to_onnx.workarounds import MEASURED, WORKAROUNDS, Workaround, register_workaround
from quark_fx.numbers.formats import INT8
from quark_fx.presets import INT8_STATIC
from quark_fx.targets import Target, register_target

REFUSED, WRONG = "refused", "wrong"
SIGNED = "float xs = {0.02}, int8 xz = {3}"
SCALE = "float s = {0.1}, int8 z = {0}"
BEHIND = "o = QuantizeLinear(p, xs, xz)  y = DequantizeLinear(o, xs, xz)"

FAULTS = [
    (
        "row scales",
        f"{MATRIX} | {STATIC}, int8[4,4] w = {{1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12, 13, 14, -15, 16}},"
        f"float[4] s = {{0.1, 0.2, 0.3, 0.4}} | {CODES}  b = DequantizeLinear<axis=0>(w, s)  y = MatMul(a, b)",
        WRONG,
    ),
    (
        "average pool beyond the rim",
        f"{IMAGE} | {STATIC} | {CODES}"
        f"p = AveragePool<ceil_mode=1, count_include_pad=1, kernel_shape=[2, 2], strides=[2, 2]>(a)  {BEHIND}",
        WRONG,
    ),
    (
        "average pool beyond the rim",
        f"float[1,2,6,6] x | {STATIC} | {CODES}  p = AveragePool<ceil_mode=1, count_include_pad=1,"
        f"kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]>(a)  {BEHIND}",
        WRONG,
    ),
    (
        "moved signed codes",
        f"{MATRIX} | {SIGNED} | {CODES}  t = Transpose(a)  u = Flatten(t)  y = Relu(u)",
        REFUSED,
    ),
    ("arithmetic of bfloat16", f"{MATRIX} | | b = Cast<to=16>(x)  c = Add(b, b)  y = Cast<to=1>(c)", REFUSED),
    (
        "sum before a layer normalization",
        "float[1,2,4] x | float[4] one = {1, 1, 1, 1} |r = Relu(x)  s = Add(x, r)  y = LayerNormalization(s, one, one)",
        "SkipLayerNormalization",
    ),
    (
        "product before float",
        f"{MATRIX} | {STATIC}, {WEIGHT}, {SCALE}, float[3] c = {{1, 2, 3}} |"
        f"{CODES}  b = DequantizeLinear(w, s, z)  p = Gemm(a, b, c)  y = Sigmoid(p)",
        "FusedGemm",
    ),
    (
        "product before float",
        f"{MATRIX} | {STATIC}, {WEIGHT}, {SCALE}, float[3] c = {{1, 2, 3}} |"
        f"{CODES}  b = DequantizeLinear(w, s, z)  y = Gemm(a, b, c)",
        "Gemm",
    ),
    (
        "padding before a pool",
        f"{IMAGE} | int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}}, float zero = {{0}} |"
        "n = Exp(x)  m = Neg(n)  p = Pad(m, pads, zero)  y = MaxPool<kernel_shape=[2, 2]>(p)",
        WRONG,
    ),
    (
        "padding before a pool",
        f"{IMAGE} | int64[8] pads = {{0, 0, 2, 2, 0, 0, 2, 2}}, float zero = {{0}} |"
        "p = Pad(x, pads, zero)  y = AveragePool<kernel_shape=[2, 2]>(p)",
        REFUSED,
    ),
    (
        "cubic resize to a smaller size",
        "float[1,5,5,2] x | float[4] s = {1, 1, 0.6, 0.6} |"
        't = Transpose<perm=[0, 3, 1, 2]>(x)  r = Resize<mode="cubic">(t, , s)  y = Transpose<perm=[0, 2, 3, 1]>(r)',
        REFUSED,
    ),
    (
        "product before a sum",
        f"{MATRIX} | {STATIC}, {WEIGHT}, {SCALE}, float[3] c = {{1, 2, 3}} |"
        f"{CODES}  b = DequantizeLinear(w, s, z)  p = MatMul(a, b)  y = Add(p, c)",
        "Gemm",
    ),
    (
        "product before a sum",
        f"float[2,3,4] x | {SIGNED}, {WEIGHT}, {SCALE}, float[3] c = {{1, 2, 3}} |"
        f"{CODES}  b = DequantizeLinear(w, s, z)  p = MatMul(a, b)  y = Add(p, c)",
        REFUSED,
    ),
    (
        "weights of recurrent layers",
        "float[2,1,4] x | uint8[2,4] w = {1, 2, 3, 4, 5, 6, 7, 8}, uint8[2] z = {3, 4}, float[2] s = {0.1, 0.2},"
        "int8[2,2] r = {1, 2, 3, -4}, float t = {0.1}, int64[3] n = {1, 2, 4}, int64[3] m = {1, 2, 2} |"
        "d = DequantizeLinear<axis=0>(w, s, z)  u = Reshape(d, n)  e = DequantizeLinear(r, t)  v = Reshape(e, m)"
        "y = RNN<hidden_size=2>(x, u, v)",
        "DequantizeLinear",
    ),
    (
        "values rounded twice",
        f"{MATRIX} | {STATIC}, float t = {{0.03}}, uint8 w = {{0}} | {CODES}"
        "r = QuantizeLinear(a, t, w)  b = DequantizeLinear(r, t, w)  y = Sin(b)",
        WRONG,
    ),
    (
        "values rounded twice",
        f"{MATRIX} | {SIGNED}, float t = {{0.04}} | {CODES}"
        "r = QuantizeLinear(a, t, xz)  b = DequantizeLinear(r, t, xz)  y = Sin(b)",
        WRONG,
    ),
    (
        "float weights",
        f"{IMAGE} | {STATIC}, float[1,2,1,1] w = {{1, 2.3}} | {CODES}  p = Conv(a, w)  {BEHIND}",
        "QLinearConv",
    ),
    (
        "float weights",
        f"{MATRIX} | {STATIC}, float[4,1] w = {{1, 2.3, 0.1, 0.2}}, float[1] c = {{0.3}} |"
        f"{CODES}  p = Gemm(a, w, c)  {BEHIND}",
        "QGemm",
    ),
]


def fault_of(model: ir.Model, expected: Any, tolerance: float, path: Path) -> str | Counter[str]:
    """Return what is wrong with the results of ONNX Runtime with all optimizations; if nothing, the kernels."""
    shape = model.graph.inputs[0].shape
    assert shape is not None
    x = np.random.default_rng(0).normal(size=shape.numpy()).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(path)
    try:
        proto = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        (result,) = session.run(["y"], {"x": x})
    except (Fail, NotImplemented, RuntimeException):
        return REFUSED
    if result.shape != expected.shape or float(np.abs(result - expected).max()) > tolerance:
        return WRONG
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize(("name", "text", "fault"), FAULTS, ids=[case[0] for case in FAULTS])
def test_onnx_runtime_has_the_fault_without_the_row_alone(name: str, text: str, fault: str, tmp_path: Path) -> None:
    """Expect newer versions to have the faults of the last measured one: a row whose fault is repaired can go."""
    model, row, path = graph(text), WORKAROUNDS[name], tmp_path / "optimized.onnx"
    assert row.runtime == "onnxruntime"
    before = ir.to_proto(model).SerializeToString()
    # Codes of a result may be rounded the other way; other sums differ in their last bits.
    tolerance = 0.0201 if "o = QuantizeLinear" in text else 1e-5
    if name == "arithmetic of bfloat16":
        values = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
        expected = (torch.from_numpy(values).bfloat16() * 2).float().numpy()
    else:
        expected = run(model)
    found = fault_of(model, expected, tolerance, path)
    version = number(onnxruntime.__version__)
    if version >= number(MEASURED[0]):
        faulty = fault in found if isinstance(found, Counter) else found == fault
        assert faulty == (min(version, number(MEASURED[-1])) in map(number, row.versions))
    row(model)
    assert ir.to_proto(model).SerializeToString() != before
    after = described(model)
    found = fault_of(model, expected, tolerance, path)
    assert isinstance(found, Counter)
    assert fault not in found
    row(model)
    assert described(model) == after, "a row leaves what it made"


SIGNED_INPUT = OPENVINO.replace(input=qfx.TensorSpec(format=INT8), output=None)
CIRCULAR = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
IN_CODES = qfx.presets.INT8_WEIGHT_ONLY.replace(target="openvino")
IN_FLOAT = IN_CODES.replace(exclude=("*",))
IN_OPENVINO: dict[str, tuple[Callable[[], nn.Module], qfx.QuantConfig, list[Tensor], bool]] = {
    "convolution without a bias": (lambda: Shared("residual"), OPENVINO, [rand(2, 16, 8, 8)], False),
    "signed codes of a convolution": (lambda: Joined("of channels"), SIGNED_INPUT, images(4), False),
    "rounded values of free sizes": (lambda: Sized("rectified"), OPENVINO, [rand(4, 3, 8, 8)], True),
    "scales along another axis": (lambda: Tied("tied", 48), IN_CODES, [rand(4, 32)], False),
    "square weight read in two directions": (lambda: Tied("tied", 32), IN_FLOAT, [rand(4, 32)], False),
    "circular padding": (lambda: CIRCULAR, OPENVINO, [rand(2, 3, 5, 6)], False),
}


@needs_openvino
@pytest.mark.parametrize("name", IN_OPENVINO)
def test_openvino_has_the_fault_without_the_row_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, config, data, varies = IN_OPENVINO[name]
    assert WORKAROUNDS[name].runtime == "openvino"
    options: Any = {"dynamic_shapes": {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)}} if varies else {}
    qmodel = quantize(seeded(make()), config, data, **options)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, file, data, runtime="openvino").max_steps <= 1
    monkeypatch.delitem(WORKAROUNDS, name)
    if name == "circular padding":
        with pytest.raises(ExportError, match=r"does not load in OpenVINO(?s:.*)exclude a layer"):
            qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    else:
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        has_kernels = name == "signed codes of a convolution" and torch.cpu._is_amx_tile_supported()
        assert (qfx.verify(qmodel, file, data, runtime="openvino").max_steps > 2) != has_kernels


def test_every_row_has_its_fault() -> None:
    assert {name for name, *_ in FAULTS} | set(IN_OPENVINO) == set(WORKAROUNDS)


@pytest.mark.parametrize(
    ("reader", "expected"),
    [("m = MaxPool<kernel_shape=[2, 2]>(a)  y = Conv(m, w)", "UINT8"), ("y = MatMul(a, a)", "INT8")],
)
def test_signed_codes_that_a_convolution_reads_are_stored_as_unsigned_ones(reader: str, expected: str) -> None:
    model = graph(
        f"{IMAGE} | float xs = {{0.02}}, int8 xz = {{3}}, float[2,2,1,1] w = {{1, 2, 3, 4}} | {CODES}  {reader}"
    )
    before = run(model)
    WORKAROUNDS["signed codes of a convolution"](model)
    codes = model.graph[0].outputs[0]
    assert codes.dtype is not None
    assert codes.dtype.name == expected
    np.testing.assert_array_equal(run(model), before)


def test_arithmetic_of_bfloat16_rounds_as_in_torch(tmp_path: Path) -> None:
    class Biases(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            slopes = x[:, :1].bfloat16()
            steep = slopes / 3 - (slopes * torch.arange(4)).abs().sqrt()
            return x + steep.to(x.dtype), torch.where(steep < slopes, x, -x)

    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    config = qfx.presets.INT8_STATIC.replace(exclude=("*",))
    qmodel = quantize(Biases().eval(), config, [x])
    session = onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    for made, expected in zip(session.run(None, {session.get_inputs()[0].name: x.numpy()}), Biases()(x), strict=True):
        assert torch.equal(torch.from_numpy(made), expected)


@pytest.mark.parametrize(("runtime", "kind"), [("onnxruntime", "Sum"), ("", "Add"), ("another", "Add")])
def test_mistakes_of_a_runtime_are_worked_around_for_that_runtime_alone(runtime: str, kind: str) -> None:
    model = graph(f"{MATRIX} | float[4] one = {{1, 1, 1, 1}} | s = Add(x, one)  y = LayerNormalization(s, one)")
    write_in_format(model, FORMATS["qdq"], FormatOptions(), OnnxFiles(runtime=runtime))
    assert [node.op_type for node in model.graph] == [kind, "LayerNormalization"]


def failing(*_: Any) -> bool:
    raise KeyError("axis")


@pytest.mark.parametrize("place", ["condition", "rewrite"])
def test_a_row_or_rule_that_fails_is_named_with_its_node(place: str) -> None:
    functions: dict[str, Any] = {"condition": lambda _: True, "rewrite": lambda *_: None} | {place: failing}
    row = Workaround(runtime="gizmo", versions=("0.1",), fault="none", operators=("Flatten",), **functions)
    register_workaround("flattened values", row)
    node = ir.node("Flatten", [ir.Value(name="x")], name="flat")
    inputs = [value for value in node.inputs if value is not None]
    model = ir.Model(ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    with pytest.raises(
        ExportError, match=r"^workaround 'flattened values' fails at Flatten flat: KeyError: 'axis'; corr"
    ):
        row(model)
    with pytest.raises(ExportError, match=r"^rule failing fails at Flatten flat: KeyError: 'axis'; correct"):
        onnx_rule("Flatten")(failing)(model)


def test_the_operators_of_a_row_are_several_names() -> None:
    with pytest.raises(qfx.ConfigError, match=r"operators of Workaround must be .*; write operators=\('Sigmoid',\)"):
        Workaround(
            runtime="gizmo",
            versions=("0.1",),
            fault="none",
            operators="Sigmoid",  # type: ignore[arg-type]
            condition=lambda _: True,
            rewrite=lambda *_: None,
        )


def test_a_row_from_outside_runs_in_the_files_of_its_runtime_alone(tmp_path: Path) -> None:
    def rename(model: ir.Model, node: ir.Node) -> None:
        node.name = "seen by the row"

    row = Workaround(
        runtime="gizmo",
        versions=("0.1",),
        fault="none",
        operators=("Flatten",),
        condition=lambda node: node.name != "seen by the row",
        rewrite=rename,
    )
    assert register_workaround("flattened values", row) is row
    register_target(Target(name="gizmo", onnx=OnnxFiles(runtime="gizmo")))
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)))
    names = {}
    for target in ("onnx", "gizmo"):
        qmodel = quantize(model, INT8_STATIC.replace(target=target), images(4))
        file = ir.load(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
        names[target] = {node.name for node in file.graph if node.op_type == "Flatten"}
    assert names["gizmo"] == {"seen by the row"}
    assert names["onnx"]
    assert "seen by the row" not in names["onnx"]
    with pytest.raises(ExportError, match="already uses that name"):
        register_workaround("row scales", row)
