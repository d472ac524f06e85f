"""Scale sites of a float graph that a pass may scale, together with how the operators at them will be quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity
from quark_fx.config.selection import NOT_SELECTED, Named, Selective
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import parameter
from quark_fx.graph.pass_manager import Change
from quark_fx.plan.placement import Coded, plan_quantization, require_finite_weights
from quark_fx.rescale.scale_sites import ScaledInput, ScaleSite, SiteAnalysis, find_scale_sites

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PlannedWeight:
    """A weight that takes part in a site.

    Attributes:
        operator: how it will be quantized.
        labels: the scale's component per element, as in `Absorber`.
    """

    operator: Coded
    labels: Tensor

    def value(self, gm: GraphModule) -> Tensor:
        """Return the weight as it is now."""
        return parameter(gm, self.operator.weight_node).detach()


@dataclass(frozen=True, eq=False)
class Reader(PlannedWeight, Generic[T]):
    """An operator that reads a site.

    Attributes:
        scaled: what it reads.
        how: what the pass judges it by (`planned_sites`).
    """

    scaled: ScaledInput
    how: T


@dataclass(frozen=True, eq=False)
class PlannedSite(Generic[T]):
    """A site whose operators will be quantized.

    Attributes:
        site: what takes part.
        name: the modules that read it.
        readers: operators whose weights are multiplied by the scale.
        producers: weights with codes that are divided by it.
    """

    site: ScaleSite
    name: str
    readers: tuple[Reader[T], ...]
    producers: tuple[PlannedWeight, ...]

    @property
    def shares_scale(self) -> bool:
        """Whether a weight that makes the value has one scale, so that dividing rows changes how it is rounded."""
        return any(found.operator.weight.granularity is Granularity.TENSOR for found in self.producers)


NOT_WHOLE = "not every operator that reads it has codes, and all channels in every output"
"""Why sites are left at which `reads_whole` takes not every reader."""

SHARED_SCALE = "the weights that make it share one scale"
"""Why sites are left that are `PlannedSite.shares_scale`."""


def reads_whole(operator: Coded) -> Linear | None:
    """Return an operator whose weights have codes and read all channels, `None` for another."""
    linear = operator.linear
    return None if operator.weight.is_cast or linear is None or linear.groups > 1 else linear


def planned_sites(
    gm: GraphModule,
    context: Context,
    chooser: Selective,
    *,
    explicit: bool,
    reads: Callable[[Coded], T | None],
    unread: str,
) -> list[PlannedSite[T]]:
    """Return the sites to scale; note why an operator has none, and what `explicit` could do besides.

    Args:
        gm: the float graph; passes may change it before the final plan is made.
        context: of the run.
        chooser: the pass, which may be limited to some operators.
        explicit: see `find_scale_sites`.
        reads: returns what the pass judges by what scaling is worth for an operator, `None` if it cannot.
        unread: why sites with other readers are left.

    Raises:
        CalibrationError: if a weight is not finite.
    """
    planned = {op.node: op for op in plan_quantization(gm, context.config, quiet=True).operators}
    require_finite_weights(gm, planned.values())
    analysis = find_scale_sites(gm, explicit=explicit)
    coded = {node: op for node, op in planned.items() if isinstance(op, Coded)}
    more = sum(node in coded and reads(coded[node]) is not None for node in analysis.divisible)
    context.remark = f"explicit=True could multiply for {more} more" if more else ""
    sites = []
    for site in selected_sites(analysis, planned, chooser, context.note):
        readers = tuple(_readers(site, coded, reads))
        name = site_name(site, planned)
        if len(readers) == len(site.inputs):
            sites.append(PlannedSite(site, name, readers, tuple(_producers(site, coded))))
        else:
            context.note(Change(name, f"skipped: {unread}", changed=False))
    return sites


def selected_sites(
    analysis: SiteAnalysis, operators: Mapping[Node, Named], chooser: Selective, note: Callable[[Change], None]
) -> list[ScaleSite]:
    """Return the sites whose readers a pass may change; note the others, and operators that have none.

    Args:
        analysis: of a graph.
        operators: what patterns call its operators by; others are not noted.
        chooser: the pass.
        note: takes each row of the report.
    """
    for node, reason in analysis.reasons.items():
        if node in operators:
            what = f"skipped: {reason}" if chooser.selects(operators[node]) else NOT_SELECTED
            note(Change(operators[node].name, what, changed=False))
    chosen = []
    for site in analysis.sites:
        if all(chooser.selects(operators[found.reader]) for found in site.inputs if found.reader in operators):
            chosen.append(site)
        else:
            note(Change(site_name(site, operators), NOT_SELECTED, changed=False))
    return chosen


def site_name(site: ScaleSite, operators: Mapping[Node, Named]) -> str:
    """Return the modules that read a site, for the report."""
    return ", ".join(operators[found.reader].name for found in site.inputs if found.reader in operators)


def _readers(site: ScaleSite, coded: Mapping[Node, Coded], reads: Callable[[Coded], T | None]) -> Iterator[Reader[T]]:
    labels = {absorber.parameter: absorber.labels for absorber in site.consumers}
    for scaled in site.inputs:
        op = coded.get(scaled.reader)
        if op is not None and op.weight_node in labels and (how := reads(op)) is not None:
            yield Reader(op, labels[op.weight_node], scaled, how)


def _producers(site: ScaleSite, coded: Mapping[Node, Coded]) -> Iterator[PlannedWeight]:
    for absorber in site.producers:
        op = coded.get(absorber.node)
        if op is not None and op.weight_node is absorber.parameter:
            yield PlannedWeight(op, absorber.labels)


__all__ = [
    *("NOT_WHOLE", "SHARED_SCALE", "PlannedSite", "PlannedWeight", "Reader"),
    *("planned_sites", "reads_whole", "selected_sites", "site_name"),
]
