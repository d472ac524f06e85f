"""Scale sites of a float graph that a pass may scale, with the planned quantization of their operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.quant_config import Granularity
from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import parameter
from quark_fx.graph.pass_manager import Change
from quark_fx.plan.placement import Coded, plan_quantization, require_finite_weights
from quark_fx.rescale.scale_sites import ScaleSite, find_scale_sites
from quark_fx.rescale.scale_walk import ScaledInput


@dataclass(frozen=True, eq=False)
class PlannedWeight:
    """A weight of a site.

    Attributes:
        operator: Its planned quantization.
        labels: Scale component of each element, see `Absorption`.
    """

    operator: Coded
    labels: Tensor

    def value(self, gm: GraphModule) -> Tensor:
        """Return the current weight."""
        return parameter(gm, self.operator.weight_node).detach()


@dataclass(frozen=True, eq=False)
class Reader(PlannedWeight):
    """An operator that reads a site.

    Attributes:
        scaled: Its scaled input.
    """

    scaled: ScaledInput

    @cached_property
    def mapping(self) -> LinearMap:
        """Mapping to matrix products, for an operator that has one."""
        mapping = self.scaled.linear.matrices
        assert mapping is not None
        return mapping

    def columns(self, gm: GraphModule) -> Tensor:
        """Return the weights that multiply each input channel, float32, shape (channels, weights)."""
        return self.value(gm).float().movedim(self.scaled.linear.input_axis, 0).flatten(1)


@dataclass(frozen=True, eq=False)
class PlannedSite:
    """A site whose operators will be quantized.

    Attributes:
        site: The scale site.
        name: Names of the modules that consume it.
        readers: Operators whose weights are multiplied by the scale.
        producers: Quantized weights that are divided by the scale.
    """

    site: ScaleSite
    name: str
    readers: tuple[Reader, ...]
    producers: tuple[PlannedWeight, ...]

    @property
    def shares_scale(self) -> bool:
        """True if a weight that produces the value has one scale, so that dividing rows changes its rounding."""
        return any(weight.operator.weight.granularity is Granularity.TENSOR for weight in self.producers)


NOT_WHOLE = "not every operator that reads it has codes, and all channels in every output"
"""Reason for skipping sites with a consumer that `reads_whole` rejects."""

SHARED_SCALE = "the weights that make it share one scale"
"""Reason for skipping sites with `PlannedSite.shares_scale`."""


def reads_whole(operator: Coded) -> bool:
    """Tell whether the weights of an operator have codes and read all channels."""
    linear = operator.linear
    return linear is not None and linear.groups == 1 and not operator.weight.is_cast


def planned_sites(
    gm: GraphModule,
    context: Context,
    chooser: Selective,
    *,
    explicit: bool,
    reads: Callable[[Coded], bool],
    unread: str,
) -> list[PlannedSite]:
    """Return the sites to scale; record why an operator has none, and the operators that `explicit` would add.

    Args:
        gm: Float graph; passes may change it before the final plan is made.
        context: Context of the run.
        chooser: The pass, which may be limited to some operators.
        explicit: See `find_scale_sites`.
        reads: Function that tells whether the pass can estimate the benefit of scaling an operator's input.
        unread: Reason for skipping sites with other consumers.

    Raises:
        CalibrationError: If a weight is not finite.
    """
    planned = {op.node: op for op in plan_quantization(gm, context.config, quiet=True).operators}
    require_finite_weights(gm, planned.values())
    analysis = find_scale_sites(gm, explicit=explicit)
    coded = {node: op for node, op in planned.items() if isinstance(op, Coded)}
    more = sum(node in coded and reads(coded[node]) for node in analysis.divisible)
    context.remark = f"explicit=True could multiply for {more} more" if more else ""
    sites = []
    for site in analysis.selected(planned, chooser, context.note):
        name, labels = site.name(planned), {a.parameter: a.labels for a in site.consumers}
        operators = [(coded[scaled.reader], scaled) for scaled in site.inputs if scaled.reader in coded]
        readers = [
            Reader(op, labels[op.weight_node], scaled)
            for op, scaled in operators
            if op.weight_node in labels and reads(op)
        ]
        producers = [
            PlannedWeight(coded[a.node], a.labels)
            for a in site.producers
            if a.node in coded and coded[a.node].weight_node is a.parameter
        ]
        if len(readers) == len(site.inputs):
            sites.append(PlannedSite(site, name, tuple(readers), tuple(producers)))
        else:
            context.note(Change.skipped(name, unread))
    return sites


__all__ = [
    *("NOT_WHOLE", "SHARED_SCALE", "PlannedSite", "PlannedWeight", "Reader"),
    *("planned_sites", "reads_whole"),
]
