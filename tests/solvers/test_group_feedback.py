"""Scales that are chosen when a group is reached: the decisions of the algorithm in float64, and what is stored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from devices import on_devices
from tiny import quantize, rand
from torch import Tensor, nn

from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.config.block_formats import MXFP4, NVFP4
from quark_fx.graph.nodes import tensor_of
from quark_fx.numbers.formats import INT4
from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Columns, Layout
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import E4M3_SCALES
from quark_fx.observers import Mse
from quark_fx.passes import GPTQ
from quark_fx.passes.gptq import _round_groups
from quark_fx.solvers import error_feedback
from quark_fx.solvers.error_feedback import factor

LIMITS, RATIOS = (-8, 7), (1.0, 1.125, 0.875, 0.75)


def moment(inputs: int, seed: int = 0) -> Tensor:
    """Return `x x'` of correlated rows whose inputs differ in size."""
    x = rand(4 * inputs, inputs, seed=seed) @ rand(inputs, inputs, seed=seed + 1)
    x = x * torch.linspace(0.1, 2, inputs)[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    return x.T @ x


def textbook(
    weight: Tensor, h: Tensor, scale: Tensor, members: Sequence[Tensor], damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ as the paper has it, in float64, a group after the other with each of the ratios.

    Returns the codes, the ratios, and how clear each row's decisions were.
    """
    h = h.double() + damping * h.diagonal().double().mean() * torch.eye(len(h), dtype=torch.float64)
    turns = sorted(range(len(members)), key=lambda g: -float(h.diagonal()[members[g]].sum()))
    order = torch.cat([members[g][h.diagonal()[members[g]].argsort(descending=True)] for g in turns])
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    w, codes, first = weight.double()[:, order], torch.zeros(weight.shape, dtype=torch.float64), 0
    ratio, clear = torch.zeros(len(weight), len(members)), torch.full((len(weight),), torch.inf, dtype=torch.float64)
    for g in turns:
        last, found = first + len(members[g]), []
        for share in RATIOS:
            left, lost, made = w.clone(), torch.zeros(len(weight), dtype=torch.float64), []
            step, margin = scale[:, g].double() * share, torch.full((len(weight),), torch.inf, dtype=torch.float64)
            for i in range(first, last):
                position = left[:, i] / step
                margin = torch.minimum(margin, (position - position.floor() - 0.5).abs())
                made.append(position.round().clamp(*LIMITS))
                error = (left[:, i] - made[-1] * step) / upper[i, i]
                left[:, i:] -= error[:, None] * upper[i, i:]
                lost += error.square()
            found.append((lost, left, torch.stack(made, 1), margin))
        losses = torch.stack([lost for lost, *_ in found])
        best, rows = losses.argmin(0), torch.arange(len(weight))
        two = losses.sort(0).values[:2]
        margins = torch.stack([margin for *_, margin in found])
        clear = torch.minimum(clear, torch.minimum(margins.amin(0), (two[1] - two[0]) / two[1]))
        w = torch.stack([left for _, left, *_ in found])[best, rows]
        codes[:, order[first:last]] = torch.stack([made for _, _, made, _ in found])[best, rows]
        ratio[:, g] = torch.tensor(RATIOS)[best]
        first = last
    return codes, ratio, clear


@pytest.mark.parametrize(("strided", "together"), [(False, 20), (True, 20), (True, 128)])
@on_devices
def test_every_decision_is_that_of_the_algorithm(
    strided: bool, together: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, size = 48, 8
    monkeypatch.setattr(error_feedback, "_CHUNK", together * inputs)  # some rows of a matrix, or both matrices
    numbers = torch.arange(inputs) % (inputs // size) if strided else torch.arange(inputs) // size
    columns = Columns(numbers)
    members = [(numbers == g).nonzero().flatten() for g in range(columns.count)]
    weight, hs = rand(2, 64, inputs), torch.stack([moment(inputs), moment(inputs, 7)])
    scale = torch.stack([weight[..., m].abs().amax(-1) / 7 for m in members], -1)
    free = FreeScales(scale, Layout.of(weight.shape, -1, size))
    found = factor(hs.to(device), damping=0.01, by_activation=True, sharing=columns)
    grid = Grid(scale[..., numbers].to(device), torch.zeros((), device=device), LIMITS)
    codes, ratio = _round_groups(weight.to(device), found, grid, free, columns, RATIOS)
    for i in range(2):
        expected, ratios, clear = textbook(weight[i], hs[i], scale[i], members, 0.01)
        sure = clear > 1e-4
        assert sure.float().mean() > 0.2
        assert torch.equal(codes[i].cpu().double()[sure], expected[sure])
        assert torch.equal(ratio[i].cpu()[sure], ratios[sure])
        assert all(bool((ratios == share).any()) for share in RATIOS)


@pytest.mark.parametrize("by_activation", [False, True])
def test_the_columns_of_a_scale_follow_each_other(by_activation: bool) -> None:
    columns = Columns(torch.arange(24) % 4)
    found = factor(torch.stack([moment(24), moment(24, 5)]), damping=0.01, by_activation=by_activation, sharing=columns)
    for order in found.order:
        assert order.sort().values.equal(torch.arange(24))
        turns = columns.numbers[order].unflatten(0, (4, 6))
        assert bool((turns == turns[:, :1]).all())
        assert by_activation or turns[:, 0].equal(torch.arange(4))


def lost(weight: TensorSpec, solver: GPTQ, inputs: int = 64) -> tuple[float, Tensor, str]:
    """Return the error of a layer whose inputs are correlated, its scales, and what the report says."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(inputs, 48)).eval(), rand(512, inputs, seed=9)
    x = x @ (rand(inputs, inputs, seed=3) + torch.eye(inputs))
    qmodel = quantize(model, QuantConfig(weight=weight, passes=(solver,), target=Target.TORCH), [x])
    with torch.no_grad():
        error = float((qmodel(x) - model(x)).square().sum() / model(x).square().sum())
    return error, tensor_of(qmodel.graph_module, "0.weight_scale"), qmodel.report().passes[-1].changes[0].what


INT4_32 = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32, symmetry=Symmetry.SIGN_AWARE)


def test_scales_chosen_on_the_way_lose_less() -> None:
    spec = NVFP4.replace(observer=Mse())
    plain, fitted, chosen = (
        lost(spec, solver)[0] for solver in (GPTQ(), GPTQ(fit_scales=True), GPTQ(static_groups=False))
    )
    assert chosen < 0.97 * min(plain, fitted)


def test_chosen_scales_can_be_stored() -> None:
    before, after = (lost(NVFP4, GPTQ(static_groups=static))[1] for static in (True, False))
    assert bool((after > before).any())
    assert bool((after < before).any())
    both = torch.cat((before, after))
    assert torch.equal(E4M3_SCALES.quantized(both).dequantize(), both)
    _, after, _ = lost(MXFP4, GPTQ(static_groups=False))
    assert bool((torch.frexp(after)[0] == 0.5).all())
    _, signed, _ = lost(INT4_32, GPTQ(static_groups=False))
    assert bool((signed < 0).any())
    assert bool((signed > 0).any())


def test_scales_of_uneven_groups_stay() -> None:
    for spec, inputs in ((NVFP4, 72), (TensorSpec(format=INT4), 64)):
        (_, before, _), (_, after, said) = (lost(spec, GPTQ(static_groups=s), inputs) for s in (True, False))
        assert torch.equal(before, after)
        assert "groups stay static" in said
