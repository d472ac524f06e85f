"""A ratio and a smallest scale on top of any observer, against the tools that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.ao.quantization.observer import MinMaxObserver

import quark_fx as qfx
from quark_fx import QuantConfig, Symmetry, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, UINT8, Format
from quark_fx.numbers.qparams import Scheme
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.observers import Adjusted, Hqq, MinMax, Percentile, Placeholder, PowerOfTwoMinMse

EPS = torch.finfo(torch.float32).eps
SCHEMES = [
    Scheme(format=INT8),
    Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC),
    Scheme(format=INT4, symmetry=Symmetry.SYMMETRIC_FULL),
    Scheme(format=INT4, symmetry=Symmetry.SIGN_AWARE),
    Scheme(format=FP8_E4M3),
    Scheme(format=INT8, scale=POWER_OF_TWO),
]


@pytest.mark.parametrize("fmt", [INT4, INT8], ids=str)
@pytest.mark.parametrize("ratio", [0.85, 0.5, 1.0])
def test_ratio_is_neural_compressors(fmt: Format, ratio: float) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    # quant_tensor, symmetric: the scale is 2 * largest * ratio over the number of steps.
    theirs = (x.abs().amax(1).double() * ratio * 2 / (2**fmt.bits - 1)).float()
    scheme = Scheme(format=fmt, symmetry=Symmetry.SYMMETRIC_FULL)
    assert torch.equal(Adjusted(ratio=ratio).observe(x).qparams(scheme).scale, theirs)


@pytest.mark.parametrize("low", [-1e-9, 0.0, -3e-6])
@pytest.mark.parametrize("high", [2e-9, 0.0, 2e-5])
@pytest.mark.parametrize("symmetric", [False, True])
def test_eps_is_that_of_torchs_observers(low: float, high: float, symmetric: bool) -> None:
    x = torch.tensor([[low, high]])
    kind = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    theirs = MinMaxObserver(torch.qint8 if symmetric else torch.quint8, kind, eps=EPS)
    theirs(x)
    scale, zero_point = theirs.calculate_qparams()
    scheme = Scheme(format=INT8, symmetry=Symmetry.SYMMETRIC_FULL) if symmetric else SCHEMES[1]
    found = Adjusted(eps=EPS).observe(x).qparams(scheme)
    torch.testing.assert_close(found.scale, scale, rtol=2**-23, atol=0)
    assert torch.equal(found.zero_point, zero_point.to(torch.int32))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_scale_is_below_eps_and_others_stay(scheme: Scheme) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-12, -3e-12], [-1e-12, 5e-13], [3.0, -1.0], [-3.0, 1.0]])
    plain, floored = (observer.observe(x).qparams(scheme) for observer in (MinMax(), Adjusted(eps=2.0**-20)))
    assert (floored.scale[:3].abs() >= 2.0**-20 * (1 - 2**-23)).all()
    assert (floored.scale[:3].abs() <= 2.0**-19).all()
    assert torch.equal(floored.scale[3:], plain.scale[3:])
    assert torch.equal(floored.zero_point[3:], plain.zero_point[3:])


def test_any_observer_can_be_adjusted_and_named_in_a_configuration() -> None:
    spec = TensorSpec.from_dict(
        {
            "format": "int8",
            "observer": {"name": "adjusted", "observer": {"name": "percentile", "percentile": 99.0}, "ratio": 0.9},
        }
    )
    assert spec.observer == Adjusted(observer=Percentile(percentile=99.0), ratio=0.9)
    assert TensorSpec.from_dict(spec.to_dict()) == spec
    activation = TensorSpec(format=UINT8, observer=Adjusted(ratio=0.5))
    config = QuantConfig(weight=spec, input=activation)
    assert QuantConfig.from_yaml(config.to_yaml()) == config
    model, data = torch.nn.Linear(8, 4).eval(), [torch.randn(6, 8)]
    half, whole = (
        qfx.quantize(
            model, config.replace(input=activation.replace(observer=Adjusted(ratio=ratio))), data, progress=False
        )
        for ratio in (0.5, 1.0)
    )
    scales = [
        [t for name, t in model.graph_module.state_dict().items() if name.endswith("_scale") and "weight" not in name]
        for model in (half, whole)
    ]
    assert scales[0]
    assert all(torch.allclose(a * 2, b, rtol=1e-6) for a, b in zip(*scales, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio of Adjusted must be a number above 0 and at most 1, not"),
        ({"ratio": 1.5}, "ratio of Adjusted must be a number above 0 and at most 1, not"),
        ({"eps": -1.0}, "eps of Adjusted must be a number of at least 0, not"),
        ({"eps": float("nan")}, "eps of Adjusted must be a number of at least 0, not"),
        ({"observer": Placeholder()}, "an observer that measures a range"),
        ({"observer": 3}, "must be an Observer, its name or its dict, not 3"),
        ({"observer": Hqq()}, "chooses scales, not a range"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adjusted(**options)


def test_a_search_for_powers_of_two_still_asks_for_such_scales() -> None:
    with pytest.raises(ConfigError, match="set scale='power_of_two'"):
        TensorSpec(format=INT8, observer=Adjusted(observer=PowerOfTwoMinMse(), eps=1e-6))
