"""Formats against facts kept elsewhere: numpy, torch and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from devices import on_devices

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FORMATS, FloatFormat, IntFormat, parse_format
from quark_fx.numbers.ops import quantize

INTEGERS = [f for f in FORMATS.values() if isinstance(f, IntFormat)]
FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
SMALL = [f for f in FLOATS if f.needs_scale]
OTHERS = [parse_format(name) for name in ("fp3_e1m1", "fp5_e1m3", "fp5_e2m2", "fp7_e3m3", "fp6_e4m1", "fp5_e4m0")]
ML_DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integer_limits_are_those_of_the_type_called_so(fmt: IntFormat) -> None:
    name = str(fmt)
    if fmt.sign_magnitude:
        assert (fmt.qmin, fmt.qmax) == (1 - 2 ** (fmt.bits - 1), 2 ** (fmt.bits - 1) - 1)
        return
    by_hand = {3: (-4, 3), 5: (-16, 15), 6: (-32, 31), 7: (-64, 63)}  # no library has them
    if fmt.bits in by_hand:
        low, high = by_hand[fmt.bits]
        assert (fmt.qmin, fmt.qmax) == ((low, high) if fmt.signed else (0, high - low))
        return
    info = np.iinfo(name) if fmt.bits >= 8 else ml_dtypes.iinfo(getattr(ml_dtypes, name))
    assert (fmt.qmin, fmt.qmax) == (int(info.min), int(info.max))


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_every_code_fits_the_dtype_and_no_smaller_one(fmt: IntFormat) -> None:
    info = torch.iinfo(fmt.dtype)
    assert info.min <= fmt.qmin
    assert fmt.qmax <= info.max
    assert info.bits == max(8, fmt.bits)
    assert fmt.dtype.is_signed is fmt.signed


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_the_limits_of_a_float_format_are_those_of_the_type_called_so(fmt: FloatFormat) -> None:
    info = torch.finfo(fmt.dtype) if fmt.bits >= 8 else ml_dtypes.finfo(ML_DTYPES[str(fmt)])
    assert fmt.max == float(info.max)
    assert fmt.bits == info.bits
    assert 2.0**-fmt.mantissa == float(info.eps)
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_the_levels_of_a_format_are_the_values_of_all_its_codes(fmt: FloatFormat) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint8).view(ML_DTYPES[str(fmt)]).astype(np.float64)
    assert fmt.levels().tolist() == sorted(set(codes[np.isfinite(codes)].tolist()))


@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_other_floats_have_the_levels_of_their_definition(fmt: FloatFormat) -> None:
    assert isinstance(fmt, FloatFormat)
    bias = 2 ** (fmt.exponent - 1) - 1
    parts = [
        mantissa / 2**fmt.mantissa * 2.0 ** (1 - bias)
        if exponent == 0
        else (1 + mantissa / 2**fmt.mantissa) * 2.0 ** (exponent - bias)
        for exponent in range(2**fmt.exponent)
        for mantissa in range(2**fmt.mantissa)
    ]
    assert fmt.levels().tolist() == sorted({sign * part for sign in (1, -1) for part in parts})
    assert fmt.max == max(parts)


@on_devices
@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_other_floats_round_to_the_nearest_level(fmt: FloatFormat, device: torch.device) -> None:
    levels, x = fmt.levels(), torch.linspace(-1.2, 1.2, 4001) * fmt.max
    nearest = (x.clamp(-fmt.max, fmt.max).double()[:, None] - levels).abs().amin(1)
    one, zero = torch.ones((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    codes = quantize(x.to(device), one, zero, str(fmt)).cpu().double()
    assert bool(torch.isin(codes, levels).all())
    assert torch.equal((x.clamp(-fmt.max, fmt.max).double() - codes).abs(), nearest)


@pytest.mark.parametrize("fmt", [*SMALL, *OTHERS], ids=str)
def test_codes_are_held_exactly(fmt: FloatFormat) -> None:
    levels = fmt.levels()
    assert torch.equal(levels.float().to(fmt.dtype).double(), levels)


def probes(fmt: FloatFormat) -> torch.Tensor:
    """Every value, every midpoint, their neighbors in float32, subnormals, values beyond the range, and noise."""
    levels = fmt.levels()
    known = torch.cat((levels, (levels[1:] + levels[:-1]) / 2)).float()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, generator=generator) * 2.0 ** torch.randint(-30, 20, (20_000,), generator=generator)
    up, down = (torch.nextafter(known, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39])
    return torch.cat((known, up, down, tiny, noise, noise * fmt.max, torch.tensor([torch.inf, -torch.inf, 3e38])))


@on_devices
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_rounding_to_a_small_float_is_that_of_ml_dtypes(fmt: FloatFormat, device: torch.device) -> None:
    x = probes(fmt)
    # Some of these types have infinities that saturation never reaches.
    saturated = x.clamp(-fmt.max, fmt.max).numpy().astype(ML_DTYPES[str(fmt)]).astype(np.float32)
    got = fmt.round_(x.to(device)).cpu()
    assert torch.equal(got, torch.from_numpy(saturated))
    one, zero = torch.ones((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    codes = quantize(x.to(device), one, zero, str(fmt))
    assert codes.dtype == fmt.dtype
    assert torch.equal(codes.float().cpu(), got)


@on_devices
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_rounding_keeps_nan(fmt: FloatFormat, device: torch.device) -> None:
    x = torch.tensor([torch.nan, 1.0, -torch.nan], device=device)
    assert fmt.round_(x.clone()).isnan().tolist() == [True, False, True]


@on_devices
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_the_step_is_the_distance_between_neighbors(fmt: FloatFormat, device: torch.device) -> None:
    levels = fmt.levels().float()
    positive = levels[levels >= 0]
    steps = fmt.step(positive[:-1].to(device)).cpu()
    assert torch.equal(steps, positive.diff())
    assert torch.equal(fmt.step(-positive[:-1].to(device)).cpu(), steps)


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_only_formats_below_16_bits_need_a_scale(fmt: FloatFormat) -> None:
    assert fmt.needs_scale == (fmt.bits <= 8)


@pytest.mark.parametrize(("name", "fmt"), FORMATS.items(), ids=list(FORMATS))
def test_a_name_and_its_format_are_one(name: str, fmt: IntFormat | FloatFormat) -> None:
    assert str(fmt) == name
    assert parse_format(name) is fmt


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown number format 'itn8'; choose one of .*int8.*fp8_e4m3.*mean 'int8'"):
        parse_format("itn8")


@pytest.mark.parametrize("name", ["int9", "int12", "uint15", "int24", "sm4", *map(str, OTHERS)])
def test_a_name_says_what_a_format_is(name: str) -> None:
    assert str(parse_format(name)) == name
    assert parse_format(name) == parse_format(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int33", "unknown number format .int33.; .* another size of 2 to 32 bits such as int12, or"),
        ("fp8_e3m3", "unknown number format 'fp8_e3m3'"),
        ("fp8_e3m4", "no torch dtype holds the values of fp8_e3m4"),
        ("fp8_e5m2x", "unknown number format"),
        ("fp6_e5m0", "no torch dtype holds the values of fp6_e5m0"),
        ("fp32_e8m23", "no torch dtype holds the values of fp32_e8m23"),
        ("sm9", "a sign-magnitude format has at most 8 bits, not 9; use int9"),
    ],
)
def test_a_format_that_nothing_holds_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_format(name)


@pytest.mark.parametrize("bits", [-1, 0, 1, 33, 64])
def test_a_width_without_codes_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"bits of IntFormat must be an integer from 2 to 32, not {bits}"):
        IntFormat(bits)


def test_formats_are_values() -> None:
    assert IntFormat(8) == FORMATS["int8"]
    assert len({IntFormat(8), FORMATS["int8"], IntFormat(8, signed=False)}) == 2
    with pytest.raises(AttributeError):
        FORMATS["int8"].bits = 4  # type: ignore[misc]
