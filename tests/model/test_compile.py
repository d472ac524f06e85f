"""What torch has kernels for computes what the simulated graph does; what has none says why, and computes the same."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from tiny import Cnn, calls, constant, quantize, rand, seeded
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from transformers.pytorch_utils import Conv1D

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import QUANTIZE, parameter, placeholders, static_size, stored_tensors
from quark_fx.model.kernels import integers
from quark_fx.model.kernels.lowering import RULES
from quark_fx.model.kernels.product import Activation
from quark_fx.model.kernels.residual import CONVOLVE_ONTO
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, UINT8, Format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, MXFP4

CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
ASYMMETRIC = GROUPS.replace(symmetry=Symmetry.ASYMMETRIC)
STATIC = QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT8))
SIGNED = STATIC.replace(input=TensorSpec(format=INT8))

NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++", "cl")),
    reason="Inductor needs a C++ compiler",
)

ROWS, IMAGE = rand(2, 3, 64), rand(2, 8, 9, 9)


def flat(inputs: int = 64, outputs: int = 32) -> nn.Module:
    return nn.Linear(inputs, outputs)


def conv(**options: int) -> nn.Module:
    return nn.Conv2d(8, 16, 3, **options)  # type: ignore[arg-type]


CASES: dict[str, tuple[tuple[str, Activation], Callable[[], nn.Module], QuantConfig, Tensor]] = {
    "linear": (("linear", Activation.STATIC), flat, STATIC, ROWS),
    "linear, signed": (("linear", Activation.STATIC), flat, SIGNED, ROWS),
    "linear and relu": (("linear", Activation.STATIC), lambda: nn.Sequential(flat(), nn.ReLU()), STATIC, ROWS),
    "linear, int4": (("linear", Activation.STATIC), flat, STATIC.replace(input=TensorSpec(format=INT4)), ROWS),
    "linear of GPT-2": (("linear", Activation.STATIC), lambda: Conv1D(32, 64), STATIC, ROWS),
    "linear, measured": (("linear", Activation.DYNAMIC), flat, INT8_DYNAMIC, ROWS),
    "linear, tokens": (("linear", Activation.TOKEN), flat, STATIC.replace(input=TOKEN), ROWS),
    "conv": (("conv", Activation.STATIC), conv, STATIC, IMAGE),
    "conv, signed": (("conv", Activation.STATIC), lambda: conv(padding=1, stride=2), SIGNED, IMAGE),
    "conv, depthwise": (("conv", Activation.STATIC), lambda: nn.Conv2d(8, 8, 3, groups=8), STATIC, IMAGE),
    "conv, groups": (("conv", Activation.STATIC), lambda: conv(groups=2, dilation=2), STATIC, IMAGE),
    "conv1d": (("conv", Activation.STATIC), lambda: nn.Conv1d(8, 16, 3, padding=1), STATIC, rand(2, 8, 11)),
    "conv, measured": (("conv", Activation.DYNAMIC), lambda: conv(padding=1), INT8_DYNAMIC, IMAGE),
    "int8": (("linear", Activation.FLOAT), flat, INT8_WEIGHT_ONLY, ROWS),
    "int8, one row": (("linear", Activation.FLOAT), flat, INT8_WEIGHT_ONLY, ROWS[:1, :1]),
    "int4 in groups": (("linear", Activation.FLOAT), flat, QuantConfig(weight=GROUPS), ROWS),
    "int4 in groups, one row": (("linear", Activation.FLOAT), flat, QuantConfig(weight=GROUPS), ROWS[:1, :1]),
    "zero points, one row": (("linear", Activation.FLOAT), flat, QuantConfig(weight=ASYMMETRIC), ROWS[:1, :1]),
    "GPT-2 in groups": (("linear", Activation.FLOAT), lambda: Conv1D(32, 64), QuantConfig(weight=GROUPS), ROWS[:1, :1]),
}


def quantized(build: Callable[[], nn.Module], config: QuantConfig, x: Tensor) -> qfx.QuantizedModel:
    dtype = x.dtype
    return qfx.quantize(seeded(build()).to(dtype), config, [x, rand(*x.shape, seed=2).to(dtype)], progress=False)


def test_every_rule_has_a_case() -> None:
    assert {("cpu", *key) for key, *_ in CASES.values()} == {key for key in RULES if key[0] == "cpu"}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_the_simulated_operator_does(name: str) -> None:
    _, build, config, x = CASES[name]
    qmodel = quantized(build, config, x)
    compiled = qmodel.compile()
    assert [row.kernel != "" for row in compiled.report()] == [True], str(compiled.report())
    assert not calls(compiled.graph_module, "quark_fx")
    expected = qmodel(x)
    (got,) = compiled.graph_module(x)
    # Both round at most 145 sums, none above the magnitudes of what is added, which are 16 of the largest result here.
    torch.testing.assert_close(got, expected, rtol=0, atol=145 * 16 * 2**-24 * float(expected.abs().max()))


@pytest.mark.parametrize("config", [QuantConfig(weight=GROUPS), INT8_WEIGHT_ONLY, QuantConfig(weight=ASYMMETRIC)])
@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_models_have_the_kernels_of_torch(config: QuantConfig, rows: int) -> None:
    x = ROWS.bfloat16().reshape(6, 64)[:rows]
    qmodel = quantized(flat, config, ROWS.bfloat16().reshape(6, 64))
    compiled = qmodel.compile()
    assert all(row.kernel.startswith("aten._weight_int") for row in compiled.report())
    expected = qmodel(x).float()
    # Scale, weight, product and bias are rounded to 8 bits here or there.
    torch.testing.assert_close(
        compiled.graph_module(x)[0].float(), expected, rtol=0, atol=4 * 2**-8 * float(expected.abs().max())
    )


@pytest.mark.parametrize("fmt", [UINT8, INT8])
def test_codes_that_a_kernel_makes_are_within_a_step(fmt: qfx.formats.IntFormat) -> None:
    config = INT8_STATIC.replace(input=TensorSpec(format=fmt), output=TensorSpec(format=fmt))
    qmodel = quantized(lambda: nn.Sequential(conv(), nn.ReLU()), config, IMAGE)
    compiled = qmodel.compile()
    step = float(constant(qmodel, calls(qmodel, "quark_fx.dequantize")[-1].args[1]))
    expected, (got,) = qmodel(IMAGE), compiled.graph_module(IMAGE)
    assert float((got - expected).abs().max()) <= 1.001 * step
    assert float((got == expected).float().mean()) > 0.999


@pytest.mark.parametrize("fmt", [UINT8, INT8])
def test_kernels_read_the_codes_that_others_make(fmt: qfx.formats.IntFormat) -> None:
    config = INT8_STATIC.replace(input=TensorSpec(format=fmt), output=TensorSpec(format=fmt))
    qmodel = quantized(lambda: nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(16, 8, 1)), config, IMAGE)
    graph = qmodel.compile().graph_module
    first, second = calls(graph, "onednn")
    assert second.args[0] is first
    assert float((graph(IMAGE)[0] == qmodel(IMAGE)).float().mean()) > 0.99


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_convolutions_are_packed_once(low: float) -> None:
    """Packed for another zero point, or for no size, a weight would be packed again in every call."""
    x = rand(1, 64, 14, 14).clamp(min=low)
    qmodel = qfx.quantize(seeded(nn.Conv2d(64, 128, 1)), STATIC, [x], progress=False)
    (kernel,) = calls(qmodel.compile().graph_module, "onednn")
    packed, scale = (parameter(qmodel.compile().graph_module, kernel.args[at]) for at in (3, 4))  # type: ignore[arg-type]
    (codes,) = (t for name, t in qmodel.state_dict().items() if name.endswith("weight_codes"))
    assert (kernel.args[2] == 0) == (low == 0)
    layout, prepack = torch.ops.mkldnn._get_mkldnn_serialized_md, torch.ops.onednn.qconv_prepack
    again = prepack(codes, scale, 1.0, kernel.args[2], [1, 1], [0, 0], [1, 1], 1, list(x.shape))
    assert torch.equal(layout(packed), layout(again))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]  # type: ignore[no-any-return]


REASONS: dict[str, tuple[Callable[[], nn.Module], QuantConfig, Tensor]] = {
    "its activation is int16": (flat, STATIC.replace(input=TensorSpec(format=INT16)), ROWS),
    "its weight is fp8_e4m3": (flat, STATIC.replace(weight=CHANNEL.replace(format=FP8_E4M3)), ROWS),
    "there are kernels for integers": (flat, QuantConfig(weight=CHANNEL.replace(format=FP8_E4M3)), ROWS),
    "its weight has zero points": (flat, STATIC.replace(weight=CHANNEL.replace(symmetry=Symmetry.ASYMMETRIC)), ROWS),
    "its weight has a scale for each group": (flat, STATIC.replace(weight=GROUPS), ROWS),
    "its activation has a zero point for each token": (
        flat,
        STATIC.replace(input=TOKEN.replace(format=UINT8, symmetry=Symmetry.ASYMMETRIC)),
        ROWS,
    ),
    "no kernel for linear with scales of groups": (flat, MXFP4.replace(exclude=()), ROWS),
    "no kernel for conv with an activation in float": (conv, INT8_WEIGHT_ONLY, IMAGE),
    "no kernel for conv_transpose with one calibrated": (lambda: nn.ConvTranspose2d(8, 4, 3), STATIC, IMAGE),
    "its groups of 32 do not divide 48 inputs": (lambda: flat(48), QuantConfig(weight=GROUPS), rand(2, 48)),
    "no kernel for lstm with quantized weights": (Cells, STATIC, rand(3, 2, 64)),
    "its activation lacks a batch dimension": (flat, STATIC, rand(64)),
    "its padding is 'same'": (lambda: nn.Conv2d(8, 4, 3, padding="same"), STATIC, IMAGE),
    "it computes in float16": (flat, INT8_WEIGHT_ONLY, ROWS.half()),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_has_no_kernel_says_why_and_computes_the_same(reason: str) -> None:
    build, config, x = REASONS[reason]
    qmodel = quantized(build, config, x)
    compiled = qmodel.compile()
    (row,) = compiled.report()
    assert not row.kernel
    assert reason in row.reason
    assert reason in str(compiled.report())
    assert not calls(compiled.graph_module, "quark_fx")
    assert torch.equal(compiled.graph_module(x)[0], qmodel(x))


def test_other_processors_have_no_integer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for build, x in ((flat, ROWS), (conv, IMAGE)):
        (row,) = quantized(build, STATIC, x).compile().report()
        assert "x64" in row.reason


def test_weights_beside_integer_kernels_are_floats() -> None:
    config = STATIC.replace(overrides=(qfx.Override(pattern="1", input=None),))
    qmodel = quantized(lambda: nn.Sequential(flat(64, 64), flat()), config, ROWS)
    first, second = qmodel.compile().report()
    assert first.integer
    assert "constant freezing" in second.reason


def test_without_vnni_only_weights_whose_pairs_fit_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "adds_pairs", lambda packed=True: True)
    free = STATIC.replace(target="onnx_vnni")
    for build, x in ((flat, ROWS), (conv, IMAGE)):
        assert [row.integer for row in quantized(build, STATIC.replace(target="onnx"), x).compile().report()] == [True]
        (row,) = quantized(build, free, x).compile().report()
        assert "saturate" in row.reason
    odd = quantized(lambda: nn.Conv2d(3, 8, 3), STATIC.replace(target="onnx"), rand(2, 3, 9, 9))
    assert "saturate" in next(iter(odd.compile().report())).reason
    depthwise = quantized(lambda: nn.Conv2d(8, 8, 3, groups=8), free, IMAGE)
    assert next(iter(depthwise.compile().report())).integer


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="the kernels with VNNI are those of the other tests")
def test_integer_kernels_without_vnni_compute_the_same() -> None:
    """Weights that the default target limits; oneDNN is told to use no more than AVX2."""
    names = ["linear", "linear of GPT-2", "conv, signed", "conv, groups"]
    program = (
        "import os, sys\nos.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX2'\nsys.path[:0] = sys.argv[1:]\n"
        "import test_compile as t\nassert t.integers.adds_pairs()\n"
        f"for _, build, config, x in map(t.CASES.get, {names}):\n"
        "    qmodel = t.quantized(build, config, x)\n"
        "    compiled = qmodel.compile()\n"
        "    assert all(row.kernel for row in compiled.report()), str(compiled.report())\n"
        "    assert (compiled.graph_module(x)[0] - qmodel(x)).abs().max() < 1e-4 * qmodel(x).abs().max()\n"
    )
    folder = Path(__file__).parent
    done = run_program(program, folder, folder.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fmt", [UINT8, INT8, INT4], ids=str)
def test_nan_and_infinity_get_the_codes_of_the_simulated_graph(fmt: Format) -> None:
    config = STATIC.replace(input=TensorSpec(format=fmt))
    qmodel = quantized(flat, config, ROWS)
    x = ROWS.clone()
    x[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    (made,) = qmodel.compile().graph_module(x)
    torch.testing.assert_close(made, qmodel(x), rtol=0, atol=2**-18)


class Residual(nn.Module):
    """A block of a convolutional network whose sum a normalization reads, or another convolution."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (
            conv(padding=1),
            *(nn.Conv2d(16, 16, 1) for _ in range(2)),
            last,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.last(torch.relu(x + self.third(torch.relu(self.second(x)))))
        return y


