"""Block formats against references written from their specifications, one value after the other in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.block_formats import (
    BFP16,
    BLOCK_FORMATS,
    MX4,
    MX6,
    MX9,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
)
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.graph.nodes import tensor_of
from quark_fx.numbers.formats import BF16, FP4_E2M1, INT4, INT8, SM8
from quark_fx.numbers.ops import dequantize, dynamic_qparams, quantize
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import CALIBRATED_E4M3_SCALES, E4M3_SCALES, global_scale_of, scale_format
from quark_fx.plan.weights import quantize_tensor, stored_bytes

Rounding = Callable[[float], float]
Row = Sequence[float]


def to_levels(dtype: type[np.generic]) -> tuple[Rounding, float]:
    """Return rounding to the codes of an ml_dtypes type, half to even, saturating, and the largest value."""
    width = ml_dtypes.finfo(dtype).bits
    codes = np.arange(1 << (width - 1), dtype=np.uint8).view(dtype).astype(np.float64)
    levels = [float(v) for v in codes if np.isfinite(v)]  # of even and odd code by turns

    def rounded(x: float) -> float:
        magnitude = min(abs(x), levels[-1])
        above = next(i for i, level in enumerate(levels) if level >= magnitude)
        below = above - (levels[above] != magnitude)
        left, right = magnitude - levels[below], levels[above] - magnitude
        code = below if left < right or (left == right and below % 2 == 0) else above
        return math.copysign(levels[code], x)

    return rounded, levels[-1]


def to_integers(low: int, high: int) -> tuple[Rounding, float]:
    return lambda x: float(min(max(round(x), low), high)), float(high)


# element rounding, its largest value, exponent of that, mantissa bits, dtype in which 1 stands for 1
ELEMENTS = {
    "fp8_e4m3": (*to_levels(ml_dtypes.float8_e4m3fn), 8, 3),
    "fp8_e5m2": (*to_levels(ml_dtypes.float8_e5m2), 15, 2),
    "fp6_e3m2": (*to_levels(ml_dtypes.float6_e3m2fn), 4, 2),
    "fp6_e2m3": (*to_levels(ml_dtypes.float6_e2m3fn), 2, 3),
    "fp4_e2m1": (*to_levels(ml_dtypes.float4_e2m1fn), 2, 1),
    "int8": (*to_integers(-128, 127), 6, 6),
}


def blocks(row: Row, size: int) -> list[Row]:
    return [row[i : i + size] for i in range(0, len(row), size)]


def exponent(x: float) -> int:
    """Return floor(log2(x)) of a float64, exactly."""
    return math.frexp(x)[1] - 1


def within_e8m0(power: int, emax: int) -> float:
    """Return 2**power, of 8 bits and such that no value leaves float32."""
    return 2.0 ** min(max(power, -127), 127 - emax)


def microscaling(row: Row, element: str, rule: str, size: int = 32) -> list[float]:
    """OCP Microscaling Formats v1.0, section 6.3, with the exponent of the rule."""
    rounded, largest, emax, mantissa = ELEMENTS[element]
    result: list[float] = []
    for block in blocks(row, size):
        amax = max(abs(x) for x in block)
        if not math.isfinite(amax) or any(math.isnan(x) for x in block):
            result += [math.nan] * len(block)
            continue
        if amax == 0:
            result += [0.0] * len(block)
            continue
        power = exponent(amax) - emax
        # Two's complement has a code for -128, so that only a value above zero raises the exponent to make room.
        top = max(block) if element == "int8" else amax
        if rule == "even" and top >= 2.0 ** exponent(amax) * (2 - 2.0 ** -(mantissa + 1)):
            power += 1
        if rule == "ceil":
            lowest = 128 if element == "int8" else largest
            steps = range(power - 1, power + 3)
            power = next(p for p in steps if largest * 2.0**p >= top and lowest * 2.0**p >= amax)
        scale = within_e8m0(power, emax)
        result += [rounded(x / scale) * scale for x in block]
    return result


def shared_microexponents(row: Row, mantissa: int) -> list[float]:
    """Rouhani et al. 2023, section 3: 16 values share an exponent, 2 a bit that lowers it by one."""
    result: list[float] = []
    for block in blocks(row, 16):
        amax = max(abs(x) for x in block)
        for pair in blocks(block, 2):
            own = max(abs(x) for x in pair)
            if not math.isfinite(sum(map(abs, block))) or own == 0:
                result += [math.nan if not math.isfinite(sum(map(abs, block))) else 0.0] * len(pair)
                continue
            shift = min(exponent(amax) - exponent(own), 1)
            step = max(2.0 ** (exponent(amax) - shift - (mantissa - 1)), 2.0**-127)
            limit = 2**mantissa - 1
            result += [min(max(round(x / step), -limit), limit) * step for x in pair]
    return result


def block_floating_point(row: Row, *, raised: bool, size: int = 8) -> list[float]:
    """`size` values share an exponent; where rounding exceeds 127 it is raised by one, or the value saturates.

    -128 is a code of the two's complement that raises, and none of sign and magnitude, which saturates.
    """
    result: list[float] = []
    for block in blocks(row, size):
        amax = max(abs(x) for x in block)
        if not math.isfinite(amax) or any(math.isnan(x) for x in block):
            result += [math.nan] * len(block)
            continue
        scale = within_e8m0(exponent(amax) - 6, 6) if amax else 1.0
        if raised and round(max(block) / scale) > 127:
            scale = within_e8m0(exponent(amax) - 5, 6)
        result += [min(max(round(x / scale), -127 - raised), 127) * scale for x in block]
    return result


def two_levels(row: Row, amax: float) -> tuple[list[float], list[float], float]:
    """Return values, E4M3 scales of blocks and the global scale of NVFP4."""
    fraction, power = math.frexp(float(np.float32(amax / (6 * 448)))) if amax else (0.5, 1)
    unit = max(math.floor(fraction * 2**20) / 2**20 * 2.0**power, 2.0**-100)
    rounded, _, _, _ = ELEMENTS["fp4_e2m1"]
    values: list[float] = []
    scales: list[float] = []
    for block in blocks(row, 16):
        largest = max(abs(x) for x in block)
        ratio = float(np.float32(largest / (6 * unit)))
        scale = float(np.float32(min(max(ratio, 2.0**-9), 448)).astype(ml_dtypes.float8_e4m3fn)) if largest else 1.0
        scales.append(scale)
        values += [rounded(float(np.float32(x / (scale * unit)))) * scale * unit for x in block]
    return values, scales, unit


Reference = Callable[[Row], list[float]]
CASES: dict[str, tuple[TensorSpec, Reference]] = {
    **{
        f"{spec.format}-{rule}": (
            spec.replace(scale=f"e8m0_{rule}"),
            lambda row, element=str(spec.format), rule=rule: microscaling(row, element, rule),  # type: ignore[misc]
        )
        for spec in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8)
        for rule in ("floor", "even", "ceil")
    },
    "bfp16": (BFP16, lambda row: block_floating_point(row, raised=True)),
    "bfp16-saturating": (
        BFP16.replace(format=SM8, scale="e8m0_floor"),
        lambda row: block_floating_point(row, raised=False),
    ),
    "mx9": (MX9, lambda row: shared_microexponents(row, 7)),
    "mx6": (MX6, lambda row: shared_microexponents(row, 4)),
    "mx4": (MX4, lambda row: shared_microexponents(row, 2)),
}
cases = pytest.mark.parametrize("case", CASES)


def rows() -> Tensor:
    """Rows of 75 values, which no block divides: noise of all sizes, ties, thresholds, zeros, the tiny and huge."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes = 2.0 ** torch.randint(-140, 120, (6, 75), generator=generator)
    ties = torch.randint(-600, 601, (12, 75), generator=generator) / 2.0 ** torch.arange(12)[:, None]
    edges = torch.tensor([1.5, 1.75, 1.875, 1.9375, 1.96875, 1.9921875, 1.998046875, 2.0])
    edges = torch.cat((edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(4.0))))
    thresholds = noise(len(edges), 75).clamp(-1, 1)
    thresholds[:, ::8] = edges[:, None] * torch.tensor([1.0, -1.0]).repeat(5)
    some_zero = noise(4, 75)
    some_zero[:, :40] = 0
    some_zero[0, 64:] = 0
    smallest = torch.full((1, 75), 1e-45) * torch.randint(-3, 4, (1, 75), generator=generator)
    extremes = [noise(2, 75) * 1e-38, noise(1, 75) * 2e-41, smallest, noise(2, 75).clamp(-3, 3) * 1e38]
    largest = torch.full((1, 75), torch.finfo(torch.float32).max)
    return torch.cat(
        (noise(8, 75), noise(6, 75) * sizes, ties, thresholds, some_zero, *extremes, largest, -largest, 0 * largest)
    )


