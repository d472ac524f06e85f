"""Weights and scales that are learned through rounding: where they begin, their gradients, what they gain."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from devices import on_devices
from tiny import free_grid, mlp, quantize, rand, record_of, tokens

from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.config.block_formats import NVFP4
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.formats import INT2
from quark_fx.passes import AdaQuant, AutoRound, BlockAP
from quark_fx.passes.adaquant import _StraightThrough
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.starts import Start

WEIGHT = TensorSpec(format=INT2, granularity=Granularity.GROUP, group_size=16, symmetry="asymmetric")  # type: ignore[arg-type]
CONFIG = QuantConfig(weight=WEIGHT, target=Target.TORCH, exclude=("op:embedding",))


@on_devices
def test_it_begins_at_the_codes_it_is_given(device: torch.device) -> None:
    weight = rand(6, 12).to(device)
    grid = free_grid(weight, 2, (-2, 1))
    nearest = grid.round(grid.position(weight))
    for start in (nearest, (nearest + 1).clamp(*grid.limits)):
        straight = _StraightThrough(grid, weight, start, 0.1)
        assert torch.equal(straight.codes(), start)
        torch.testing.assert_close(straight.weight(), grid.value(start))


def test_scales_have_the_gradient_of_lsq() -> None:
    """`round(w / s) - w / s` within the range, the limit beyond it (Esser et al. 2020, equation 3)."""
    weight, rate = rand(6, 12), 0.1
    grid = free_grid(weight, 2, (-2, 1))
    straight = _StraightThrough(grid, weight, grid.round(grid.position(weight)), rate)
    with torch.no_grad():
        straight.parameter.mul_(2)  # some are beyond the range now
    upstream = rand(6, 12, seed=5)
    gradients = torch.autograd.grad((straight.weight() * upstream).sum(), list(straight.parameters))
    position = straight.parameter.detach()
    low, high = grid.limits
    inside = (position > low - 0.5) & (position < high + 0.5)
    assert 0 < int(inside.sum()) < inside.numel()
    of_scale = torch.where(inside, position.round() - position, position.round().clamp(low, high))
    # Of the logarithm's step: times the scale and the rate.
    expected = (of_scale * upstream * grid.scale * rate).reshape(6, 3, 4).sum(-1)
    torch.testing.assert_close(gradients[1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], torch.where(inside, upstream * grid.scale, 0.0))


def test_a_weight_stays_while_its_scale_moves() -> None:
    weight = rand(6, 12)
    grid = free_grid(weight, 2, (-2, 1))
    straight = _StraightThrough(grid, weight, grid.round(grid.position(weight)), 0.5)
    assert straight.logarithms is not None
    with torch.no_grad():
        straight.logarithms.fill_(1.0)
    assert straight.ratio is not None
    wider = grid.times(straight.ratio.detach())
    torch.testing.assert_close(wider.scale, grid.scale * torch.tensor(0.5).exp())
    assert torch.equal(straight.codes(), wider.round(wider.position(grid.value(straight.parameter.detach()))))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_steps_gain_on_unseen_samples_and_move_scales_only_if_asked(rate: float) -> None:
    model, data = mlp(), tokens(64, 64, 64)
    with torch.no_grad():
        expected = model(data[2])
    errors, scales = [], []
    for steps in (0, 60):
        config = CONFIG.replace(passes=(BlockAP(range_rate=rate, iterations=steps, start=Start.CODES),))
        qmodel = quantize(model, config, data[:2])
        errors.append(float((qmodel.run_batch(data[2]) - expected).square().sum()))
        stored = stored_tensors(qmodel.graph_module)
        scales.append([stored[name] for name in stored if name.endswith("weight_scale")])
    assert errors[1] < 0.8 * errors[0]
    assert all(torch.equal(a, b) for a, b in zip(*scales, strict=True)) == (rate == 0)


def test_codes_go_further_than_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2 bits that is what it gains over `AutoRound`."""
    monkeypatch.setattr(Schedule, "patience", 20)
    data, options = tokens(64, 64), {"iterations": 60, "start": Start.CODES}
    near = stored_tensors(quantize(mlp(), CONFIG, data).graph_module)
    most = {}
    for learner in (AutoRound(**options), BlockAP(learning_rate=0.2, **options)):  # type: ignore[arg-type]
        found = stored_tensors(quantize(mlp(), CONFIG.replace(passes=(learner,)), data).graph_module)
        codes = [name for name in near if name.endswith("weight_codes")]
        most[type(learner)] = max(int((found[n].int() - near[n].int()).abs().max()) for n in codes)
    assert most[AutoRound] <= 1 < most[BlockAP]


def test_floats_in_blocks_are_learned() -> None:
    config = QuantConfig(weight=NVFP4, target=Target.TORCH, exclude=("op:embedding",))
    record = record_of(quantize(mlp(), config.replace(passes=(BlockAP(start=Start.CODES),)), tokens(64, 64)), "BlockAP")
    assert any(change.changed for change in record.changes)


def test_it_is_adaquant_with_other_options() -> None:
    assert isinstance(BlockAP(), AdaQuant)
    data = tokens(64, 64)
    options = {f.name: getattr(BlockAP(), f.name) for f in fields(BlockAP)}
    a, b = (
        stored_tensors(quantize(mlp(), CONFIG.replace(passes=(p,)), data).graph_module)
        for p in (BlockAP(), AdaQuant(**options))
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
