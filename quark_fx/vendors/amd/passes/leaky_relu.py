"""Round the negative slopes of leaky relus to values that a DPU supports."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.operators import argument, set_argument


@graph_rule("aten.leaky_relu.default", exact=False)
def use_dpu_slopes(_: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Round the slope of every leaky relu to 8 fractional bits: 0.1 becomes 26/256.

    Source:
        AMD Quark for ONNX, `ConvertLeakyReluToDPUVersion`.
    """
    slope = 0.01 if argument(node, 1) is None else float(argument(node, 1))
    rounded = round(slope * 256) / 256
    if rounded == slope:
        return None
    set_argument(node, 1, rounded)
    return node, f"slope {slope:.6g} → {rounded:.6g}"