def static(x: Tensor, spec: TensorSpec) -> Tensor:
    return quantize_tensor(x, spec).dequantize()


def dynamic(x: Tensor, spec: TensorSpec) -> Tensor:
    arguments = spec.replace(dynamic=True).measurement(x.dim() - 1)
    fmt, _, axis, block, *_ = arguments
    scale, zero_point = dynamic_qparams(x, *arguments)
    value: Tensor = dequantize(quantize(x, scale, zero_point, fmt, axis, block), scale, zero_point, fmt, axis, block)
    return value


@on_devices
@pytest.mark.parametrize("quantized", [static, dynamic])
@cases
def test_values_are_those_of_the_specification(
    case: str, quantized: Callable[[Tensor, TensorSpec], Tensor], device: torch.device
) -> None:
    spec, reference = CASES[case]
    x = rows()
    expected = torch.tensor([reference(row) for row in x.double().tolist()], dtype=torch.float64)
    got = quantized(x.to(device), spec).cpu()
    # -128 times the largest scale is -2**128, which float32 does not hold.
    assert torch.equal(got, expected.float())


@pytest.mark.parametrize("quantized", [static, dynamic])
@pytest.mark.parametrize("spec", [BFP16, MXINT8, MXINT8.replace(scale="e8m0_ceil")], ids=str)
def test_a_block_that_reaches_minus_128_keeps_its_exponent(
    spec: TensorSpec, quantized: Callable[[Tensor, TensorSpec], Tensor]
) -> None:
    """-127.75 is -128 of steps of 1; 127.75 has no code there, and steps of 2."""
    x = torch.tensor([[-127.75, 1.25, 64.0, 0, 0, 0, 0, 0], [127.75, 1.25, 64.0, 0, 0, 0, 0, 0]])
    expected = torch.tensor([[-128, 1, 64, 0, 0, 0, 0, 0], [128, 2, 64, 0, 0, 0, 0, 0]])
    assert torch.equal(quantized(x, spec), expected.float())


