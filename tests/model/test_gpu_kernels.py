"""torch's products for GPUs compute what the simulated graph does, or the report says why not.

On the pretend GPU they are those of `gpu_products.py`, which require what CUDA does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from devices import on_gpus
from gpu_products import e2m1_values
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.model.kernels import gpu_products
from quark_fx.model.kernels.gpu_products import KERNELS
from quark_fx.model.kernels.product import Product
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, FP8_E5M2, INT4, INT8, UINT4, UINT8, Codebook, register_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.presets import MXFP4, NVFP4, PRESETS
from quark_fx.system import accelerator

INPUTS, OUTPUTS = 512, 256
INT, SCALED, BLOCKS, INT4PACK = (
    "aten._int_mm",
    "aten._scaled_mm",
    "aten._scaled_mm of blocks",
    "aten._weight_int4pack_mm",
)
NV4, MX4, MX8 = (f"aten._scaled_mm_v2 of {name}" for name in ("NVFP4", "MXFP4", "MXFP8"))

BYTE, FP8 = TensorSpec(format=INT8), TensorSpec(format=FP8_E4M3)
CHANNEL, FP8_CHANNEL = (spec.replace(granularity=Granularity.CHANNEL) for spec in (BYTE, FP8))
TOKEN, FP8_TOKEN = (spec.replace(granularity=Granularity.TOKEN, dynamic=True) for spec in (BYTE, FP8))
GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
BLOCK = FP8.replace(granularity=Granularity.GROUP, group_size=128)
BLOCK_OF_16 = BLOCK.replace(format=FP4_E2M1, group_size=16)


def both(config: QuantConfig) -> QuantConfig:
    """Return what rounds the weight and the input of a layer."""
    return QuantConfig(weight=config.weight, input=config.input)


CASES: dict[str, tuple[str, QuantConfig]] = {
    "int8": (INT, QuantConfig(weight=CHANNEL, input=BYTE)),
    "int8, one scale": (INT, QuantConfig(weight=BYTE, input=BYTE)),
    "int8 and uint8": (INT, QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT8))),
    "int8 and uint4": (INT, QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT4))),
    "int8, measured": (INT, QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT8, dynamic=True))),
    "int8 by token": (INT, QuantConfig(weight=CHANNEL, input=TOKEN)),
    "int8 by token, zero points": (INT, QuantConfig(weight=CHANNEL, input=TOKEN.replace(symmetry=Symmetry.ASYMMETRIC))),
    "fp8": (SCALED, QuantConfig(weight=FP8, input=FP8)),
    "fp8 by channel": (SCALED, QuantConfig(weight=FP8_CHANNEL, input=FP8)),
    "fp8 by token": (SCALED, QuantConfig(weight=FP8_CHANNEL, input=FP8_TOKEN)),
    "fp8 by token, one scale": (SCALED, QuantConfig(weight=FP8, input=FP8_TOKEN)),
    "fp8 in groups": (BLOCKS, QuantConfig(weight=BLOCK, input=BLOCK.replace(dynamic=True))),
    "fp8 in blocks": (BLOCKS, QuantConfig(weight=BLOCK.replace(group_rows=128), input=BLOCK.replace(dynamic=True))),
    "nvfp4": (NV4, both(NVFP4)),
    "mxfp4": (MX4, both(MXFP4)),
    "mxfp8": (MX8, both(PRESETS["mxfp8_e4m3"])),
    "mxfp6": (MX8, both(PRESETS["mxfp6_e3m2"])),
    "mxfp4 and mxfp8": (MX8, QuantConfig(weight=MXFP4.weight, input=PRESETS["mxfp8_e4m3"].input)),
    "int4 in groups": (INT4PACK, QuantConfig(weight=GROUPS)),
    "int4 in groups, zero points": (INT4PACK, QuantConfig(weight=GROUPS.replace(symmetry=Symmetry.ASYMMETRIC))),
    "int4 in large groups": (INT4PACK, QuantConfig(weight=GROUPS.replace(group_size=256))),
    "int4 by channel": (INT4PACK, QuantConfig(weight=CHANNEL.replace(format=INT4))),
}


@cache
def session(device: torch.device, dtype: torch.dtype, inputs: int = INPUTS, outputs: int = OUTPUTS) -> qfx.Session:
    layer = seeded(nn.Sequential(nn.Linear(inputs, outputs))).to(dtype).to(device)
    return qfx.Session(layer, [rand(2, 3, inputs, seed=seed).to(dtype).to(device) for seed in (1, 2)])


@cache
def simulated_layer(one: qfx.Session, config: QuantConfig) -> tuple[qfx.QuantizedModel, nn.Module]:
    """Return a quantized layer, which several tests read, and the simulated one."""
    qmodel = qfx.quantize(one, config, progress=False)
    return qmodel, qmodel.eager()


def of_layer(one: qfx.Session, config: QuantConfig) -> tuple[qfx.QuantizedModel, nn.Module, Any]:
    """Return a quantized layer, the simulated one, and the one with kernels."""
    qmodel, simulated = simulated_layer(one, config)
    return qmodel, simulated, qmodel.eager(kernels=True)


def magnitudes(qmodel: qfx.QuantizedModel, x: Tensor) -> Tensor:
    """Return the root of the sum of the squares of what each result is a sum of, without the bias."""
    gm = qmodel.graph_module
    (product,) = (product for node in gm.graph.nodes if (product := Product.of(gm, node)) is not None)
    weight = product.weight.decoded().abs()
    if not product.rounded:  # scale and zero point are rounded apart: the magnitude of each
        weight = weight + 8 * product.weight.layout.spread(product.weight.scale)
    return (x.float().square() @ weight.square().mT).sqrt()


def make_capable(kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pretend GPU be new enough for a kernel; skip the test on a GPU that is not."""
    needed, before = next((row.since, row.before) for row in KERNELS if row.name == kernel)
    if device.type == "cuda" and not needed <= torch.cuda.get_device_capability(device) < before:
        pytest.skip(f"{kernel} is not for this GPU")
    if device.type != "cuda":
        monkeypatch.setattr(accelerator, "capability", lambda _: max(needed, (9, 0)))


