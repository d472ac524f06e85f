"""Rows that make up for the errors of other rows, by which output channels' errors add up in the end loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import on_devices
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.engine import guidance
from quark_fx.engine.back_walk import BackWalk, NoGradientError
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.sizes import Matrices
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import graph_pass
from quark_fx.numbers.formats import INT3, INT8
from quark_fx.numbers.grid import Grid
from quark_fx.passes import GPTQ, gptq
from quark_fx.solvers.error_feedback import factor, gptq_round
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.solver import InputHessian, QuantizedMatrix, Skip, Solver, solver

WEIGHT = TensorSpec(format=INT3, granularity=Granularity.CHANNEL)


def correlated(size: int, seed: int, rank: int = 3) -> Tensor:
    """Return a positive definite matrix of the size, most of which has few directions; the diagonal 1 on average."""
    some = rand(size, rank, seed=seed)
    found = some @ some.T + 0.05 * torch.eye(size)
    return found / found.diagonal().mean()


def grid(rows: int, columns: int, step: float = 0.4) -> Grid:
    scale = torch.full((1, rows, columns), step)
    return Grid(scale, torch.zeros(()), (-4.0, 3.0))


def form(outputs: Tensor, error: Tensor, h: Tensor) -> float:
    return float(((outputs @ error) * (error @ h)).sum())


def rounded(weight: Tensor, h: Tensor, outputs: Tensor | None) -> Tensor:
    """Return codes of a matrix by error feedback, on both sides where there are `outputs`."""
    own, step = factor(h[None], damping=0.0, by_activation=True), grid(*weight.shape)
    if outputs is None:
        return gptq_round(weight[None], own, step)[0]
    return gptq._round_rows(weight[None], own, step, outputs, torch.float32)[0]


@on_devices
def test_codes_are_those_of_error_feedback_on_all_weights_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The Hessian of a weight in one row is the Kronecker product of both sides."""
    monkeypatch.setattr(gptq, "_ROWS", 1)
    weight, h, outputs = (t.to(device) for t in (rand(6, 8), correlated(8, 1), correlated(6, 2)))
    found = rounded(weight, h, outputs[None])
    rows = outputs.diagonal().argsort(descending=True, stable=True)
    columns = h.diagonal().argsort(descending=True, stable=True)
    whole = torch.kron(outputs[rows][:, rows], h[columns][:, columns])[None]
    flat = weight[rows][:, columns].reshape(1, 1, -1)
    expected = gptq_round(flat, factor(whole, damping=0.0, by_activation=False), grid_of(device, 48))
    assert torch.equal(found[rows][:, columns].flatten(), expected.flatten())


def grid_of(device: torch.device, columns: int) -> Grid:
    found = grid(1, columns)
    return Grid(found.scale.to(device), found.zero_point.to(device), found.limits)


def test_the_end_loss_is_smaller_where_outputs_go_together() -> None:
    weight, h, outputs = rand(64, 32), correlated(32, 1, rank=8), correlated(64, 2, rank=8)

    def lost(codes: Tensor) -> float:
        return form(outputs, weight - 0.4 * codes, h)

    two, one = lost(rounded(weight, h, outputs[None])), lost(rounded(weight, h, None))
    assert two < 0.75 * one
    runs = torch.stack([outputs[:32, :32], outputs[32:, 32:]])
    assert two < lost(rounded(weight, h, runs)) < one


def test_outputs_that_count_by_themselves_change_nothing() -> None:
    weight, h = rand(40, 16), correlated(16, 1)
    assert torch.equal(rounded(weight, h, torch.eye(40)[None]), rounded(weight, h, None))