@on_devices
@cases
def test_nan_and_infinity_spoil_their_block_alone(case: str, device: torch.device) -> None:
    spec, reference = CASES[case]
    x = rows()[:6].to(device)
    x[0, 3], x[1, 40], x[2, 74], x[3, 20:22] = torch.nan, torch.inf, -torch.inf, torch.nan
    expected = torch.tensor([reference(row) for row in x.double().tolist()], dtype=torch.float64)
    got = dynamic(x, spec).double().cpu()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert 0 < int(expected.isnan().sum()) < expected.numel() / 2
    with pytest.raises(ValueError, match=r"not finite|NaN or infinity"):
        quantize_tensor(x, spec)


@on_devices
@pytest.mark.parametrize("quantized", [static, dynamic])
def test_nvfp4_is_fp4_times_e4m3_times_one_float(
    quantized: Callable[[Tensor, TensorSpec], Tensor], device: torch.device
) -> None:
    for x in (*rows().split(7), *(rows()[[i]] for i in (0, 7, -1))):
        amax = float(x.abs().max())
        expected = torch.tensor([two_levels(row, amax)[0] for row in x.double().tolist()], dtype=torch.float64)
        got = quantized(x.to(device), NVFP4).cpu()
        assert torch.equal(got, expected.float())


def test_nvfp4_with_a_value_that_is_not_finite_is_refused_or_spoilt() -> None:
    x = rows()[:4]
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_tensor(x, NVFP4)
    assert dynamic(x, NVFP4).isnan().all()


