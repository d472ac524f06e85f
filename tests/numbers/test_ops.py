"""`quantize`, `dequantize` and `dynamic_qparams` against the ONNX reference evaluator and ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from quark_fx.numbers.formats import FORMATS, FloatFormat, IntFormat, parse_format
from quark_fx.numbers.ops import dequantize, dynamic_qparams, encode, quantize, rounded, spread
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry, affine_qparams
from quark_fx.observers import PowerOfTwoMinMse

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]
ops = torch.ops.quark_fx

ONNX_TYPES = {
    "int8": "INT8",
    "uint8": "UINT8",
    "int16": "INT16",
    "uint16": "UINT16",
    "int4": "INT4",
    "uint4": "UINT4",
    "fp8_e4m3": "FLOAT8E4M3FN",
    "fp8_e5m2": "FLOAT8E5M2",
}
INTEGERS = [name for name in ONNX_TYPES if isinstance(FORMATS[name], IntFormat)]
SHAPE = (3, 7)
# (axis, block_size, shape of the scale): 7 is not a multiple of 3, so the last block is ragged.
GRANULARITIES = {
    "tensor": (None, 0, ()),
    "channel_0": (0, 0, (3,)),
    "channel_last": (-1, 0, (7,)),
    "block_even": (1, 7, (3, 1)),
    "block_ragged": (1, 3, (3, 3)),
    "block_axis_0": (0, 2, (2, 7)),
}
granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
formats = pytest.mark.parametrize("name", ONNX_TYPES)


@cache
def onnx_model(name: str, axis: int | None, block: int, shape: tuple[int, ...]) -> onnx.ModelProto:
    """`x → QuantizeLinear → DequantizeLinear → y`, and the codes as float32."""
    onnx = pytest.importorskip("onnx")  # machines with a GPU may lack it
    helper, types = onnx.helper, onnx.TensorProto
    attributes = {} if axis is None else {"axis": axis} | ({"block_size": block} if block else {})
    nodes = [
        helper.make_node("Cast", ["z"], ["zq"], to=getattr(types, ONNX_TYPES[name])),
        helper.make_node("QuantizeLinear", ["x", "s", "zq"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "s", "zq"], ["y"], **attributes),
        helper.make_node("Cast", ["q"], ["codes"], to=types.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "round_trip",
        [
            helper.make_tensor_value_info("x", types.FLOAT, None),
            helper.make_tensor_value_info("s", types.FLOAT, list(shape)),
            helper.make_tensor_value_info("z", types.FLOAT, list(shape)),
        ],
        [helper.make_tensor_value_info(n, types.FLOAT, None) for n in ("codes", "y")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run_ort(model: onnx.ModelProto, feed: dict[str, Array], outputs: list[str]) -> list[Array]:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(outputs, feed))


def values(name: str, shape: tuple[int, ...], scale: Tensor) -> Tensor:
    """Random values in steps of the scale, with exact ties and values far beyond every code."""
    generator = torch.Generator().manual_seed(len(name) + len(shape))
    fmt = parse_format(name)
    reach = float(fmt.limits[1])
    x = torch.randn(shape, generator=generator) * reach
    flat = x.flatten()
    flat[:6] = torch.tensor([0.5, 1.5, -0.5, -2.5, 4 * reach, -4 * reach])
    return flat.reshape(shape) * scale


def parameters(name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    # Powers of two: x / scale is exact, so the ties above stay ties.
    scale = torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())
    fmt = parse_format(name)
    if isinstance(fmt, FloatFormat):
        return scale, torch.zeros(shape, dtype=torch.int32)
    return scale, torch.randint(fmt.qmin, fmt.qmax + 1, shape, generator=generator).int()


def both_runtimes(name: str, granularity: str, x: Tensor, scale: Tensor, zero: Tensor) -> dict[str, list[Array]]:
    axis, block, shape = GRANULARITIES[granularity]
    model = onnx_model(name, axis, block, shape)
    from onnx.reference import ReferenceEvaluator

    feed = {"x": x.numpy(), "s": scale.numpy(), "z": zero.numpy().astype(np.float32)}
    return {
        "reference": [np.asarray(a, dtype=np.float32) for a in ReferenceEvaluator(model).run(["codes", "y"], feed)],
        "onnxruntime": run_ort(model, feed, ["codes", "y"]),
    }


@on_devices
@formats
@granularities
def test_codes_and_values_are_those_of_onnx(name: str, granularity: str, device: torch.device) -> None:
    axis, block, shape = GRANULARITIES[granularity]
    scale, zero = parameters(name, shape)
    x = values(name, SHAPE, spread(scale, torch.empty(SHAPE), axis, block))
    codes = quantize(x.to(device), scale.to(device), zero.to(device), name, axis, block)
    real = dequantize(codes, scale.to(device), zero.to(device), name, axis, block)
    assert codes.dtype == FORMATS[name].dtype
    for runtime, (expected, expected_real) in both_runtimes(name, granularity, x, scale, zero).items():
        if runtime == "reference" and granularity == "block_ragged":
            continue  # onnx 1.23: the reference evaluator asserts that blocks divide the axis
        np.testing.assert_array_equal(codes.float().cpu().numpy(), expected, err_msg=runtime)
        np.testing.assert_array_equal(real.cpu().numpy(), expected_real, err_msg=runtime)


@on_devices
@formats
def test_any_scale_gives_the_codes_of_onnx_runtime(name: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    scale, zero = torch.tensor(0.0371), torch.tensor(0, dtype=torch.int32)
    x = torch.randn(4096, generator=generator) * 2
    (expected,) = run_ort(
        onnx_model(name, None, 0, ()),
        {"x": x.numpy(), "s": scale.numpy(), "z": zero.numpy().astype(np.float32)},
        ["codes"],
    )
    codes = quantize(x.to(device), scale.to(device), zero.to(device), name)
    np.testing.assert_array_equal(codes.float().cpu().numpy(), expected)


@on_devices
@pytest.mark.parametrize("name", INTEGERS)
def test_infinity_saturates_and_nan_becomes_the_lowest_code_as_in_onnx_runtime(name: str, device: torch.device) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan] * 16)
    one, zero = torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)
    feed = {"x": x.numpy(), "s": one.numpy(), "z": zero.numpy().astype(np.float32)}
    (expected,) = run_ort(onnx_model(name, None, 0, ()), feed, ["codes"])
    codes = quantize(x.to(device), one.to(device), zero.to(device), name)
    np.testing.assert_array_equal(codes.float().cpu().numpy(), expected)


@on_devices
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_an_8_bit_float_saturates_and_keeps_nan(name: str, device: torch.device) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 1e6, torch.nan], device=device)
    zero = torch.zeros((), dtype=torch.int32, device=device)
    got = quantize(x, torch.ones((), device=device), zero, name).float().cpu()
    largest = float(torch.finfo(FORMATS[name].dtype).max)
    torch.testing.assert_close(
        got, torch.tensor([largest, -largest, largest, torch.nan]), rtol=0, atol=0, equal_nan=True
    )


@given(
    low=st.floats(-1e4, 0, width=32),
    high=st.floats(0, 1e4, width=32),
    position=st.floats(0, 1),
    name=st.sampled_from([n for n, f in FORMATS.items() if isinstance(f, IntFormat) and f.bits <= 16]),
    symmetry=st.sampled_from([s for s in Symmetry if s not in (Symmetry.SIGN_AWARE, Symmetry.OFFSET)]),
)
@settings(max_examples=200, deadline=None)
def test_round_trip_error_is_at_most_half_a_step_inside_the_range(
    low: float, high: float, position: float, name: str, symmetry: Symmetry
) -> None:
    scheme = Scheme(format=FORMATS[name], symmetry=symmetry)
    p = affine_qparams(torch.tensor(low), torch.tensor(high), scheme)
    # The real values of the outermost codes: inside them nothing saturates.
    edges = [(code - int(p.zero_point)) * float(p.scale) for code in (scheme.qmin, scheme.qmax)]
    x = torch.tensor(edges[0] + position * (edges[1] - edges[0]), dtype=torch.float32)
    y = dequantize(encode(x, p, scheme), p.scale, p.zero_point, name)
    rounding = abs(float(x)) * 2**-23  # of x and of y to float32
    assert abs(float(y) - float(x)) <= float(p.scale) / 2 + rounding


@on_devices
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", [(None, 0, ()), (0, 0, (4096,)), (1, 3, (4096, 3))], ids=str)
def test_what_is_rounded_without_codes_is_what_codes_stand_for_bit_for_bit(
    name: str, layout: tuple[int | None, int, tuple[int, ...]], device: torch.device
) -> None:
    axis, block, shape = layout
    signed = not name.startswith("uint")
    scheme = Scheme(format=FORMATS[name], symmetry=Symmetry.SYMMETRIC if signed else Symmetry.ASYMMETRIC)
    # All magnitudes that a format has, those around and below its smallest, and what saturates.
    x = (rand(4096, 7) * torch.logspace(-12, 6, 4096)[:, None]).to(device)
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5).to(device)
    point = torch.full_like(scale, 0 if signed else 3, dtype=torch.int32)
    found = rounded(x, QParams(scale, point), scheme, axis, block)
    codes = encode(x, QParams(scale, point), scheme, axis, block)
    stored = dequantize(codes, scale, point, name, axis, block)
    assert torch.equal(found.view(torch.int32), stored.view(torch.int32)), "signs of zeros, too"
    codes = quantize(x, scale, point, name, axis, block)
    stored = dequantize(codes, scale, point, name, axis, block)
    at_once = ops.fake_quantize(x, scale, point, name, axis, block)
    assert torch.equal(at_once.view(torch.int32), stored.view(torch.int32))
    assert not encode(x.clone().requires_grad_(), QParams(scale, point), scheme, axis, block).requires_grad


def test_codes_of_e4m3_are_read_whatever_are_the_defaults_and_keep_their_layout() -> None:
    # A caller may set a default device before the package is imported, and a default dtype later.
    code = """
