"""Scales shrink to where rounding to nearest changes the outputs least, operator after operator."""

from __future__ import annotations

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.formats import INT3, INT4
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.passes import AWQ, GPTQ, FitScales
from quark_fx.presets import INT8_STATIC, W4A16_RTN
from quark_fx.solvers.scale_search import RATIOS

GROUPS = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=8)
FITTED = QuantConfig(weight=GROUPS, passes=(FitScales(),), target=Target.TORCH)


class Skewed(nn.Module):
    """Two layers, whose input has channels of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def scales(qmodel: qfx.QuantizedModel, weight: str) -> Tensor:
    (found,) = (t for name, t in stored_tensors(qmodel.graph_module).items() if name.endswith(f"{weight}_scale"))
    return found


def batches() -> list[Tensor]:
    return [rand(16, 32, seed=i) * torch.linspace(0.05, 3, 32) for i in range(4)]


def test_each_scale_is_the_best_of_the_ratios_for_its_group() -> None:
    """Against every ratio, one group at a time, in float64."""
    layer, x = seeded(nn.Linear(8, 12, bias=False)), torch.cat([b[:, :8] for b in batches()])
    plain, fitted = (quantize(layer, c, [x]) for c in (FITTED.replace(passes=()), FITTED))
    before, after = (scales(q, "weight").double().reshape(-1) for q in (plain, fitted))
    weight, x = layer.weight.detach().double(), x.double()
    limits = -INT3.qmax, INT3.qmax  # symmetric grids leave the smallest code out
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        errors = []
        for ratio in RATIOS:
            values = (weight[row] / (old * ratio)).round().clamp(*limits) * old * ratio
            errors.append(float((x @ (values - weight[row])).square().sum()))
        found = min(range(len(RATIOS)), key=lambda i: abs(RATIOS[i] - float(new / old)))
        assert errors[found] <= min(errors) * (1 + 1e-4)
    assert (after < before * 0.99).any()


def test_errors_fall_and_are_reported() -> None:
    qmodel = quantize(seeded(Skewed()), FITTED, batches())
    record = record_of(qmodel, "FitScales")
    assert [change.name for change in record.changes] == ["first", "second"]
    assert all(c.before and c.after and c.after < 0.9 * c.before for c in record.changes)
    assert all(change.what.startswith("scales and ") for change in record.changes)


@pytest.mark.parametrize("passes", [(AWQ(),), (GPTQ(),)])
def test_it_goes_with_other_passes(passes: tuple[object, ...]) -> None:
    """After scales of channels are chosen, and before codes are."""
    model = seeded(Skewed())
    order = (*passes, FitScales()) if isinstance(passes[0], AWQ) else (FitScales(), *passes)
    both, one = (quantize(model, FITTED.replace(passes=p), batches()) for p in (order, passes))
    with torch.no_grad():
        lost = [sum(float((q(x) - model(x)).square().sum()) for x in batches()) for q in (both, one)]
    assert lost[0] < lost[1]


def test_scales_that_may_not_shrink_are_left_and_say_so() -> None:
    power = FITTED.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL, scale=POWER_OF_TWO))
    qmodel = quantize(seeded(Skewed()), power, batches())
    plain = quantize(seeded(Skewed()), power.replace(passes=()), batches())
    record = record_of(qmodel, "FitScales")
    assert {change.what for change in record.changes} == {
        "skipped: its scales are fixed (per tensor, power of two, or shared)"
    }
    assert torch.equal(scales(qmodel, "first.weight"), scales(plain, "first.weight"))


def test_it_is_known_by_name() -> None:
    config = qfx.QuantConfig.from_dict(W4A16_RTN.replace(passes=(FitScales(),)).to_dict())
    assert config.passes == (FitScales(),)


def test_a_weight_that_several_operators_read_is_left_and_says_so() -> None:
    model = seeded(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    model[2].weight = model[0].weight
    qmodel = quantize(model, FITTED, [rand(16, 16)])
    record = record_of(qmodel, "FitScales")
    assert {change.what for change in record.changes} == {"skipped: several operators read its weight"}


def test_an_int32_bias_follows_the_scales_that_change() -> None:
    """It keeps its value at steps of input times weight, which the kernel adds in."""
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT3, granularity=Granularity.CHANNEL))
    data = [rand(16, 16, seed=i) @ rand(16, 16, seed=9) for i in range(8)]
    model = seeded(nn.Sequential(nn.Linear(16, 12)))
    plain, fitted = (quantize(model, config.replace(passes=p), data) for p in ((), (FitScales(),)))
    old, new = (stored_tensors(q.graph_module) for q in (plain, fitted))
    assert not torch.equal(old["0.weight_scale"], new["0.weight_scale"])
    ratio = new["0.bias_scale"] / old["0.bias_scale"]
    torch.testing.assert_close(ratio, new["0.weight_scale"] / old["0.weight_scale"])
    values = [t["0.bias_codes"].double() * t["0.bias_scale"].double() for t in (old, new)]
    assert ((values[0] - values[1]).abs() <= old["0.bias_scale"]).all()
