"""Rewrites to the arithmetic of a DPU: what each computes, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import build
from tiny import calls, quantize, rand
from torch import Tensor
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.graph.pass_manager import GraphPass, run_passes
from quark_fx.passes import (
    SplitLargePools,
    harden_sigmoids,
    pool_means,
    slice_splits,
    spell_out_swish,
    use_dpu_averages,
    use_dpu_clips,
    use_dpu_hard_sigmoids,
    use_dpu_slopes,
    use_dpu_softmax,
)
from quark_fx.presets import INT8_STATIC, XINT8
from quark_fx.vendors.amd.passes.average import nearest_shift, square_factor

Function = Callable[[Tensor], Any]
X = rand(2, 3, 12, 12)


def rewritten(function: Function, *passes: GraphPass, x: Tensor = X, **options: Any) -> tuple[GraphModule, list[int]]:
    """Return the graph of a function after some passes, and how often each rewrote."""
    graph = qfx.capture_graph(build(lambda m, x: function(x)), x, **options).module
    after, records = run_passes(graph, passes, verify_inputs=(x,))
    return after, [record.rewrites for record in records]


def names(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in calls(gm, "aten.")]


EXACT: dict[str, tuple[GraphPass, Function, list[str]]] = {
    "a mean over height and width": (
        pool_means,
        lambda x: x.mean((2, 3), keepdim=True),
        ["aten.adaptive_avg_pool2d.default"],
    ),
    "a mean over width and height, without them": (
        pool_means,
        lambda x: x.mean((-1, -2)),
        ["aten.adaptive_avg_pool2d.default", "aten.squeeze.dims"],
    ),
    "a large pool": (
        SplitLargePools(largest=100),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        ["aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"],
    ),
    "a split": (
        slice_splits,
        lambda x: [part.relu() for part in x.split((1, 2), dim=1)],
        ["aten.slice.Tensor", "aten.slice.Tensor", "aten.relu.default", "aten.relu.default"],
    ),
    "a chunk of which one part is read": (slice_splits, lambda x: x.chunk(5, -1)[3], ["aten.slice.Tensor"]),
    "a hard swish": (spell_out_swish, F.hardswish, ["aten.hardsigmoid.default", "aten.mul.Tensor"]),
    "a swish": (spell_out_swish, F.silu, ["aten.sigmoid.default", "aten.mul.Tensor"]),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_rewrites_are_exact(case: str) -> None:
    rewrite, function, after = EXACT[case]
    for x in (X, X * 50):
        gm, counts = rewritten(function, rewrite, x=x)
        assert counts == [1]
        assert names(gm) == after
        expected = function(x)
        for got, wanted in zip(gm(x), expected if isinstance(expected, list) else [expected], strict=True):
            # A reordered sum of 144 values, or another order of the same three operations.
            torch.testing.assert_close(
                got, wanted, rtol=0, atol=16 * torch.finfo(torch.float32).eps * float(x.abs().max())
            )


LEFT: dict[str, tuple[GraphPass, Function]] = {
    "a mean over channels": (pool_means, lambda x: x.mean((1, 2))),
    "a mean over rows of matrices": (pool_means, lambda x: x.flatten(2).mean((1, 2))),
    "a mean in another type": (pool_means, lambda x: x.mean((2, 3), dtype=torch.float64)),
    "a pool that is small enough": (SplitLargePools(largest=144), lambda x: F.adaptive_avg_pool2d(x, 1)),
    "a pool to several values": (SplitLargePools(largest=1), lambda x: F.adaptive_avg_pool2d(x, 3)),
    "a prime pool": (SplitLargePools(largest=100), lambda x: F.adaptive_avg_pool2d(x[:, :, :11, :11], 1)),
    "a pool that is too large in two parts": (SplitLargePools(largest=8), lambda x: F.adaptive_avg_pool2d(x, 1)),
    "a pool whose factor is 1": (use_dpu_averages, lambda x: F.avg_pool2d(x, 2)),
    "a pool that is not square": (use_dpu_averages, lambda x: F.avg_pool2d(x, (3, 2))),
    "a pool with another divisor": (use_dpu_averages, lambda x: F.avg_pool2d(x, 3, divisor_override=5)),
    "a pool to several values of one kernel": (use_dpu_averages, lambda x: F.adaptive_avg_pool2d(x, 3)),
    "a slope of 26/256": (use_dpu_slopes, lambda x: F.leaky_relu(x, 26 / 256)),
    "a relu": (use_dpu_slopes, F.relu),
    "a relu, for clips": (use_dpu_clips, F.relu),
    "a relu6": (use_dpu_clips, F.relu6),
    "a clip to integers": (use_dpu_clips, lambda x: x.clamp(-3, 127)),
    "a clip to tensors": (use_dpu_clips, lambda x: x.clamp(x.mean() - 0.5, x.mean() + 0.5)),
    "a sigmoid, where hard ones are meant": (use_dpu_hard_sigmoids, torch.sigmoid),
    "a tanh": (harden_sigmoids, torch.tanh),
    "a gelu": (spell_out_swish, F.gelu),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    rewrite, function = LEFT[case]
    before = names(rewritten(function)[0])
    gm, counts = rewritten(function, rewrite)
    assert counts == [0]
    assert names(gm) == before


def test_a_pool_over_sizes_that_vary_is_left() -> None:
    free = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    passes = (SplitLargePools(largest=1), use_dpu_averages)
    assert rewritten(lambda x: F.adaptive_avg_pool2d(x, 1), *passes, dynamic_shapes=free)[1] == [0, 0]


@pytest.mark.parametrize(
    ("side", "factor"),
    [
        *((1, 1), (2, 1), (3, 63 / 64), (4, 1), (5, 250 / 256), (6, 252 / 256), (7, 1029 / 1024), (14, 4116 / 4096)),
        *((8, 1), (10, 100 * 41 / 4096), (256, 1), (300, 1)),
    ],
)
def test_the_factor_of_a_square_pool(side: int, factor: float) -> None:
    assert square_factor(side) == factor


@given(count=st.integers(1, 4000))
@settings(max_examples=200, deadline=None)
def test_a_reciprocal_is_the_nearest_that_shifts_can_do(count: int) -> None:
    shifts = range(7 + math.ceil(math.log2(count)))
    errors = [abs(Fraction(round(Fraction(2**n, count)), 2**n) - Fraction(1, count)) for n in shifts]
    assert abs(Fraction(nearest_shift(count)) / count - Fraction(1, count)) <= min(errors) + Fraction(1, 2**60)


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda x: F.avg_pool2d(x, 3), 63 / 64),
        (lambda x: F.avg_pool2d(x, 7, stride=1, padding=2), 1029 / 1024),
        (lambda x: F.adaptive_avg_pool2d(x, 1), nearest_shift(144)),
        (lambda x: x.mean(1), nearest_shift(3)),
    ],
)
def test_averages_are_multiplied(function: Function, factor: float) -> None:
    gm, counts = rewritten(function, use_dpu_averages, use_dpu_averages)
    assert counts == [1, 0]  # once, however often it is asked for
    torch.testing.assert_close(gm(X)[0], function(X) * factor, rtol=0, atol=0)


def noted(function: Function, rewrite: GraphPass, **options: Any) -> list[tuple[str, bool]]:
    """Return what a pass notes about a function of the output of a convolution."""
    model = build(lambda m, x: function(m.a(x)), a=torch.nn.Conv2d(3, 4, 1))
    config = INT8_STATIC.replace(passes=(rewrite,))
    return [(c.what, c.changed) for c in quantize(model, config, [X], **options).report().passes[0].changes]


FREE = {"dynamic_shapes": ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)}
REASONS: dict[str, tuple[Function, GraphPass, dict[str, Any], str]] = {
    "not square": (lambda x: F.avg_pool2d(x, (3, 2)), use_dpu_averages, {}, "its kernel of 3×2 is not square"),
    "exact": (lambda x: F.avg_pool2d(x, 2), use_dpu_averages, {}, "the DPU averages it exactly"),
    "divisor": (
        lambda x: F.avg_pool2d(x, 3, divisor_override=5), use_dpu_averages, {}, "it divides 3×3 values by 5",
    ),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 5), use_dpu_averages, {}, "an adaptive pool to several values"),
    "one dimension": (lambda x: F.avg_pool1d(x.flatten(2), 3), use_dpu_averages, {}, "a pool over one dimension"),
    "global, not square": (
        lambda x: F.adaptive_avg_pool2d(x[..., :7], 1), use_dpu_averages, {}, "its kernel of 12×7 is not square",
    ),
    "size of a pool": (lambda x: F.adaptive_avg_pool2d(x, 1), use_dpu_averages, FREE, "the size varies"),
    "size of a mean": (lambda x: x.mean((2, 3)), use_dpu_averages, FREE, "the size varies"),
    "mean, exact": (lambda x: x.mean(1), use_dpu_averages, {}, "the DPU averages it exactly"),
    "large, sizes vary": (
        lambda x: F.adaptive_avg_pool2d(x, 1), SplitLargePools(largest=9), FREE, "a pool over sizes that vary",
    ),
    "large, prime": (
        lambda x: F.adaptive_avg_pool2d(x[..., :11, :7], 1), SplitLargePools(largest=9), {},
        "pool 11×7, whose sides cannot be divided",
    ),
    "large twice": (
        lambda x: F.adaptive_avg_pool2d(x, 1), SplitLargePools(largest=9), {},
        "pool 12×12: 4×4 values remain after windows of 3×3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_pools_that_stay_say_why(case: str) -> None:
    function, rewrite, options, reason = REASONS[case]
    assert noted(function, rewrite, **options) == [(f"skipped: {reason}", False)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, stride=2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, divisor_override=9),
    ],
)
def test_pools_over_the_border_have_the_factor_of_their_kernel(function: Function) -> None:
    gm, counts = rewritten(function, use_dpu_averages)
    assert counts == [1]
    torch.testing.assert_close(gm(X)[0], function(X) * (63 / 64), rtol=0, atol=0)


def test_a_pool_of_exact_sums_is_that_of_the_device() -> None:
    """`sum * 7 / 2**6`, which is what the shifter computes, up to the rounding of two float products."""
    codes = torch.randint(-128, 128, (1, 1, 12, 12), generator=torch.Generator().manual_seed(0)).float()
    gm, _ = rewritten(lambda x: F.avg_pool2d(x, 3), use_dpu_averages, x=codes)
    torch.testing.assert_close(gm(codes)[0], F.avg_pool2d(codes, 3, divisor_override=1) * 7 / 64, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize(("slope", "rounded"), [(0.1, 26 / 256), (0.01, 3 / 256), (0.2, 51 / 256), (0.3, 77 / 256)])
def test_slopes_have_8_bits(slope: float, rounded: float) -> None:
    gm, counts = rewritten(lambda x: F.leaky_relu(x, slope), use_dpu_slopes)
    assert counts == [1]
    torch.testing.assert_close(gm(X)[0], F.leaky_relu(X, rounded), rtol=0, atol=0)


def test_the_default_slope_counts_too() -> None:
    gm, counts = rewritten(F.leaky_relu, use_dpu_slopes)
    assert counts == [1]
    torch.testing.assert_close(gm(X)[0], F.leaky_relu(X, 3 / 256), rtol=0, atol=0)


def test_a_sigmoid_becomes_lines() -> None:
    x = torch.linspace(-8, 8, 100_001)
    gm, counts = rewritten(torch.sigmoid, harden_sigmoids, x=x)
    assert counts == [1]
    assert torch.equal(gm(x)[0], F.hardsigmoid(x))
    gap = (gm(x)[0] - x.sigmoid()).abs()
    assert float(gap.max()) == pytest.approx(0.0692, abs=1e-4)
    assert abs(float(x[gap.argmax()])) == pytest.approx(1.317, abs=0.001)


def test_a_hard_sigmoid_has_a_sixth_of_14_bits() -> None:
    gm, counts = rewritten(F.hardsigmoid, use_dpu_hard_sigmoids, use_dpu_hard_sigmoids)
    assert counts == [1, 0]
    torch.testing.assert_close(gm(X)[0], F.hardsigmoid(X) * (2731 / 16384 * 6), rtol=0, atol=0)


def test_the_factor_of_the_user_stays() -> None:
    gm, counts = rewritten(lambda x: torch.mul(F.hardsigmoid(x), 2.0), use_dpu_hard_sigmoids)
    assert counts == [1]
    torch.testing.assert_close(gm(X)[0], F.hardsigmoid(X) * (2731 / 16384 * 6) * 2, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (lambda x: x.clamp(-0.4, 6.4), 0, 6),
        (lambda x: (x * 100).clamp(-0.6, 500), -1, 127),
        (lambda x: (x * 100).clamp(min=-1.5), -2, 127),
        (lambda x: (x * 100).clamp(max=2.5), -128, 2),
        (lambda x: F.hardtanh(x * 3, -2.2, 2.7), -2, 3),
        (lambda x: (x * 100).clamp(0.0, math.inf), 0, 127),
        (lambda x: (x * 100).clamp(-math.inf, 2.5), -128, 2),
    ],
)
def test_bounds_of_clips_are_integers_of_8_bits(function: Function, low: int, high: int) -> None:
    gm, counts = rewritten(function, use_dpu_clips, use_dpu_clips)
    assert counts == [1, 0]
    clips = calls(gm, "aten.clamp")
    assert [clip.args[1:] for clip in clips] == [(low, high)]
    out = gm(X * 10)[0]
    assert (float(out.min()), float(out.max())) == (low, high)


def softmax_of_a_dpu(x: Tensor, dim: int) -> Tensor:
    """The chain of `SimulateDPUSoftmax`, on tensors of bfloat16."""
    half = torch.bfloat16
    x = x.to(half)
    whole = torch.floor(x * torch.tensor(1 / math.log(2), dtype=half))
    rest = (x - whole * torch.tensor(math.log(2), dtype=half)).float()
    power = (rest * 0.21875 + 0.486328125).to(half).float()
    power = (rest * power + 1).to(half).float()
    exponential = torch.pow(torch.tensor(2.0, dtype=half), whole) * (rest * power + 1).to(half)
    return (exponential / exponential.float().sum(dim, keepdim=True).to(half)).float()


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_a_softmax_is_a_polynomial_in_bfloat16(dim: int, scale: float) -> None:
    x = X * scale
    gm, counts = rewritten(lambda x: torch.softmax(x, dim), use_dpu_softmax, x=x)
    assert counts == [1]
    torch.testing.assert_close(gm(x)[0], softmax_of_a_dpu(x, dim), rtol=0, atol=0)
    # `n log 2` is off by 2**-8.6 of itself for the constant and 2**-9 for the product; a polynomial and a sum by 2**-7.
    # What moves all exponentials by up to d moves a share p by 2 d p (1 - p) at most, which is d / 2.
    off = float(x.abs().max()) * 2**-7 + 2**-6
    assert float((gm(x)[0] - torch.softmax(x.bfloat16().float(), dim)).abs().max()) < off / 2


def test_a_softmax_of_another_type_is_left() -> None:
    for function in (lambda x: torch.softmax(x, 1, dtype=torch.float64), lambda x: torch.log_softmax(x, 1)):
        assert rewritten(function, use_dpu_softmax)[1] == [0]


def test_clips_and_softmax_run_in_onnx_runtime(tmp_path: Any) -> None:
    layers = {"a": torch.nn.Conv2d(3, 4, 1), "b": torch.nn.Linear(4, 5)}
    model = build(lambda m, x: torch.softmax(m.b(m.a(x).clamp(-0.6, 2.4).mean((2, 3))), 1), **layers)
    config = XINT8.replace(passes=(use_dpu_clips, use_dpu_softmax, *XINT8.passes))
    qmodel = quantize(model, config, [X])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, path, [X]).max_steps == 0
    assert {record.name: record.rewrites for record in qmodel.report().passes}["use_dpu_softmax"] == 1


def test_the_preset_says_what_it_rewrote() -> None:
    """A squeeze-and-excite block, whose pool and gate are the device's."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.leaky_relu(m.a(x), 0.1)
        out: Tensor = m.c(y * F.hardsigmoid(m.b(y.mean((2, 3), keepdim=True))))
        return out

    layers = {"a": torch.nn.Conv2d(3, 4, 1), "b": torch.nn.Conv2d(4, 4, 1), "c": torch.nn.Conv2d(4, 4, 1)}
    report = quantize(build(forward, **layers), XINT8, [X], verify=True).report()
    said = {record.name: [change.what for change in record.changes] for record in report.passes}
    assert all(record.rewrites == sum(c.changed for c in record.changes) for record in report.passes if record.changes)
    assert said["use_dpu_averages"] == [f"multiplied by {nearest_shift(144)}"]
    assert said["use_dpu_slopes"] == ["slope 0.1 → 0.101562"]
    assert said["use_dpu_hard_sigmoids"] == ["multiplied by 1.00012"]
