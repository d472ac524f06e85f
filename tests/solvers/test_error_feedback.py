"""Rounding with feedback makes the decisions of GPTQ's algorithm in float64, and nothing else."""

from __future__ import annotations

import pytest
import torch
from devices import on_devices
from forked import run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import rand
from torch import Tensor

from quark_fx.errors import CalibrationError
from quark_fx.numbers.grid import Grid
from quark_fx.solvers import error_feedback
from quark_fx.solvers.error_feedback import factor, gptq_round

LIMITS = (-8, 7)


def moment(inputs: int, rows: int, seed: int = 0) -> Tensor:
    """Return `x x'` of correlated rows whose inputs differ in size."""
    x = rand(rows, inputs, seed=seed) @ rand(inputs, inputs, seed=seed + 1)
    x = x * torch.linspace(0.1, 2, inputs)[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    return x.T @ x


def grid_of(weight: Tensor, *, asymmetric: bool = False) -> Grid:
    scale = weight.abs().amax(-1, keepdim=True) / (4 if asymmetric else 7)
    return Grid(scale, torch.full_like(scale, 3.0 if asymmetric else 0.0), LIMITS)


def textbook(weight: Tensor, h: Tensor, grid: Grid, damping: float, by_activation: bool) -> tuple[Tensor, Tensor]:
    """GPTQ as the paper has it, in float64: the Cholesky factor of the inverse, the whole row updated each time.

    Returns the codes, and how far each was from a tie.
    """
    w, h = weight.double().clone(), h.double()
    order = h.diagonal().argsort(descending=True, stable=True) if by_activation else torch.arange(len(h))
    scale, zero = (p.double().expand_as(weight)[:, order] for p in (grid.scale, grid.zero_point))
    w, h = w[:, order], h[order][:, order]
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes, margin = torch.empty_like(w), torch.empty_like(w)
    for i in range(len(h)):
        position = w[:, i] / scale[:, i] + zero[:, i]
        margin[:, i] = (position - position.floor() - 0.5).abs()
        codes[:, i] = position.round().clamp(*grid.limits)
        error = (w[:, i] - (codes[:, i] - zero[:, i]) * scale[:, i]) / upper[i, i]
        w[:, i:] -= error[:, None] * upper[i, i:]
    back = order.argsort()
    return codes[:, back], margin[:, back]


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("inputs", [1, 15, 16, 17, 100, 256])
@on_devices
def test_every_decision_is_that_of_the_algorithm(
    inputs: int, asymmetric: bool, by_activation: bool, device: torch.device
) -> None:
    weight, h = rand(32, inputs), moment(inputs, 3 * inputs + 8)
    grid = grid_of(weight, asymmetric=asymmetric)
    expected, margin = textbook(weight, h, grid, 0.01, by_activation)
    found = factor(h.to(device)[None], damping=0.01, by_activation=by_activation)
    there = Grid(grid.scale.to(device), grid.zero_point.to(device), grid.limits)
    codes = gptq_round(weight.to(device)[None], found, there)[0].cpu()
    # A decision within float32's reach of a tie may fall either way, and what follows it in its row, too.
    clear = margin.amin(1) > 1e-4
    assert clear.float().mean() > 0.2
    assert torch.equal(codes.double()[clear], expected[clear])
    triangle = found.feedback[0] + torch.eye(inputs, device=device)
    product = (triangle * found.pivots[0]) @ triangle.mT
    order = found.order[0]
    damped = h.to(device) + 0.01 * h.diagonal().mean().to(device) * torch.eye(inputs, device=device)
    torch.testing.assert_close(product, damped[order][:, order], rtol=0, atol=inputs * 2**-23 * float(damped.max()))
    assert bool((found.damping == torch.full_like(found.damping, 0.01)).all())


@pytest.mark.parametrize("by_activation", [False, True])
@on_devices
def test_codes_are_the_nearest_to_what_was_made_up_for(by_activation: bool, device: torch.device) -> None:
    weight, h = torch.stack([rand(32, 40), rand(32, 40, seed=5)]).to(device), moment(40, 128).to(device)
    grid, found = grid_of(weight[0].cpu()), factor(torch.stack([h, h]), damping=0.01, by_activation=by_activation)
    there = Grid(grid.scale.to(device), grid.zero_point.to(device), grid.limits)
    codes = gptq_round(weight, found, there)
    wanted = there.position(found.compensated(weight, there.value(codes)))
    clear = (wanted - wanted.floor() - 0.5).abs() > 1e-4
    assert clear.float().mean() > 0.9
    assert torch.equal(there.round(wanted)[clear], codes[clear])
    assert not torch.equal(there.round(there.position(weight)), codes)
    # What is rounded first makes up for nothing.
    first = found.order[:, :1].unsqueeze(1).expand(2, 32, 1)
    torch.testing.assert_close(wanted.gather(-1, first), there.position(weight).gather(-1, first))


def loss(weight: Tensor, codes: Tensor, grid: Grid, h: Tensor) -> float:
    error = weight - grid.value(codes)
    return float(((error @ h) * error).sum())


@given(inputs=st.integers(2, 40), seed=st.integers(0, 1000), by_activation=st.booleans())
@settings(deadline=None, max_examples=30)
def test_the_error_of_an_output_is_bounded_by_the_pivots(inputs: int, seed: int, by_activation: bool) -> None:
    """As in Babai's nearest plane, an input adds at most its pivot times the square of half a step."""
    weight, h = rand(64, inputs, seed=seed), moment(inputs, 200, seed)
    grid = Grid(torch.full((1, 1), 0.3), torch.zeros(1, 1), (-100, 100))
    found = factor(h[None], damping=0.001, by_activation=by_activation)
    codes = gptq_round(weight[None], found, grid)[0]
    damped = h.double() + 0.001 * h.double().diag().mean() * torch.eye(inputs, dtype=torch.float64)
    order = found.order[0]
    pivots = torch.linalg.cholesky(damped[order][:, order].inverse(), upper=True).diag() ** -2
    assert loss(weight, codes, grid, damped.float()) <= 64 * 0.15**2 * float(pivots.sum()) * (1 + 1e-3)
    if inputs >= 8:  # of fewer inputs, rounding to nearest is better now and then
        assert loss(weight, codes, grid, h) <= loss(weight, (weight / 0.3).round(), grid, h)


def test_groups_are_independent() -> None:
    weight, h = rand(3, 8, 20), torch.stack([moment(20, 50, seed) for seed in (0, 5, 9)])
    grid = grid_of(weight)
    together = gptq_round(weight, factor(h, damping=0.01, by_activation=True), grid)
    for i in range(3):
        alone = factor(h[i : i + 1], damping=0.01, by_activation=True)
        one = Grid(grid.scale[i : i + 1], grid.zero_point[i : i + 1], LIMITS)
        assert torch.equal(together[i : i + 1], gptq_round(weight[i : i + 1], alone, one))


def test_chunks_are_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stack some matrices at once, of a large matrix some rows."""
    weight, h = rand(3, 8, 20), torch.stack([moment(20, 50, seed) for seed in (0, 5, 9)])
    found = factor(h, damping=0.01, by_activation=True)
    whole = gptq_round(weight, found, grid_of(weight))
    for most, pieces in ((2 * 8 * 20, 2), (3 * 20, 9), (1, 24)):
        monkeypatch.setattr(error_feedback, "_CHUNK", most)
        assert len(list(error_feedback.chunks(weight))) == pieces
        assert torch.equal(gptq_round(weight, found, grid_of(weight)), whole)


def test_inputs_that_are_never_there_are_rounded_to_nearest() -> None:
    weight, h = rand(16, 24), moment(24, 100)
    dead = [0, 7, 23]
    h[dead] = 0
    h[:, dead] = 0
    grid = grid_of(weight)
    codes = gptq_round(weight[None], factor(h[None], damping=0.01, by_activation=True), grid)[0]
    assert torch.equal(codes[:, dead], (weight / grid.scale).round().clamp(*LIMITS)[:, dead])


def test_without_any_input_all_is_rounded_to_nearest() -> None:
    weight = rand(4, 6)
    grid = grid_of(weight)
    codes = gptq_round(weight[None], factor(torch.zeros(1, 6, 6), damping=0.01, by_activation=True), grid)[0]
    assert torch.equal(codes, (weight / grid.scale).round().clamp(*LIMITS))


def test_fewer_rows_than_inputs_are_enough() -> None:
    found = factor(moment(64, 3)[None], damping=0.01, by_activation=True)
    assert bool(torch.isfinite(found.feedback).all())


def test_damping_that_is_not_enough_is_raised() -> None:
    h = torch.eye(8)
    h[0, 1] = h[1, 0] = -1.5  # indefinite, as sums of rounding errors may be
    found = factor(h[None], damping=0.01, by_activation=False)
    assert bool((found.damping == 1.0).all())


@on_devices
def test_only_the_matrix_of_a_stack_that_needs_it_is_damped_more(device: torch.device) -> None:
    good, bad = torch.eye(4, device=device), torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.3], device=device))
    found = factor(torch.stack([good, bad]), damping=0.01, by_activation=False)
    alone = factor(good[None], damping=0.01, by_activation=False)
    assert found.damping.tolist() == [pytest.approx(0.01), 1.0]
    assert torch.equal(found.pivots[:1], alone.pivots)


def test_what_is_not_finite_or_hopeless_is_refused() -> None:
    with pytest.raises(CalibrationError, match="not finite"):
        factor(torch.full((1, 3, 3), torch.nan), damping=0.01, by_activation=True)
    with pytest.raises(CalibrationError, match="not positive definite"):
        factor(-5 * torch.ones(1, 3, 3) + 6 * torch.eye(3), damping=0.01, by_activation=True)


def test_a_moment_may_lie_in_memory_by_columns() -> None:
    h = torch.stack([moment(20, 50, seed) for seed in (0, 5)])
    by_rows, by_columns = (factor(x, damping=0.01, by_activation=True) for x in (h, h.mT.contiguous().mT))
    assert torch.equal(by_rows.feedback, by_columns.feedback)


@pytest.mark.parametrize("by_activation", [False, True])
def test_solve_divides_by_the_damped_moment(by_activation: bool) -> None:
    h, right = moment(30, 90), rand(1, 7, 30)
    x = factor(h[None], damping=0.01, by_activation=by_activation).solve(right)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(30)
    torch.testing.assert_close(x @ damped, right, rtol=1e-3, atol=1e-3)


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
from quark_fx.numbers.grid import Grid

torch.manual_seed(0)
chosen = error_feedback._block_function
for groups, outputs, inputs in ((1, 40, 100), (3, 33, 64), (2, 5, 7)):
    weight, x = torch.randn(groups, outputs, inputs), torch.randn(groups, 4 * inputs, inputs)
    found = error_feedback.factor(x.mT @ x, damping=0.01, by_activation=True)
    grid = Grid(weight.abs().amax(-1, keepdim=True) / 7, torch.ones(1), (-8, 7))
    plain = error_feedback.gptq_round(weight, found, grid)
    kernel_of = error_feedback_kernel.quantize_block, error_feedback_kernel.COLUMNS
    error_feedback._block_function = lambda like, grid: kernel_of
    kernel = error_feedback.gptq_round(weight, found, grid)
    error_feedback._block_function = chosen
    clear = (plain == kernel).all(-1).float().mean()
    assert clear > 0.95, clear
"""


def test_the_kernel_makes_the_same_decisions() -> None:
    """Triton interprets it on the CPU, in a process of its own: it asks the environment when it is imported."""
    pytest.importorskip("triton")
    done = run_program(INTERPRETED)
    assert done.returncode == 0, done.stderr


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quark_fx.solvers import error_feedback_kernel

kernel = error_feedback_kernel._quantize_block
constants = dict(error_feedback_kernel.OPTIONS)
options = {"enable_fp_fusion": constants.pop("enable_fp_fusion")}
kinds = {"outputs": "i32", "stride": "i32", "count": "i32", **dict.fromkeys(constants, "constexpr")}
kinds |= dict.fromkeys(("wanted", "real", "scale", "zero", "feedback"), "*fp32")
signature = {name: kinds.get(name, "fp32") for name in kernel.arg_names}
source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): value for n, value in constants.items()})
for capability in (80, 90):
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"], capability
    assert "fma.rn" in made.asm["ptx"], capability
"""


def test_the_kernel_is_compiled_for_gpus_that_are_not_here() -> None:
    """The interpreter takes Python that the compiler refuses."""
    pytest.importorskip("triton.backends.nvidia")
    done = run_program(COMPILED)
    assert done.returncode == 0, done.stderr
