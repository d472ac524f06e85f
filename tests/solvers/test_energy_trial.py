"""Scales by root mean squares, which lose least behind a rotation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from zoo import ZOO

from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import stored_tensors
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
        record = record_of(quantize(model, configured(SmoothQuant(alphas=(alpha,), rms=True)), data()), "SmoothQuant")
        (change,) = record.changes
        s = seen.sqrt() ** alpha / (sum(weights) / 2).sqrt() ** (1 - alpha)  # a common factor does not count
        expected = [float((w * s**2).sum() * (x / s**2).sum() / (len(x) * (w * x).sum())) for w in weights]
        assert change.before is not None
        assert change.after == pytest.approx(min(sum(expected) / 2, change.before), rel=1e-4)
        found.append(sum(expected))
    assert min(found) == found[2]
    assert all(a > b for a, b in pairwise(found[:3]))


def test_what_follows_loses_less() -> None:
    model = uneven()
    rotate = Rotate(streams=False, overhead=9)
    scaled = error(model, SmoothQuant(rms=True), rotate)
    assert scaled < 0.7 * error(model, rotate)
    assert scaled < error(model, SmoothQuant(), rotate)


def test_groups_of_channels_have_a_reason() -> None:
    model = seeded(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4)))
    spec = TensorSpec(format=INT8)
    config = QuantConfig(weight=spec, input=spec, passes=(SmoothQuant(rms=True),))
    record = record_of(quantize(model, config, [rand(2, 8, 6, 6)]), "SmoothQuant")
    assert [change.what for change in record.changes] == [
        "skipped: not every operator that reads it is quantized and uses all channels for every output"
    ]


def test_experts_are_scaled() -> None:
    case = ZOO["Mixtral"]
    config = configured(SmoothQuant(rms=True)).replace(exclude=("op:embedding", "op:head"))
    record = record_of(quantize(seeded(case.make()), config, list(case.batches)), "SmoothQuant")
    assert any("experts" in change.name and change.changed for change in record.changes)


def test_weights_that_share_one_scale_are_not_divided() -> None:
    model = seeded(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
    config = configured(SmoothQuant(rms=True)).replace(weight=TensorSpec(format=INT8))
    record = record_of(quantize(model, config, [rand(16, 32)]), "SmoothQuant")
    assert "skipped: the weights that produce it share one scale" in [change.what for change in record.changes]


@pytest.mark.parametrize("rows", [6, 600])
def test_scales_do_not_grow_with_the_data(rows: int) -> None:
    """Their median is 1; so float16 models keep their range."""
    model = uneven()
    before = model.norm.weight.detach().clone()
    qmodel = quantize(model, configured(SmoothQuant(rms=True)), [rand(4, rows, 32, seed=seed) for seed in range(8)])
    after = stored_tensors(qmodel.graph_module)["norm.weight"]
    assert float((before / after).median()) == pytest.approx(1, rel=1e-4)


def test_channels_that_are_zero_or_that_no_weight_reads_do_not_count() -> None:
    model, rotate = uneven(), Rotate(streams=False, overhead=9)
    with torch.no_grad():
        model.norm.weight[5] = 0
        model.norm.weight[7] *= 10
        model.first.weight[:, 7] = 0
        model.second.weight[:, 7] = 0
    qmodel = quantize(model, configured(SmoothQuant(rms=True)), data())
    after = stored_tensors(qmodel.graph_module)["norm.weight"]
    assert float(after[5]) == 0
    assert bool((after[7].abs() < 0.5 * model.norm.weight[7].abs()).all())
    assert error(model, SmoothQuant(rms=True), rotate) < 0.7 * error(model, rotate)


def test_padding_does_not_count() -> None:
    """Scales are those of the data without it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = uneven()

        def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.inner(x)
            return first * attention_mask.unsqueeze(-1), second

    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    found = []
    for noise in (1.0, 100.0):
        batches = [{"x": x * torch.where(mask > 0, 1.0, noise).unsqueeze(-1), "attention_mask": mask} for x in data()]
        for batch in batches:
            batch["x"][:, 4:, ::2] *= noise
        qmodel = quantize(Masked().eval(), configured(SmoothQuant(rms=True)), batches)
        found.append(stored_tensors(qmodel.graph_module)["inner.norm.weight"])
    assert torch.equal(*found)
