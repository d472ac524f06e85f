"""Rewrite the mean over the height and width of images to a global average pool."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call, value_of
from quark_fx.graph.operators import argument

_aten = torch.ops.aten


@graph_rule("aten.mean.dim")
def pool_means(gm: GraphModule, node: Node) -> Node | None:
    """Rewrite the mean over height and width of images, `(batch, channels, height, width)`, to a global average pool.

    Compilers for accelerators support the pool. Without `keepdim`, a squeeze removes the two dimensions of size 1.
    """
    images, dims, keep, dtype = (argument(node, position) for position in range(4))
    if dtype is not None or value_of(gm, images).dim() != 4 or sorted(dim % 4 for dim in dims or ()) != [2, 3]:
        return None
    pooled = call(gm, _aten.adaptive_avg_pool2d.default, images, [1, 1], like=node)
    return pooled if keep else call(gm, _aten.squeeze.dims, pooled, [2, 3], like=node)
