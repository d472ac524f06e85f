"""What torch has kernels for computes what the simulated graph does; what has none says why, and computes the same."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Cnn, calls, constant, rand, seeded
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import parameter
from quark_fx.model.kernels import integers
from quark_fx.model.kernels.lowering import RULES
from quark_fx.model.kernels.product import Activation
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, UINT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, MXFP4

CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
ASYMMETRIC = GROUPS.replace(symmetry=Symmetry.ASYMMETRIC)
STATIC = QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT8))
SIGNED = STATIC.replace(input=TensorSpec(format=INT8))

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
    assert {key for key, *_ in CASES.values()} == set(RULES)


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
    "its activation has no batch": (flat, STATIC, rand(64)),
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
    assert "fold" in second.reason


def test_without_vnni_only_weights_whose_pairs_fit_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "adds_pairs", lambda: True)
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
        "import test_compile as t\nassert t.integers.adds_pairs()\n"
        f"for _, build, config, x in map(t.CASES.get, {names}):\n"
        "    qmodel = t.quantized(build, config, x)\n"
        "    compiled = qmodel.compile()\n"
        "    assert all(row.kernel for row in compiled.report()), str(compiled.report())\n"
        "    assert (compiled.graph_module(x)[0] - qmodel(x)).abs().max() < 1e-4 * qmodel(x).abs().max()\n"
    )
    folder = Path(__file__).parent
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "PYTHONPATH": os.pathsep.join((str(folder), str(folder.parent), *sys.path)),
    }
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_loaded_model_has_the_same_kernels(tmp_path: Path) -> None:
    qmodel = quantized(Cnn, INT8_STATIC, rand(2, 3, 12, 12))
    qmodel.save(tmp_path)
    again = qfx.load(tmp_path)
    ours, theirs = qmodel.compile(), again.compile()
    assert ours.report() == theirs.report()
    x = rand(5, 3, 12, 12, seed=3)
    assert torch.equal(ours.graph_module(x)[0], theirs.graph_module(x)[0])


def test_the_quantized_model_stays_as_it_is() -> None:
    qmodel = quantized(Cnn, INT8_STATIC, rand(2, 3, 12, 12))
    names, code = set(qmodel.state_dict()), qmodel.graph_module.code
    qmodel.compile()
    assert (set(qmodel.state_dict()), qmodel.graph_module.code) == (names, code)


def test_a_model_elsewhere_than_on_a_cpu_is_refused() -> None:
    qmodel = quantized(flat, STATIC, ROWS).to("meta")
    with pytest.raises(qfx.QuarkError, match=r"the model is on meta; move it"):
        qmodel.compile()


def test_a_compiled_model_is_neither_copied_nor_pickled() -> None:
    compiled = quantized(flat, STATIC, ROWS).compile()
    with pytest.raises(qfx.QuarkError, match="compile the quantized model again"):
        copy.deepcopy(compiled)


def test_torch_compile_computes_the_same_for_every_batch_size() -> None:
    """The one test that waits for a compiler: convolutions, codes between kernels, sizes that vary."""
    qmodel = quantized(lambda: nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(16, 8, 1)), INT8_STATIC, IMAGE)
    compiled = qmodel.compile()
    for size in (2, 3, 1):
        x = rand(size, 8, 9, 9, seed=size)
        (expected,) = compiled.graph_module(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=2**-20)


def test_torch_compile_reads_codes_where_there_is_one_row() -> None:
    qmodel = quantized(flat, QuantConfig(weight=GROUPS), ROWS)
    compiled = qmodel.compile()
    for x in (ROWS[:1, :1], ROWS):
        expected = qmodel(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=64 * 2**-22 * float(expected.abs().max()))
