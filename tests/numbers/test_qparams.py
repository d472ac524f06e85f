"""Scales and zero points against ONNX Runtime's own, and the promises of each kind of scale."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from devices import on_devices
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FORMATS, FP8_E4M3, FP8_E5M2, INT4, UINT8, FloatFormat, IntFormat
from quark_fx.numbers.qparams import Scheme, Symmetry, affine_qparams
from quark_fx.numbers.scales import E4M3_SCALES, FLOAT16, FLOAT20, POWER_OF_TWO, SCALES

NUMPY = {name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16")}
NARROW = (Symmetry.ASYMMETRIC, Symmetry.SYMMETRIC)
POSITIVE = tuple(symmetry for symmetry in Symmetry if symmetry not in (Symmetry.SIGN_AWARE, Symmetry.OFFSET))
bounds = st.floats(-(2.0**100), 2.0**100, width=32)
TINY = float(torch.finfo(torch.float32).tiny)


def ranges(low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(min(low, high)), torch.tensor(max(low, high))


def test_a_clip_range_of_32_bits_holds_both_ends() -> None:
    scheme = Scheme(format=FORMATS["int32"], symmetry=Symmetry.ASYMMETRIC)
    found = affine_qparams(torch.tensor(-4.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), scheme)
    low, high = scheme.clip_range(found.scale.double(), found.zero_point)
    torch.testing.assert_close((float(low), float(high)), (-4.0, 1.0), rtol=1e-5, atol=1e-5)


@given(low=bounds, high=bounds, name=st.sampled_from(list(NUMPY)), symmetry=st.sampled_from(NARROW))
@settings(max_examples=400, deadline=None)
def test_scale_and_zero_point_are_onnxruntimes(low: float, high: float, name: str, symmetry: Symmetry) -> None:
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    scheme = Scheme(format=FORMATS[name], symmetry=symmetry)
    a, b = ranges(low, high)
    symmetric = symmetry is Symmetry.SYMMETRIC
    zero, scale = compute_scale_zp(
        np.array(a), np.array(b), np.array(scheme.qmin, NUMPY[name]), np.array(scheme.qmax, NUMPY[name]), symmetric
    )
    got = affine_qparams(a, b, scheme)
    # A range no wider than a rounding error of zero: both choose scale 1, and zero is exact under any zero point.
    assert float(got.scale) == float(scale)
    if float(scale) == 1.0 and max(abs(low), abs(high)) < 1:
        return
    if symmetric:
        assert int(got.zero_point) == int(zero)
        return
    # Both round `qmin - low / scale`; ours divides by the float32 scale that is stored, theirs by the float64 one, so
    # they may part only where the quotient is that close to a tie.
    quotient = scheme.qmin - Fraction(min(float(a), 0.0)) / Fraction(float(got.scale))
    distance = abs(abs(quotient - int(quotient)) - Fraction(1, 2))
    assert int(got.zero_point) == int(zero) or distance <= 2**16 * 2.0**-24


@given(low=bounds, high=bounds, name=st.sampled_from(list(NUMPY)), symmetry=st.sampled_from(POSITIVE))
@settings(max_examples=200, deadline=None)
def test_the_codes_span_the_range_and_zero_is_exact(low: float, high: float, name: str, symmetry: Symmetry) -> None:
    scheme = Scheme(format=FORMATS[name], symmetry=symmetry)
    a, b = ranges(low, high)
    p = affine_qparams(a, b, scheme)
    scale, zero = Fraction(float(p.scale)), int(p.zero_point)
    assert scale > 0
    assert scheme.qmin <= zero <= scheme.qmax  # so the code of 0.0 is one of the scheme's
    lowest, highest = (scheme.qmin - zero) * scale, (scheme.qmax - zero) * scale
    assert lowest <= Fraction(min(float(a), 0.0)) + scale * Fraction(51, 100)
    assert highest >= Fraction(max(float(b), 0.0)) - scale * Fraction(51, 100)


@given(
    low=st.floats(-(2.0**100), 2.0**100, width=32),
    high=st.floats(-(2.0**100), 2.0**100, width=32),
    name=st.sampled_from(["int4", "int8", "int16", "uint8", "fp8_e4m3"]),
    symmetry=st.sampled_from(POSITIVE),
)
@settings(max_examples=300, deadline=None)
def test_a_power_of_two_scale_never_overflows_and_is_the_smallest_that_does_not(
    low: float, high: float, name: str, symmetry: Symmetry
) -> None:
    scheme = Scheme(format=FORMATS[name], symmetry=symmetry, scale=POWER_OF_TWO)
    a, b = ranges(low, high)
    scale = affine_qparams(a, b, scheme).scale
    mantissa, _ = torch.frexp(scale)
    assert float(mantissa) == 0.5
    widest = min(float(a), 0.0), max(float(b), 0.0)
    amax = max(-widest[0], widest[1])
    if isinstance(scheme.format, FloatFormat):
        reach, needed = Fraction(scheme.format.max), Fraction(amax)
    elif scheme.symmetric:
        reach, needed = Fraction(scheme.qmax - scheme.qmin, 2), Fraction(amax)
    else:
        reach, needed = Fraction(scheme.qmax - scheme.qmin), Fraction(widest[1]) - Fraction(widest[0])
    assume(needed / reach >= TINY)
    assert reach * Fraction(float(scale)) >= needed
    assert reach * Fraction(float(scale)) / 2 < needed


@given(high=st.floats(2.0**-120, 2.0**100, width=32), name=st.sampled_from(["int4", "int8", "uint8"]))
def test_a_float16_scale_is_one_float16_holds_and_the_nearest_to_the_ideal(high: float, name: str) -> None:
    scheme = Scheme(format=FORMATS[name], symmetry=Symmetry.SYMMETRIC, scale=FLOAT16)
    p = affine_qparams(torch.tensor(-high), torch.tensor(high), scheme)
    half = p.scale.half()
    assert float(half.float()) == float(p.scale)
    ideal = Fraction(high) / Fraction(scheme.qmax - scheme.qmin, 2)
    if torch.finfo(torch.float16).smallest_normal <= ideal <= torch.finfo(torch.float16).max:
        assert abs(Fraction(float(p.scale)) - ideal) <= ideal * Fraction(1, 2**11)


@on_devices
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_a_bound_that_is_not_finite_is_refused(bad: float, position: int, device: torch.device) -> None:
    edges = [torch.tensor([-1.0, -2.0], device=device), torch.tensor([1.0, 2.0], device=device)]
    edges[position][1] = bad
    with pytest.raises(ValueError, match=r"the range is not finite: low -1.0, .* high 1.0, "):
        affine_qparams(edges[0], edges[1], Scheme(format=FORMATS["int8"]))


@on_devices
@pytest.mark.parametrize("name", [n for n in FORMATS if n != "uint32"])  # refused by `TensorSpec`
@pytest.mark.parametrize("symmetry", POSITIVE)
def test_the_range_of_zero_alone_has_scale_one(name: str, symmetry: Symmetry, device: torch.device) -> None:
    zero = torch.zeros(3, device=device)
    for scale in (*SCALES.values(), FLOAT20, E4M3_SCALES):
        scheme = Scheme(format=FORMATS[name], symmetry=symmetry, scale=scale)
        p = affine_qparams(zero, zero, scheme)
        assert p.scale.tolist() == [1.0] * 3, scale
        if isinstance(scheme.format, IntFormat):
            assert all(scheme.qmin <= z <= scheme.qmax for z in p.zero_point.tolist()), scale


@pytest.mark.parametrize(("low", "high"), [(1.0, -1.0), (2.0, 1.0), (-1.0, -2.0)])
def test_a_range_that_ends_below_its_beginning_is_refused(low: float, high: float) -> None:
    scheme = Scheme(format=FORMATS["int8"])
    with pytest.raises(ValueError, match=f"the range ends below its beginning: low 0.0, {low}, high 0.0, {high}"):
        affine_qparams(torch.tensor([0.0, low]), torch.tensor([0.0, high]), scheme)


@pytest.mark.parametrize("point", [-5.0, 3.0])
def test_a_range_of_one_point_is_widened_to_zero(point: float) -> None:
    x = torch.tensor(point)
    p = affine_qparams(x, x, Scheme(format=FORMATS["uint8"], symmetry=Symmetry.ASYMMETRIC))
    assert int(p.zero_point) == (255 if point < 0 else 0)
    torch.testing.assert_close(p.scale, torch.tensor(abs(point) / 255))


def test_the_symmetries_of_int8_and_uint8_are_those_of_the_documentation() -> None:
    one = torch.tensor(1.0)
    table = {
        ("int8", Symmetry.SYMMETRIC): (1 / 127, 0, -127, 127),
        ("int8", Symmetry.SYMMETRIC_FULL): (1 / 127.5, 0, -128, 127),
        ("int8", Symmetry.ASYMMETRIC): (2 / 255, 0, -128, 127),
        ("uint8", Symmetry.SYMMETRIC): (1 / 127.5, 128, 0, 255),
        ("int4", Symmetry.SYMMETRIC): (1 / 7, 0, -7, 7),
        ("int4", Symmetry.SYMMETRIC_FULL): (1 / 7.5, 0, -8, 7),
        ("uint4", Symmetry.SYMMETRIC): (1 / 7.5, 8, 0, 15),
    }
    for (name, symmetry), (scale, zero, qmin, qmax) in table.items():
        scheme = Scheme(format=FORMATS[name], symmetry=symmetry)
        p = affine_qparams(-one, one, scheme)
        torch.testing.assert_close(p.scale, torch.tensor(scale))
        if (name, symmetry) != ("int8", Symmetry.ASYMMETRIC):
            assert int(p.zero_point) == zero
        assert (scheme.qmin, scheme.qmax) == (qmin, qmax)


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=str)
@pytest.mark.parametrize("symmetry", Symmetry)
def test_a_float_format_is_symmetric_whatever_is_said(fmt: FloatFormat, symmetry: Symmetry) -> None:
    scheme = Scheme(format=fmt, symmetry=symmetry)
    p = affine_qparams(torch.tensor(-2.0), torch.tensor(1.0), scheme)
    assert scheme.symmetric
    torch.testing.assert_close(p.scale, torch.tensor(2.0 / torch.finfo(fmt.dtype).max))
    assert int(p.zero_point) == 0
    with pytest.raises(ConfigError, match="are not integers"):
        _ = scheme.qmin


@on_devices
def test_parameters_have_the_shape_and_device_of_the_range(device: torch.device) -> None:
    low, high = -torch.rand(2, 3, device=device), torch.rand(2, 3, device=device)
    for symmetry in Symmetry:
        p = affine_qparams(low, high, Scheme(format=FORMATS["int8"], symmetry=symmetry))
        assert p.scale.shape == p.zero_point.shape == (2, 3)
        point = torch.float32 if symmetry is Symmetry.OFFSET else torch.int32
        assert (p.scale.dtype, p.zero_point.dtype) == (torch.float32, point)
        assert p.scale.device.type == p.zero_point.device.type == device.type


def test_a_sign_aware_scale_puts_the_largest_magnitude_on_the_code_without_a_counterpart() -> None:
    scheme = Scheme(format=INT4, symmetry=Symmetry.SIGN_AWARE)
    found = affine_qparams(torch.tensor([-4.0, -1.0, 0.0]), torch.tensor([1.0, 4.0, 0.0]), scheme)
    assert found.scale.tolist() == [0.5, -0.5, 1.0]
    assert found.zero_point.tolist() == [0, 0, 0]
    assert (scheme.qmin, scheme.qmax) == (-8, 7)


def test_a_tie_is_that_of_the_exact_scale() -> None:
    """From -1 to 169 in 255 steps of two thirds, zero lies at 1.5: to even. The scale in float32 would give 1."""
    scheme = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)
    assert int(affine_qparams(torch.tensor(-1.0), torch.tensor(169.0), scheme).zero_point) == 2


@pytest.mark.parametrize(("fmt", "low"), [("uint16", -1000.0), ("uint16", -77.7), ("uint8", -1e9), ("int8", -1e9)])
def test_a_zero_point_is_a_code_where_the_scale_is_smaller_than_the_ideal_one(fmt: str, low: float) -> None:
    """float16 rounds a scale down, or ends at 65504: the quotient by it lies beyond the codes."""
    scheme = Scheme(format=FORMATS[fmt], symmetry=Symmetry.ASYMMETRIC, scale=FLOAT16)
    for share in (1.0, 1.01, 1.02, 1.05, 1.1):
        found = affine_qparams(torch.tensor(low * share), torch.tensor(0.0), scheme)
        assert scheme.qmin <= int(found.zero_point) <= scheme.qmax
