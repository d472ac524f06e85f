"""Half-quadratic zero points: fewer large errors than the range's own, without data."""

from __future__ import annotations

import pytest
import torch
from devices import on_devices
from tiny import mlp, quantize, rand, tokens

from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.formats import INT3, INT4, UINT8
from quark_fx.observers import Hqq, MinMax
from quark_fx.qparams import QParams, Scheme, Symmetry

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
    with pytest.raises(ConfigError, match="this one is for weights"):
        QuantConfig(weight=weight, input=TensorSpec(format=UINT8, observer=Hqq()))


def test_a_symmetric_scheme_and_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="symmetry='asymmetric'"):
        Hqq().of_constant(rand(2, 8), Scheme(format=INT4))
    for options in ({"norm": 0.0}, {"norm": 1.5}, {"penalty": 0.0}, {"iterations": 0}):
        with pytest.raises(ConfigError, match="norm is above 0"):
            Hqq(**options)