@on_gpus
@pytest.mark.parametrize("name", CASES)
def test_a_product_is_that_of_the_simulated_layer(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, config = CASES[name]
    make_capable(kernel, device, monkeypatch)
    dtype = torch.float32 if kernel == INT else torch.bfloat16
    qmodel, simulated, kernels = of_layer(session(device, dtype), config)
    assert [row.kernel for row in kernels.kernel_report] == [kernel], str(kernels.kernel_report)
    compiled = qmodel.compile()
    assert compiled.report() == kernels.kernel_report
    for shape in ((2, 3), (1, 1), (40, 1)):
        x = rand(*shape, INPUTS, seed=3).to(dtype).to(device)
        with torch.no_grad():
            expected, got, lowered = simulated(x), kernels(x), compiled.graph_module(x)[0]
        assert torch.equal(got, lowered)
        assert got.dtype is dtype
        size = magnitudes(qmodel, x)
        # Each of INPUTS sums of float32 is rounded there, and the codes' sum and two scales here; in bfloat16 both
        # factors are rounded there, up to three numbers of a weight here, and the result in both, all independently.
        bound = (INPUTS**0.5 + 3) * 2**-24 if dtype is torch.float32 else 7**0.5 * 2**-9
        assert (got - expected).float().norm() <= bound * (size + expected.float().abs()).norm()


def test_every_product_has_a_case() -> None:
    assert {kernel for kernel, _ in CASES.values()} == {kernel.name for kernel in KERNELS}


@on_gpus
def test_a_product_of_no_rows_is_empty(device: torch.device) -> None:
    for name in ("int8", "fp8 by channel", "int4 in groups"):
        _, _, kernels = of_layer(session(device, torch.bfloat16), CASES[name][1])
        assert kernels(torch.zeros(2, 0, INPUTS, dtype=torch.bfloat16, device=device)).shape == (2, 0, OUTPUTS)


@on_gpus
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_blocks_of_zeros_of_tiny_values_and_with_a_nan_are_those_of_the_simulated_layer(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_capable(CASES[name][0], device, monkeypatch)
    layer = seeded(nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))).to(HALF).to(device)
    x = rand(3, 1, INPUTS).to(HALF).to(device)
    _, simulated, kernels = of_layer(qfx.Session(layer, [x]), CASES[name][1])
    some = torch.where(x > 0, 0.0, x)
    for given, factor in (
        (0 * x, 1),
        (some, 1),
        (2.0**-98 * x, 2.0**98),
        (torch.where(x == x.amax(), torch.nan, x), 1),
    ):
        expected, got = (factor * model(given) for model in (simulated, kernels))
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6, equal_nan=True)


