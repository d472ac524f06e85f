"""Scales that a rotation behind them loses least with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn

from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.numbers.formats import INT4, INT8
from quark_fx.passes import Rotate, SmoothQuant

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Normed(nn.Module):
    """A norm that two matrices read; its channels differ as a trained one's do."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.first, self.second = nn.Linear(width, 48, bias=False), nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.first(y), self.second(y)


def uneven() -> Any:
    model: Any = seeded(Normed())
    with torch.no_grad():
        model.norm.weight *= torch.logspace(-1, 1, 32)
        model.first.weight *= torch.logspace(0.5, -0.5, 32)
    return model


def data(count: int = 8) -> list[Tensor]:
    return [rand(4, 6, 32, seed=seed) for seed in range(1, count + 1)]


def configured(*passes: Any) -> QuantConfig:
    weight = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
    activation = TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True)
    return QuantConfig(weight=weight, input=activation, passes=passes)


def error(model: Any, *passes: Any) -> float:
    """Return the relative squared error on data that nothing is calibrated on."""
    qmodel, x = quantize(model, configured(*passes), data()), rand(16, 6, 32, seed=99)
    with torch.no_grad():
        pairs = list(zip(qmodel(x), model(x), strict=True))
    return sum(float((a - b).square().sum() / b.square().sum()) for a, b in pairs)


def test_the_error_is_that_of_the_formula_and_least_at_one_half() -> None:
    """With one strength alone, what is noted is the formula's, on the batch that is held out."""
    model, found = uneven(), list[float]()
    with torch.no_grad():
        x = model.norm(data()[-1]).flatten(0, 1).square().sum(0).double()
        seen = torch.cat([model.norm(batch).flatten(0, 1) for batch in data()[:-1]]).square().sum(0).double()
    weights = [m.weight.detach().square().sum(0).double() for m in (model.first, model.second)]
    for alpha in ALPHAS:
        record = record_of(
            quantize(model, configured(SmoothQuant(alphas=(alpha,), rotated=True)), data()), "SmoothQuant"
        )
        (change,) = record.changes
        s = seen.sqrt() ** alpha / (sum(weights) / 2).sqrt() ** (1 - alpha)
        expected = [float((w * s**2).sum() * (x / s**2).sum() / (len(x) * (w * x).sum())) for w in weights]
        assert change.before is not None
        assert change.after == pytest.approx(min(sum(expected) / 2, change.before), rel=1e-4)
        found.append(sum(expected))
    assert min(found) == found[2]
    assert all(a > b for a, b in pairwise(found[:3]))


def test_what_follows_loses_less() -> None:
    model = uneven()
    rotate = Rotate(streams=False, overhead=9)
    scaled = error(model, SmoothQuant(rotated=True), rotate)
    assert scaled < 0.7 * error(model, rotate)
    assert scaled < error(model, SmoothQuant(), rotate)


def test_experts_and_groups_of_channels_have_a_reason() -> None:
    model = seeded(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4)))
    spec = TensorSpec(format=INT8)
    config = QuantConfig(weight=spec, input=spec, passes=(SmoothQuant(rotated=True),))
    record = record_of(quantize(model, config, [rand(2, 8, 6, 6)]), "SmoothQuant")
    assert [change.what for change in record.changes] == [
        "skipped: not every operator that reads it has codes, and all channels in every output"
    ]


def test_dead_channels_keep_their_scale() -> None:
    model = uneven()
    with torch.no_grad():
        model.norm.weight[5] = 0
        model.first.weight[:, 7] = 0
        model.second.weight[:, 7] = 0
    qmodel = quantize(model, configured(SmoothQuant(rotated=True)), data())
    assert all(bool(t.isfinite().all()) for t in qmodel(data()[0]))
    (change,) = record_of(qmodel, "SmoothQuant").changes
    assert change.changed
