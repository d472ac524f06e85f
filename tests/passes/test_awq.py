"""The exponents AWQ takes, against a search by hand; what it asks of wide operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import divided, quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.config.block_formats import NVFP4
from quark_fx.config.quant_config import Granularity, Target, TensorSpec
from quark_fx.engine.block_walk import FloatRun
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.formats import INT4
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import AWQ, GPTQ, awq
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import INT4_WEIGHT_ONLY, NVFP4_WEIGHT_ONLY
from quark_fx.rescale.planned_sites import Reader
from quark_fx.solvers.scaling import Magnitudes

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


DATA = [rand(32, 16, seed=seed) for seed in range(1, 9)]


def found(model: nn.Module, *, feedback: bool = False, **changes: Any) -> Change:
    """Return what AWQ notes of `down`."""
    config = GROUPS.replace(passes=(*GROUPS.passes, AWQ(feedback=feedback)))
    if changes:
        assert config.weight is not None
        config = config.replace(weight=config.weight.replace(**changes))
    record = record_of(quantize(model, config, DATA), "AWQ")
    (change,) = [c for c in record.changes if "down" in c.name]
    return change


def exponents(change: Change) -> tuple[float, float]:
    if not change.changed:
        return 0.0, 0.0
    r, q = change.what.split(", ")
    return float(r.removeprefix("r ")), float(q.removeprefix("q "))


def left_by_feedback(learned: Tensor, y: Tensor) -> Callable[[Tensor], float]:
    """Return what computes the squared error of outputs where inputs make up for the errors of those before.

    Args:
        learned: the inputs that they learned to from.
        y: the inputs that the outputs are computed from.
    """
    h = learned.double().T @ learned.double()
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    order = learned.square().sum(0).argsort(descending=True)
    h, y, squares = h[order][:, order], y[:, order].double(), torch.empty(len(h), dtype=torch.float64)
    for k in range(len(h)):  # an error of 1 there, and what makes up for it
        off = torch.cat((torch.ones(1, dtype=torch.float64), -torch.linalg.solve(h[k + 1 :, k + 1 :], h[k + 1 :, k])))
        squares[k] = (y[:, k:] @ off).square().sum()
    return lambda lost: float(lost[:, order].double().square().sum(0) @ squares)


def left(y: Tensor) -> Callable[[Tensor], float]:
    """Return what computes the squared error of outputs."""
    return lambda lost: float((y @ lost.T).square().sum())


def by_hand(model: Chain, *, feedback: bool = False) -> dict[tuple[float, float], tuple[float, float]]:
    """Return the relative error of the outputs, on what is learned from and on validation data, for all exponents."""
    x, validation = (model.up(part).detach() for part in divided(DATA))
    judges = [(y, left_by_feedback(x, y) if feedback else left(y)) for y in (x, validation)]
    weight = model.down.weight.detach()
    groups = weight.unflatten(1, (-1, 16)).abs()
    ratio = (groups / groups.amax(2, keepdim=True)).flatten(1).mean(0)
    errors = {}
    for r, q in itertools.product(range(21), repeat=2):
        scale = x.square().mean(0).sqrt() ** (r / 20) / ratio ** (q / 20)
        assert GROUPS.weight is not None
        rounded = quantize_tensor(weight * scale, GROUPS.weight).dequantize() / scale
        lost = rounded - weight
        one, other = (judge(lost) / left(y)(weight) for y, judge in judges)
        errors[r / 20, q / 20] = one, other
    return errors


@pytest.mark.parametrize("feedback", [False, True])
def test_the_exponents_are_those_that_change_the_outputs_least(feedback: bool) -> None:
    model = chain(96)
    with torch.no_grad():
        model.down.weight *= torch.linspace(0.1, 1, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    errors, change = by_hand(model, feedback=feedback), found(model, feedback=feedback)
    best = exponents(change)
    assert (max if feedback else min)(best) > 0
    assert change.after == pytest.approx(errors[best][1], rel=1e-4)
    assert change.before == pytest.approx(errors[0, 0][1], rel=1e-4)
    assert errors[best][0] <= 1.02 * min(learned for learned, _ in errors.values())


class Convolutions(nn.Module):
    """A convolution of two groups that reads channels whose magnitudes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


