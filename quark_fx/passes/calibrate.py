"""Plan the quantization, insert observers, and measure the ranges of activations."""

from __future__ import annotations

from torch.fx import GraphModule

from quark_fx.engine.calibration import (
    Watch,
    histograms_of,
    insert_watches,
    observe_batches,
    read_observers,
    remove_watches,
    watches_in,
)
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
    return len(insert_watches(gm, [(node, Watch(spec, describe(node), dims)) for (node, spec), dims in observed]))


@graph_pass(stage=Stage.OBSERVED, distributed=True)
def calibrate(gm: GraphModule, context: Context) -> int:
    """Run the calibration data, compute scales from the observers, and remove the observers; return their number.

    The data does not run without observers, or if a `Session` has run it before.

    Raises:
        CalibrationError: If batches are missing, a value is not finite, or an index exceeds its table; the message
            names the batch, or the operator and the user's source line.
    """
    watches = watches_in(gm)
    if watches:
        calibration = context.planned
        observe_batches(gm, context)
        calibration.values = read_observers(gm, calibration.plan, context.known)
        context.histograms = histograms_of(gm, calibration.values)
        remove_watches(gm, watches)
    return len(watches)


__all__ = ["calibrate", "insert_observers"]
