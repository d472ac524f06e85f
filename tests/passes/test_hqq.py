"""Half-quadratic zero points: fewer large errors than the range's own, without data."""

from __future__ import annotations

import pytest
import torch
from devices import on_devices
from tiny import mlp, quantize, rand, tokens
from torch import Tensor

from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT3, INT4, UINT4, UINT8
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry, affine_qparams
from quark_fx.observers import Hqq, MinMax

SCHEME = Scheme(format=INT3, symmetry=Symmetry.ASYMMETRIC)


def lost(x: torch.Tensor, qparams: QParams, norm: float) -> torch.Tensor:
    scale, zero = qparams.scale.unsqueeze(1), qparams.zero_point.unsqueeze(1)
    codes = (x / scale + zero).round().clamp(SCHEME.qmin, SCHEME.qmax)
    return (x - (codes - zero) * scale).abs().pow(norm).sum(1)


@on_devices
def test_no_row_is_worse_and_many_are_better(device: torch.device) -> None:
    x = rand(400, 64).to(device) ** 3  # heavy tails
    plain, found = MinMax().observe(x).qparams(SCHEME), Hqq().of_constant(x, SCHEME)
    before, after = lost(x, plain, 0.7), lost(x, found, 0.7)
    assert bool((after <= before * (1 + 1e-6)).all())
    assert float((after < 0.99 * before).float().mean()) > 0.2
    assert found.zero_point.dtype == torch.int32
    assert bool((found.scale > 0).all())
    assert bool(((found.zero_point >= SCHEME.qmin) & (found.zero_point <= SCHEME.qmax)).all())


def test_it_is_an_observer_of_weights() -> None:
    weight = TensorSpec(
        format=INT4, granularity=Granularity.GROUP, group_size=16, symmetry=Symmetry.ASYMMETRIC, observer=Hqq()
    )
    config = QuantConfig(weight=weight, target=Target.TORCH)
    assert QuantConfig.from_dict(config.to_dict()) == config
    qmodel = quantize(mlp(), config, tokens())
    assert all(not row.reason for row in qmodel.report())
    with pytest.raises(ConfigError, match="works only for weights"):
        QuantConfig(weight=weight, input=TensorSpec(format=UINT8, observer=Hqq()))


def test_a_symmetric_scheme_and_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="symmetry='asymmetric'"):
        Hqq().of_constant(rand(2, 8), Scheme(format=INT4))
    for options in ({"norm": 0.0}, {"norm": 1.5}, {"penalty": 0.0}, {"iterations": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} of Hqq must be an? (number|integer)"):
            Hqq(**options)


def test_the_penalty_grows_by_a_hundredth_from_one_iteration_to_the_next() -> None:
    """Against the iteration written out in float64: fitted scales show which penalty each of them had."""
    x, scheme = rand(6, 64) ** 3, Scheme(format=UINT4, symmetry=Symmetry.ASYMMETRIC)
    found = Hqq(iterations=8, penalty=30.0).of_constant(x, scheme)
    w, start = x.double(), affine_qparams(x.amin(1), x.amax(1), scheme)
    scale, zero = start.scale.double()[:, None], start.zero_point.double()[:, None]

    def lost(scale: Tensor, zero: Tensor) -> Tensor:
        return w - ((w / scale + zero).round().clamp(0, 15) - zero) * scale

    best, least = scale, lost(scale, zero).abs().pow(0.7).sum(1, keepdim=True)
    for step in range(8):
        penalty, missed = 30.0 * 1.01**step, lost(scale, zero)
        codes = (w / scale + zero).round().clamp(0, 15)
        kept = missed.sign() * (missed.abs() - missed.abs().clamp(min=1e-12) ** -0.3 / penalty).clamp(min=0)
        zero = (codes - (w - kept) / scale).mean(1, keepdim=True).round().clamp(0, 15)
        steps = codes - zero
        scale = ((w - kept) * steps).sum(1, keepdim=True) / steps.square().sum(1, keepdim=True)
        error = lost(scale, zero).abs().pow(0.7).sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    torch.testing.assert_close(found.scale.double(), best[:, 0], rtol=1e-5, atol=0)
