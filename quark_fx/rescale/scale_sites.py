"""Rescaling that does not change the function of a graph: the analysis for CLE, SmoothQuant, and AWQ.

All three divide some channels of a value by a scale at its producer and multiply the weights of its consumers by it. A
*site* is a set of scales with all parameters that they change; the pass chooses the scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Named, Selective
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import call, describe, fake_mode, get_attr, is_parameter, parameter, set_parameter, value_of
from quark_fx.graph.operators import given_bounds, operator_row, set_argument
from quark_fx.graph.pass_manager import Change
from quark_fx.rescale.components import Components, per_element
from quark_fx.rescale.scale_rules import visit, weight_sharer
from quark_fx.rescale.scale_walk import Absorption, ScaledInput, Walk

_AT_ONCE = 1 << 20
"""Approximate number of elements of a parameter that are rescaled together."""


@dataclass(frozen=True, eq=False)
class ScaleSite:
    """Scales `s`, one per component, that leave the graph's function unchanged.

    Attributes:
        channels: Number of components.
        producers: Parameters that are divided by `s`.
        consumers: Parameters that are multiplied by `s`: weights, and vectors that multiply an activation.
        inputs: Inputs of the weighted operators among the consumers.
        bounds: Clamps whose bounds are divided by `s`, with the component of each element of their output.
        explicit: Whether a multiplication by `1 / s` is inserted, because no producer can absorb it.
    """

    channels: int
    producers: tuple[Absorption, ...]
    consumers: tuple[Absorption, ...]
    inputs: tuple[ScaledInput, ...]
    bounds: tuple[tuple[Node, Tensor], ...] = ()
    explicit: bool = False

    def name(self, operators: Mapping[Node, Named]) -> str:
        """Return the names of the consumers that are among `operators`, for the report."""
        return ", ".join(operators[scaled.reader].name for scaled in self.inputs if scaled.reader in operators)


@dataclass(frozen=True)
class SiteAnalysis:
    """The sites of a graph, and the reason for each weighted operator whose input no site scales.

    Attributes:
        sites: Sites, in the order of their first consumers.
        reasons: Reasons, keyed by operator.
        divisible: Operators in `reasons` that would have a site with `explicit=True`.
    """

    sites: tuple[ScaleSite, ...]
    reasons: dict[Node, str] = field(default_factory=dict)
    divisible: frozenset[Node] = frozenset()

    def selected(
        self, operators: Mapping[Node, Named], chooser: Selective, note: Callable[[Change], None]
    ) -> list[ScaleSite]:
        """Return the sites whose consumers a pass may change; record other sites, and operators without a site.

        Args:
            operators: Names by which patterns select operators; other operators are not recorded.
            chooser: The pass.
            note: Function called with each row of the report.
        """
        for node, reason in self.reasons.items():
            if node in operators:
                note(Change.skipped(operators[node].name, chooser.why_not(operators[node]) or reason))
        chosen = []
        for site in self.sites:
            if reason := chooser.why_not(*(operators[i.reader] for i in site.inputs if i.reader in operators)):
                note(Change.skipped(site.name(operators), reason))
            else:
                chosen.append(site)
        return chosen


def find_scale_sites(gm: GraphModule, *, explicit: bool = False) -> SiteAnalysis:
    """Find all sites of a graph.

    Operators whose inputs can only be scaled together share a site. Any subset of the sites, with any positive
    scales, leaves the function unchanged up to rounding.

    Args:
        gm: Captured graph; it is not changed.
        explicit: Whether to insert a multiplication for operators whose input cannot be divided at its producer.
    """
    walk = Walk(gm)
    reasons: dict[Node, str] = {}
    readers = [linear for node in gm.graph.nodes if (linear := Linear.of(node)) is not None]
    for linear in readers:
        value = linear.activation
        if (sharer := weight_sharer(walk, linear)) is not None:
            reasons[linear.node] = f"its weight is shared with {describe(sharer)}"
        elif isinstance(value, Node):
            rank = len(walk.shape(value))
            axis = linear.channel_dim(rank)
            size = walk.concrete(walk.shape(value)[axis])
            shape = [-1 if d == axis else 1 for d in range(rank)]
            walk.join(value, walk.components.fresh(size).reshape(shape))
    while walk.pending:
        node = next(iter(walk.pending))
        del walk.pending[node]
        visit(walk, node)
    _settle_products(walk)
    sites = _sites(walk)
    scaled = {entry.reader for site in sites for entry in site.inputs}
    for linear in readers:
        if linear.node not in scaled and linear.node not in reasons:
            reasons[linear.node] = _reason(walk, linear.node)
    if explicit:
        for site in _explicit_sites(walk, [linear for linear in readers if linear.node in reasons]):
            sites.append(site)
            for entry in site.inputs:
                del reasons[entry.reader]
    return SiteAnalysis(tuple(sites), reasons, frozenset(reasons.keys() & walk.inputs.keys()))


def _explicit_sites(walk: Walk, readers: list[Linear]) -> Iterator[ScaleSite]:
    """Yield a site for each value that `readers` read; no other operator uses their weights."""
    together: dict[tuple[Node, int], list[Linear]] = {}
    for linear in readers:
        if linear.node in walk.inputs:
            entry = walk.inputs[linear.node]
            together.setdefault((entry.value, entry.axis), []).append(linear)
    for (value, axis), members in together.items():
        channels = walk.sizes(value)[axis]
        vector = torch.arange(channels)
        consumers = (
            Absorption(m.node, m.weight_at, m.stored.node, m.of_inputs(vector), divides=False) for m in members
        )
        inputs = (ScaledInput(linear, value, axis, vector) for linear in members)
        yield ScaleSite(channels, (), tuple(consumers), tuple(inputs), explicit=True)


def _reason(walk: Walk, node: Node) -> str:
    scaled = walk.inputs[node]
    reasons = walk.components.reasons(scaled.labels)
    culprit, text = walk.reasons[int(reasons[reasons > 0][0])]
    if culprit is scaled.value:
        return f"its input {text}"
    return f"its input is tied to %{culprit.name if culprit else '?'}, which {text}"


def _settle_products(walk: Walk) -> None:
    """Pass the scale of every product of activations through one of its factors."""
    components = walk.components
    while True:
        changed = False
        for y, a, b in walk.products.values():
            # If one factor is not scaled, the other has the scale of the product; if the product is not scaled, neither
            # factor is.
            for fixed, one, other in ((a, y, b), (b, y, a), (y, y, a)):
                frozen = components.reasons(fixed) > 0
                changed |= components.tie(one[frozen], other[frozen])
        if not changed and not any(_choose(walk, node, triple) for node, triple in walk.products.items()):
            return


def _choose(walk: Walk, node: Node, triple: Tensor) -> bool:
    """Fix the scale of one factor at one where both factors could be scaled; return whether that changed anything.

    The other factor takes the scale; it is more likely to come from a weight.
    """
    _, a, b = triple

    def preference(factor: Any) -> tuple[int, bool]:
        # A smaller factor is a gate; of two factors of the same size, the output of an activation function is the gate.
        return math.prod(walk.sizes(factor)), operator_row(factor) is not None

    either = (walk.components.reasons(a) == 0) & (walk.components.reasons(b) == 0)
    dropped = a if preference(node.args[1]) >= preference(node.args[0]) else b
    if not walk.components.freeze(dropped[either], len(walk.reasons)):
        return False
    walk.reasons.append((node, f"is {describe(node)}, whose other factor takes the scale"))
    return True


def _sites(walk: Walk) -> list[ScaleSite]:
    """Return the sites: groups of components that weighted operators read together, numbered from 0 in each site."""
    components = walk.components
    groups = Components()
    groups.fresh(components.count)
    final = [_free(components, entry.labels) for entry in walk.inputs.values()]
    for labels in final:
        used = labels[labels >= 0]
        groups.tie(used, used[:1].expand_as(used))
    # One more entry than components: -1 selects the last.
    site_of = torch.full((components.count + 1,), -1)
    number = torch.full((components.count + 1,), -1)
    sizes: list[int] = []
    first_of: dict[int, int] = {}
    for labels in final:
        used = labels[labels >= 0]
        if not len(used):
            continue
        index = first_of.setdefault(int(groups.roots(used[:1])), len(sizes))
        if index == len(sizes):
            sizes.append(0)
        new = torch.tensor(list(dict.fromkeys(used[number[used] < 0].tolist())), dtype=torch.long)
        site_of[new] = index
        number[new] = torch.arange(sizes[index], sizes[index] + len(new))
        sizes[index] += len(new)

    def split(labels: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each site in `labels`, with the number of each element's component in that site, or -1."""
        free = _free(components, labels)
        site = site_of[free]
        for index in torch.unique(site[site >= 0]).tolist():
            yield index, torch.where(site == index, number[free], -1)

    order = {node: i for i, node in enumerate(walk.gm.graph.nodes)}
    producers, consumers = ([list[Absorption]() for _ in sizes] for _ in range(2))
    inputs, bounds = [list[ScaledInput]() for _ in sizes], [list[tuple[Node, Tensor]]() for _ in sizes]
    for absorption in sorted(
        itertools.chain(*walk.absorptions.values()), key=lambda absorption: order[absorption.node]
    ):
        for index, labels in split(absorption.labels):
            (producers if absorption.divides else consumers)[index].append(replace(absorption, labels=labels))
    for node, labels in walk.bounds.items():
        for index, part in split(labels):
            bounds[index].append((node, part))
    for entry in sorted(walk.inputs.values(), key=lambda entry: order[entry.reader]):
        for index, part in split(entry.labels):
            inputs[index].append(replace(entry, labels=part))
    sites = [
        ScaleSite(size, tuple(producers[i]), tuple(consumers[i]), tuple(inputs[i]), tuple(bounds[i]))
        for i, size in enumerate(sizes)
    ]
    return sorted(sites, key=lambda site: order[site.inputs[0].reader])


