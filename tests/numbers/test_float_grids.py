"""What chooses codes works on small floats as on whole numbers: the solvers one by one, and the passes on a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import on_devices
from forked import run_program
from test_error_feedback import moment
from tiny import quantize, rand, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.config.block_formats import BFP16, MX6, MXFP4, MXFP6_E2M3, MXFP6_E3M2, NVFP4
from quark_fx.config.quant_config import QuantConfig, Target, TensorSpec
from quark_fx.graph.nodes import tensor_of
from quark_fx.numbers.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT32,
    Codebook,
    FloatFormat,
)
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.scales import E4M3_SCALES, E8M0_EVEN
from quark_fx.observers import Mse
from quark_fx.passes import AWQ, GPTQ, AdaQuant, AdaRound, AutoRound, BiasCorrection
from quark_fx.passes.adaround import _SoftRounding
from quark_fx.passes.autoround import _SignRounding
from quark_fx.plan.weights import quantize_tensor
from quark_fx.solvers.error_feedback import _block_function, factor, gptq_round, quantize_block
from quark_fx.solvers.rounding import QuadraticError, round_by_descent
from quark_fx.solvers.scale_search import around, fit_scales
from quark_fx.solvers.starts import Start

FLOATS = (FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2)
floats = pytest.mark.parametrize("fmt", FLOATS, ids=str)


def grid_of(weight: Tensor, fmt: FloatFormat = FP4_E2M1) -> Grid:
    scale = weight.abs().amax(-1, keepdim=True) / fmt.max
    return Grid(scale, torch.zeros_like(scale), (-fmt.max, fmt.max), format=fmt)


# The grid itself.


@on_devices
@floats
def test_neighbors_are_the_next_values(fmt: FloatFormat, device: torch.device) -> None:
    levels = fmt.levels().float().to(device)
    grid = grid_of(torch.ones(1, device=device), fmt)
    assert torch.equal(grid.above(levels)[:-1], levels[1:])
    assert torch.equal(grid.below(levels)[1:], levels[:-1])
    assert float(grid.above(levels)[-1]) > fmt.max
    assert float(grid.below(levels)[0]) < -fmt.max


def test_neighbors_of_whole_numbers_are_one_away() -> None:
    codes = torch.arange(-7.0, 8.0)
    grid = Grid(torch.ones(1), torch.zeros(1), (-7, 7))
    assert torch.equal(grid.above(codes), codes + 1)
    assert torch.equal(grid.below(codes), codes - 1)
    assert torch.equal(grid.step(codes / 3), torch.ones(15))


@floats
def test_positions_within_reach_round_as_before(fmt: FloatFormat) -> None:
    x = (rand(1000) * fmt.max).requires_grad_()
    grid = grid_of(torch.ones(1), fmt)
    moved = grid.within_reach(x)
    assert torch.equal(grid.round(moved), grid.round(x))
    (gradient,) = torch.autograd.grad(moved.sum(), x)
    last = float(fmt.levels()[-1] - fmt.levels()[-2])
    assert torch.equal(gradient == 0, x.abs() > fmt.max + last / 2)
    assert x.abs().max() > fmt.max + last


# The solvers.


@on_devices
@pytest.mark.parametrize("by_activation", [False, True])
@floats
def test_every_decision_is_that_of_the_algorithm(fmt: FloatFormat, by_activation: bool, device: torch.device) -> None:
    weight, h = rand(32, 100), moment(100, 308)
    grid = grid_of(weight, fmt)
    expected = reference(weight, h, grid, by_activation)
    found = factor(h.to(device)[None], damping=0.01, by_activation=by_activation)
    there = Grid(grid.scale.to(device), grid.zero_point.to(device), grid.limits, format=fmt)
    codes = gptq_round(weight.to(device)[None], found, there)[0].cpu()
    assert torch.isin(codes.double(), fmt.levels()).all()
    # One decision within float32's reach of a tie turns what follows it in its row.
    same = (codes.double() == expected).all(1).float().mean()
    assert same > (0.9 if fmt.bits < 8 else 0.5)


def reference(weight: Tensor, h: Tensor, grid: Grid, by_activation: bool) -> Tensor:
    """Return the codes of the paper's algorithm in float64, with the nearest of the format's values."""
    assert grid.format is not None
    levels = grid.format.levels()

    w, h = weight.double().clone(), h.double()
    order = h.diagonal().argsort(descending=True, stable=True) if by_activation else torch.arange(len(h))
    scale = grid.scale.double().expand_as(weight)[:, order]
    w, h = w[:, order], h[order][:, order]
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes = torch.empty_like(w)
    for i in range(len(h)):
        position = w[:, i] / scale[:, i]
        codes[:, i] = levels[(position[:, None] - levels).abs().argmin(1)]
        error = (w[:, i] - codes[:, i] * scale[:, i]) / upper[i, i]
        w[:, i:] -= error[:, None] * upper[i, i:]
    return codes[:, order.argsort()]


def test_the_kernel_rounds_only_to_what_it_computes() -> None:
    kernel = pytest.importorskip("quark_fx.solvers.error_feedback_kernel", exc_type=ImportError)
    gpu: Any = SimpleNamespace(is_cuda=True)
    one, zero = torch.ones(1), torch.zeros(1)
    for fmt, limits in ((INT4, (-8, 7)), (INT32, (0, 255)), (FP4_E2M1, FP4_E2M1.limits)):
        assert _block_function(gpu, Grid(one, zero, limits, format=fmt))[0] is kernel.quantize_block
    for wide in (Codebook("table", (-1.0, 0.0, 1.0)), INT32):
        assert _block_function(gpu, Grid(one, zero, wide.limits, format=wide))[0] is quantize_block


INTERPRETED = """
import os
import sys