@pytest.mark.parametrize(
    ("last", "rounded"),
    [
        (nn.Conv2d(16, 4, 1), ["x", "conv2d", "conv2d_1", "add"]),
        (nn.InstanceNorm2d(16), ["x", "conv2d", "conv2d_1"]),
    ],
    ids=["between convolutions", "read in float"],
)
def test_inductor_rounds_what_integer_kernels_read(last: nn.Module, rounded: list[str]) -> None:
    qmodel = quantized(lambda: Residual(last), INT8_STATIC.replace(target="inductor"), IMAGE)
    assert [str(node.args[0]) for node in calls(qmodel.graph_module, QUANTIZE)] == rounded
    assert all(row.kernel for row in qmodel.compile().report())


class Added(nn.Module):
    """A convolution whose result is added to something.

    Args:
        to: what it is added to: the "input"; "earlier" codes; codes that are read "later" as well; these "flipped", or
            "transposed"; those that the convolution "itself" reads; what a "convolution" makes of the input; what is
            computed "after" it.
        activation: of the sum.
    """

    def __init__(self, to: str, activation: nn.Module) -> None:
        super().__init__()
        self.partner, self.activation = to, activation
        self.first, self.second, self.third, self.last = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        branch = self.third(y if self.partner == "itself" else torch.relu(self.second(y)))
        if self.partner == "input":
            other = x
        elif self.partner == "convolution":
            other = self.first(x)
        elif self.partner == "after":
            other = nn.functional.max_pool2d(y, 3, 1, 1)
        else:
            other = {"flipped": y.flip(-1), "transposed": y.mT}.get(self.partner, y)
        z: Tensor = self.last(self.activation(branch + other))
        return z + self.second(y) if self.partner == "later" else z


