"""Every site that is found leaves the function as it is, and every operator without one says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import all_but, calls, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from zoo import SIMILAR, ZOO, Net, capture, difference, double_inputs, folded, in_double, outputs

from quark_fx.graph.nodes import parameter, stored_tensors, target_name
from quark_fx.graph.operators import operator_row
from quark_fx.graph.pass_manager import copy_graph, run_passes
from quark_fx.passes import fold_batch_norm, fold_constants
from quark_fx.rescale.scale_rules import RULES
from quark_fx.rescale.scale_sites import ScaleSite, apply_scale, find_scale_sites
from quark_fx.rescale.scale_walk import Absorption

ROUNDING = 1e-9
"""Of the largest output, for float64: scales span twelve decades, and a few thousand roundings add up."""


def drawn(site: ScaleSite, generator: torch.Generator) -> Tensor:
    """Return scales from 1/4 to 4, a few of them a million times larger or smaller."""
    size = (site.channels,)
    scale = 4 ** (torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1)
    chance = torch.rand(size, generator=generator)
    return torch.where(chance < 0.02, scale * 1e6, torch.where(chance > 0.98, scale * 1e-6, scale))


def rescaled(gm: GraphModule, *, explicit: bool = False) -> GraphModule:
    """Return a copy with all of its sites at random scales."""
    gm = copy_graph(gm)
    generator = torch.Generator().manual_seed(0)
    for site in find_scale_sites(gm, explicit=explicit).sites:
        apply_scale(gm, site, drawn(site, generator))
    gm.graph.lint()
    gm.recompile()
    return gm


def assert_sites_are_exact(gm: GraphModule, batch: Any, other: Any = None) -> None:
    """Require that sites, the scalings that multiply at run time among them or not, do not change the outputs.

    Args:
        gm: a graph in float64.
        batch: what it was captured with.
        other: a batch of other sizes.
    """
    batches = [double_inputs(b) for b in (batch, other) if b is not None]
    for explicit in (False, True):
        changed = rescaled(gm, explicit=explicit)
        for inputs in batches:
            if not difference(outputs(gm, inputs), outputs(changed, inputs)) < ROUNDING:
                pytest.fail(f"site {first_wrong_site(gm, inputs, explicit=explicit)} changes the outputs")


def first_wrong_site(gm: GraphModule, inputs: Any, *, explicit: bool) -> int | None:
    """Return the index of the first site that changes the outputs."""
    expected, stepwise = outputs(gm, inputs), copy_graph(gm)
    generator = torch.Generator().manual_seed(1)
    for index, site in enumerate(find_scale_sites(stepwise, explicit=explicit).sites):
        apply_scale(stepwise, site, drawn(site, generator))
        stepwise.recompile()
        if not difference(expected, outputs(stepwise, inputs)) < ROUNDING:
            return index
    return None


@pytest.mark.parametrize("name", all_but(ZOO, SIMILAR))
def test_an_architecture_keeps_its_function_at_every_site(name: str) -> None:
    case, (gm, _) = ZOO[name], folded(name)
    analysis = find_scale_sites(gm)
    readers = [n for n in gm.graph.nodes if (row := operator_row(n)) and row.weight is not None and row.activations]
    scaled = {found.reader for site in analysis.sites for found in site.inputs}
    assert len(scaled) == case.scaled
    assert len(readers) == case.operators
    assert set(readers) - scaled == set(analysis.reasons), "an operator is in a site or has a reason"
    assert_sites_are_exact(gm, *case.batches)


def conv(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **options)


def sites_of(model: nn.Module, x: Tensor) -> tuple[GraphModule, tuple[ScaleSite, ...]]:
    """Capture, require that the sites are exact, and return them."""
    gm = in_double(capture(seeded(model), x))
    assert_sites_are_exact(gm, x)
    return gm, find_scale_sites(gm).sites


def shown(absorbers: Sequence[Absorption]) -> dict[str, list[int]]:
    """Return the labels of each parameter, in its order of elements."""
    return {str(a.parameter.target): a.labels.flatten().tolist() for a in absorbers}


def reasons_of(gm: GraphModule) -> dict[str, str]:
    """Return why an operator has no site, by its weight."""
    found = {}
    for node, reason in find_scale_sites(gm).reasons.items():
        row = operator_row(node)
        assert row is not None
        assert row.weight is not None
        found[str(node.args[row.weight]).removesuffix("_weight")] = reason
    return found


X = rand(2, 3, 6, 6)


def test_relu6_gets_a_bound_per_channel() -> None:
    model = nn.Sequential(conv(3, 4, 3), nn.ReLU6(), conv(4, 2))
    gm, (site,) = sites_of(model, 50 * X)
    assert site.channels == 4
    assert shown(site.producers) == {"0.weight": [0, 1, 2, 3], "0.bias": [0, 1, 2, 3]}
    assert shown(site.consumers) == {"2.weight": [0, 1, 2, 3]}
    assert [a.labels.shape for a in (*site.producers, *site.consumers)] == [(4, 1, 1, 1), (4,), (1, 4, 1, 1)]
    ((clamp, labels),) = site.bounds
    assert labels.shape == (1, 4, 1, 1)
    assert float((outputs(gm, [50 * X.double()])[0]).abs().max()) > 0
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    apply_scale(gm, site, scale)
    assert target_name(clamp) == "aten.clamp.Tensor"
    low, high = (parameter(gm, bound) for bound in clamp.args[1:])  # type: ignore[arg-type]
    assert torch.equal(low, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(high.flatten(), 6 / scale, rtol=0, atol=0)
    gm.recompile()
    assert_sites_are_exact(gm, 50 * X)


def test_a_depthwise_convolution_is_both_sides_channel_by_channel() -> None:
    model = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 8, 3, groups=4), nn.ReLU(), conv(8, 2))
    _, (first, second) = sites_of(model, X)
    assert shown(first.consumers) == {"2.weight": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert shown(second.producers) == {"2.weight": list(range(8)), "2.bias": list(range(8))}


def test_columns_of_a_grouped_convolution_have_their_group_s_channels() -> None:
    model = nn.Sequential(conv(3, 4), conv(4, 6, groups=2), conv(6, 2))
    _, (first, _) = sites_of(model, X)
    assert first.consumers[0].labels.shape == (6, 2, 1, 1)
    assert shown(first.consumers) == {"1.weight": [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]}


def test_a_grouped_transposed_convolution_is_read_and_made_by_groups() -> None:
    model = nn.Sequential(conv(3, 4), nn.ConvTranspose2d(4, 6, 2, groups=2), conv(6, 2))
    _, (first, second) = sites_of(model, X)
    assert shown(first.consumers) == {"1.weight": [0, 1, 2, 3]}
    assert second.producers[0].labels.shape == (4, 3, 1, 1)
    assert shown(second.producers)["1.weight"] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]


def test_a_residual_addition_ties_what_it_adds() -> None:
    layers = {"a": conv(3, 4), "b": conv(4, 4), "c": conv(4, 4), "head": conv(4, 2)}

    def wiring(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x))
        x = x + m.b(x)
        return m.head(F.relu(x + m.c(x)))  # type: ignore[no-any-return]

    _, (site,) = sites_of(Net(wiring, **layers), X)
    assert site.channels == 4
    assert [a.parameter.target for a in site.consumers] == ["b.weight", "c.weight", "head.weight"]
    assert {str(a.parameter.target) for a in site.producers} == {f"{n}.{p}" for n in "abc" for p in ("weight", "bias")}


def test_a_concatenation_keeps_its_parts_apart() -> None:
    net = Net(lambda m, x: m.c(torch.cat([m.a(x), F.relu(m.b(x))], 1)), a=conv(3, 2), b=conv(3, 3), c=conv(5, 2))
    _, (site,) = sites_of(net, X)
    assert site.channels == 5
    made = shown(site.producers)
    assert (made["a.weight"], made["b.weight"]) == ([0, 1], [2, 3, 4])


def test_a_value_whose_largest_rows_are_returned_is_not_scaled() -> None:
    layers = {"a": nn.Linear(5, 4), "b": nn.Linear(4, 3)}
    net = Net(lambda m, x: (m.b(y := F.relu(m.a(x))), y.amax(0)), **layers)
    _, sites = sites_of(net, rand(3, 5))  # of the result, each channel is one element
    assert not sites


def test_the_part_of_a_concatenation_that_cannot_be_scaled_is_left_out() -> None:
    net = Net(lambda m, x: m.c(torch.cat([m.a(x), torch.sigmoid(m.b(x))], 1)), a=conv(3, 2), b=conv(3, 3), c=conv(5, 2))
    _, (site,) = sites_of(net, X)
    assert shown(site.producers) == {"a.weight": [0, 1], "a.bias": [0, 1]}
    assert shown(site.consumers) == {"c.weight": [0, 1, -1, -1, -1]}
    assert site.inputs[0].labels.tolist() == [0, 1, -1, -1, -1]


def test_a_flattened_image_has_a_component_per_channel() -> None:
    model = nn.Sequential(conv(3, 2), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 3))
    _, (site,) = sites_of(model, X)
    assert site.channels == 2
    assert shown(site.consumers) == {"4.weight": [0] * 4 + [1] * 4}


def attention(m: Any, x: Tensor, share: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    """Two heads of keys and values, four of queries, three wide."""
    heads = [layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (m.q, m.k, m.v)]
    values = F.scaled_dot_product_attention(heads[0], share(heads[1]), share(heads[2]), **options)
    return m.out(values.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (lambda x: x, {"enable_gqa": True}),
        (lambda x: x.repeat_interleave(2, 1), {}),
        (lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, x.shape[2], 3), {}),
    ],
    ids=["enable_gqa", "repeat_interleave", "expand"],
)
def test_heads_that_share_a_value_share_its_scales(share: Any, options: Any) -> None:
    layers = {"q": nn.Linear(5, 12), "k": nn.Linear(5, 6), "v": nn.Linear(5, 6), "out": nn.Linear(12, 4)}
    net = Net(lambda m, x: attention(m, x, share, **options), **layers)
    _, (site,) = sites_of(net, rand(2, 7, 5))
    assert site.channels == 6
    assert shown(site.producers) == {"v.weight": list(range(6)), "v.bias": list(range(6))}
    assert shown(site.consumers) == {"out.weight": [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]}


def test_of_a_packed_projection_only_the_values_are_scaled() -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).split(4, -1)
        return m.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)  # type: ignore[no-any-return]

    _, (site,) = sites_of(Net(wiring, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)), rand(2, 7, 4))
    assert shown(site.producers)["qkv.weight"] == [-1] * 8 + [0, 1, 2, 3]
    assert shown(site.consumers) == {"out.weight": [0, 1, 2, 3]}


def test_a_gate_is_not_scaled() -> None:
    layers = {"gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}
    for wiring in (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), lambda m, x: m.down(m.up(x) * F.silu(m.gate(x)))):
        _, (site,) = sites_of(Net(wiring, **layers), rand(2, 4))
        assert shown(site.producers) == {"up.weight": list(range(6)), "up.bias": list(range(6))}


def test_of_two_factors_that_could_be_scaled_one_is() -> None:
    layers = {"gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}
    for wiring in (lambda m, x: m.down(F.relu(m.gate(x)) * m.up(x)), lambda m, x: m.down(m.up(x) * F.relu(m.gate(x)))):
        _, (site,) = sites_of(Net(wiring, **layers), rand(2, 4))
        assert shown(site.producers) == {"up.weight": list(range(6)), "up.bias": list(range(6))}


@pytest.mark.parametrize(
    "square",
    [lambda y: y * y, lambda y: y * F.relu(y), lambda y: y**2, lambda y: y * y.mean(-1, keepdim=True)],
    ids=["itself", "its relu", "power", "its mean"],
)
def test_a_product_with_itself_is_not_scaled(square: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda m, x: m.b(square(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 4))
    assert sites_of(net, rand(2, 4))[1] == ()


def test_a_vector_takes_the_difference_between_what_it_reads_and_makes() -> None:
    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3), "c": nn.Linear(6, 3), "scale": nn.Parameter(torch.ones(6))}
    net = Net(lambda m, x: m.c(m.scale * (y := m.a(x))) + m.b(y), **layers)
    _, sites = sites_of(net, rand(2, 4))
    found = {str(site.inputs[0].reader.args[1]): site for site in sites}
    assert shown(found["c_weight"].producers) == {"scale": list(range(6))}
    assert shown(found["b_weight"].consumers) == {"b.weight": list(range(6)), "scale": list(range(6))}


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(4, bias=False)],
    ids=["layer_norm", "rms_norm", "layer_norm without bias"],
)
def test_a_norm_makes_what_several_operators_read(norm: nn.Module) -> None:
    net = Net(lambda m, x: m.q(y := m.norm(x)) * torch.tanh(m.k(y)), norm=norm, q=nn.Linear(4, 3), k=nn.Linear(4, 3))
    _, (site,) = sites_of(net, rand(2, 7, 4))
    assert shown(site.producers) == {f"norm.{name}": [0, 1, 2, 3] for name, _ in norm.named_parameters()}
    assert [a.parameter.target for a in site.consumers] == ["q.weight", "k.weight"]


def test_an_embedding_makes_its_columns() -> None:
    net = Net(lambda m, x: m.head(m.table(x)), table=nn.Embedding(9, 4), head=nn.Linear(4, 3))
    _, (site,) = sites_of(net, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert shown(site.producers) == {"table.weight": [0, 1, 2, 3]}
    assert site.producers[0].labels.shape == (1, 4)


class Together(nn.Module):
    """Experts in one tensor, as `[experts, in, out]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, 4, 6))
        self.down = nn.Parameter(torch.zeros(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.up) @ self.down


def test_stacked_experts_share_the_scales_of_their_input() -> None:
    _, (site,) = sites_of(Together(), rand(3, 5, 4))
    assert shown(site.producers) == {"up": list(range(6))}
    assert [a.labels.shape for a in (*site.producers, *site.consumers)] == [(1, 1, 6), (1, 6, 1)]


def test_a_weight_is_labelled_as_it_is_stored() -> None:
    net = Net(
        lambda m, x: torch.addmm(m.bias, F.relu(x @ m.a.t()), m.b),
        **{name: nn.Parameter(torch.zeros(shape)) for name, shape in {"a": (6, 4), "b": (6, 3), "bias": (3,)}.items()},
    )
    _, (site,) = sites_of(net, rand(2, 4))
    assert [a.labels.shape for a in (*site.producers, *site.consumers)] == [(6, 1), (6, 1)]


def test_an_operator_without_a_site_says_what_is_in_the_way() -> None:
    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 4)}
    net = Net(lambda m, x: m.c(F.relu(m.b(y := m.a(x)))) + torch.softmax(y, -1)[:, :4], **layers)
    reasons = reasons_of(capture(seeded(net), rand(2, 4)))
    assert set(reasons) == {"a", "b"}
    assert reasons["a"] == "its input is an input of the model"
    assert reasons["b"].startswith("its input is read by aten.softmax.int at %softmax (")
    tied = Net(lambda m, x: m.c(F.relu(F.gelu(m.a(x)))), **layers)
    assert reasons_of(capture(seeded(tied), rand(2, 4)))["c"].startswith("its input is tied to %gelu, which is made by")
    out = Net(lambda m, x: (y := m.a(x), m.b(y)), **layers)
    assert reasons_of(capture(seeded(out), rand(2, 4)))["b"] == "its input is an output of the model"


def test_both_factors_of_a_product_that_cannot_be_scaled_say_so() -> None:
    def wiring(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = F.relu(m.gate(x)), m.up(x)
        return m.b(gate), m.c(up), (gate * up).softmax(-1)

    layers = {"gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "b": nn.Linear(6, 3), "c": nn.Linear(6, 3)}
    reasons = reasons_of(in_double(capture(seeded(Net(wiring, **layers)), rand(2, 4))))
    for reader in "bc":
        assert reasons[reader].startswith("its input is tied to %mul, which is read by aten.softmax")


def test_a_shared_weight_is_not_rescaled() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.inner(self.table(x))))  # type: ignore[no-any-return]

    gm = capture(seeded(Tied()), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    analysis = find_scale_sites(gm, explicit=True)
    assert not {str(a.parameter.target) for s in analysis.sites for a in s.producers} & {"table.weight", "head.weight"}
    (reason,) = analysis.reasons.values()
    assert reason.startswith("its weight is shared with aten.embedding.default at %embedding")


def test_a_layer_that_runs_twice_is_not_rescaled() -> None:
    net = Net(lambda m, x: m.a(F.relu(m.a(x))), a=nn.Linear(4, 4))
    gm = capture(seeded(net), rand(2, 4))
    analysis = find_scale_sites(gm)
    assert not analysis.sites
    assert all(reason.startswith("its weight is shared with aten.linear") for reason in analysis.reasons.values())


def test_an_element_that_is_read_twice_is_not_scaled_for_one_reader() -> None:
    def wiring(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = m.a(x)
        first, second = torch.cat([x, x], -1).split(6, -1)
        return m.b(first), m.c(second), second.softmax(-1)

    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 5), "c": nn.Linear(6, 5)}
    assert sites_of(Net(wiring, **layers), rand(2, 4))[1] == ()


def test_an_element_that_is_broadcast_is_not_scaled_for_one_reader() -> None:
    def wiring(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (m.one(x) + m.a(x)).split(6, -1)
        return m.b(first), m.c(second), second.softmax(-1)

    layers = {"one": nn.Linear(4, 1), "a": nn.Linear(4, 12), "b": nn.Linear(6, 5), "c": nn.Linear(6, 5)}
    assert sites_of(Net(wiring, **layers), rand(2, 4))[1] == ()


def test_a_size_that_varies_is_not_mistaken_for_the_one_it_is_worked_out_at() -> None:
    # With a batch of two the first row is taken, with a batch of three the second.
    def wiring(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.cat([m.rows, m.a(x)]).roll(5, 0)[:1])  # type: ignore[no-any-return]

    net = Net(wiring, a=nn.Linear(4, 6), b=nn.Linear(6, 5), rows=nn.Parameter(torch.zeros(3, 6)))
    gm = in_double(capture(seeded(net), rand(2, 4)))
    assert_sites_are_exact(gm, rand(2, 4), rand(3, 4))
    (site,) = find_scale_sites(gm).sites
    assert {str(a.parameter.target) for a in site.producers} == {"a.weight", "a.bias", "rows"}


def test_an_explicit_site_multiplies_its_input_once() -> None:
    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 5), "c": nn.Linear(6, 5)}
    net = Net(lambda m, x: m.b(y := F.gelu(m.a(x))) * torch.tanh(m.c(y)), **layers)
    gm = in_double(capture(seeded(net), rand(2, 4)))
    assert find_scale_sites(gm).sites == ()
    sites = find_scale_sites(gm, explicit=True).sites
    assert [(s.explicit, s.channels, len(s.consumers), s.producers) for s in sites] == [
        (True, 4, 1, ()),
        (True, 6, 2, ()),
    ]
    after = rescaled(gm, explicit=True)
    assert len(calls(after, "aten.mul")) == len(calls(gm, "aten.mul")) + 2
    assert_sites_are_exact(gm, rand(2, 4))


ROW, CHANNEL, MATRIX = torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 8)[:, None, None], rand(4, 4, seed=7)
SCALAR, EYE, ORDER = torch.tensor(0.3), torch.eye(4, dtype=torch.bool), torch.tensor([0, 0, 1, 7, 6, 5, 4, 3])

PASSED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp_min(0.2),
    "clamp_max": lambda x: x.clamp_max(0.2),
    "tensor clamp": lambda x: x.clamp(-CHANNEL.abs(), CHANNEL.abs()),
    "abs": torch.abs,
    "neg": torch.neg,
    "halve": lambda x: x / 2,
    "max_pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "global pool": lambda x: F.adaptive_avg_pool2d(x, 1).expand(-1, -1, 4, 4),
    "mean": lambda x: x + x.mean((2, 3), keepdim=True),
    "channel mean": lambda x: x + x.mean(1, keepdim=True),
    "largest": lambda x: x - x.amax(2, keepdim=True),
    "upsample": lambda x: F.interpolate(x, scale_factor=2)[:, :, :4, :4],
    "bilinear": lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
    "zero pad": lambda x: F.pad(x, (1, 1, 1, 1))[:, :, :4, 1:5],
    "channel pad": lambda x: F.pad(x, (0, 0, 0, 0, 2, 0))[:, :8],
    "reflect": lambda x: F.pad(x, (1, 1, 0, 0), mode="reflect")[..., :4],
    "roll channels": lambda x: x.roll(3, 1),
    "roll rows": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(1, 3),
    "shuffle": lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
    "halves": lambda x: torch.cat([x[:, 4:], F.relu(x[:, :4])], 1),
    "one half": lambda x: torch.cat([torch.tanh(x[:, 4:]), x[:, :4]], 1),
    "chunks": lambda x: x + torch.cat(x.chunk(2, 1)[::-1], 1),
    "overlap": lambda x: x[:, :4].repeat(1, 2, 1, 1) + x,
    "thrice": lambda x: torch.cat([x, x, x], 1)[:, 6:14],
    "stacked": lambda x: torch.stack([x[:, :, 1:], x[:, :, :-1]]).mean(0).repeat(1, 1, 2, 1)[:, :, :4],
    "picked channels": lambda x: x[:, ORDER],
    "picked rows": lambda x: x.index_select(2, ORDER[:4].clamp(max=3)),
    "gathered": lambda x: x.gather(3, EYE.long().expand_as(x)),
    "added rows": lambda x: x.index_add(2, ORDER[1:3], F.relu(x[:, :, :2])),
    "masked": lambda x: x.masked_fill(EYE, 0.0),
    "where": lambda x: torch.where(EYE, x, x.flip(2)),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 1)),
    "attended": lambda x: F.scaled_dot_product_attention(MATRIX.expand_as(x), MATRIX.expand_as(x), x),
    "mixed rows": lambda x: MATRIX.tanh() @ x,
    "plus zero": lambda x: x + 0.0,
    "plus a channel": lambda x: x + CHANNEL,
    "channel minus": lambda x: CHANNEL - x,
    "times a row": lambda x: x * ROW,
    "times a channel": lambda x: x * CHANNEL,
    "quotient": lambda x: CHANNEL / (1 + x.abs()),
    "over a channel": lambda x: x / (2 + CHANNEL),
    "shifted channels in the batch": lambda x: (x.flatten(0, 1) + SCALAR).unflatten(0, (-1, 8)),
    "clamped channels in the batch": lambda x: x.flatten(0, 1).clamp(-0.5, 0.7).unflatten(0, (-1, 8)),
    "channels in the batch": lambda x: F.relu(x.flatten(0, 1)).unflatten(0, (-1, 8)),
    "channels last": lambda x: F.relu(x.permute(0, 2, 3, 1).flatten(0, 2)).unflatten(0, (-1, 4, 4)).permute(0, 3, 1, 2),
}
"""What a value of shape (batch, 8, 4, 4) may go through and still be scaled."""

STOPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "one pad": lambda x: F.pad(x, (1, 0, 0, 0), value=1.0)[..., :4],
    "masked by one": lambda x: x.masked_fill(EYE, 1.0),
    "plus one": lambda x: x + 1.0,
    "gated": F.silu,
    "excited": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "normalized": lambda x: x / (1 + x.abs()),
    "norm beside it": lambda x: x + F.layer_norm(x, [4], ROW),
    "product": lambda x: x * x.roll(1, 3),
    "square": lambda x: x * x,
    "ratio": lambda x: x / x.roll(1, 3).abs().clamp_min(0.1),
    "plus a row, which would outgrow both": lambda x: x + ROW,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "left operand": lambda x: x @ F.relu(x),
    "softmax": lambda x: x.softmax(1),
    "integers": lambda x: x.round().long().float(),
    "picked by values": lambda x: torch.where(x > 0, x, x.flip(1)),
}
"""What it may not."""

STEPS = PASSED | STOPPED


class Steps(nn.Module):
    """Convolutions with a few steps between them."""

    def __init__(self, steps: Sequence[str], others: Sequence[str]) -> None:
        super().__init__()
        self.first, self.second, self.side = conv(3, 8), conv(8, 8, 3, padding=1, groups=2), conv(8, 4)
        self.steps, self.others = steps, others

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for step in self.steps:
            x = STEPS[step](x)
        y = self.second(x)
        for step in self.others:
            y = STEPS[step](y)
        return self.side(y + F.relu(x))  # type: ignore[no-any-return]


def between_convolutions(step: str) -> tuple[GraphModule, Tensor, Tensor]:
    x = rand(2, 3, 4, 4)
    model = nn.Sequential(conv(3, 8), Net(lambda _, x: STEPS[step](x)), conv(8, 2))
    gm, _ = run_passes(capture(seeded(model), x), [fold_constants])
    return in_double(gm), x, rand(3, 3, 4, 4, seed=5)


@pytest.mark.parametrize("step", PASSED)
def test_a_scale_passes(step: str) -> None:
    gm, *batches = between_convolutions(step)
    assert_sites_are_exact(gm, *batches)
    assert find_scale_sites(gm).sites


def test_a_vector_along_another_dimension_is_passed() -> None:
    gm, *_ = between_convolutions("times a row")
    (site,) = find_scale_sites(gm).sites
    assert shown(site.producers) == {"0.weight": list(range(8)), "0.bias": list(range(8))}


@pytest.mark.parametrize("name", sorted(set(RULES) - {"python.getitem"}))
def test_a_rule_is_for_an_operator_that_exists(name: str) -> None:
    _, packet, overload = name.split(".")
    assert overload in getattr(torch.ops.aten, packet).overloads()


@pytest.mark.parametrize("step", STOPPED)
def test_a_scale_does_not_pass(step: str) -> None:
    gm, *batches = between_convolutions(step)
    assert not find_scale_sites(gm).sites
    assert_sites_are_exact(gm, *batches)


_names = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)


@given(steps=_names, others=_names)
@settings(max_examples=15, deadline=None)
def test_any_steps_between_convolutions_are_passed_exactly(steps: list[str], others: list[str]) -> None:
    x = rand(2, 3, 4, 4)
    gm, _ = run_passes(capture(seeded(Steps(steps, others)), x), [fold_constants])
    assert_sites_are_exact(in_double(gm), x, rand(3, 3, 4, 4, seed=5))


def test_parameters_are_replaced_and_never_written_to() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))).half()
    gm = capture(model, rand(2, 4).half())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changed = copy_graph(gm)
    (site,) = find_scale_sites(changed).sites
    apply_scale(changed, site, torch.full((6,), 3.0))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    after = stored_tensors(changed)
    assert all(after[name].dtype == torch.float16 for name in before)
    torch.testing.assert_close(after["0.weight"], (before["0.weight"].float() / 3).half(), rtol=0, atol=0)
    torch.testing.assert_close(after["2.weight"], (before["2.weight"].float() * 3).half(), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [[1.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, math.nan, 1.0], [math.inf] * 3])
def test_scales_that_make_no_sense_are_refused(scale: list[float]) -> None:
    gm = capture(seeded(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))), rand(2, 4))
    (site,) = find_scale_sites(gm).sites
    with pytest.raises(ValueError, match=r"positive and finite|needs scales of shape \(3,\)"):
        apply_scale(gm, site, torch.tensor(scale))


def test_a_norm_s_statistics_are_scaled_with_its_convolution() -> None:
    model = seeded(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 2)))
    gm, _ = run_passes(capture(model, X), [fold_batch_norm])
    (site,) = find_scale_sites(gm).sites
    node = site.producers[0].node
    beta, gamma = node.meta["batch_norm"]
    torch.testing.assert_close(beta, model.get_parameter("1.bias"), rtol=0, atol=0)
    torch.testing.assert_close(gamma, model.get_parameter("1.weight").abs(), rtol=0, atol=0)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0])
    apply_scale(gm, site, scale)
    torch.testing.assert_close(node.meta["batch_norm"], (beta / scale, gamma / scale), rtol=0, atol=0)