def _free(components: Components, labels: Tensor) -> Tensor:
    return torch.where(components.reasons(labels) > 0, -1, components.roots(labels))


def apply_scale(gm: GraphModule, site: ScaleSite, scale: Tensor) -> None:
    """Rescale the parameters of a site, replacing the tensors.

    Args:
        gm: Graph in which the site was found; other sites may have been applied since.
        site: Site from `find_scale_sites`.
        scale: Positive scales, shape `(site.channels,)`. Computed in float32 or wider; parameters keep their dtypes.

    Raises:
        ValueError: If a scale is not positive and finite, or the number of scales is not `site.channels`.
    """
    if scale.shape != (site.channels,):
        raise ValueError(f"the site needs scales of shape ({site.channels},), not {tuple(scale.shape)}")
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError("scales must be positive and finite")
    for absorber in site.producers:
        rescale(gm, absorber.parameter, absorber.labels, 1 / scale)
        _rescale_statistics(absorber, 1 / scale)
    for absorber in site.consumers:
        rescale(gm, absorber.parameter, absorber.labels, scale)
    for node, labels in site.bounds:
        _rescale_bounds(gm, node, labels, scale)
    if site.explicit:
        _insert_division(gm, site, scale)


def _insert_division(gm: GraphModule, site: ScaleSite, scale: Tensor) -> None:
    """Multiply the value that the site's consumers read by `1 / scale`."""
    value, axis = site.inputs[0].value, site.inputs[0].axis
    fake = value_of(gm, value)
    shape = [-1 if d == axis else 1 for d in range(fake.dim())]
    factor = (1 / scale).reshape(shape).to(device=fake.device, dtype=fake.dtype)
    first = min(entry.reader for entry in site.inputs)
    with gm.graph.inserting_before(first):
        constant = get_attr(gm, f"{first.name}_input_factor", factor)
        scaled = call(gm, torch.ops.aten.mul.Tensor, value, constant, like=first)
    for entry in site.inputs:
        set_argument(entry.reader, entry.linear.activation_at, scaled)