LARGE = rand(2, 32, 32, 32)

ADDED = {"earlier": 1, "later": 1, "itself": 1, "convolution": 1, "input": 0, "flipped": 0, "transposed": 0, "after": 0}
"""What a convolution is added to, and how many kernels add it to their sums: codes that come before it, as they are."""


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Identity()], ids=["relu", "sum"])
@pytest.mark.parametrize("fmt", [UINT8, INT8], ids=str)
@pytest.mark.parametrize("to", ADDED)
def test_a_convolution_adds_codes_to_its_sums(to: str, fmt: Format, activation: nn.Module) -> None:
    spec = TensorSpec(format=fmt)
    config = INT8_STATIC.replace(target="inductor", input=spec, output=spec)
    qmodel = quantized(lambda: Added(to, activation), config, LARGE)
    compiled = qmodel.compile()
    assert [row.kernel for row in compiled.report()].count("onednn.qconv2d_pointwise.binary") == ADDED[to]
    x = rand(3, *LARGE.shape[1:], seed=4)
    expected = qmodel(x)
    step = float(expected.max() - expected.min()) / 255
    plain = compiled.graph_module(x)[0]
    torch.testing.assert_close(plain, expected, rtol=0, atol=3 * step)
    assert bool(((plain - expected).abs() < 0.1 * step).double().mean() > 0.9)  # a code that is one off shows in few


