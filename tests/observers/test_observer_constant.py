"""Ranges of constants whose squared error is measured: against every share of the range, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT3, INT4, UINT4, FloatFormat
from quark_fx.numbers.ops import dequantize, encode
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry, affine_qparams
from quark_fx.numbers.scales import E4M3_SCALES, E8M0_EVEN
from quark_fx.observers.constant import smallest_error_qparams


def rows() -> Tensor:
    """Normal rows with an outlier above, one below, one on each side, and none."""
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 0], x[2, :2] = 9.0, -9.0, torch.tensor([-7.0, 11.0])
    return x


def error(x: Tensor, found: QParams, scheme: Scheme) -> Tensor:
    codes = encode(x, found, scheme, 0)
    values: Tensor = dequantize(codes, found.scale, found.zero_point, str(scheme.format), 0)
    return (values - x).double().square().sum(1)


@pytest.mark.parametrize("fmt", [INT3, INT4])
def test_a_symmetric_range_is_nearly_the_best_of_all_shares(fmt: object) -> None:
    x, scheme = rows(), Scheme(format=fmt)  # type: ignore[arg-type]
    amax = x.abs().amax(1)
    tried = [error(x, affine_qparams(-amax * i / 128, amax * i / 128, scheme), scheme) for i in range(1, 129)]
    found = error(x, smallest_error_qparams(x, scheme), scheme)
    assert bool((found <= torch.stack(tried).amin(0) * 1.03).all())
    assert bool((found[:3] < 0.8 * tried[-1][:3]).all())


def test_scales_of_e4m3_are_nearly_the_best_of_all(device: torch.device) -> None:
    """Blocks of NVFP4: against every positive E4M3 float, those that widen the range included."""
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)).to(device)
    unit = 2.0**-9
    scheme = Scheme(format=FP4_E2M1, scale=replace(E4M3_SCALES, unit=unit))
    every = torch.arange(1, 127, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * unit
    points = torch.zeros(len(x), dtype=torch.int32, device=device)
    tried = torch.stack([error(x, QParams(scale.expand(len(x)), points), scheme) for scale in every])
    amax = x.abs().amax(1)
    plain, found = affine_qparams(-amax, amax, scheme), smallest_error_qparams(x, scheme)
    assert float(error(x, found, scheme).sum()) < 1.01 * float(tried.amin(0).sum())
    assert float(error(x, found, scheme).sum()) < 0.8 * float(error(x, plain, scheme).sum())
    assert bool((found.scale > plain.scale).any()), "4 instead of 6"


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("fmt", [FP4_E2M1, FP8_E4M3], ids=str)
def test_exponents_are_the_best_of_all(fmt: FloatFormat, long: bool, device: torch.device) -> None:
    x = torch.randn(300, 4096 if long else 32, generator=torch.Generator().manual_seed(0)).to(device)
    x[:, 0] *= 50 if long else 1
    scheme = Scheme(format=fmt, scale=E8M0_EVEN)
    points = torch.zeros(len(x), dtype=torch.int32, device=device)
    every = [torch.full((len(x),), 2.0**power, device=device, dtype=torch.float32) for power in range(-12, 8)]
    tried = torch.stack([error(x, QParams(scale, points), scheme) for scale in every])
    assert torch.equal(error(x, smallest_error_qparams(x, scheme), scheme), tried.amin(0))


def test_both_ends_of_an_asymmetric_range_move_by_themselves() -> None:
    scheme = Scheme(format=UINT4, symmetry=Symmetry.ASYMMETRIC)
    x = torch.rand(2, 4000, generator=torch.Generator().manual_seed(0))
    x[:, :1200], x[:, -1] = 1.0, -2.0  # many at one end, which would lose most if both ends moved, and one beyond
    x[1] *= -1
    low, high = x.amin(1), x.amax(1)
    shares = [i / 24 for i in range(1, 25)]
    tried = torch.stack([error(x, affine_qparams(low * a, high * b, scheme), scheme) for a in shares for b in shares])
    alike = torch.stack([error(x, affine_qparams(low * a, high * a, scheme), scheme) for a in shares])
    found = error(x, smallest_error_qparams(x, scheme), scheme)
    assert bool((found <= tried.amin(0) * 1.1).all())
    assert bool((found < 0.8 * alike.amin(0)).all())


@pytest.mark.parametrize("symmetry", [Symmetry.SYMMETRIC, Symmetry.ASYMMETRIC])
def test_rows_do_not_know_of_each_other(symmetry: Symmetry) -> None:
    x, scheme = rows(), Scheme(format=INT4, symmetry=symmetry)
    together = smallest_error_qparams(x, scheme)
    for row in range(len(x)):
        alone = smallest_error_qparams(x[row : row + 1], scheme)
        assert torch.equal(together.scale[row], alone.scale[0])
        assert torch.equal(together.zero_point[row], alone.zero_point[0])
