"""Round the slopes of leaky relus to ones that a DPU supports."""

from __future__ import annotations

from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import argument, set_argument
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import module_name


@graph_pass(exact=False)
def use_dpu_slopes(gm: GraphModule, context: Context | None = None) -> int:
    """Round the slope of every leaky relu to 8 fractional bits: 0.1 becomes 26/256; return the number of changes.

    Source:
        AMD Quark for ONNX, `ConvertLeakyReluToDPUVersion`.
    """
    done = 0
    for node in gm.graph.nodes:
        if target_name(node) != "aten.leaky_relu.default":
            continue
        slope = 0.01 if argument(node, 1) is None else float(argument(node, 1))
        rounded = round(slope * 256) / 256
        if rounded != slope:
            set_argument(node, 1, rounded)
            done += 1
            if context is not None:
                context.note(Change(module_name(node), f"slope {slope:.6g} → {rounded:.6g}"))
    return done