class Beside(nn.Module):
    """One block for each kind of codes that a kernel adds to its sums, all with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(Added(to, nn.ReLU()) for to, added in ADDED.items() if added)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [kind(x) for kind in self.kinds]


@NEEDS_COMPILER
def test_kernels_write_over_codes_that_nothing_else_reads() -> None:
    """In place for "earlier" and "convolution", in a copy for "later" and "itself"."""
    compiled = quantized(Beside, INT8_STATIC.replace(target="inductor"), LARGE).compile()
    torch._dynamo.reset()
    found, code = run_and_get_code(compiled, LARGE)
    for made, expected in zip(found, compiled.graph_module(LARGE), strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)
    calls_of = [line.strip().split(" = ")[-1] for line in "".join(code).splitlines()]
    in_place, copied = (
        sum(call.startswith(f"torch.ops.{name}") for call in calls_of)
        for name in ("onednn.qconv2d_pointwise.binary", "quark_fx.convolve_onto")
    )
    assert (in_place, copied) == (2, 2)


@NEEDS_COMPILER
def test_a_pass_of_the_users_own_stays() -> None:
    seen = list[Any]()
    compiled = quantized(lambda: Added("earlier", nn.ReLU()), INT8_STATIC.replace(target="inductor"), LARGE).compile()
    torch._dynamo.reset()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=seen.append):
        found = compiled(LARGE)
    assert seen
    torch.testing.assert_close(found, compiled.graph_module(LARGE)[0], rtol=0, atol=1e-4)


def test_codes_in_any_order_of_memory_are_added_to() -> None:
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    codes, scale = torch.randint(-127, 128, (4, 4, 1, 1), dtype=torch.int8), torch.full((4,), 0.01)
    packed = torch.ops.onednn.qconv_prepack.default(codes, scale, 1.0, 0, *geometry, [1, 4, 5, 5])
    x, onto = (torch.randint(0, 255, (1, 4, 5, 5), dtype=torch.uint8) for _ in range(2))

    def added(onto: Tensor) -> Tensor:
        zero = torch.zeros(4, dtype=torch.int32)
        made: Tensor = CONVOLVE_ONTO(x, 0.1, 0, packed, scale, zero, onto, None, *geometry, 0.5, 7, 0.2, 3, "none")
        return made

    before = onto.clone()
    products = nn.functional.conv2d(x.float() * 0.1, codes.float() * 0.01)
    expected = ((products + (onto.float() - 3) * 0.2) / 0.5).round().add(7).clamp(0, 255)
    for laid_out in (onto, onto.mT.contiguous().mT, onto.to(memory_format=torch.channels_last)):
        assert (added(laid_out).float() - expected).abs().max() <= 1
    assert torch.equal(onto, before)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("config", [INT8_STATIC, INT8_DYNAMIC], ids=["static", "dynamic"])
def test_a_product_applies_gelu(config: QuantConfig, approximate: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(approximate), nn.Linear(64, 8))

    qmodel = quantized(build, config.replace(target="inductor"), rand(4, 32))
    graph = qmodel.compile().graph_module
    assert not calls(graph, "aten.gelu.default")
    kernels = [node.args for node in graph.graph.nodes if "qlinear_pointwise" in str(node.target)]
    assert [(args[-3], args[-1]) for args in kernels] == [("gelu", approximate), ("none", "")]
    x = rand(5, 32, seed=4)
    expected = qmodel(x)
    torch.testing.assert_close(graph(x)[0], expected, rtol=0, atol=3 * float(expected.abs().max()) / 255)


def test_a_loaded_model_has_the_same_kernels(tmp_path: Path) -> None:
    qmodel = quantized(Cnn, INT8_STATIC, rand(2, 3, 12, 12))
    qmodel.save(tmp_path)
    again = qfx.load(tmp_path)
    ours, theirs = qmodel.compile(), again.compile()
    assert ours.report() == theirs.report()
    x = rand(5, 3, 12, 12, seed=3)
    assert torch.equal(ours.graph_module(x)[0], theirs.graph_module(x)[0])


class Perceptron(nn.Sequential):
    def __init__(self, inputs: int) -> None:
        super().__init__(
            nn.Linear(inputs, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, inputs), nn.Linear(inputs, 4, bias=False)
        )


def test_the_quantized_model_stays_as_it_is() -> None:
    qmodel = quantized(Cnn, INT8_STATIC, rand(2, 3, 12, 12))
    names, code = set(qmodel.state_dict()), qmodel.graph_module.code
    qmodel.compile()
    assert (set(qmodel.state_dict()), qmodel.graph_module.code) == (names, code)


@pytest.mark.parametrize("preset", ["mxint8", "bfp16", "nvfp4", "int8_static", "int8_dynamic"])
def test_sizes_that_vary_still_vary(preset: str) -> None:
    """Rows of 12 are padded to blocks of 8, 16 or 32, which asks torch for shapes."""
    qmodel = qfx.quantize(seeded(Perceptron(12)), preset, [rand(4, 12)], progress=False)
    compiled = qmodel.compile(backend="eager")
    (given,) = placeholders(qmodel.graph_module)
    assert [static_size(size) for size in given.meta["val"].shape] == [None, 12]
    for batch in (1, 9):
        x = rand(batch, 12, seed=batch)
        expected = qmodel(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=32 * 2**-20 * float(expected.abs().max()))


@pytest.mark.parametrize("preset", ["int8_static", "int8_weight_only", "int4_weight_only"])
def test_a_compiled_model_is_a_snapshot(preset: str) -> None:
    x = rand(4, 32)
    qmodel = qfx.quantize(seeded(Perceptron(32)), preset, [x], progress=False)
    compiled = qmodel.compile(backend="eager")
    before = compiled(x)
    other = {name: tensor * 2 + 1 for name, tensor in qmodel.state_dict().items()}
    qmodel.load_state_dict(other)
    assert not torch.equal(qmodel(x), before)
    assert torch.equal(compiled(x), before)


def test_a_compiled_model_has_no_tensors_that_it_does_not_read() -> None:
    graph = quantized(Cnn, INT8_STATIC, rand(2, 3, 12, 12)).compile().graph_module
    assert set(graph.state_dict()) == set(stored_tensors(graph))


def test_a_compiled_model_stays_in_its_dtypes_and_where_it_is() -> None:
    compiled = quantized(flat, STATIC, ROWS).compile(backend="eager")
    for convert in (compiled.half, compiled.bfloat16, compiled.double, lambda: compiled.to("meta")):
        with pytest.raises(RuntimeError, match="cannot change its dtypes or device"):
            convert()
    assert compiled.float().cpu() is compiled
    halves = quantized(flat, INT8_WEIGHT_ONLY, ROWS.bfloat16()).compile(backend="eager")
    with pytest.raises(RuntimeError, match="cannot change its dtypes"):
        halves.float()


def test_a_compiled_model_is_not_compiled_again() -> None:
    with pytest.raises(qfx.QuarkError, match="compiled already"):
        quantized(flat, STATIC, ROWS).compile().compile()


def test_an_onnx_export_leaves_no_sizes_behind_that_compile_stumbles_over(tmp_path: Path) -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y[y > 0]

    x = rand(6, 4)
    qmodel = qfx.quantize(seeded(Some()), STATIC, [x], progress=False)
    qfx.export.onnx(qmodel, tmp_path / "some.onnx")
    torch.testing.assert_close(qmodel.compile(backend="eager")(x), qmodel(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fullgraph": False}, "compile has no argument fullgraph; it has mode, dynamic, backend, options"),
        ({"foo": 1}, "compile has no argument foo; it has mode, dynamic, backend, options"),
        ({"dynamic": "yes"}, "dynamic of compile must be True or False or None, not 'yes'"),
        ({"backend": 3}, "backend of compile must be"),
        ({"mode": 3}, "mode of compile must be"),
        ({"options": 3}, "options of compile must be"),
        ({"options": {"foo": 1}}, "torch.compile does not accept .*foo.*: Unexpected optimization option foo$"),
        ({"mode": "foo"}, "torch.compile does not accept .*: Unrecognized mode=foo"),
        ({"backend": "foo"}, "torch.compile does not accept .*: Invalid backend: 'foo'"),
    ],
)
def test_options_that_do_not_exist_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(qfx.ConfigError, match=words):
        quantized(flat, STATIC, ROWS).compile(**options)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(16, 2, batch_first=True)
        self.table = nn.Parameter(rand(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.att(x, x, x, need_weights=False)[0], self.table)


def test_operators_are_called_as_in_the_report_of_the_quantized_model(tmp_path: Path) -> None:
    qmodel = quantized(Attending, INT8_STATIC, rand(2, 5, 16))
    names = [row.name for row in qmodel.report().rows if row.weight]
    assert names == ["att", "att.out_proj", "table"]
    assert [row.name for row in qmodel.compile().report()] == names
    qmodel.save(tmp_path)
    assert [row.name for row in qfx.load(tmp_path).compile().report()] == names


def test_a_model_elsewhere_than_on_a_cpu_is_refused() -> None:
    qmodel = quantized(flat, STATIC, ROWS).to("meta")
    with pytest.raises(qfx.QuarkError, match=r"the model is on meta; move it"):
        qmodel.compile()


def test_a_compiled_model_is_neither_copied_nor_pickled() -> None:
    compiled = quantized(flat, STATIC, ROWS).compile()
    with pytest.raises(qfx.QuarkError, match="load it at the destination, and compile it again"):
        copy.deepcopy(compiled)


@NEEDS_COMPILER
def test_torch_compile_computes_the_same_for_every_batch_size() -> None:
    """The one test that waits for a compiler: convolutions, codes between kernels, sizes that vary."""
    qmodel = quantized(lambda: nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(16, 8, 1)), INT8_STATIC, IMAGE)
    compiled = qmodel.compile()
    for size in (2, 3, 1):
        x = rand(size, 8, 9, 9, seed=size)
        (expected,) = compiled.graph_module(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=2**-20)
    x[0, :, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, *[0.0] * 4])
    torch.testing.assert_close(compiled(x), qmodel(x), rtol=0, atol=2**-20)
    other = quantized(lambda: nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(16, 8, 1)), INT8_STATIC, IMAGE)
    with torch.no_grad():
        for tensor in stored_tensors(other.graph_module).values():
            if tensor.dtype == torch.int8:
                tensor.neg_()
    torch.testing.assert_close(other.compile()(x), other(x), rtol=0, atol=2**-20)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 6, 5, padding=2), nn.Conv1d(6, 6, 3, stride=2, dilation=2, groups=6)
        self.last = nn.Linear(6 * 18, 5)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)) + x)).flatten(1))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("config", "backend"),
    [(INT8_STATIC, "aot_eager"), (INT8_STATIC.replace(target="inductor"), None), (INT8_DYNAMIC, "aot_eager")],
)
def test_what_reads_a_convolution_of_rows_knows_their_length(config: QuantConfig, backend: str | None) -> None:
    """The sizes that tracing finds are those of the kernels: one compiled program shows that they are usable."""
    qmodel = quantized(Rows, config, rand(8, 6, 40))
    compiled = qmodel.compile(backend=backend)
    assert [row.kernel for row in compiled.report()][:2] == ["onednn.qconv_pointwise"] * 2
    for size in (8, 3):
        x = rand(size, 6, 40, seed=size)
        torch.testing.assert_close(compiled(x), qmodel(x), rtol=0, atol=2e-2)


@NEEDS_COMPILER
def test_torch_compile_reads_codes_where_there_is_one_row() -> None:
    qmodel = quantized(flat, QuantConfig(weight=GROUPS), ROWS)
    compiled = qmodel.compile()
    for x in (ROWS[:1, :1], ROWS):
        expected = qmodel(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=64 * 2**-22 * float(expected.abs().max()))


def test_any_number_of_layouts_and_sizes_runs() -> None:
    x, free = rand(4, 8, 3, 5), torch.export.Dim.AUTO
    model = seeded(nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU()))
    sizes = {"input": {0: free, 2: free, 3: free}}
    qmodel = qfx.quantize(model, STATIC, [x], progress=False, dynamic_shapes=sizes)
    compiled = qmodel.compile(backend="eager", dynamic=False)
    (wanted,) = compiled.graph_module(x)
    for order in permutations(range(4)):
        image = x.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        assert torch.equal(compiled(image.requires_grad_()), wanted)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = {rows: compiled(rand(rows, 8, 3, 5)) for rows in (*range(1, 12), 1)}
    assert all(torch.equal(y, compiled.graph_module(rand(rows, 8, 3, 5))[0]) for rows, y in results.items())
    (message,) = [str(warning.message) for warning in seen if "sizes" in str(warning.message)]
    assert "for 8 input sizes and reached its limit" in message
    assert "call compile(dynamic=True)" in message


def test_arguments_that_are_no_tensors_are_accepted() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 8)

        def forward(self, x: Tensor, factor: int, mask: Tensor | None = None) -> Tensor:
            y: Tensor = self.linear(x)
            return y * factor if mask is None else y * mask

    qmodel = quantize(Scaled().eval(), "int8_weight_only", [(rand(2, 32), 3, None)])
    compiled = qmodel.compile(backend="eager")
    torch.testing.assert_close(compiled(rand(2, 32), 3, None), qmodel(rand(2, 32), 3, None))