@pytest.mark.parametrize("feedback", [False, True])
def test_the_groups_of_a_convolution_have_channels_of_their_own(feedback: bool) -> None:
    model, data = seeded(Convolutions()), [rand(4, 3, 8, 8, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        model.up.weight *= torch.linspace(0.1, 4, 16)[:, None, None, None]
    spec = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
    config = qfx.QuantConfig(weight=spec, passes=(AWQ(feedback=feedback),), exclude=("up",), target=Target.TORCH)
    changes = record_of(quantize(model, config, data), "AWQ").changes
    (change,) = [c for c in changes if c.changed]
    r, q = exponents(change)
    x, validation = (torch.relu(model.up(part)).detach() for part in divided(data))
    weight = model.down.weight.detach()
    ratio = (weight / weight.abs().amax((1, 2, 3), keepdim=True)).abs().unflatten(0, (2, 16)).mean(1).flatten()
    scale = x.square().mean((0, 2, 3)).sqrt() ** r / ratio**q
    factor = scale.reshape(2, 1, 8, 1, 1).expand(2, 16, 8, 1, 1).flatten(0, 1)
    rounded = quantize_tensor(weight * factor, spec).dequantize() / factor
    lost, signal = (F.conv2d(validation, w, groups=2).square().sum() for w in (rounded - weight, weight))
    if feedback:
        inputs = zip(*(y.movedim(1, -1).flatten(0, -2).split(8, -1) for y in (x, validation)), strict=True)
        parts = zip(inputs, (rounded - weight).flatten(1).split(16), strict=True)
        lost = torch.tensor(sum(left_by_feedback(*of)(part) for of, part in parts), dtype=torch.float32)
    assert change.after == pytest.approx(float(lost / signal), rel=1e-3)
    assert change.after is not None
    assert change.before is not None
    assert change.after < 0.9 * change.before


def mixed(seed: int) -> Tensor:
    """Return rows of 64 inputs that depend on each other, as those of a network do."""
    return rand(96, 64, seed=seed) @ rand(64, 64, seed=99).softmax(-1).add(0.3 * torch.eye(64))


class Readers(nn.Module):
    """A norm whose channels two linears of unequal width read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.a(y), self.b(y)


def seen_at(model: nn.Module, config: qfx.QuantConfig, data: list[Tensor]) -> Magnitudes:
    """Return the statistics of the only site."""
    found = []
    scale = AWQ.scale

    def noted(self: AWQ, seen: Magnitudes, values: tuple[float, ...]) -> Tensor:
        found.append(seen)
        return scale(self, seen, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AWQ, "scale", noted)
        qfx.quantize(model, config, data, progress=False)
    assert len({id(seen.activation) for seen in found}) == 1
    return found[0]


def test_all_readers_count_by_their_outputs_and_what_is_never_there_hardly(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = seeded(Readers()), [rand(32, 64, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(0.2, 4, 64))
        model.norm.weight[3] = model.norm.bias[3] = 0.0
        model.a.weight[:, 5] = model.b.weight[:, 5] = 0.0
    monkeypatch.setattr(awq, "_AT_ONCE", 500)
    weight = GROUPS.weight
    assert weight is not None
    signed = weight.replace(symmetry=Symmetry.SIGN_AWARE)
    seen = seen_at(model, GROUPS.replace(weight=signed, passes=(AWQ(),), exclude=()), data)
    squares = model.norm(divided(data)[0]).detach().square().mean(0)
    both = torch.cat((model.a.weight, model.b.weight)).detach().unflatten(1, (-1, 16)).abs()
    ratios = (both / both.amax(2, keepdim=True)).flatten(1).mean(0)
    torch.testing.assert_close(seen.activation, squares.sqrt())
    torch.testing.assert_close(seen.weight / seen.weight.max(), ratios / ratios.max())
    a, w = (x / x.max() for x in (squares.sqrt(), ratios))
    scale = a.clamp_min(1e-4) ** 0.5 / w.clamp_min(1e-4) ** 0.25
    torch.testing.assert_close(AWQ().scale(seen, (0.5, 0.25)), scale / (scale.max() * scale.min()).sqrt())
    assert float(seen.activation[3]) == float(seen.weight[5]) == 0


def test_scales_for_feedback_undo_outliers_better_than_those_for_rounding_to_nearest() -> None:
    """In the second model some channels are large, and small weights read them."""
    data, unseen = [mixed(seed) for seed in range(1, 9)], mixed(0)
    errors = {}
    for planted in (False, True):
        model = seeded(Readers())
        if planted:
            with torch.no_grad():
                model.norm.weight[::11] *= 30
                model.norm.bias[::11] *= 30
                for reader in (model.a, model.b):
                    reader.weight[:, ::11] /= 30
        for name, first in (("none", ()), ("nearest", (AWQ(),)), ("feedback", (AWQ(feedback=True),))):
            qmodel = quantize(model, GROUPS.replace(passes=(*first, GPTQ()), exclude=()), data)
            with torch.no_grad():
                made, expected = qmodel(unseen), model(unseen)
            lost = (float((m - e).square().mean()) for m, e in zip(made, expected, strict=True))
            errors[planted, name] = sum(lost)
    assert errors[False, "feedback"] < errors[False, "none"]
    assert errors[True, "feedback"] < min(0.95 * errors[True, "nearest"], 0.2 * errors[True, "none"])


class Shared(nn.Module):
    """Channels that a convolution in groups reads, some of which another one reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.a, self.b = nn.Conv2d(16, 16, 1, groups=4), nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.up(x))
        return self.a(torch.cat((y, torch.relu(self.other(x))), 1)), self.b(y)


def test_the_groups_of_a_convolution_all_see_every_row() -> None:
    model, data = seeded(Shared()), [rand(4, 3, 8, 8, seed=seed) for seed in (1, 2)]
    spec = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
    config = qfx.QuantConfig(weight=spec, passes=(AWQ(),), exclude=("up", "other"), target=Target.TORCH)
    read = torch.cat([torch.relu(one(divided(data)[0])) for one in (model.up, model.other)], 1)
    squares = read.detach().square().mean((0, 2, 3))
    found = seen_at(model, config, data)
    torch.testing.assert_close(found.activation, squares.sqrt())
    a, b = ((w / w.amax(1, keepdim=True)).flatten(1) for w in (one.weight.detach().abs() for one in (model.a, model.b)))
    sums = a.unflatten(0, (4, 4)).sum(1).flatten()
    ratios = torch.cat(((sums[:8] + b.sum(0)) / 20, sums[8:] / 4))
    torch.testing.assert_close(found.weight / found.weight.max(), ratios / ratios.max())


def test_what_is_too_large_to_be_squared_is_left() -> None:
    model = seeded(Chain(32))
    config = GROUPS.replace(passes=(*GROUPS.passes, AWQ()))
    record = record_of(quantize(model, config, [1e25 * x for x in DATA]), "AWQ")
    (change,) = [c for c in record.changes if "down" in c.name]
    assert change.what == "skipped: its input is infinite or too large to be squared; check the calibration data"


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
    config = GROUPS.replace(passes=(*GROUPS.passes, AWQ()), exclude=())
    undisturbed = qfx.quantize(model, config, data, progress=False)
    assert any(c.changed for c in record_of(undisturbed, "AWQ").changes)
    begin, blocks = awq._hessians, list[str]()

    def stop(run: FloatRun, *rest: Any) -> Any:
        blocks.append(run.block.name)
        if len(blocks) > 1:
            raise KeyboardInterrupt
        return begin(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(awq, "_hessians", stop)
        with pytest.raises(KeyboardInterrupt):
            qfx.quantize(model, config, data, progress=False, resources=qfx.Resources(checkpoint=tmp_path))
    continued = qfx.quantize(model, config, data, progress=False, resources=qfx.Resources(checkpoint=tmp_path))
    assert torch.equal(continued(data[0]), undisturbed(data[0]))


def test_of_wide_operators_some_outputs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(weight))
        return quantize_tensor(weight, *args, **kwargs)

    monkeypatch.setattr(awq, "quantize_tensor", noted)
    model = chain(3000)
    errors = by_hand(model)
    assert errors[exponents(found(model))][0] <= 1.01 * min(learned for learned, _ in errors.values())
    assert set(asked) == {600}  # every fifth
    asked.clear()
    # One scale for all depends on every output.
    found(model, granularity=Granularity.TENSOR, group_size=None)
    assert set(asked) == {3000}


@pytest.mark.parametrize(
    "config", [GROUPS, NVFP4_WEIGHT_ONLY.replace(weight=NVFP4, exclude=("up",))], ids=["groups", "shared scale"]
)
def test_a_weight_is_read_once_for_all_scales_that_are_tried(
    config: qfx.QuantConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lie on another device, or on disk."""
    read, value = list[str](), Reader.value

    def noted(self: Reader, gm: GraphModule) -> Tensor:
        read.append(self.operator.name)
        return value(self, gm)

    monkeypatch.setattr(Reader, "value", noted)
    config = config.replace(passes=(*config.passes, AWQ()))
    assert record_of(quantize(chain(96), config, DATA), "AWQ").rewrites == 1
    assert read == ["down"]


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
def test_the_largest_part_that_a_scale_is_tried_on_is_predicted(
    granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale for the whole weight needs the whole weight."""
    parts = list[int]()

    def noted(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts.append(weight.numel())
        return quantize_tensor(weight, *args, **kwargs)

    monkeypatch.setattr(awq, "quantize_tensor", noted)
    monkeypatch.setattr(awq, "_AT_ONCE", 1 << 12)
    assert GROUPS.weight is not None
    weight = GROUPS.weight.replace(granularity=granularity, group_size=None)
    config = GROUPS.replace(weight=weight, passes=(AWQ(),))
    model = chain(400)
    quantize(model, config, DATA)
    ((_, _, need),) = [stage for stage in qfx.predict(model, config, DATA).stages if stage[0] == "AWQ"]
    copies = awq._WHOLE if granularity is Granularity.TENSOR else awq._COPIES
    least = 4 * copies * max(parts)
    assert least <= max(moment.working for moment in need.moments) <= 2 * (least + 4 * 400 * 64 + 2 * 4 * 64 * 64)


class Stack(nn.Module):
    """Three matrices that multiply what a norm makes."""

    def __init__(self, outputs: int = 1200) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(64), nn.Parameter(torch.randn(3, 64, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.norm(x), self.weight)


def test_of_wide_matrices_in_a_stack_some_outputs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(tuple(weight.shape))
        return quantize_tensor(weight, *args, **kwargs)

    monkeypatch.setattr(awq, "quantize_tensor", noted)
    model = seeded(Stack())
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(0.2, 4, 64))
    config = GROUPS.replace(passes=(AWQ(),), exclude=())
    qmodel = quantize(model, config, [rand(3, 8, 64, seed=seed) for seed in (1, 2)])
    assert any(change.changed for change in record_of(qmodel, "AWQ").changes)
    assert set(asked) == {(3, 64, 600)}  # every fifth
    asked.clear()
    monkeypatch.setattr(awq, "_AT_ONCE", 64 * 600 + 1)
    qfx.quantize(model, config, [rand(3, 8, 64, seed=seed) for seed in (1, 2)], progress=False)
    assert set(asked) == {(1, 64, 600)}


def test_what_feedback_leaves_of_a_stack_is_that_of_its_matrices() -> None:
    """The last matrix reads zeros: what it loses does not count."""
    model, data = seeded(Stack(48)), [rand(3, 40, 64, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(0.2, 4, 64))
        for batch in data:
            batch[2] = 0
    config = GROUPS.replace(passes=(AWQ(feedback=True),), exclude=())
    (change,) = record_of(quantize(model, config, data), "AWQ").changes
    assert config.weight is not None
    lost = signal = 0.0
    for x, y, weight in zip(*(model.norm(part).detach() for part in data), model.weight.detach(), strict=True):
        rounded = quantize_tensor(weight.T, config.weight).dequantize()
        lost += left_by_feedback(x, y)(rounded - weight.T) if x.any() else 0.0
        signal += float((y @ weight).square().sum())
    assert change.before == pytest.approx(lost / signal, rel=1e-3)
