"""Scale sites of a float graph together with how the operators that read them will be quantized."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from quark_fx.config.selection import NOT_SELECTED, Selective
from quark_fx.engine.context import Context
from quark_fx.graph.pass_manager import Change
from quark_fx.plan.placement import PlannedOperator, plan_quantization, require_finite_weights
from quark_fx.rescale.scale_sites import ScaleSite, SiteAnalysis, find_scale_sites


def planned_sites(
    gm: GraphModule, context: Context, chooser: Selective, *, explicit: bool
) -> tuple[dict[Node, PlannedOperator], SiteAnalysis]:
    """Return the operators as they are planned, by node, and the sites to scale; note why an operator has none.

    Args:
        gm: the float graph; passes may change it before the final plan is made.
        context: of the run.
        chooser: the pass, which may be limited to some operators.
        explicit: see `find_scale_sites`.

    Raises:
        CalibrationError: if a weight is not finite.
    """
    planned = {op.node: op for op in plan_quantization(gm, context.config, quiet=True).operators}
    require_finite_weights(gm, planned.values())
    analysis = find_scale_sites(gm, explicit=explicit)
    for node, reason in analysis.reasons.items():
        if node in planned:
            what = f"left: {reason}" if chooser.selects(planned[node]) else NOT_SELECTED
            context.note(Change(planned[node].name, what, changed=False))

    def chosen(site: ScaleSite) -> bool:
        readers = [planned[scaled.reader] for scaled in site.inputs if scaled.reader in planned]
        if all(map(chooser.selects, readers)):
            return True
        context.note(Change(", ".join(reader.name for reader in readers), NOT_SELECTED, changed=False))
        return False

    return planned, replace(analysis, sites=tuple(filter(chosen, analysis.sites)))


__all__ = ["planned_sites"]
