"""Scale sites of a float graph together with how the operators that read them will be quantized."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from quark_fx.context import Context
from quark_fx.pass_manager import Change
from quark_fx.placement import PlannedOperator, plan_quantization, require_finite_weights
from quark_fx.scale_sites import SiteAnalysis, find_scale_sites


def planned_sites(
    gm: GraphModule, context: Context, *, explicit: bool
) -> tuple[dict[Node, PlannedOperator], SiteAnalysis]:
    """Return the operators as they are planned, by node, and the sites; note why an operator has none.

    Args:
        gm: the float graph; passes may change it before the final plan is made.
        context: of the run.
        explicit: see `find_scale_sites`.

    Raises:
        CalibrationError: if a weight is not finite.
    """
    planned = {op.node: op for op in plan_quantization(gm, context.config, quiet=True).operators}
    require_finite_weights(gm, planned.values())
    analysis = find_scale_sites(gm, explicit=explicit)
    for node, reason in analysis.reasons.items():
        if node in planned:
            context.note(Change(planned[node].name, f"left: {reason}", changed=False))
    return planned, analysis


__all__ = ["planned_sites"]