class Summed(nn.Module):
    """What is predicted depends on sums of pairs of the first operator's outputs."""

    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, outputs, bias=False), nn.Linear(outputs // 2, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        logits: Tensor = self.head(2 * torch.tanh(y[..., ::2] + y[..., 1::2]))
        return logits


def data(count: int = 6) -> list[Tensor]:
    mixing = rand(16, 16, seed=77)
    return [rand(8, 32, 16, seed=seed) @ mixing for seed in range(count)]


@graph_pass(stage="quantized")
def looking(gm: GraphModule, context: Context) -> int:
    """Keep what is measured of the outputs."""
    measured = InputHessian(two_sided=True).guidance(context)
    assert measured is not None
    SEEN.update(measured.outputs or {})
    return 0


SEEN: dict[str, Tensor] = {}


@on_devices
@pytest.mark.parametrize("size", [8, 4])
def test_what_goes_together_is_measured(size: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Gradients of a pair are equal, so is what is measured of it, but for the identity that is added."""
    monkeypatch.setattr(guidance, "_TOGETHER", size)
    SEEN.clear()
    batches = [x.to(device) for x in data()]
    config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(looking,))
    quantize(seeded(Summed()).to(device), config, batches)
    (outputs,) = SEEN.values()
    assert outputs.shape == (8 // size, size, size)
    torch.testing.assert_close(outputs, outputs.mT)
    assert float(outputs.diagonal(dim1=-2, dim2=-1).mean()) == pytest.approx(1)
    for run in outputs:
        for pair in range(0, size, 2):
            own = run[pair, pair] - 0.5
            assert own > 0.1
            torch.testing.assert_close(run[pair, pair + 1], own)
            torch.testing.assert_close(run[pair + 1, pair + 1], own + 0.5)


def divergence(model: nn.Module, qmodel: Any) -> float:
    x = torch.cat(data(12)[8:])
    with torch.no_grad():
        expected, found = model(x).log_softmax(-1), qmodel(x).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_predictions_are_nearer_to_those_of_the_float_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "_ROWS", 1)  # pairs would be rounded together
    model = seeded(Summed(32))
    losses = dict[bool, float]()
    for two_sided in (False, True):
        config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(GPTQ(two_sided=two_sided),))
        qmodel = quantize(model, config, data(8))
        losses[two_sided] = divergence(model, qmodel)
        (change,) = record_of(qmodel, "GPTQ").changes
        assert change.changed
        assert "one-sided" not in change.what
    assert losses[True] < 0.85 * losses[False]


def test_a_proposal_is_judged_on_both_sides() -> None:
    """What the report has is the error by which it was chosen."""
    before = dict[bool, float]()
    for two_sided in (False, True):
        config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(GPTQ(two_sided=two_sided),))
        (change,) = record_of(quantize(seeded(Summed(32)), config, data(8)), "GPTQ").changes
        assert change.before is not None
        before[two_sided] = change.before
    assert before[True] != pytest.approx(before[False], rel=1e-3)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda y: (y * (y > 0)).abs().sqrt(), "its gradient is not finite"),
        (lambda y: torch.argsort(y, -1).float(), "no prediction depends on it"),
    ],
    ids=["not finite", "zero"],
)
def test_operators_without_a_gradient_say_that_they_are_rounded_as_without(end: Any, why: str) -> None:
    class Ended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 7)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(end(self.first(x)))
            return logits

    config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(GPTQ(two_sided=True),))
    (change,) = record_of(quantize(seeded(Ended()), config, data()), "GPTQ").changes
    assert change.changed
    assert change.what.endswith(f"one-sided: {why}")


def test_what_no_gradient_passes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = list[bool](), guidance.Guidance.measure.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, gm: GraphModule, context: Context, *, outputs: bool) -> Any:
        measured.append(outputs)
        return measure(cls, gm, context, outputs=outputs)

    monkeypatch.setattr(guidance.Guidance, "measure", classmethod(counted))
    monkeypatch.setattr(BackWalk, "backward", _blocked)
    config = QuantConfig(weight=WEIGHT, input=None, passes=(GPTQ(two_sided=True),))
    changes = record_of(quantize(seeded(Summed(32)), config, data(8)), "GPTQ").changes
    assert measured == [True]
    assert len(changes) == 2
    assert all(change.what.endswith("one-sided: nothing passes") for change in changes)
    quantize(seeded(Summed(32)), config.replace(passes=(GPTQ(guided=True), GPTQ(two_sided=True))), data(8))
    assert measured == [True, False, True]


def _blocked(*_: Any) -> Any:
    raise NoGradientError("nothing passes")


@on_devices
def test_rows_count_by_their_direction_alone(device: torch.device) -> None:
    """However large or small their gradients are; what is 0 in float32 when squared counts less."""
    rows = torch.tensor([[3e8, 4e8], [-3e-9, 4e-9], [3e-23, 4e-23], [0, 0]], device=device, dtype=torch.float32)
    sums = torch.zeros(1, 2, 2, device=device)
    guidance._add_together(sums, rows)
    expected = torch.tensor([[[0.72, 0.0], [0.0, 1.28]]], device=device)
    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=0)


def test_channels_of_convolutions_are_their_second_dimension() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            logits: Tensor = self.head((y[:, ::2] + y[:, 1::2]).mean((2, 3)))
            return logits

    SEEN.clear()
    config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(looking,))
    quantize(seeded(Image()), config, [rand(16, 3, 9, 7, seed=i) for i in range(3)])
    (outputs,) = SEEN.values()
    assert outputs.shape == (1, 8, 8)
    torch.testing.assert_close(outputs[0, 0, 1], outputs[0, 0, 0] - 0.5)


@pytest.mark.parametrize("symmetry", ["asymmetric", "symmetric"])
def test_codes_and_zero_points_are_those_of_their_rows(symmetry: str) -> None:
    """At 8 bits what is stored is near the weight, whatever the order of rows; and a moved target is judged."""
    model: Any = seeded(Summed(32))
    with torch.no_grad():
        model.first.weight += torch.linspace(-3, 3, 32)[:, None]
        model.first.weight *= torch.logspace(-1, 1, 32)[torch.randperm(32)][:, None]
    weight = TensorSpec(format=INT8, granularity=Granularity.CHANNEL, symmetry=symmetry)  # type: ignore[arg-type]
    config = QuantConfig(weight=weight, input=None, exclude=("head",), passes=(GPTQ(two_sided=True, asymmetry=0.5),))
    qmodel = quantize(model, config, data())
    (change,) = record_of(qmodel, "GPTQ").changes
    assert change.changed
    assert change.after is not None
    assert change.after < 1e-3
    with torch.no_grad():
        eager: Any = qmodel.eager()
        found, real = eager.first.weight.detach(), model.first.weight.detach()
    assert float(((found - real).norm(dim=1) / real.norm(dim=1)).max()) < 0.03


def test_memory_for_the_outputs_is_predicted() -> None:
    sizes = Matrices(groups=1, outputs=3072, inputs=64, itemsize=4, rows=8)
    assert together_bytes(sizes) == 4 * 3072 * 1024
    one, two = GPTQ().working_bytes(sizes), GPTQ(two_sided=True).working_bytes(sizes)
    assert two - one >= 2 * together_bytes(sizes)


def test_the_error_is_the_distance_to_the_target_on_both_sides() -> None:
    seen = list[tuple[float, ...]]()

    @solver
    @dataclass(frozen=True, kw_only=True)
    class AskingForErrors(Solver):
        """Asks for errors, and changes nothing."""

        @property
        def reads(self) -> InputHessian:
            return InputHessian(two_sided=True)

        def solve(self, weight: QuantizedMatrix, seen_: Hessian) -> Skip:
            value, target = weight.grid().value(weight.codes.float()), weight.real + 0.1 * weight.real.flip(-1)
            assert weight.outputs is not None
            expected = form(weight.outputs[0], (value - target)[0], seen_.h[0]) / form(
                weight.outputs[0], target[0], seen_.h[0]
            )
            errors = (weight.error(value, seen_.h), weight.error(target, seen_.h), expected)
            seen.append(tuple(float(error) for error in errors))
            return Skip("only asked")

    config = QuantConfig(weight=WEIGHT, input=None, exclude=("head",), passes=(AskingForErrors(),))
    quantize(seeded(Summed(32)), config, data())
    ((none, found, expected),) = seen
    assert none == 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_operators_of_several_matrices_say_that_they_are_rounded_as_without() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 16, 5)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(GPTQ(two_sided=True),))
    conv, linear = record_of(quantize(model, config, [rand(64, 8, 6, 6, seed=i) for i in range(3)]), "GPTQ").changes
    assert "one-sided: it has several matrices" in conv.what
    assert "one-sided" not in linear.what


def test_what_moves_scales_of_rows_by_themselves_is_refused() -> None:
    with pytest.raises(qfx.ConfigError, match=r"two_sided=True of GPTQ needs static_groups=True"):
        GPTQ(two_sided=True, static_groups=False)


@pytest.mark.parametrize(
    ("model", "swept"),
    [(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.Flatten()), True), (nn.Sequential(nn.Linear(8, 16)), False)],
    ids=["groups", "one matrix"],
)
def test_sweeps_are_for_operators_of_several_matrices(model: nn.Sequential, swept: bool) -> None:
    """Rows that make up for each other keep what they were rounded to; the others are swept as without."""
    mixed, shape = rand(8, 8, seed=9) @ torch.diag(torch.logspace(0, -1, 8)), (64, 6, 6, 8) if swept else (64, 8)
    batches = [(rand(*shape, seed=i) @ mixed).movedim(-1, 1) for i in range(3)]

    def codes(**options: Any) -> Tensor:
        config = QuantConfig(weight=TensorSpec(format=INT3), input=None, passes=(GPTQ(guided=True, **options),))
        stored = stored_tensors(quantize(seeded(model), config, batches).graph_module)
        return next(t for name, t in stored.items() if name.endswith("weight_codes"))

    both = codes(two_sided=True, sweeps=3)
    assert torch.equal(both, codes(two_sided=True)) is not swept
    assert torch.equal(both, codes(sweeps=3)) is swept
