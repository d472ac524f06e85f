"""Restrict the bounds of clips to ones that a DPU supports."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.graph.nodes import call, target_name
from quark_fx.graph.operators import clamp_bounds
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import module_name

_CLIPS = ("aten.clamp.default", "aten.hardtanh.default")
"""Operators with bounds set by the user; the bounds of a relu and a relu6 are integers already."""

_ENDS = (-128, 127)


@graph_pass(exact=False)
def use_dpu_clips(gm: GraphModule, context: Context | None = None) -> int:
    """Round the bounds of every clip to integers from -128 to 127; missing ones become -128 or 127. Returns the count.

    This follows Quark, which rounds the values of the bounds regardless of scales: bounds of ±0.4 become zero. Bounds
    stored in tensors, such as equalized channels', are left alone.

    Source:
        AMD Quark for ONNX, `ConvertClipToDPUVersion`, off by default.
    """
    done = 0
    for node in list(gm.graph.nodes):
        bounds = clamp_bounds(node) if target_name(node) in _CLIPS else None
        if bounds is None:
            continue
        given = [end if bound is None else bound for bound, end in zip(bounds, _ENDS, strict=True)]
        rounded = [round(min(_ENDS[1], max(_ENDS[0], bound))) for bound in given]
        if rounded == list(bounds):
            continue
        with gm.graph.inserting_before(node):
            clip = call(gm, torch.ops.aten.clamp.default, node.args[0], *map(float, rounded), like=node)
        node.replace_all_uses_with(clip)
        gm.graph.erase_node(node)
        if context is not None:
            context.note(Change(module_name(clip), f"bounds {bounds} → {tuple(rounded)}"))
        done += 1
    return done