@on_devices
def test_calibration_finds_the_scale_of_the_scales_of_activations(device: torch.device, tmp_path: Path) -> None:
    """It is that of the largest magnitude; larger ones at run time saturate, and a stored model keeps it."""
    read = NVFP4.replace(scale=CALIBRATED_E4M3_SCALES, dynamic=True)
    assert TensorSpec.from_dict(read.to_dict()) == read == NVFP4.replace(scale="fp8_e4m3_calibrated", dynamic=True)
    model = nn.Linear(32, 32, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(32))
    batches = [torch.randn(4, 32, device=device) * size for size in (1.0, 3.0)]
    config = QuantConfig(weight=TensorSpec(format=BF16), input=read, target=Target.TORCH)
    assert qfx.quantization.needs_data(config)
    qmodel = qfx.quantize(model.to(device), config, batches, progress=False)
    amax = torch.cat(batches).abs().max()
    unit = global_scale_of(amax, read.scheme)
    ((name, *_),) = [node.args[5:6] for node in qmodel.graph_module.graph.nodes if "qparams" in str(node.target)]
    kind = scale_format(name)
    assert kind.unit == float(unit)
    assert scale_format(str(kind)) == kind
    x = batches[0] * 100
    expected = dynamic(x, read.replace(scale=kind))
    assert expected.abs().max() == 448 * 6 * unit
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=0)
    qmodel.save(tmp_path)
    assert torch.equal(qfx.load(tmp_path, device=str(device))(x), qmodel(x))
    with pytest.raises(qfx.ConfigError, match="is for activations; set dynamic=True"):
        read.replace(dynamic=False)


