"""Rewrite the mean over height and width to a pool."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.graph.nodes import call, target_name, value_of
from quark_fx.graph.operators import argument
from quark_fx.graph.pass_manager import graph_pass

_aten = torch.ops.aten


@graph_pass()
def pool_means(gm: GraphModule) -> int:
    """Rewrite the mean of images, `(batch, channels, height, width)`, over both dimensions to a global average pool.

    Compilers for accelerators support the pool. Without `keepdim`, a squeeze removes the two dimensions of size 1.
    of size 1.
    """
    done = 0
    for node in list(gm.graph.nodes):
        if (
            target_name(node) != "aten.mean.dim"
            or argument(node, 3) is not None
            or value_of(gm, node.args[0]).dim() != 4
        ):
            continue
        if sorted(dim % 4 for dim in argument(node, 1) or ()) != [2, 3]:
            continue
        with gm.graph.inserting_before(node):
            pooled = call(gm, _aten.adaptive_avg_pool2d.default, node.args[0], [1, 1], like=node)
            if not argument(node, 2):
                pooled = call(gm, _aten.squeeze.dims, pooled, [2, 3], like=node)
        node.replace_all_uses_with(pooled)
        gm.graph.erase_node(node)
        done += 1
    return done