def rescale(gm: GraphModule, node: Node, labels: Tensor, factor: Tensor) -> None:
    """Multiply the labeled elements of a parameter by the factors of their components."""
    replace_parameter(gm, node, _scaled(parameter(gm, node), labels, factor))


def replace_parameter(gm: GraphModule, node: Node, new: Tensor) -> None:
    """Replace the tensor that a `get_attr` node reads, possibly with one of another shape."""
    shape = parameter(gm, node).shape
    set_parameter(gm, str(node.target), new)
    if new.shape != shape:
        node.meta["val"] = fake_mode(gm).from_tensor(new, static_shapes=True)


def _scaled(value: Tensor, labels: Tensor, factor: Tensor) -> Tensor:
    wide = torch.promote_types(value.dtype, torch.promote_types(factor.dtype, torch.float32))
    factors = per_element(labels, factor.to(value.device)).to(wide)
    shape = torch.broadcast_shapes(value.shape, factors.shape)
    value, factors = value.detach().expand(shape), factors.expand(shape)
    result = torch.empty(shape, dtype=value.dtype, device=value.device)
    if not shape:
        return result.copy_(value.to(wide) * factors)
    rows = max(1, _AT_ONCE * shape[0] // max(1, result.numel()))
    for first in range(0, shape[0], rows):  # a float32 copy of a large weight would need even more memory
        part = slice(first, first + rows)
        result[part] = value[part].to(wide) * factors[part]
    return result


def _rescale_statistics(producer: Absorption, factor: Tensor) -> None:
    """Rescale the statistics of the operator's output that `fold_batch_norm` recorded."""
    linear = Linear.of(producer.node)
    if (
        linear is not None
        and producer.position == linear.bias_at
        and (statistics := producer.node.meta.get("batch_norm"))
    ):
        producer.node.meta["batch_norm"] = tuple(_scaled(x, producer.labels, factor) for x in statistics)


def _rescale_bounds(gm: GraphModule, node: Node, labels: Tensor, scale: Tensor) -> None:
    """Divide the bounds of a clamp, which becomes a clamp with constants per element."""
    value = node.all_input_nodes[0]
    bounds = given_bounds(node)
    assert bounds is not None
    fake = value_of(gm, node)
    new: list[Node | None] = []
    for name, bound in zip(("min", "max"), bounds, strict=True):
        if is_parameter(bound):
            rescale(gm, bound, labels, 1 / scale)
            new.append(bound)
        elif bound is None:
            new.append(None)
        else:
            number = torch.tensor(bound, dtype=fake.dtype, device=fake.device)
            with gm.graph.inserting_before(node):
                scaled = number if bound == 0 else _scaled(number, labels, 1 / scale)
                new.append(get_attr(gm, f"{node.name}_{name}", scaled))
    node.target, node.args, node.kwargs = torch.ops.aten.clamp.Tensor, (value, *new), {}


__all__ = [
    *("ScaleSite", "SiteAnalysis"),
    *("apply_scale", "find_scale_sites", "replace_parameter", "rescale"),
]
