"""Roundings and ranges learned by signs: what they start at, where they may go, what is stored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from devices import on_devices
from tiny import free_grid, mlp, quantize, rand, seeded, tokens
from torch import nn

from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.config.block_formats import MXFP4, NVFP4
from quark_fx.engine.blocks import Unit
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.formats import INT2, INT3, INT4, IntFormat
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.scales import FLOAT16
from quark_fx.passes import AutoRound, autoround
from quark_fx.passes.autoround import _SignRounding
from quark_fx.presets import INT8_STATIC
from quark_fx.solvers.starts import Start

WEIGHT = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=16)
CONFIG = QuantConfig(weight=WEIGHT, target=Target.TORCH, exclude=("op:embedding",))


@on_devices
def test_it_begins_at_the_codes_it_is_given(device: torch.device) -> None:
    weight = rand(6, 12).to(device)
    grid = free_grid(weight, 3, (-4, 3))
    nearest = grid.position(weight).round().clamp(*grid.limits)
    elsewhere = (nearest + torch.randint(-1, 2, nearest.shape, device=device)).clamp(*grid.limits)
    for start in (nearest, elsewhere):
        rounding = _SignRounding(grid, weight, start, AutoRound())
        assert torch.equal(rounding.codes(), start)
        torch.testing.assert_close(rounding.weight(), grid.value(start))


def test_an_offset_moves_a_code_by_one_at_most_and_leads_back() -> None:
    weight = rand(6, 12)
    grid = free_grid(weight, 3, (-4, 3))
    rounding = _SignRounding(grid, weight, grid.position(weight).round().clamp(*grid.limits), AutoRound(ranges=False))
    start = rounding.codes()
    with torch.no_grad():
        rounding.offset.fill_(7.0)
    assert float((rounding.codes() - start).abs().max()) <= 1
    inside = (rounding.codes() > -4) & (rounding.codes() < 3)
    (gradient,) = torch.autograd.grad(rounding.weight().sum(), rounding.offset)
    assert bool((gradient[inside] != 0).all())
    assert rounding.shares is None


def test_a_share_shrinks_all_weights_of_its_scale_and_no_other() -> None:
    weight = rand(6, 12)
    grid = free_grid(weight, 3, (-4, 3))
    rounding = _SignRounding(grid, weight, grid.position(weight).round().clamp(*grid.limits), AutoRound())
    shares = rounding.parameters[-1]
    assert tuple(shares.shape) == (6, 3)
    with torch.no_grad():
        shares[2, 1] = -9.0
    assert rounding.ratio is not None
    assert float(rounding.ratio.detach()[2, 1]) == 0.5
    changed = grid.times(rounding.ratio.detach()).scale / grid.scale
    expected = torch.ones(6, 12)
    expected[2, 4:8] = 0.5
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("start", Start)
def test_unseen_samples_gain(start: Start, ranges: bool) -> None:
    model, data = mlp(), tokens(64, 64, 64)
    with torch.no_grad():
        expected = model(data[2])
    nearest = quantize(model, CONFIG, data[:2])
    learned = quantize(
        model, CONFIG.replace(passes=(AutoRound(iterations=60, start=start, ranges=ranges, range_rate=1.0),)), data[:2]
    )
    errors = [float((q.run_batch(data[2]) - expected).square().sum()) for q in (nearest, learned)]
    assert errors[1] < 0.9 * errors[0]
    changes = [c.what for c in learned.report().passes[-1].changes if c.changed]
    assert changes
    # From the codes of coordinate descent there is nothing left for the scales of so small a model to gain.
    assert any("scales" in what for what in changes) == (ranges and start is not Start.DESCENT)


@pytest.mark.parametrize("unit", Unit)
def test_experts_are_learned_with_what_sends_them_their_rows_or_left(unit: Unit) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "bos_token_id": None}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, use_cache=False)).eval()
    data = [{"input_ids": torch.randint(40, (8, 12), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    exclude = ("op:embedding", "op:head", "op:router")
    qmodel = quantize(model, CONFIG.replace(exclude=exclude, passes=(AutoRound(unit=unit, iterations=2),)), data)
    changes = {c.name: c for c in qmodel.report().passes[-1].changes}
    experts = [change for name, change in changes.items() if "experts" in name]
    assert len(experts) == 2
    assert all(("which rows it multiplies depends on the data" in c.what) == (unit is Unit.OPERATOR) for c in experts)
    assert all(c.changed == (unit is Unit.BLOCK) for c in experts)
    assert any(c.changed for name, c in changes.items() if "attn" in name)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_shares_move_in_steps_of_their_own(rate: float) -> None:
    weight = rand(6, 12)
    grid = free_grid(weight, 3, (-4, 3))
    rounding = _SignRounding(grid, weight, grid.round(grid.position(weight)), AutoRound(range_rate=rate))
    with torch.no_grad():
        rounding.parameters[-1].sub_(0.25)
    assert rounding.ratio is not None
    torch.testing.assert_close(rounding.ratio.detach(), torch.full((6, 3), 1 - rate * 0.25))


@pytest.mark.parametrize("bits", [INT2, INT3])
def test_from_feedback_codes_are_as_near_to_the_next_as_what_it_rounded(
    bits: IntFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Grid, torch.Tensor, torch.Tensor]] = []

    def begin(grid: Grid, weight: torch.Tensor, start: torch.Tensor, options: AutoRound) -> _SignRounding:
        begun.append((grid, weight, start))
        return _SignRounding(grid, weight, start, options)

    monkeypatch.setattr(autoround, "_SignRounding", begin)
    config = CONFIG.replace(weight=WEIGHT.replace(format=bits), passes=(AutoRound(iterations=1),))
    model = mlp()
    quantize(model, config, tokens(64, 64))
    real = {tuple(p.shape): p for p in model.parameters()}
    assert begun
    for grid, near, start in begun:
        away = (grid.position(near) - grid.position(near).floor() - 0.5).abs() > 1e-4
        assert torch.equal(grid.round(grid.position(near))[away], start[away])
        assert not torch.equal(grid.round(grid.position(real[tuple(near.shape)])), start)


@pytest.mark.parametrize("start", [Start.FEEDBACK, Start.CODES])
def test_integer_biases_follow_the_scales(start: Start) -> None:
    """They keep their values, to half a step of the old scale and half a step of the new."""
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL))
    model = seeded(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10)))
    data = [rand(64, 32, seed=i) @ rand(32, 32, seed=99) + 1 for i in range(4)]
    learning = config.replace(passes=(AutoRound(iterations=5 if start is Start.FEEDBACK else 40, start=start),))
    qmodel = quantize(model, learning, data)
    plain, learned = (stored_tensors(q.graph_module) for q in (quantize(model, config, data), qmodel))
    assert plain["0.bias_codes"].dtype == torch.int32
    assert any(not torch.equal(plain[f"{layer}.weight_scale"], learned[f"{layer}.weight_scale"]) for layer in "02")
    for layer in "02":
        ratio = learned[f"{layer}.weight_scale"] / plain[f"{layer}.weight_scale"]
        torch.testing.assert_close(learned[f"{layer}.bias_scale"], plain[f"{layer}.bias_scale"] * ratio)
        old, new = (t[f"{layer}.bias_codes"] * t[f"{layer}.bias_scale"].double() for t in (plain, learned))
        steps = plain[f"{layer}.bias_scale"] + learned[f"{layer}.bias_scale"]
        assert bool(((old - new).abs() <= 0.5 * steps).all())


@pytest.mark.parametrize("start", [Start.FEEDBACK, Start.CODES])
def test_scales_stay_where_an_integer_bias_would_overflow(start: Start) -> None:
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL))
    linear = nn.Linear(32, 10)
    model = seeded(nn.Sequential(linear))
    with torch.no_grad():
        linear.weight[0] *= 1e-7  # its scale is raised to where int32 just holds the bias
        linear.bias[0] = 5.0
    data = [rand(64, 32, seed=i) @ rand(32, 32, seed=99) + 1 for i in range(4)]
    learner = AutoRound(start=start, iterations=0 if start is Start.FEEDBACK else 20)
    qmodel = quantize(model, config.replace(passes=(learner,)), data)
    plain, learned = (stored_tensors(q.graph_module) for q in (quantize(model, config, data), qmodel))
    assert torch.equal(plain["0.weight_scale"], learned["0.weight_scale"])
    # Error feedback rounds without new scales then; of learned scales and codes there is all or nothing.
    assert torch.equal(plain["0.weight_codes"], learned["0.weight_codes"]) == (start is Start.CODES)
    assert torch.equal(plain["0.bias_codes"], learned["0.bias_codes"])


SCALE_TYPES = {
    "fp16": WEIGHT.replace(scale=FLOAT16),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}


@pytest.mark.parametrize("start", [Start.FEEDBACK, Start.CODES])
@pytest.mark.parametrize("name", SCALE_TYPES)
def test_learned_scales_are_ones_that_can_be_stored(name: str, start: Start) -> None:
    spec = SCALE_TYPES[name]
    config = QuantConfig(weight=spec, target=Target.TORCH, exclude=("op:embedding",))
    learner = AutoRound(start=start, iterations=40, range_rate=3.0)
    plain, learned = (quantize(mlp(), c, tokens(64, 64)) for c in (config, config.replace(passes=(learner,))))
    scales = [
        (t, stored_tensors(plain.graph_module)[key])
        for key, t in stored_tensors(learned.graph_module).items()
        if key.endswith("weight_scale")
    ]
    assert any(not torch.equal(new, old) for new, old in scales) or (name == "mxfp4" and start is Start.CODES)
    for new, old in scales:
        assert torch.equal(new, spec.scale.allowed(old)(new.double()))


def test_the_step_is_one_over_their_number_unless_given() -> None:
    assert AutoRound(iterations=50, start=Start.DESCENT).rate == 1 / 50
    assert AutoRound(iterations=50, learning_rate=0.1).learning_rate == 0.1
    with pytest.raises(ConfigError, match="range_rate"):
        AutoRound(range_rate=-0.1)


def test_a_step_is_a_sign_however_small_the_gradient() -> None:
    """Where the square of one is zero in float32 it is no reason to move, let alone a thousand times as far."""
    moved = torch.nn.Parameter(torch.zeros(4))
    optimizer, _ = AutoRound().optimizer([{"params": [moved], "lr": 0.01}])
    moved.grad = torch.tensor([0.0, 1e-25, 1e-6, -1e3])
    optimizer.step()
    torch.testing.assert_close(moved.detach(), torch.tensor([0.0, 0.0, -0.01, 0.01]), atol=1e-4, rtol=0)


def test_the_learning_rate_follows_the_number_of_steps_and_the_start() -> None:
    assert dataclasses.replace(AutoRound(start=Start.CODES), iterations=1000).rate == 0.001
    assert dataclasses.replace(AutoRound(), iterations=1000).rate == pytest.approx(0.0003)
    assert AutoRound(learning_rate=0.5).rate == 0.5