import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may have done
for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
    del sys.modules[name]
torch.set_num_threads(1)
from quark_fx.solvers import error_feedback
from quark_fx.solvers import error_feedback_kernel
from quark_fx.numbers.formats import FORMATS
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns

torch.manual_seed(0)
chosen = error_feedback._block_function
for name in ("fp4_e2m1", "fp8_e4m3"):
    fmt = FORMATS[name]
    weight, x = torch.randn(2, 9, 66), torch.randn(2, 280, 66)
    found = error_feedback.factor(x.mT @ x, damping=0.01, by_activation=True)
    scale = weight.abs().amax(-1, keepdim=True) / fmt.max
    grid = Grid(scale, torch.zeros(1), (-fmt.max, fmt.max), format=fmt)
    plain = error_feedback.gptq_round(weight, found, grid)
    kernel_of = error_feedback_kernel.quantize_block, error_feedback_kernel.COLUMNS
    error_feedback._block_function = lambda like, grid: kernel_of
    kernel = error_feedback.gptq_round(weight, found, grid)
    error_feedback._block_function = chosen
    assert torch.isin(kernel.double(), fmt.levels()).all()
    same = (plain == kernel).all(-1).float().mean()
    assert same > 0.9, (name, same)
"""


def test_the_kernel_makes_the_same_decisions() -> None:
    pytest.importorskip("triton")
    done = run_program(INTERPRETED)
    assert done.returncode == 0, done.stderr


@on_devices
@floats
def test_descent_stays_on_the_grid_and_lowers_the_error(fmt: FloatFormat, device: torch.device) -> None:
    weight, mixing = rand(1, 12, 24), rand(24, 24, seed=3)
    x = rand(1, 24, 300, seed=4).mT.matmul(mixing).mT.to(device)
    weight = weight.to(device)
    error, grid = QuadraticError.of(x, weight @ x), grid_of(weight, fmt)
    codes = round_by_descent(weight, error, grid)
    assert torch.isin(codes.double().cpu(), fmt.levels()).all()
    nearest = grid.round(grid.position(weight))
    assert float(error(grid.value(codes))) < 0.7 * float(error(grid.value(nearest)))


@on_devices
def test_scales_of_floats_are_searched_with_their_own_rounding(device: torch.device) -> None:
    weight, h = rand(1, 5, 32).to(device), moment(32, 100).to(device)[None]
    grid = grid_of(weight.unflatten(-1, (2, 16)))
    scale = grid.scale.expand(1, 5, 2, 16).flatten(2)
    there = Grid(scale, torch.zeros_like(scale), grid.limits, format=FP4_E2M1)
    tried = around(NVFP4.scheme)
    found = fit_scales(weight, h, there, Columns.in_blocks(32, 16), tried=tried)
    levels = FP4_E2M1.levels().float().to(device)
    for row in range(5):
        for block in range(2):
            part = slice(16 * block, 16 * block + 16)
            w, step = weight[0, row, part], scale[0, row, 16 * block]
            errors = []
            for ratio in tried:
                lost = levels[(w[:, None] / (step * ratio) - levels).abs().argmin(1)] * step * ratio - w
                errors.append(float(lost @ h[0, part, part] @ lost))
            assert float(found[0, row, block]) == pytest.approx(tried[errors.index(min(errors))])


def test_a_scale_that_may_not_be_stored_is_not_chosen() -> None:
    """Of powers of two only the scale itself and its half are tried, so what is found is the better of these."""
    weight, h = rand(1, 40, 16), moment(16, 100)[None]
    grid = Grid(torch.full((1, 40, 1), 0.5), torch.zeros(1), (-6.0, 6.0), format=FP4_E2M1)
    found = fit_scales(weight, h, grid, Columns.in_blocks(weight.shape[-1], 16), E8M0_EVEN.nearest)
    lost = [weight - g.value(g.round(g.position(weight))) for g in (grid, replace(grid, scale=grid.scale / 2))]
    whole, half = (torch.linalg.vecdot(error @ h, error) for error in lost)
    assert torch.equal(found[..., 0] == 0.5, half < whole)
    assert torch.equal(found[..., 0] == 1.0, half >= whole)
    assert 0 < int((half < whole).sum()) < 40


@floats
def test_a_soft_code_begins_at_the_float_weight_and_ends_at_a_neighbor(fmt: FloatFormat) -> None:
    weight = rand(200) * fmt.max / 4
    grid = replace(grid_of(torch.ones(1), fmt), scale=torch.ones(1))
    start = grid.round(weight)
    soft = _SoftRounding(grid, weight, start, AdaRound(softness=1.0))
    inside = (weight - start).abs().clamp(min=fmt.max * 1e-6) > grid.step(start) / 50
    inside &= (weight - start).abs() < (grid.above(start) - start).minimum(start - grid.below(start)) * 0.49
    torch.testing.assert_close(soft.weight()[inside], weight[inside], rtol=1e-4, atol=0)
    assert inside.float().mean() > 0.7
    assert torch.equal(soft.codes(), start)
    with torch.no_grad():
        soft.parameter.neg_()
    other = torch.where(weight < start, grid.below(start), grid.above(start)).clamp(*grid.limits)
    assert torch.equal(soft.codes()[inside], other[inside])


@floats
def test_an_offset_of_half_a_step_reaches_the_neighbor(fmt: FloatFormat) -> None:
    # Between two codes of one binade, where half a step is half a step on either side.
    codes = fmt.levels().float()
    codes = codes[(codes > 0) & (codes < fmt.max)]
    grid = replace(grid_of(torch.ones(1), fmt), scale=torch.ones(1))
    weight = codes + grid.step(codes) / 4
    rounding = _SignRounding(grid, weight, grid.round(weight), AutoRound())
    assert torch.equal(rounding.codes(), codes)
    with torch.no_grad():
        rounding.offset.fill_(0.5)
    assert torch.equal(rounding.codes(), grid.above(codes))


# The passes.


class Mlp(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]


def weights_only(spec: TensorSpec, *passes: Any) -> QuantConfig:
    return QuantConfig(weight=spec, passes=passes, target=Target.TORCH)


def rows(count: int, seed: int) -> Tensor:
    """Rows whose inputs are correlated, which is what there is to gain from."""
    mix = rand(48, 48, seed=5) / 7
    return rand(count, 48, seed=seed) @ mix.T @ mix


def data() -> list[Tensor]:
    return [rows(64, seed) for seed in range(10, 18)]


def lost(config: QuantConfig, model: nn.Module) -> tuple[float, qfx.QuantizedModel]:
    """Return the relative squared error on unseen data, and the quantized model."""
    qmodel, unseen = quantize(model, config, data()), rows(512, 99)
    with torch.no_grad():
        real, made = model(unseen), qmodel(unseen)
    return float((real - made).square().sum() / real.square().sum()), qmodel


def on_grid(qmodel: qfx.QuantizedModel, spec: TensorSpec) -> None:
    for name in ("first", "second"):
        codes = tensor_of(qmodel.graph_module, f"{name}.weight_codes")
        assert codes.dtype == spec.format.dtype
        if isinstance(spec.format, FloatFormat):
            assert torch.isin(codes.double(), spec.format.levels()).all()


LEARNERS: dict[str, tuple[Sequence[Any], float]] = {
    "GPTQ": ((GPTQ(),), 0.8),
    "GPTQ with scales": ((GPTQ(fit_scales=True),), 0.8),
    "AdaRound": ((AdaRound(iterations=30),), 0.6),
    "AdaRound from nearest": ((AdaRound(start=Start.CODES, softness=1.0, iterations=200, learning_rate=0.03),), 0.9),
    "AdaQuant": ((AdaQuant(iterations=30),), 0.6),
    "AutoRound": ((AutoRound(iterations=30),), 0.6),
    "AutoRound from nearest": ((AutoRound(start=Start.CODES, iterations=60),), 0.9),
}


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("spec", [MXFP4, NVFP4, MXFP6_E3M2], ids=str)
def test_what_learns_beats_rounding_to_nearest(spec: TensorSpec, learner: str) -> None:
    passes, share = LEARNERS[learner]
    model = seeded(Mlp())
    nearest, _ = lost(weights_only(spec), model)
    learned, qmodel = lost(weights_only(spec, *passes), model)
    on_grid(qmodel, spec)
    assert learned < share * nearest
    changed = [c for c in qmodel.report().passes[-1].changes if c.changed]
    assert {c.name for c in changed} == {"first", "second"}


@pytest.mark.parametrize("spec", [MXFP6_E2M3, BFP16, MX6], ids=str)
def test_formats_of_more_bits_gain_too(spec: TensorSpec) -> None:
    model = seeded(Mlp())
    nearest, _ = lost(weights_only(spec), model)
    learned, qmodel = lost(weights_only(spec, GPTQ()), model)
    on_grid(qmodel, spec)
    assert learned < nearest


def test_fitted_scales_keep_their_kind() -> None:
    model = seeded(Mlp())
    plain, fitted = (lost(weights_only(NVFP4, GPTQ(fit_scales=fit)), model)[1] for fit in (False, True))
    for name in ("first", "second"):
        before, after = (tensor_of(q.graph_module, f"{name}.weight_scale") for q in (plain, fitted))
        assert not torch.equal(before, after)
        both = torch.cat((before, after))
        assert torch.equal(E4M3_SCALES.quantized(both).dequantize(), both)
    _, qmodel = lost(weights_only(MXFP4, GPTQ(fit_scales=True)), model)
    for name in ("first", "second"):
        mantissa, _ = torch.frexp(tensor_of(qmodel.graph_module, f"{name}.weight_scale"))
        assert (mantissa == 0.5).all()


def test_a_pass_says_which_scales_it_may_not_change() -> None:
    model = seeded(Mlp())
    _, found = lost(weights_only(MX6, GPTQ(fit_scales=True)), model)
    assert all("scales kept" in c.what for c in found.report().passes[-1].changes)
    for spec in (MX6, MXFP4):
        _, found = lost(weights_only(spec, AutoRound(iterations=5)), model)
        assert all(("scales kept" in c.what) == (spec is MX6) for c in found.report().passes[-1].changes)
    _, found = lost(weights_only(TensorSpec(format=INT4), GPTQ(fit_scales=True)), model)
    assert all("scales kept" in c.what for c in found.report().passes[-1].changes)


@pytest.mark.parametrize("spec", [MXFP4, NVFP4], ids=str)
def test_observers_search_scales_of_their_kind(spec: TensorSpec) -> None:
    weight = rand(64, 96)
    nearest, searched = (quantize_tensor(weight, s) for s in (spec, spec.replace(observer=Mse())))
    assert searched.sqnr(weight) > nearest.sqnr(weight)
    if spec is NVFP4:
        E4M3_SCALES.quantized(torch.cat((nearest.scale, searched.scale)))
    else:
        assert (torch.frexp(searched.scale)[0] == 0.5).all()


class Normed(nn.Module):
    """A norm that can absorb scales, with channels of very different size behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(48), nn.Linear(48, 32)
        with torch.no_grad():
            self.norm.weight.copy_(torch.logspace(-1.5, 1.5, 48)[torch.randperm(48)])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("spec", "share"), [(MXFP4, 0.95), (NVFP4, 0.8)], ids=str)
def test_awq_helps_floats(spec: TensorSpec, share: float) -> None:
    torch.manual_seed(7)
    model = Normed().eval()
    nearest, _ = lost(weights_only(spec), model)
    scaled, _ = lost(weights_only(spec, AWQ()), model)
    assert scaled < share * nearest


def test_biases_of_float_weights_are_corrected() -> None:
    model = seeded(Mlp())
    batches = [batch + 2 for batch in data()]
    qmodel = quantize(model, weights_only(MXFP4, BiasCorrection()), batches)
    changes = qmodel.report().passes[-1].changes
    assert {c.name for c in changes} == {"first", "second"}
    assert any(c.changed for c in changes)


def test_activations_in_blocks_do_not_stop_what_learns() -> None:
    """Gradients pass through scales that are measured, and GPTQ sees what they leave."""
    model = seeded(Mlp())
    config = QuantConfig(weight=MXFP4, input=MXFP4.replace(dynamic=True), target=Target.TORCH)
    nearest, _ = lost(config, model)
    for learner in (GPTQ(), AdaRound(iterations=30), AdaQuant(iterations=30, scale_rate=0.0)):
        assert lost(config.replace(passes=(learner,)), model)[0] < nearest
