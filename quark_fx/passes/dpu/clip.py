"""Bounds of clips that a DPU has."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.graph.nodes import call, target_name
from quark_fx.graph.operators import clamp_bounds
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import module_name

_CLIPS = ("aten.clamp.default", "aten.hardtanh.default")
"""Those with bounds of the user's: of a relu there is one, and 0 and 6 of a relu6 are integers already."""

_ENDS = (-128, 127)


@graph_pass(exact=False)
def use_dpu_clips(gm: GraphModule, context: Context | None = None) -> int:
    """Round the bounds of every clip to integers from -128 to 127; a missing one is -128 or 127. Returns how many.

    So Quark has it, of the values themselves and whatever their scales: bounds of ±0.4 leave zero alone. Bounds that
    are tensors, as those of equalized channels, stay.

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
