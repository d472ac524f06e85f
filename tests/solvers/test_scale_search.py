"""Scales that are fitted to the data: never worse on it than the whole range, and written back where they came from."""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import on_devices
from tiny import quantize, rand
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.formats import INT2, INT4
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import GPTQ
from quark_fx.solvers import scale_search
from quark_fx.solvers.error_feedback import Factor, factor, gptq_round
from quark_fx.solvers.scale_search import RATIOS, _fit_scales_to_feedback, fit_scales


def rounded(weight: Tensor, grid: Grid, ratio: Tensor, block: int) -> Tensor:
    scale = grid.scale.expand_as(weight) * ratio.repeat_interleave(block, -1)[..., : weight.shape[-1]]
    codes = (weight / scale + grid.zero_point).round().clamp(*grid.limits)
    return (codes - grid.zero_point) * scale


@pytest.mark.parametrize(("inputs", "block"), [(64, 16), (70, 16), (300, 128), (300, 300), (16, 1)])
@on_devices
def test_each_block_has_the_best_ratio_of_the_partial_product(
    inputs: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 48
    monkeypatch.setattr(scale_search, "_CHUNK", chunk)  # wide blocks are weighed in several parts
    weight, x = rand(2, 5, inputs).to(device), rand(2, 90, inputs, seed=3).to(device)
    h = x.mT @ x
    grid = Grid(weight.abs().amax(-1, keepdim=True) / 7, torch.zeros(1, device=device), (-8, 7))
    found = fit_scales(weight, h, grid, Columns.in_blocks(inputs, block))
    assert found.shape == (2, 5, -(-inputs // block))
    tried = []
    for ratio in RATIOS:
        lost = rounded(weight, grid, torch.full_like(found, ratio), block) - weight
        # What one block makes of the data, by itself.
        parts = [
            (lost[..., a : min(a + chunk, b)] @ x[..., a : min(a + chunk, b)].mT).square().sum(-1)
            for start in range(0, inputs, block)
            for b in [min(start + block, inputs)]
            for a in range(start, b, chunk)
        ]
        per = -(-block // chunk)
        tried.append(torch.stack([sum(parts[i : i + per], torch.zeros(())) for i in range(0, len(parts), per)], -1))
    best = torch.tensor(RATIOS, device=device)[torch.stack(tried).argmin(0)]
    # float32 may order two ratios otherwise that are as good as each other.
    least = torch.stack(tried).amin(0)
    index = (torch.tensor(RATIOS, device=device).reshape(-1, 1, 1, 1) == found).float().argmax(0, keepdim=True)
    assert bool((torch.stack(tried).gather(0, index)[0] <= least * 1.001).all())
    assert float((best == found).float().mean()) > 0.95


@pytest.mark.parametrize(("inputs", "block"), [(64, 16), (70, 16), (300, 300)])
@on_devices
def test_each_block_has_the_ratio_that_feedback_is_expected_to_lose_least_with(
    inputs: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_search, "_AT_ONCE", 3 * inputs)  # a row of each matrix at a time
    weight, x = rand(2, 5, inputs), rand(2, 2 * inputs, inputs, seed=3)
    empty = 0, 1, slice(block, 2 * block)
    weight[empty] = 0.0  # whatever its scale is, it says nothing of them
    grid = Grid(weight.abs().amax(-1, keepdim=True) / 3, torch.zeros(1), (-4, 3))
    found = factor(x.mT @ x, damping=0.01, by_activation=True)
    there = Grid(grid.scale.to(device), grid.zero_point.to(device), grid.limits)
    order, feedback, curvature = (tensor.to(device) for tensor in (found.order, found.feedback, found.pivots))
    moved = Factor(order, feedback, curvature, found.damping)
    got = _fit_scales_to_feedback(weight.to(device), moved, there, Columns.in_blocks(inputs, block)).cpu()

    def lost(w: Tensor, scale: Tensor) -> Tensor:
        return (w / scale).round().clamp(*grid.limits) * scale - w

    spread = torch.zeros(2, 5, inputs, dtype=torch.float64)
    scale, w = grid.scale.double().expand_as(weight), weight.double()
    variance = lost(w, scale).square()
    variance = torch.where(variance > scale.square() / 4, variance, scale.square() / 12)
    variance[empty] = 0.0
    for g in range(2):
        for later, k in enumerate(found.order[g].tolist()):
            for earlier, j in enumerate(found.order[g, :later].tolist()):
                spread[g, :, k] += found.feedback[g, earlier, later].double() ** 2 * variance[g, :, j]
    spread = spread.sqrt()
    counts = torch.zeros(2, inputs).scatter_(1, found.order, found.pivots).double().unsqueeze(1)
    tried = []
    for ratio in RATIOS:
        squares = (share * lost(w + away * spread, scale * ratio).square() for away, share in scale_search._QUADRATURE)
        expected = sum(squares, torch.zeros(())) * counts
        tried.append(torch.stack([part.sum(-1) for part in expected.split(block, -1)], -1))
    index = (torch.tensor(RATIOS).reshape(-1, 1, 1, 1) == got).float().argmax(0, keepdim=True)
    assert got.shape == (2, 5, -(-inputs // block))
    assert bool((torch.stack(tried).gather(0, index)[0] <= torch.stack(tried).amin(0) * 1.001).all())


def test_the_points_that_are_averaged_have_the_moments_of_a_normal_distribution() -> None:
    """Three points can hold the first six: 1, 0, 1, 0, 3, 0."""
    for power, moment in enumerate((1, 0, 1, 0, 3, 0)):
        found = sum(share * away**power for away, share in scale_search._QUADRATURE)
        assert found == pytest.approx(moment, abs=1e-12)


def test_the_whole_range_is_the_first_share_that_is_tried_and_the_others_are_smaller() -> None:
    """Of shares that are as good as each other the first is kept, and fitting never has to lose."""
    assert RATIOS[0] == 1
    assert all(0 < b < a for a, b in itertools.pairwise(RATIOS))


def test_a_group_of_zeros_does_not_keep_the_range_of_others() -> None:
    weight, x = rand(1, 32, 64), rand(256, 64, seed=3)
    weight[..., :16] = 0.0
    found = factor((x.T @ x)[None], damping=0.01, by_activation=True)
    scale = torch.ones(1, 32, 64)
    scale[..., 16:] = weight[..., 16:].abs().unflatten(-1, (3, 16)).amax(-1).repeat_interleave(16, -1) / 3 / 50
    grid, columns = Grid(scale, torch.zeros(1), (-4, 3)), Columns.in_blocks(64, 16)
    ratios = _fit_scales_to_feedback(weight / 50, found, grid, columns)
    assert float((ratios[..., 1:] < 1).float().mean()) > 0.5


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_feedback_keeps_range_that_rounding_to_nearest_gives_away(bits: int) -> None:
    """Measured, of the error with scales fitted to nearest: 0.95, 0.98 and 0.96."""
    weight, x = rand(1, 64, 128), rand(512, 128, seed=3) @ (rand(128, 128, seed=4) + 2 * torch.eye(128))
    h, most = (x.T @ x)[None], 2 ** (bits - 1)
    found = factor(h, damping=0.01, by_activation=True)
    scale = (weight.abs().unflatten(-1, (4, 32)).amax(-1) / most).repeat_interleave(32, -1)

    def error(ratio: Tensor) -> float:
        grid = Grid(scale * ratio.repeat_interleave(32, -1), torch.zeros(1), (-most, most - 1))
        missed = grid.value(gptq_round(weight, found, grid)) - weight
        return float(((missed @ h) * missed).sum())

    grid, columns = Grid(scale, torch.zeros(1), (-most, most - 1)), Columns.in_blocks(128, 32)
    fitted = error(_fit_scales_to_feedback(weight, found, grid, columns))
    assert fitted < 0.99 * error(fit_scales(weight, h, grid, columns))


class Matrices(nn.Module):
    """Matrices in every orientation: linear, transposed, and a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 24)
        self.turned = nn.Parameter(rand(24, 20, seed=4))
        self.stack = nn.Parameter(rand(2, 20, 12, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x)) @ self.turned
        return torch.bmm(torch.stack((y, -y)), self.stack)


GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16)


@pytest.mark.parametrize(
    "weight",
    [
        GROUPS,
        GROUPS.replace(symmetry=Symmetry.ASYMMETRIC),
        GROUPS.replace(symmetry=Symmetry.SIGN_AWARE),
        TensorSpec(format=INT2, granularity=Granularity.CHANNEL, symmetry=Symmetry.SYMMETRIC_FULL),
    ],
    ids=str,
)
def test_scales_are_written_back_in_any_layout(weight: TensorSpec) -> None:
    model, data = Matrices().eval(), [rand(400, 36) @ rand(36, 36, seed=5)]
    config = QuantConfig(weight=weight, target=Target.TORCH)
    plain, fitted = (quantize(model, config.replace(passes=(GPTQ(fit_scales=flag),)), data) for flag in (False, True))
    changes = [c for c in fitted.report().passes[-1].changes if c.before is not None]
    assert len(changes) == 3
    for (name, old), (_, new) in zip(scales(plain), scales(fitted), strict=True):
        assert old.shape == new.shape, name
        distance = (new / old).unsqueeze(-1).sub(torch.tensor(RATIOS)).abs().amin(-1)
        assert float(distance.max()) < 1e-6
        assert not torch.equal(new, old)


def scales(qmodel: qfx.QuantizedModel) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in stored_tensors(qmodel.graph_module).items() if "scale" in name]
