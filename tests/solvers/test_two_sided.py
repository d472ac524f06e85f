"""Rows that make up for the errors of other rows, by which output channels' errors add up in the end loss."""

from __future__ import annotations

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
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import guidance_of
from quark_fx.graph.pass_manager import graph_pass
from quark_fx.numbers.formats import INT3, INT8
from quark_fx.numbers.grid import Grid
from quark_fx.passes import GPTQ
from quark_fx.solvers import matrix_feedback
from quark_fx.solvers.error_feedback import factor, round_with_feedback

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
        return round_with_feedback(weight[None], own, step)[0]
    return matrix_feedback.round_rows(weight[None], own, step, outputs, torch.float32)[0]


@on_devices
def test_codes_are_those_of_error_feedback_on_all_weights_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The Hessian of a weight in one row is the Kronecker product of both sides."""
    monkeypatch.setattr(matrix_feedback, "_ROWS", 1)
    weight, h, outputs = (t.to(device) for t in (rand(6, 8), correlated(8, 1), correlated(6, 2)))
    found = rounded(weight, h, outputs[None])
    rows = outputs.diagonal().argsort(descending=True, stable=True)
    columns = h.diagonal().argsort(descending=True, stable=True)
    whole = torch.kron(outputs[rows][:, rows], h[columns][:, columns])[None]
    flat = weight[rows][:, columns].reshape(1, 1, -1)
    expected = round_with_feedback(flat, factor(whole, damping=0.0, by_activation=False), grid_of(device, 48))
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
    SEEN.update(guidance_of(context, outputs=True).outputs or {})
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
    monkeypatch.setattr(matrix_feedback, "_ROWS", 1)  # pairs would be rounded together
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


def test_operators_of_several_matrices_say_that_they_are_rounded_as_without() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 16, 5)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(GPTQ(two_sided=True),))
    conv, linear = record_of(quantize(model, config, [rand(64, 8, 6, 6, seed=i) for i in range(3)]), "GPTQ").changes
    assert "one-sided: several matrices, or no gradient" in conv.what
    assert "one-sided" not in linear.what


@pytest.mark.parametrize("options", [{"sweeps": 2}, {"static_groups": False}])
def test_what_moves_rows_by_themselves_is_refused(options: Any) -> None:
    with pytest.raises(qfx.ConfigError, match=r"two_sided=True of GPTQ goes with sweeps=0 and static_groups=True"):
        GPTQ(two_sided=True, **options)
