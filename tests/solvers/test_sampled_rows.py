"""What is measured on some rows, samples or batches is not misled by a pattern in them, such as attention heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

from quark_fx.graph.linear_map import LinearMap
from quark_fx.numbers.sampling import spread_indices
from quark_fx.passes import GPTQ
from quark_fx.passes.awq import _ROWS
from quark_fx.presets import INT4_WEIGHT_ONLY
from quark_fx.solvers.quantized_matrix import QuantizedMatrix, relative_errors
from quark_fx.solvers.solver import Proposal, Solver, solver

INPUTS, OUTPUTS = 32, 2048

PATTERNS: dict[str, tuple[int, slice]] = {
    "first channel of each head of 32": (OUTPUTS, slice(0, None, 32)),
    "last channel of each head of 128": (OUTPUTS, slice(127, None, 128)),
    "every fourth channel": (OUTPUTS, slice(0, None, 4)),
    "heads of 80": (80 * 16, slice(0, None, 80)),
    "first half": (OUTPUTS, slice(0, OUTPUTS // 2)),
}


@solver
@dataclass(frozen=True, kw_only=True)
class RefitSomeRows(Solver):
    """Change the scales of some rows by one factor, and of the others by another one."""

    some: str
    better: float
    worse: float

    def solve(self, weight: QuantizedMatrix, seen: Any) -> Proposal:
        ratio = torch.full((1, weight.real.shape[1], 1), self.worse)
        ratio[:, PATTERNS[self.some][1]] = self.better
        return Proposal(weight.with_scales(ratio).nearest())


def outcome(layer: nn.Linear, *passes: Any) -> tuple[float, str]:
    mix = rand(INPUTS, INPUTS, seed=99) * torch.logspace(-1, 1, INPUTS)  # error feedback needs related inputs
    data = [rand(8, 8, INPUTS, seed=i) @ mix for i in range(4)]
    qmodel = quantize(layer, INT4_WEIGHT_ONLY.replace(exclude=(), passes=passes), data)
    with torch.no_grad():
        exact = layer(data[0])
        error = float((qmodel(data[0]) - exact).square().sum() / exact.square().sum())
    return error, "".join(change.what for record in qmodel.report().passes for change in record.changes)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_change_that_helps_some_rows_and_hurts_more_is_dropped(name: str) -> None:
    layer = seeded(nn.Linear(INPUTS, PATTERNS[name][0], bias=False))
    before, _ = outcome(layer)
    after, what = outcome(layer, RefitSomeRows(some=name, better=0.95, worse=1.5))
    assert what.startswith("skipped: no better on validation data (")
    assert after == before


@pytest.mark.parametrize("name", PATTERNS)
def test_a_change_that_leaves_some_rows_and_helps_the_others_is_kept(name: str) -> None:
    """The rows of the pattern are on the grid, so that they cannot become better."""
    outputs, some = PATTERNS[name]
    layer = seeded(nn.Linear(INPUTS, outputs, bias=False))
    with torch.no_grad():
        rows = layer.weight[some]
        scale = rows.abs().amax(-1, keepdim=True) / 7
        layer.weight[some] = (rows / scale).round() * scale
    before, _ = outcome(layer)
    after, what = outcome(layer, GPTQ())
    assert what.endswith("of the codes")
    assert after < before


def test_one_row_that_becomes_wrong_is_seen() -> None:
    """A few sampled rows of so many would miss it."""

    @solver
    @dataclass(frozen=True, kw_only=True)
    class BreakOneRow(Solver):
        def solve(self, weight: QuantizedMatrix, seen: Any) -> Proposal:
            ratio = torch.full((1, OUTPUTS, 1), 0.95)
            ratio[:, 1234] = 100
            return Proposal(weight.with_scales(ratio).nearest())

    layer = seeded(nn.Linear(INPUTS, OUTPUTS, bias=False))
    with torch.no_grad():
        layer.weight[1234] *= 30
    assert outcome(layer, BreakOneRow())[1].startswith("skipped: no better on validation data (")


def test_the_error_of_many_rows_is_estimated_without_bias() -> None:
    """Rows are independent: their products cancel, so the estimate is close to the sum over all rows."""
    found: list[Tensor] = []

    @solver
    @dataclass(frozen=True, kw_only=True)
    class LookAtError(Solver):
        def solve(self, weight: QuantizedMatrix, seen: Any) -> Proposal:
            lost = weight.grid().value(weight.codes.float()) - weight.real
            noise, signal = (((x @ seen.h) * x).sum() for x in (lost, weight.real))
            found.append(torch.tensor([weight.error(weight.real, seen.h), noise / signal]))
            smaller = weight.with_scales(torch.full((1, weight.real.shape[1], 1), 0.9)).nearest()
            choices = (weight, smaller.with_codes(smaller.codes + 1), smaller)  # the last two have the same scales
            together = relative_errors(choices, weight.real, seen.h)
            assert torch.equal(together, torch.stack([choice.error(weight.real, seen.h) for choice in choices]))
            return Proposal(weight)

    for outputs in (300, OUTPUTS):
        outcome(seeded(nn.Linear(INPUTS, outputs, bias=False)), LookAtError())
    torch.testing.assert_close(found[0][0], found[0][1], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[-1][0], found[-1][1], rtol=0.1, atol=0)


@pytest.mark.parametrize("period", [2, 3, 4, 16, 60, 64, 80, 128])
def test_indices_follow_no_period(period: int) -> None:
    found = spread_indices(4096, _ROWS)
    assert len(found) == _ROWS == len(set(found.tolist()))
    assert (found.diff() > 0).all()
    assert 0 <= int(found[0]) < int(found[-1]) < 4096
    counts = (found % period).bincount(minlength=period)
    # A binomial count is within five standard deviations of its mean.
    assert ((counts - _ROWS / period).abs() <= 5 * (_ROWS / period) ** 0.5).all()
    assert torch.equal(found, spread_indices(4096, _ROWS))
    assert not torch.equal(found, spread_indices(4096, _ROWS, seed=1))


def test_rows_of_a_product_come_from_all_positions_of_a_sequence() -> None:
    x = torch.arange(64.0).expand(128, 64).unsqueeze(-1)
    rows, outputs = LinearMap().rows(x, x, most=128, seed=0)
    assert torch.equal(rows, outputs)
    assert len(rows.unique()) > 32
