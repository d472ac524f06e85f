"""The exponent AWQ takes, against a search by hand; what it asks of wide operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.block_walk import FloatRun
from quark_fx.config import Granularity
from quark_fx.passes import awq
from quark_fx.presets import INT4_WEIGHT_ONLY
from quark_fx.weights import quantize_tensor

GROUPS = INT4_WEIGHT_ONLY.replace(
    weight=INT4_WEIGHT_ONLY.weight and INT4_WEIGHT_ONLY.weight.replace(group_size=16), exclude=("up",)
)


class Chain(nn.Module):
    """A linear whose outputs differ in magnitude by a factor of twenty, and one that reads them."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def chain(outputs: int) -> Chain:
    model = seeded(Chain(outputs))
    with torch.no_grad():
        model.up.weight *= torch.linspace(0.2, 4, 64)[:, None]
    return model


DATA = [rand(32, 16, seed=seed) for seed in (1, 2)]


def exponent(model: nn.Module, **changes: Any) -> float:
    config = GROUPS.replace(passes=(*GROUPS.passes, awq.AWQ()))
    if changes:
        assert config.weight is not None
        config = config.replace(weight=config.weight.replace(**changes))
    report = qfx.quantize(model, config, DATA, progress=False).report()
    (change,) = [c for c in report.passes[-1].changes if "down" in c.name]
    return float(change.what.removeprefix("exponent ")) if change.changed else 0.0


def by_hand(model: Chain) -> dict[float, float]:
    """Return the error of the outputs for every exponent."""
    x = model.up(torch.cat(DATA)).detach()
    weight, magnitude = model.down.weight.detach(), x.abs().mean(0)
    found = {}
    for step in range(21):
        scale = magnitude ** (step / 20)
        assert GROUPS.weight is not None
        rounded = quantize_tensor(weight * scale, GROUPS.weight, output_axis=0, input_axis=1).dequantize() / scale
        found[step / 20] = float((x @ (rounded - weight).T).square().sum())
    return found


def test_the_exponent_is_the_one_that_changes_the_outputs_least() -> None:
    model = chain(96)
    errors = by_hand(model)
    coarse = min((step / 10 for step in range(11)), key=lambda r: errors[r])
    best = min((r for r in errors if abs(r - coarse) < 0.06), key=lambda r: errors[r])
    assert 0 < best < 1
    assert exponent(model) == best


class Fork(nn.Module):
    """Two linears that read what a norm makes, one of them after a relu: one site, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = self.a(y) + self.b(torch.relu(y))
        return z


def test_a_site_that_waits_for_a_second_block_is_not_lost_in_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = seeded(Fork()), [rand(32, 64, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(0.2, 4, 64))
    config = GROUPS.replace(passes=(*GROUPS.passes, awq.AWQ()), exclude=())
    undisturbed = qfx.quantize(model, config, data, progress=False)
    assert any(c.changed for c in undisturbed.report().passes[-1].changes)
    begin, blocks = awq._collect, list[str]()

    def stop(run: FloatRun, *rest: Any) -> None:
        blocks.append(run.block.name)
        if len(blocks) > 1:
            raise KeyboardInterrupt
        begin(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(awq, "_collect", stop)
        with pytest.raises(KeyboardInterrupt):
            qfx.quantize(model, config, data, progress=False, checkpoint=tmp_path)
    continued = qfx.quantize(model, config, data, progress=False, checkpoint=tmp_path)
    assert torch.equal(continued(data[0]), undisturbed(data[0]))


def test_of_wide_operators_some_outputs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(weight))
        return quantize_tensor(weight, *args, **kwargs)

    monkeypatch.setattr(awq, "quantize_tensor", noted)
    model = chain(3000)
    errors = by_hand(model)
    assert errors[exponent(model)] <= 1.01 * min(errors.values())
    assert set(asked) == {600}  # every fifth
    asked.clear()
    # One scale for all depends on every output.
    exponent(model, granularity=Granularity.TENSOR, group_size=None)
    assert set(asked) == {3000}
