"""Equalize the ranges of weights across layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import parameter, target_name
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import names_of
from quark_fx.plan.roles import Uses
from quark_fx.rescale.components import largest_per_component, per_element
from quark_fx.rescale.scale_sites import ScaleSite, apply_scale, find_scale_sites
from quark_fx.system.options import Interval, PositiveInt


@graph_pass(after=("fold_batch_norm",))
@dataclass(frozen=True)
class CrossLayerEqualization(Selective):
    """Rescale channels between layers until the weights before and after each channel have equal ranges.

    At every site between convolutions and matrix products, the scale of a channel is `sqrt(r1 / r2)`: `r1` is the
    largest magnitude of the weights that produce the channel, and `r2` is the largest magnitude of the weights that
    read it. Rounds over all sites repeat until no scale changes. Channels with only zero weights on either side are
    skipped, and so are sites with a norm or another constant, whose range is not quantized. The bounds of a clamp, such
    as the 6 of ReLU6, become constants per channel.

    Attributes:
        rounds: Largest number of rounds.
        tolerance: Relative change of a scale; rounds end when no scale changes by more.
        keep_scalar_bounds: Whether to skip sites with clamps, for hardware that supports only scalar bounds.

    Source:
        Nagel et al. 2019, section 4.1.
    """

    rounds: PositiveInt = 20
    tolerance: Annotated[float, Interval("(0, inf)")] = 0.05
    keep_scalar_bounds: bool = False

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Equalize `gm`, report each operator, and return the number of rescaled sites."""
        analysis = find_scale_sites(gm)
        readers = [scaled.reader for site in analysis.sites for scaled in site.inputs]
        uses = Uses(gm.graph)
        names = {node: names_of(node, uses) for node in (*analysis.reasons, *readers)}
        note = context.note if context is not None else lambda change: None
        sites = []
        for site in analysis.selected(names, self, note):
            if reason := self._refusal(site):
                note(Change.skipped(site.name(names), reason))
            else:
                sites.append(site)
        weights = _weights(gm, sites)
        scales = [torch.ones(site.channels, device=_device(gm, site), dtype=torch.float32) for site in sites]
        for _ in range(self.rounds):
            largest = max((_equalize(index, scales, weights) for index in range(len(sites))), default=0.0)
            if largest < math.log1p(self.tolerance):
                break
        rescaled = 0
        for site, scale in zip(sites, scales, strict=True):
            name = site.name(names)
            if not bool((scale != 1).any()):
                note(Change.skipped(name, "its channels already have equal ranges"))
                continue
            apply_scale(gm, site, scale)
            rescaled += 1
            note(Change(name, f"scaled by {float(scale.min()):.2g} to {float(scale.max()):.2g}"))
        return rescaled

    def _refusal(self, site: ScaleSite) -> str:
        """Return the reason to skip a site; empty if the site is equalized."""
        for absorber in (*site.producers, *site.consumers):
            node = absorber.node
            if Linear.of(node) is None:
                return f"{target_name(node)} (%{node.name}) uses these channels, and its constants cannot be equalized"
        if site.bounds and self.keep_scalar_bounds:
            return f"the bounds of %{site.bounds[0][0].name} stay scalar (keep_scalar_bounds)"
        return ""


@dataclass(frozen=True, eq=False)
class _Role:
    """The role of a weight in the site at `index`; labels are documented in `Absorption`."""

    index: int
    labels: Tensor
    divides: bool


@dataclass(eq=False)
class _Weight:
    """Magnitudes of a weight: maxima over the dimensions along which the labels of its roles do not vary."""

    roles: list[_Role] = field(default_factory=list)
    magnitude: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32))

    def reduce(self, weight: Tensor) -> None:
        """Compute the magnitudes from `weight`."""
        varying = [any(role.labels.shape[d] > 1 for role in self.roles) for d in range(weight.dim())]
        alike = [d for d, varies in enumerate(varying) if not varies]
        magnitude = weight.detach().abs()
        self.magnitude = (magnitude.amax(alike, keepdim=True) if alike else magnitude).float()
        self.roles = [_Role(r.index, r.labels.to(weight.device), r.divides) for r in self.roles]

    def largest(self, role: _Role, scales: Sequence[Tensor]) -> Tensor:
        """Return the largest magnitude per component of a role's site, with the current scales applied."""
        now = self.magnitude
        for other in self.roles:
            factor = per_element(other.labels, scales[other.index])
            now = now / factor if other.divides else now * factor
        return largest_per_component(role.labels, now, len(scales[role.index]))


def _weights(gm: GraphModule, sites: Sequence[ScaleSite]) -> list[list[tuple[_Weight, _Role]]]:
    """Return the weights of each site, with their roles in it."""
    weights: dict[Node, _Weight] = {}
    per_site: list[list[tuple[_Weight, _Role]]] = []
    for index, site in enumerate(sites):
        per_site.append([])
        for absorbers, divides in ((site.producers, True), (site.consumers, False)):
            for absorber in absorbers:
                linear = Linear.of(absorber.node)
                if linear is not None and absorber.position == linear.weight_at:
                    weight = weights.setdefault(absorber.parameter, _Weight())
                    weight.roles.append(_Role(index, absorber.labels, divides))
    for node, weight in weights.items():
        weight.reduce(parameter(gm, node))
        for role in weight.roles:
            per_site[role.index].append((weight, role))
    return per_site


def _device(gm: GraphModule, site: ScaleSite) -> torch.device:
    return parameter(gm, site.consumers[0].parameter).device


def _equalize(index: int, scales: list[Tensor], weights: Sequence[Sequence[tuple[_Weight, _Role]]]) -> float:
    """Update the scale of one site; return the largest absolute logarithm of its change."""
    rows, columns = torch.zeros_like(scales[index]), torch.zeros_like(scales[index])
    for weight, role in weights[index]:
        largest = weight.largest(role, scales)
        if role.divides:
            rows = torch.maximum(rows, largest)
        else:
            columns = torch.maximum(columns, largest)
    usable = (rows > 0) & (columns > 0) & rows.isfinite() & columns.isfinite()
    factor = torch.where(usable, rows.sqrt() / columns.sqrt(), 1)
    scales[index] = scales[index] * factor
    return float(factor.log().abs().max())