import torch
torch.set_default_device("meta")
import quark_fx
torch.set_default_device("cpu")
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128).T
one, zero = torch.ones(()), torch.zeros((), dtype=torch.int32)
torch.set_default_dtype(torch.float64)
found = quark_fx.ops.dequantize(codes, one, zero, "fp8_e4m3")
assert found.dtype is torch.float32
assert found.stride() == codes.stride()
assert quark_fx.ops.fake_quantize(codes.float(), one, zero, "fp8_e4m3").stride() == codes.stride()
assert torch.equal(found.nan_to_num(1e9), codes.float().nan_to_num(1e9))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@given(x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_dynamic_parameters_are_those_of_dynamic_quantize_linear_bit_for_bit(x: list[float]) -> None:
    tensor = torch.tensor(x)
    if 0 < max(0.0, *x) - min(0.0, *x) < 255 * torch.finfo(torch.float32).tiny:
        return  # a denormal scale: ours is 1
    scale, zero = dynamic_qparams(tensor, "uint8", "asymmetric")
    codes = quantize(tensor, scale, zero, "uint8")
    expected = dynamic_session().run(None, {"x": tensor.numpy()})
    for got, want in zip((codes, scale, zero), expected, strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


@cache
def dynamic_session() -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    outputs = [("q", TensorProto.UINT8), ("s", TensorProto.FLOAT), ("z", TensorProto.UINT8)]
    graph = helper.make_graph(
        [node],
        "dynamic",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@on_devices
@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "fp8_e4m3"])
@pytest.mark.parametrize("symmetry", [s for s in Symmetry if s not in (Symmetry.SIGN_AWARE, Symmetry.OFFSET)])
def test_dynamic_parameters_are_the_static_ones_of_the_same_range(
    name: str, symmetry: Symmetry, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 4, 16, generator=generator).to(device)
    scheme = Scheme(format=FORMATS[name], symmetry=symmetry)
    for per_token in (False, True):
        low, high = (x.amin(-1, True), x.amax(-1, True)) if per_token else (x.min(), x.max())
        expected = affine_qparams(low, high, scheme)
        scale, zero = dynamic_qparams(x, name, str(symmetry), *((-1, -1) if per_token else ()))
        assert scale.shape == zero.shape == expected.scale.shape
        # float32 at run time, float64 beforehand: the last bit of the scale may differ.
        torch.testing.assert_close(scale, expected.scale, rtol=2**-22, atol=0)
        # The zero point is rounded from a quotient that may reach 2**16, at float32's relative error.
        assert (zero - expected.zero_point).abs().max() <= (1 if symmetry is Symmetry.ASYMMETRIC else 0)


@on_devices
@pytest.mark.parametrize("symmetry", [Symmetry.SYMMETRIC_FULL, Symmetry.ASYMMETRIC])
def test_a_share_of_the_range_is_that_of_both_ends(symmetry: Symmetry, device: torch.device) -> None:
    x = rand(5, 4, 16).to(device)
    scale, zero = dynamic_qparams(x, "int4", str(symmetry), -1, -1, "float32", 0, 0.75)
    # float32 at run time, float64 beforehand: the last bit of the scale may differ.
    expected = affine_qparams(
        0.75 * x.amin(-1, True), 0.75 * x.amax(-1, True), Scheme(format=FORMATS["int4"], symmetry=symmetry)
    )
    torch.testing.assert_close(scale, expected.scale, rtol=2**-22, atol=0)
    assert torch.equal(zero, expected.zero_point)
    whole, _ = dynamic_qparams(x, "int4", str(symmetry), -1, -1)
    torch.testing.assert_close(scale, 0.75 * whole)


@on_devices
def test_a_token_of_zeros_has_scale_one(device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device)
    x[1] = torch.tensor([-1.0, 0.5, 254.0])
    scale, zero = dynamic_qparams(x, "uint8", "asymmetric", 1, -1)
    assert scale.tolist() == [[1.0], [1.0]]
    assert zero.tolist() == [[0], [1]]


class _Recorded(TorchFunctionMode):
    """Remembers the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


WAITING = {"as_tensor", "tensor", "from_numpy", "item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "cpu"}
"""What copies between host and device, or waits for a device."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("uint8", "asymmetric"),
        ("int8", "symmetric"),
        ("int8", "symmetric", -1, -1),
        ("int4", "symmetric", -1, -1, "float32", 0, 0.9),
        ("fp8_e4m3", "symmetric", 1, -1),
        ("fp4_e2m1", "symmetric", 1, 16, "fp8_e4m3"),
        ("int8", "symmetric", 1, 16, "e8m0_even"),
        ("sm5", "symmetric", -1, 2, "e8m0_floor", 16),
    ],
    ids=str,
)
def test_measuring_an_activation_neither_copies_numbers_nor_waits(arguments: tuple[Any, ...]) -> None:
    x, (fmt, _, *layout) = rand(4, 32), arguments
    with _Recorded() as seen:
        scale, zero_point = dynamic_qparams(x, *arguments)
        codes = quantize(x, scale, zero_point, fmt, *layout[:2])
        dequantize(codes, scale, zero_point, fmt, *layout[:2])
        PowerOfTwoMinMse(mode="most_common").observe(x)
    assert len(seen.names) > 10
    assert not seen.names & WAITING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_computes_in_float32_and_then_casts(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    scale, zero = torch.tensor(0.01), torch.tensor(3, dtype=torch.int32)
    got = dequantize(codes, scale, zero, "int8", dtype=dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, ((codes.float() - 3) * scale).to(dtype), rtol=0, atol=0)


def test_encode_keeps_to_the_codes_of_its_scheme() -> None:
    x = torch.tensor([-10.0, 10.0])
    p = QParams(torch.tensor(0.01), torch.tensor(0, dtype=torch.int32))
    narrow = encode(x, p, Scheme(format=FORMATS["int8"]))
    full = encode(x, p, Scheme(format=FORMATS["int8"], symmetry=Symmetry.SYMMETRIC_FULL))
    assert narrow.tolist() == [-127, 127]
    assert full.tolist() == [-128, 127]


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "channels_last": lambda: torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
    "strided": lambda: torch.randn(4, 12)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "one_element": lambda: torch.randn(1, 1),
}
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_the_operators_pass_torchs_own_checks_in_every_memory_layout(layout: str, granularity: str) -> None:
    x = LAYOUTS[layout]()
    channels = x.shape[1]
    blocks = (x.shape[0], -(-channels // 3), *x.shape[2:])
    shape, axis, block = {"tensor": ((), None, 0), "channel": ((channels,), 1, 0), "block": (blocks, 1, 3)}[granularity]
    scale, zero = torch.rand(shape) + 0.1, torch.zeros(shape, dtype=torch.int32)
    arguments = (scale, zero, "int8", axis, block)
    torch.library.opcheck(ops.quantize.default, (x, *arguments), test_utils=TESTS)
    codes = x.to(torch.int8)
    for dtype in (torch.float32, torch.float16):
        torch.library.opcheck(ops.dequantize.default, (codes, *arguments, dtype), test_utils=TESTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [
        ("uint8", "asymmetric"),
        ("uint8", "asymmetric", 2, -1),
        ("uint8", "asymmetric", -2, 2),
        ("int4", "symmetric", 2, -1, "float32", 0, 0.9),
        ("fp4_e2m1", "symmetric", 2, 3, "fp8_e4m3"),
        ("sm5", "symmetric", -1, 2, "e8m0_floor", 4),
    ],
)
def test_dynamic_qparams_passes_torchs_own_checks(arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(ops.dynamic_qparams.default, (torch.randn(2, 3, 5), *arguments), test_utils=TESTS)


@formats
@granularities
def test_fake_tensors_have_the_shape_and_dtype_of_real_ones(name: str, granularity: str) -> None:
    axis, block, shape = GRANULARITIES[granularity]
    scale, zero = parameters(name, shape)
    x = torch.randn(SHAPE)
    real = ops.quantize(x, scale, zero, name, axis, block)
    real_back = ops.dequantize(real, scale, zero, name, axis, block, torch.float16)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, scale, zero)]
        fake = ops.quantize(*fakes, name, axis, block)
        fake_back = ops.dequantize(fake, *fakes[1:], name, axis, block, torch.float16)
    for a, b in ((real, fake), (real_back, fake_back)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_the_input_is_not_written_to() -> None:
    x, one, zero = torch.randn(9), torch.ones(()), torch.ones((), dtype=torch.int32)
    before = x.clone()
    codes = quantize(x, one, zero, "int8")
    kept = codes.clone()
    dequantize(codes, one, zero, "int8")
    assert torch.equal(x, before)
    assert torch.equal(codes, kept)


@pytest.mark.parametrize("kind", ["quantize", "encode"])
def test_codes_of_32_bits_are_exact_beyond_those_of_float32(kind: str) -> None:
    x, one = torch.tensor([2.0**24, 2.0**25, -(2.0**24), 2.0**30]), torch.ones(())
    point = torch.tensor(1, dtype=torch.int32)
    if kind == "quantize":
        codes = quantize(x, one, point, "int32")
    else:
        scheme = Scheme(format=FORMATS["int32"], symmetry=Symmetry.ASYMMETRIC)
        codes = encode(x, QParams(one, point), scheme)
    assert codes.tolist() == [2**24 + 1, 2**25 + 1, -(2**24) + 1, 2**30 + 1]


@pytest.mark.parametrize(
    ("fmt", "symmetry"), [("int8", "symmetric"), ("uint8", "asymmetric"), ("fp8_e4m3", "symmetric")]
)
def test_a_token_too_small_for_a_normal_scale_has_scale_one(fmt: str, symmetry: str) -> None:
    """Of zeros, and of values whose scale would be subnormal; quantized they are zeros, and not NaN."""
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-44, -1e-44, 3e-38], [1.0, -2.0, 3.0]])
    scale, zero = dynamic_qparams(x, fmt, symmetry, 1, -1)
    assert scale[:2].tolist() == [[1.0], [1.0]]
    assert 0 < float(scale[2]) < 1
    whole, _ = dynamic_qparams(x[:2], fmt, symmetry)
    assert float(whole) == 1.0
    back = dequantize(quantize(x, scale, zero, fmt, 1, -1), scale, zero, fmt, 1, -1)
    assert not back[:2].any()
    assert bool(back.isfinite().all())
