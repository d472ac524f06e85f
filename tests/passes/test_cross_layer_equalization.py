"""Equalization evens ranges out and keeps the function; absorbing high biases keeps it where ReLUs let it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import on_devices
from networks import MobileNet, ResidualCnn
from tiny import calls, quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import parameter, stored_tensors
from quark_fx.graph.pass_manager import Change, copy_graph, pass_from_dict, pass_name, pass_to_dict, run_passes
from quark_fx.passes import AbsorbHighBias, CrossLayerEqualization, fold_batch_norm
from quark_fx.presets import INT8_STATIC
from quark_fx.rescale.scale_sites import apply_scale, find_scale_sites
from quark_fx.rescale.scale_walk import Absorption


def folded(model: nn.Module, x: Tensor) -> GraphModule:
    gm, _ = run_passes(qfx.capture_graph(model.eval(), x).module, [fold_batch_norm])
    return gm


def equalized(gm: GraphModule, x: Tensor, p: CrossLayerEqualization | None = None) -> tuple[GraphModule, int]:
    """Equalize a copy, hold it to its promise on `x`, and return it with the number of rewrites."""
    gm, (record,) = run_passes(gm, [p or CrossLayerEqualization()], verify_inputs=(x,))
    return gm, record.rewrites


def largest(gm: GraphModule, absorbers: tuple[Absorption, ...], channels: int) -> Tensor:
    """Return the largest magnitude of a site's weights per component."""
    found = torch.zeros(channels)
    for absorber in absorbers:
        weight = parameter(gm, absorber.parameter).detach().abs()
        if weight.dim() > 1:
            labels = absorber.labels.expand(weight.shape)
            found = found.scatter_reduce(0, labels[labels >= 0], weight[labels >= 0], "amax")
    return found


