"""Replace splits by slices."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call, is_getitem, static_size, value_of
from quark_fx.graph.operators import argument


@graph_rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def slice_splits(gm: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Rewrite each part of a split or chunk to a slice, which compilers support, if all sizes are static.

    Source:
        AMD Quark for ONNX, `ConvertSplitToSlice`.
    """
    parts = value_of(gm, node)
    dim = (argument(node, 2) or 0) % parts[0].dim()
    sizes = [static_size(part.shape[dim]) for part in parts]
    if None in sizes or not all(is_getitem(user) for user in node.users):
        return None
    for user in node.users:
        index: int = argument(user, 1) % len(sizes)
        start = sum(size for size in sizes[:index] if size)
        end = start + (sizes[index] or 0)
        user.replace_all_uses_with(call(gm, torch.ops.aten.slice.Tensor, node.args[0], dim, start, end, like=node))
    for user in list(node.users):
        gm.graph.erase_node(user)
    return node, f"{len(parts)} parts → slices"