def e4m3_parts(quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    stored = E4M3_SCALES.quantized(quantized.scale)
    return stored.codes.float(), stored.scale


@on_devices
def test_the_two_levels_of_nvfp4_are_found_again(device: torch.device) -> None:
    for x in rows().split(7):
        _, scales, unit = zip(*(two_levels(row, float(x.abs().max())) for row in x.double().tolist()), strict=True)
        multiples, found = e4m3_parts(quantize_tensor(x.to(device), NVFP4))
        assert torch.equal(multiples.to(torch.float8_e4m3fn).float(), multiples)
        # Of several that all scales are multiples of, any will do.
        expected = torch.tensor(scales, dtype=torch.float64) * unit[0]
        assert torch.equal((multiples.double() * found.double()).cpu(), expected)


@given(
    amax=st.floats(2.0**-60, 2.0**120, width=32),
    shares=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_every_scale_of_two_levels_is_an_exact_product(amax: float, shares: list[float]) -> None:
    x = torch.zeros(len(shares) + 1, 16)
    x[:, 0] = torch.tensor([*shares, 1.0]) * amax
    quantized = quantize_tensor(x, NVFP4)
    multiples, unit = e4m3_parts(quantized)
    assert torch.equal(multiples.to(torch.float8_e4m3fn).float(), multiples)
    assert torch.equal(multiples.double() * unit.double(), quantized.scale.double())
    assert abs(float(quantized.scale.max()) * 6 / amax - 1) <= 2.0**-19


def test_tensors_that_are_joined_share_a_global_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    small, large = torch.randn(4, 32, generator=generator), torch.randn(4, 32, generator=generator) * 37
    apart = [quantize_tensor(x, NVFP4).scale for x in (small, large)]
    with pytest.raises(ValueError, match="one global scale"):
        E4M3_SCALES.quantized(torch.cat(apart))
    joint = [quantize_tensor(x, NVFP4, amax=large.abs().amax()).scale for x in (small, large)]
    E4M3_SCALES.quantized(torch.cat(joint))
    assert torch.equal(joint[1], apart[1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.softmax(q @ k.mT, -1) @ v)  # type: ignore[no-any-return]


def test_linears_that_read_one_value_share_a_global_scale() -> None:
    torch.manual_seed(2)
    model = Attention().eval()
    with torch.no_grad():
        model.k.weight.mul_(11)
    x = torch.randn(2, 5, 32)
    config = QuantConfig(weight=NVFP4, input=NVFP4.replace(dynamic=True), target=Target.TORCH)
    gm = qfx.quantize(model, config, [x], progress=False).graph_module
    scales = {name: tensor_of(gm, f"{name}.weight_scale") for name in "qkvo"}
    unit = E4M3_SCALES.quantized(torch.cat([scales[name] for name in "qkv"])).scale
    assert abs(float(unit) * 2688 / float(model.k.weight.detach().abs().max()) - 1) < 2.0**-19
    with pytest.raises(ValueError, match="one global scale"):
        E4M3_SCALES.quantized(torch.cat([scales["q"], scales["o"]]))


@pytest.mark.parametrize(
    ("spec", "bits"),
    [(MXFP8_E4M3, 8.25), (MX4, 4.0), (MXFP4, 4.25), (MXINT8, 8.25), (BFP16, 9.0), (MX9, 9.0), (MX6, 6.0)],
    ids=str,
)
def test_bits_per_value_are_those_of_the_standard(spec: TensorSpec, bits: float) -> None:
    assert stored_bytes(quantize_tensor(torch.randn(8, 64), spec), spec) == 8 * 64 * bits / 8


def test_bytes_of_ragged_groups_and_of_two_levels() -> None:
    x = torch.randn(4, 37)
    assert stored_bytes(quantize_tensor(x, NVFP4), NVFP4) == 4 * 37 // 2 + 4 * 3 + 4
    # Three exponents and 19 shift bits a row.
    assert stored_bytes(quantize_tensor(x, MX4), MX4) == (4 * 37 * 3 + 7) // 8 + 4 * 3 + (4 * 19 + 7) // 8


@pytest.mark.parametrize("width", [1, 2, 7, 15])
@cases
def test_a_row_shorter_than_a_block_is_one(case: str, width: int) -> None:
    spec, reference = CASES[case]
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    expected = torch.tensor([reference(row) for row in x.double().tolist()])
    assert torch.equal(static(x, spec), expected)
    assert torch.equal(dynamic(x, spec), expected)


@on_devices
def test_a_scale_of_two_levels_serves_integers(device: torch.device) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4)).to(device)
    spec = NVFP4.replace(format=INT4)
    quantized = quantize_tensor(x, spec)
    multiples, _ = e4m3_parts(quantized)
    assert torch.equal(multiples.to(torch.float8_e4m3fn).float(), multiples)
    assert float(quantized.codes.abs().max()) == 7
    error = (quantized.dequantize() - x).abs().unflatten(1, (4, 16)).amax(-1)
    # Half a step, and what the largest value loses where its scale was rounded down by up to a sixteenth.
    assert (error <= quantized.scale * (0.5 + 7 / 16)).all()


class Products(nn.Module):
    """One operator of each kind whose activations may be in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(6, 8, 3), nn.ConvTranspose1d(8, 4, 2)
        self.linear = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.up(self.conv(image).mean(-1))
        y = self.linear(x)
        return y, torch.matmul(y.mT, y)


def rounded_along(x: Tensor, dim: int, spec: TensorSpec) -> Tensor:
    return (
        static(x.movedim(dim, -1).reshape(-1, x.shape[dim]), spec.replace(dynamic=False))
        .reshape(x.movedim(dim, -1).shape)
        .movedim(-1, dim)
    )


@on_devices
@pytest.mark.parametrize("group", [4, 5, 100])
def test_activations_are_grouped_along_what_is_summed_over(group: int, device: torch.device) -> None:
    torch.manual_seed(3)
    model, image = Products().eval().to(device), torch.randn(2, 6, 5, 8, device=device)
    spec = MXFP4.replace(group_size=group, dynamic=True)
    config = QuantConfig(
        weight=TensorSpec(format=qfx.formats.FP16),
        input=spec,
        overrides=(qfx.Override(pattern="op:matmul"),),
        target=Target.TORCH,
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
        got = qfx.quantize(model, config, [image], progress=False)(image)
        x = model.conv(rounded_along(image, 1, spec)).mean(-1)
        y = model.linear(rounded_along(model.up(rounded_along(x, 1, spec)), 2, spec))
        z = torch.matmul(rounded_along(y.mT, 2, spec), rounded_along(y, 1, spec))
    torch.testing.assert_close(got[0], y, rtol=0, atol=0)
    torch.testing.assert_close(got[1], z, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", [INT8, FP4_E2M1], ids=str)
@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
def test_groups_of_activations_may_have_float_scales(fmt: qfx.formats.Format, symmetry: str) -> None:
    if fmt == FP4_E2M1 and symmetry == "asymmetric":
        pytest.skip("floats are symmetric")
    spec = TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=16, symmetry=qfx.Symmetry(symmetry))
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(5)) + 1
    # float32 at run time, float64 beforehand.
    off = (dynamic(x, spec) - static(x, spec)).abs()
    assert (off > 1e-5).float().mean() < 0.02


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_block_format_is_a_value_that_survives_its_dict(name: str) -> None:
    spec = BLOCK_FORMATS[name]
    assert spec is getattr(qfx.block_formats, name.upper())
    for given_spec in (spec, spec.replace(dynamic=True)):
        assert TensorSpec.from_dict(given_spec.to_dict()) == given_spec
    assert spec.scale.is_8_bit
