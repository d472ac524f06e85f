"""Replace splits by slices."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.graph.nodes import call, erase_dead, is_getitem, static_size, target_name, value_of
from quark_fx.graph.operators import argument
from quark_fx.graph.pass_manager import graph_pass

_SPLITS = {"aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.chunk.default": 2}
"""Position of the dimension, by operator."""


@graph_pass()
def slice_splits(gm: GraphModule) -> int:
    """Rewrite each part of a split or chunk to a slice, if sizes are static; return the number of splits.

    Source:
        AMD Quark for ONNX, `ConvertSplitToSlice`: compilers support slices.
    """
    done = 0
    for node in list(gm.graph.nodes):
        if target_name(node) not in _SPLITS or not all(is_getitem(user) for user in node.users):
            continue
        parts = value_of(gm, node)
        dim = (argument(node, _SPLITS[target_name(node)]) or 0) % parts[0].dim()
        sizes = [static_size(part.shape[dim]) for part in parts]
        if None in sizes:
            continue
        for user in list(node.users):
            index = int(user.args[1]) % len(sizes)
            start = sum(size for size in sizes[:index] if size)
            with gm.graph.inserting_before(user):
                end = start + (sizes[index] or 0)
                part = call(gm, torch.ops.aten.slice.Tensor, node.args[0], dim, start, end, like=node)
            user.replace_all_uses_with(part)
            gm.graph.erase_node(user)
        done += 1
    erase_dead(gm)
    return done