NETWORKS: dict[str, tuple[nn.Module, Tensor]] = {
    "relu": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)), rand(2, 1, 8, 8)),
    "depthwise": (
        nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU6(), nn.Conv2d(4, 3, 1)),
        rand(2, 1, 8, 8),
    ),
    "linear": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), rand(2, 5)),
    "transposed": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Conv2d(6, 3, 1)),
        rand(2, 1, 8, 8),
    ),
    "residual": (ResidualCnn(8), rand(2, 1, 8, 8)),
    "MobileNet": (MobileNet(), rand(2, 1, 8, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_reach_as_far_where_they_are_made_as_where_they_are_read(name: str) -> None:
    model, x = NETWORKS[name]
    gm = folded(seeded(model), x)
    before = find_scale_sites(gm).sites
    gm, rewrites = equalized(gm, x, CrossLayerEqualization(tolerance=1e-3, rounds=100))
    after = find_scale_sites(gm).sites
    assert rewrites == len(after) == len(before) > 0
    for site in after:
        made, read = (largest(gm, side, site.channels) for side in (site.producers, site.consumers))
        assert (made > 0).all()
        # The last round changes a scale by 0.1 %, a range by that twice, once for each of its two sides.
        torch.testing.assert_close(made, read, rtol=5e-3, atol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_how_ranges_were_spread_before_makes_no_difference(name: str) -> None:
    model, x = NETWORKS[name]
    gm = folded(seeded(model), x)
    uneven = copy_graph(gm)
    generator = torch.Generator().manual_seed(0)
    for site in find_scale_sites(uneven).sites:
        apply_scale(uneven, site, 10 ** (2 * torch.rand(site.channels, generator=generator) - 1))
    p = CrossLayerEqualization(tolerance=1e-5, rounds=500)
    even, uneven = equalized(gm, x, p)[0], equalized(uneven, x, p)[0]
    names = {str(node.target): node for node in even.graph.nodes if node.op == "get_attr"}
    weights = [name for name in names if name.endswith("weight")]
    assert weights
    for weight in weights:
        torch.testing.assert_close(stored_tensors(uneven)[weight], stored_tensors(even)[weight], rtol=1e-2, atol=1e-6)


def test_one_round_is_the_published_formula() -> None:
    model = seeded(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    x = rand(4, 2)
    gm, rewrites = equalized(folded(model, x), x, CrossLayerEqualization(rounds=1))
    assert rewrites == 1
    first, second = model.get_parameter("0.weight"), model.get_parameter("2.weight")
    scale = (first.abs().amax(1) / second.abs().amax(0)).sqrt()
    after = stored_tensors(gm)
    torch.testing.assert_close(after["0.weight"], first / scale[:, None])
    torch.testing.assert_close(after["0.bias"], model.get_parameter("0.bias") / scale)
    torch.testing.assert_close(after["2.weight"], second * scale)
    torch.testing.assert_close(after["2.bias"], model.get_parameter("2.bias"), rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["0.weight", "2.weight"])
def test_a_channel_without_a_range_is_left_alone(where: str, value: float) -> None:
    model = seeded(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    with torch.no_grad():
        weight = model.get_parameter(where)
        (weight if where == "0.weight" else weight.T)[1] = value
    gm = folded(model, rand(4, 2))
    after = copy_graph(gm)
    assert CrossLayerEqualization()(after) == 1
    before, now = stored_tensors(gm), stored_tensors(after)
    for name, axis in (("0.weight", 0), ("2.weight", 1)):
        torch.testing.assert_close(
            now[name].select(axis, 1), before[name].select(axis, 1), rtol=0, atol=0, equal_nan=True
        )
        assert not torch.equal(now[name].select(axis, 0), before[name].select(axis, 0))


def test_scalar_bounds_can_be_kept() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)))
    x = 20 * rand(2, 3, 4, 4)
    gm = folded(model, x)
    kept, rewrites = equalized(gm, x, CrossLayerEqualization(keep_scalar_bounds=True))
    assert rewrites == 1
    assert not calls(kept, "aten.clamp.Tensor")
    free, rewrites = equalized(gm, x)
    assert rewrites == 2
    assert len(calls(free, "aten.clamp.Tensor")) == 1


class Normed(nn.Module):
    """Only a norm, an embedding and a vector make what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.scale = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.gelu(self.a(self.table(ids)))
        return self.c(self.scale * torch.sigmoid(self.b(self.norm(x))))  # type: ignore[no-any-return]


def test_what_no_weight_makes_is_left_alone() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    gm = qfx.capture_graph(seeded(Normed()).eval(), ids).module  # the vector would be folded into what reads it
    assert len(find_scale_sites(gm).sites) == 3
    assert equalized(gm, ids)[1] == 0


def test_the_model_is_left_as_it_was() -> None:
    model = seeded(MobileNet())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = rand(2, 1, 8, 8)
    gm = folded(model, x)
    shared = {name: value.clone() for name, value in stored_tensors(gm).items()}
    equalized(gm, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, shared[name]) for name, value in stored_tensors(gm).items())


def test_half_precision_stays_half() -> None:
    model = seeded(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))).half()
    x = rand(2, 5).half()
    gm, rewrites = equalized(folded(model, x), x)
    assert rewrites == 1
    assert {value.dtype for value in stored_tensors(gm).values()} == {torch.float16}


@on_devices
def test_weights_stay_on_their_device(device: torch.device) -> None:
    model = seeded(MobileNet()).to(device)
    x = rand(2, 1, 8, 8).to(device)
    gm, rewrites = equalized(folded(model, x), x)
    assert rewrites > 0
    assert {value.device.type for value in stored_tensors(gm).values()} == {device.type}


def test_a_second_run_finds_nothing_to_do_worth_more_than_its_tolerance() -> None:
    model, x = seeded(ResidualCnn(8)), rand(2, 1, 8, 8)
    p = CrossLayerEqualization(tolerance=1e-3, rounds=200)
    once, _ = equalized(folded(model, x), x, p)
    twice, _ = equalized(once, x, p)
    for name, value in stored_tensors(once).items():
        torch.testing.assert_close(stored_tensors(twice)[name], value, rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    "p", [CrossLayerEqualization(rounds=3, keep_scalar_bounds=True), AbsorbHighBias(deviations=2.0)]
)
def test_passes_are_values(p: Any) -> None:
    assert pass_from_dict(pass_to_dict(p)) == p


def high_bias(second: nn.Module, between: nn.Module | None = None, *, beta: float = 5.0) -> nn.Sequential:
    """Return a convolution whose norm has a mean of `beta`, a deviation of 1, and what reads it."""
    layers = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *([between] if between is not None else []), second]
    model = seeded(nn.Sequential(*layers))
    with torch.no_grad():
        model.get_parameter("1.bias").copy_(beta + torch.tensor([0.0, 0.5, 1.0, -beta]))
        model.get_parameter("1.weight").copy_(torch.tensor([1.0, -1.0, 0.5, 1.0]))
    return model


SHIFT = torch.tensor([2.0, 2.5, 4.5, 0.0])
"""What is taken from the biases of `high_bias` under a ReLU: mean less three deviations."""


def absorbed(gm: GraphModule) -> tuple[GraphModule, int]:
    gm, (record,) = run_passes(gm, [AbsorbHighBias()])
    return gm, record.rewrites


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_high_bias_goes_through_a_relu_that_does_not_cut_it(groups: int, bias: bool) -> None:
    model = high_bias(nn.Conv2d(4, 8, 3, groups=groups, bias=bias), nn.ReLU())
    x = 0.3 * rand(2, 3, 6, 6)
    norm: Any = model[1]
    with torch.no_grad():
        value = model[0](x)
        norm.running_mean.copy_(value.mean((0, 2, 3)))
        norm.running_var.copy_(4 * value.var((0, 2, 3)))
        value = model[:2](x)
    assert (value.amin((0, 2, 3)) >= SHIFT).logical_or(SHIFT == 0).all(), "the data is as the norm says"
    gm = folded(model, x)
    after, rewrites = absorbed(gm)
    assert rewrites == 1
    torch.testing.assert_close(stored_tensors(gm)["0.bias"] - stored_tensors(after)["0.bias"], SHIFT)
    torch.testing.assert_close(after(x)[0], gm(x)[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(stored_tensors(after)["3.bias"], torch.zeros(8))


def test_without_an_activation_the_whole_mean_moves_exactly() -> None:
    model, x = high_bias(nn.Conv2d(4, 8, 3)), 30 * rand(2, 3, 6, 6)
    gm = folded(model, x)
    after, rewrites = absorbed(gm)
    assert rewrites == 1
    before = stored_tensors(gm)["0.bias"]
    torch.testing.assert_close(before - stored_tensors(after)["0.bias"], model.get_parameter("1.bias"))
    torch.testing.assert_close(after(x)[0], gm(x)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        high_bias(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
        high_bias(nn.Conv2d(4, 8, 3, padding="same"), nn.ReLU()),
        high_bias(nn.Conv2d(4, 8, 3), nn.ReLU6()),
        high_bias(nn.Conv2d(4, 8, 3), nn.ReLU(), beta=0.4),
        high_bias(nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3)),
    ],
    ids=["padding", "string padding", "relu6", "low bias", "no consumer", "no norm"],
)
def test_a_bias_stays_where_it_is(model: nn.Module) -> None:
    x = rand(2, 3, 6, 6)
    gm = folded(model, x)
    after, rewrites = absorbed(gm)
    assert rewrites == 0
    torch.testing.assert_close(after(x)[0], gm(x)[0], rtol=0, atol=0)


def test_a_value_with_a_second_reader_keeps_its_bias() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = high_bias(nn.Conv2d(4, 4, 1), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[:3](x)
            return x + self.layers[3](x)  # type: ignore[no-any-return]

    assert absorbed(folded(Twice(), rand(2, 3, 6, 6)))[1] == 0


def test_linear_operators_absorb_too() -> None:
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5)))
    with torch.no_grad():
        model.get_parameter("1.bias").fill_(50.0)
        model.get_buffer("1.running_var").fill_(100.0)
    x = rand(6, 3)
    gm = folded(model, x)
    after, rewrites = absorbed(gm)
    assert rewrites == 1
    torch.testing.assert_close(after(x)[0], gm(x)[0], rtol=1e-4, atol=1e-4)
    assert stored_tensors(after)["0.bias"].abs().max() < stored_tensors(gm)["0.bias"].abs().max()


def test_biases_are_absorbed_as_equalization_left_them() -> None:
    model, x = high_bias(nn.Conv2d(4, 8, 3), nn.ReLU()), rand(2, 3, 6, 6)
    gm, _ = equalized(folded(model, x), x)
    beta, gamma = calls(gm, "aten.conv2d")[0].meta["batch_norm"]
    after, rewrites = absorbed(gm)
    assert rewrites == 1
    expected = (beta - 3 * gamma).clamp(min=0)
    torch.testing.assert_close(stored_tensors(gm)["0.bias"] - stored_tensors(after)["0.bias"], expected)
    # Equalization divided the channels, so their means are no longer those of the norm.
    assert not torch.allclose(expected, SHIFT)
    original, _ = absorbed(folded(model, x))
    torch.testing.assert_close(after(x)[0], original(x)[0], rtol=1e-4, atol=1e-4)


# What is said about it.


def noted(model: nn.Module, x: Tensor, *passes: Any) -> dict[str, Change]:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, *passes))
    record = record_of(quantize(model, config, [x]), pass_name(passes[-1]))
    return {change.name: change for change in record.changes}


@pytest.mark.parametrize(
    ("second", "between", "what"),
    [
        (nn.Conv2d(4, 8, 3), nn.ReLU(), "lowered by up to 4.5"),
        (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            "skipped: %conv2d_1 pads with zeros",
        ),
        (
            nn.Conv2d(4, 8, 3),
            nn.ReLU6(),
            "skipped: it is read by aten.hardtanh.default (%hardtanh), which cannot absorb a bias",
        ),
        (
            nn.MaxPool2d(2),
            nn.ReLU(),
            "skipped: it is read by aten.max_pool2d.default (%max_pool2d), which cannot absorb a bias",
        ),
    ],
)
def test_every_operator_says_what_became_of_its_bias(second: nn.Module, between: nn.Module, what: str) -> None:
    rows = noted(high_bias(second, between), rand(2, 3, 6, 6), AbsorbHighBias())
    assert rows["0"].what.startswith(what)
    assert rows["0"].changed == what.startswith("lowered")
    if isinstance(second, nn.Conv2d):
        assert rows["3"].what == "skipped: no batch norm was folded into it"


def test_a_low_mean_is_said_to_be_low() -> None:
    rows = noted(high_bias(nn.Conv2d(4, 8, 3), nn.ReLU(), beta=0.4), rand(2, 3, 6, 6), AbsorbHighBias())
    assert rows["0"].what == "skipped: its mean is too close to the ReLU's threshold"


def test_what_takes_part_in_a_site_that_is_left_is_named() -> None:
    rows = noted(seeded(Normed()), torch.tensor([[1, 2, 3], [4, 5, 6]]), CrossLayerEqualization())
    assert "skipped: aten.layer_norm.default (%layer_norm) uses these channels" in rows["b"].what
    assert "skipped: aten.embedding.default (%embedding) uses these channels" in rows["a"].what
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 3, 1)))
    rows = noted(model, rand(2, 3, 4, 4), CrossLayerEqualization(keep_scalar_bounds=True))
    assert rows["2"].what == "skipped: the bounds of %hardtanh stay scalar (keep_scalar_bounds)"


@pytest.mark.parametrize(
    "build",
    [
        lambda: CrossLayerEqualization(rounds=0),
        lambda: CrossLayerEqualization(rounds=1.5),  # type: ignore[arg-type]
        lambda: CrossLayerEqualization(tolerance=0.0),
        lambda: CrossLayerEqualization(tolerance=float("nan")),
        lambda: CrossLayerEqualization(tolerance=float("inf")),
        lambda: AbsorbHighBias(deviations=-1.0),
        lambda: AbsorbHighBias(deviations=float("nan")),
        lambda: AbsorbHighBias(deviations=float("inf")),
    ],
)
def test_options_out_of_range_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError):
        build()