@on_gpus
def test_a_product_that_a_build_of_torch_lacks_is_simulated(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_capable(MX4, device, monkeypatch)

    def refuse(*_: object) -> Tensor:
        raise NotImplementedError("MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only")

    monkeypatch.setattr(gpu_products, "small_block_product", refuse)
    _, simulated, kernels = of_layer(session(device, HALF), CASES["mxfp4"][1])
    assert "torch rejects this product: MXFP4 scaling supported on" in str(kernels.kernel_report)
    x = rand(2, 3, INPUTS).to(HALF).to(device)
    assert torch.equal(kernels(x), simulated(x))


@on_gpus
def test_square_blocks_of_other_strides_are_multiplied_by_row(device: torch.device) -> None:
    _, simulated, kernels = of_layer(session(device, torch.bfloat16, 384), CASES["fp8 in blocks"][1])
    x = rand(5, 1, 384).to(torch.bfloat16).to(device)
    assert [row.kernel for row in kernels.kernel_report] == [BLOCKS]
    gap = (kernels(x) - simulated(x)).float().norm() / simulated(x).float().norm()
    assert gap < 2**-8 * 3**0.5


@on_gpus
def test_integers_are_multiplied_for_every_dtype(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        _, simulated, kernels = of_layer(session(device, dtype), CASES["int8 by token"][1])
        x = rand(5, 1, INPUTS).to(dtype).to(device)
        assert [row.kernel for row in kernels.kernel_report] == [INT]
        gap = (kernels(x) - simulated(x)).float().norm() / simulated(x).float().norm()
        assert gap < 2 ** (-8 if dtype is torch.bfloat16 else -11) * 3**0.5


HALF = torch.bfloat16
REASONS: dict[str, tuple[tuple[int, int], torch.dtype, tuple[int, int], QuantConfig]] = {
    "aten._scaled_mm needs compute capability 8.9 or above, and this GPU has 8.6": (
        *((8, 6), HALF, (INPUTS, OUTPUTS)),
        CASES["fp8"][1],
    ),
    "9.0 or above and below 10.0, and this GPU has 10.0": ((10, 0), HALF, (INPUTS, OUTPUTS), CASES["fp8 in blocks"][1]),
    "_weight_int4pack_mm needs compute capability 8.0": ((7, 5), HALF, (INPUTS, OUTPUTS), CASES["int4 in groups"][1]),
    "it computes in float32; aten._scaled_mm computes in bfloat16": (
        *((9, 0), torch.float32, (INPUTS, OUTPUTS)),
        CASES["fp8"][1],
    ),
    "it has 24 inputs and 16 outputs; aten._scaled_mm takes multiples of 16 and 16": (
        *((9, 0), HALF, (24, 16)),
        CASES["fp8"][1],
    ),
    "takes multiples of 8 and 8": ((9, 0), HALF, (24, 12), CASES["int8"][1]),
    "torch does not multiply floats and fp8_e4m3": (
        *((9, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=FP8_CHANNEL),
    ),
    "fp8_e5m2 and fp8_e4m3": (
        *((9, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=FP8, input=TensorSpec(format=FP8_E5M2)),
    ),
    "its weight is int8; torch multiplies floats only by integers of at most 4 bits": (
        *((9, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=CHANNEL),
    ),
    "its groups of 16 inputs": ((9, 0), HALF, (INPUTS, OUTPUTS), QuantConfig(weight=GROUPS.replace(group_size=16))),
    "of NVFP4 needs compute capability 10.0 or above, and this GPU has 9.0": (
        *((9, 0), HALF, (INPUTS, OUTPUTS)),
        both(NVFP4),
    ),
    "of MXFP4 needs compute capability 10.0 or above and below 11.0, and this GPU has 12.0": (
        *((12, 0), HALF, (INPUTS, OUTPUTS)),
        both(MXFP4),
    ),
    "of MXFP8 needs compute capability 10.0": ((9, 0), HALF, (INPUTS, OUTPUTS), both(PRESETS["mxfp8_e4m3"])),
    "it has 48 inputs and 16 outputs; aten._scaled_mm_v2 of NVFP4 takes": ((10, 0), HALF, (48, 16), both(NVFP4)),
    "scales of its weight are not powers of two": (
        *((10, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=BLOCK.replace(group_size=32), input=PRESETS["mxfp8_e4m3"].input),
    ),
    "scales of its activation are not powers of two": (
        *((10, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=MXFP4.weight, input=BLOCK.replace(group_size=32, dynamic=True)),
    ),
    "these scales are not E4M3 floats": (
        *((10, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=BLOCK_OF_16, input=NVFP4.input),
    ),
    "scales of its activation are not E4M3 floats": (
        *((10, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=NVFP4.weight, input=BLOCK_OF_16.replace(dynamic=True)),
    ),
    "64 inputs of its weight and 64 of its activation": (
        *((9, 0), HALF, (INPUTS, OUTPUTS)),
        QuantConfig(weight=BLOCK.replace(group_size=64), input=BLOCK.replace(group_size=64, dynamic=True)),
    ),
}


@on_gpus
@pytest.mark.parametrize("reason", REASONS)
def test_what_has_no_product_is_simulated_and_says_why(
    reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, dtype, sizes, config = REASONS[reason]
    monkeypatch.setattr(accelerator, "capability", lambda _: capability)
    _, simulated, kernels = of_layer(session(device, dtype, *sizes), config)
    (row,) = kernels.kernel_report
    assert reason in row.reason
    x = rand(2, 3, sizes[0]).to(dtype).to(device)
    assert torch.equal(kernels(x), simulated(x))


@on_gpus
def test_tables_of_4_bits_are_simulated(device: torch.device) -> None:
    table = register_format(Codebook("table16", tuple(i / 8 for i in range(-8, 8))))
    _, simulated, kernels = of_layer(session(device, HALF), QuantConfig(weight=GROUPS.replace(format=table)))
    assert "its weight is table16; torch multiplies floats only by integers" in str(kernels.kernel_report)
    x = rand(2, 3, INPUTS).to(HALF).to(device)
    assert torch.equal(kernels(x), simulated(x))


@on_gpus
def test_blocks_need_the_library_of_cuda_12_9(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "cuda_version", lambda: (12, 6))
    _, _, kernels = of_layer(session(device, torch.bfloat16), CASES["fp8 in blocks"][1])
    assert "needs torch built for CUDA 12.9 or above" in str(kernels.kernel_report)


@on_gpus
def test_a_model_with_kernels_stays_on_its_gpu(device: torch.device) -> None:
    qmodel, _, kernels = of_layer(session(device, torch.bfloat16), CASES["fp8"][1])
    assert kernels[0].weight.device.type == device.type
    for model in (kernels, qmodel.compile()):
        with pytest.raises(RuntimeError, match="cannot change its dtypes or device"):
            model.cpu()


def test_the_first_of_two_floats_of_4_bits_is_in_the_low_ones() -> None:
    codes = FP4_E2M1.levels()[1:].view(1, -1).to(FP4_E2M1.dtype)
    assert torch.equal(e2m1_values(gpu_products._pairs(codes)), codes.float())
