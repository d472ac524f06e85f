"""Formats against facts kept elsewhere: numpy, torch and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from quark_fx.errors import ConfigError
from quark_fx.formats import FORMATS, FloatFormat, IntFormat, parse_format

INTEGERS = [f for f in FORMATS.values() if isinstance(f, IntFormat)]
FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integer_limits_are_those_of_the_type_called_so(fmt: IntFormat) -> None:
    name = str(fmt)
    if fmt.bits == 3:  # no library has it: two's complement by hand
        assert (fmt.qmin, fmt.qmax) == ((-4, 3) if fmt.signed else (0, 7))
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
def test_the_largest_value_of_a_float_format_is_that_of_its_dtype(fmt: FloatFormat) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.bits == info.bits
    assert 2.0**-fmt.mantissa == info.eps


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_only_formats_below_16_bits_need_a_scale(fmt: FloatFormat) -> None:
    assert fmt.needs_scale == (fmt.dtype.itemsize == 1)


@pytest.mark.parametrize(("name", "fmt"), FORMATS.items(), ids=list(FORMATS))
def test_a_name_and_its_format_are_one(name: str, fmt: IntFormat | FloatFormat) -> None:
    assert str(fmt) == name
    assert parse_format(name) is fmt


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown number format 'int7'; choose one of .*int8.*fp8_e4m3"):
        parse_format("int7")


@pytest.mark.parametrize("bits", [-1, 0, 1, 33, 64])
def test_a_width_without_codes_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"2 to 32 bits, not {bits}"):
        IntFormat(bits)


def test_formats_are_values() -> None:
    assert IntFormat(8) == FORMATS["int8"]
    assert len({IntFormat(8), FORMATS["int8"], IntFormat(8, signed=False)}) == 2
    with pytest.raises(AttributeError):
        FORMATS["int8"].bits = 4  # type: ignore[misc]
