"""Plan the quantization, and insert observers for ranges that must be calibrated."""

from __future__ import annotations

from torch.fx import GraphModule

from quark_fx.engine.calibration import Watch, insert_watches
from quark_fx.engine.context import Calibrated, Context
from quark_fx.graph.nodes import describe
from quark_fx.graph.pass_manager import Stage, copy_graph, graph_pass
from quark_fx.plan.placement import plan_quantization, require_finite_floats


@graph_pass(stage=Stage.PLANNED, distributed=True)
def insert_observers(gm: GraphModule, context: Context) -> int:
    """Plan the quantization of `gm`, insert an observer for every value with a static range, and return their number.

    The plan is stored in `context.calibrated`, with a copy of the graph.

    Raises:
        CalibrationError: If a weight that stays in float is not finite.
    """
    plan = plan_quantization(gm, context.config)
    require_finite_floats(gm, plan.operators)
    context.calibrated = Calibrated(plan, copy_graph(gm, lazy=True))
    observed = plan.observed.items()
    return len(insert_watches(gm, [(node, Watch(spec, describe(node), dim)) for (node, spec), dim in observed]))


__all__ = ["insert_observers"]
