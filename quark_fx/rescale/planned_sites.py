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
from quark_fx.errors import Declined
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import parameter
from quark_fx.graph.pass_manager import Change
from quark_fx.plan.placement import Coded, plan_quantization, require_finite_weights
from quark_fx.rescale.scale_sites import ScaleSite, find_scale_sites
from quark_fx.rescale.scale_walk import ScaledInput


@dataclass(frozen=True)
class Condition:
    """A condition that all readers of a site must satisfy.

    Attributes:
        holds: Function that tells whether an operator satisfies the condition.
        unmet: Reason to report for a site with an operator that does not satisfy the condition.
    """

    holds: Callable[[Coded], bool]
    unmet: str


READS_WHOLE = Condition(
    lambda op: op.linear is not None and op.linear.groups == 1 and not op.weight.is_cast,
    "not every operator that reads it is quantized and uses all channels for every output",
)
"""Operators whose weights have codes and read all channels."""


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight of a site.

    Attributes:
        operator: Planned operator that multiplies by the weight.
        labels: Scale component of each element; see `Absorption`.
    """

    operator: Coded
    labels: Tensor

    def value(self, gm: GraphModule) -> Tensor:
        """Return the current weight."""
        return parameter(gm, self.operator.weight_node).detach()


@dataclass(frozen=True, eq=False)
class Reader(_Weight):
    """An operator that reads a site.

    Attributes:
        scaled: Scaled input of the operator.
    """

    scaled: ScaledInput

    @cached_property
    def mapping(self) -> LinearMap:
        """View of the operator as a matrix product; the operator must have `matrices`."""
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
        name: Names of the modules that consume the value.
        readers: Operators whose weights are multiplied by the scale.
        producers: Quantized weights that are divided by the scale.
    """

    site: ScaleSite
    name: str
    readers: tuple[Reader, ...]
    producers: tuple[_Weight, ...]

    def require_own_scales(self) -> None:
        """Require that the weights of producers are rounded in the same way after their rows are divided.

        Raises:
            Declined: If one of these weights has a single scale.
        """
        if any(weight.operator.weight.granularity is Granularity.TENSOR for weight in self.producers):
            raise Declined("the weights that produce it share one scale")


def planned_sites(
    gm: GraphModule, context: Context, chooser: Selective, condition: Condition, *, explicit: bool
) -> list[PlannedSite]:
    """Return the sites to scale; record the reasons for other operators, and the number that `explicit` would add.

    Args:
        gm: Float graph; passes may change it before the final plan is made.
        context: Context of the run.
        chooser: The pass, which may be limited to some operators.
        condition: Condition on the operators for which the pass can estimate the benefit of a scale.
        explicit: See `find_scale_sites`.

    Raises:
        CalibrationError: If a weight is not finite.
    """
    planned = {op.node: op for op in plan_quantization(gm, context.config, quiet=True).operators}
    require_finite_weights(gm, planned.values())
    analysis = find_scale_sites(gm, explicit=explicit)
    coded = {node: op for node, op in planned.items() if isinstance(op, Coded)}
    more = sum(node in coded and condition.holds(coded[node]) for node in analysis.divisible)
    context.remark = f"explicit=True could multiply for {more} more" if more else ""
    sites = []
    for site in analysis.selected(planned, chooser, context.note):
        name, labels = site.name(planned), {a.parameter: a.labels for a in site.consumers}
        operators = [(coded[scaled.reader], scaled) for scaled in site.inputs if scaled.reader in coded]
        readers = [
            Reader(op, labels[op.weight_node], scaled)
            for op, scaled in operators
            if op.weight_node in labels and condition.holds(op)
        ]
        producers = [
            _Weight(coded[a.node], a.labels)
            for a in site.producers
            if a.node in coded and coded[a.node].weight_node is a.parameter
        ]
        if len(readers) == len(site.inputs):
            sites.append(PlannedSite(site, name, tuple(readers), tuple(producers)))
        else:
            context.note(Change.skipped(name, condition.unmet))
    return sites


__all__ = ["READS_WHOLE", "Condition", "PlannedSite", "Reader", "planned_sites"]
