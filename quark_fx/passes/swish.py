"""Rewrite swish operators to products."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.graph.nodes import call, target_name
from quark_fx.graph.pass_manager import graph_pass

_aten = torch.ops.aten
_GATES = {"aten.silu.default": _aten.sigmoid.default, "aten.hardswish.default": _aten.hardsigmoid.default}


@graph_pass()
def spell_out_swish(gm: GraphModule) -> int:
    """Rewrite `silu(x)` to `x * sigmoid(x)` and `hardswish(x)` to `x * hardsigmoid(x)`; the values are equal.

    A DPU rounds both the gate and the product; a single operator would be rounded once.
    """
    done = 0
    for node in list(gm.graph.nodes):
        gate = _GATES.get(target_name(node))
        if gate is None:
            continue
        value = node.args[0]
        with gm.graph.inserting_before(node):
            opened = call(gm, gate, value, like=node)
            product = call(gm, _aten.mul.Tensor, value, opened, like=node)
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        done += 1
    return done
