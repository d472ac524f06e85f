"""Round the bounds of clips to values that a DPU supports."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call
from quark_fx.graph.operators import clamp_bounds

_ENDS = (-128, 127)


@graph_rule("aten.clamp.default", "aten.hardtanh.default", exact=False)
def use_dpu_clips(gm: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Round the bounds of every clip to integers from -128 to 127; a missing bound becomes -128 or 127.

    Like Quark, this pass rounds the values of the bounds regardless of scales: bounds of ±0.4 become zero. Bounds
    stored in tensors, such as those after channel equalization, are left unchanged. relu and relu6 are not affected,
    because their bounds are integers.

    Source:
        AMD Quark for ONNX, `ConvertClipToDPUVersion`, off by default.
    """
    bounds = clamp_bounds(node)
    if bounds is None:
        return None
    full = [end if bound is None else bound for bound, end in zip(bounds, _ENDS, strict=True)]
    rounded = [round(min(_ENDS[1], max(_ENDS[0], bound))) for bound in full]
    if rounded == list(bounds):
        return None
    clip = call(gm, torch.ops.aten.clamp.default, node.args[0], *map(float, rounded), like=node)
    return clip, f"bounds {bounds} → {tuple(rounded)}"
