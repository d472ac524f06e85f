"""Rewrite silu and hardswish to products."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call, target_name

_aten = torch.ops.aten
_GATES = {"aten.silu.default": _aten.sigmoid.default, "aten.hardswish.default": _aten.hardsigmoid.default}


@graph_rule(*_GATES)
def spell_out_swish(gm: GraphModule, node: Node) -> Node:
    """Rewrite `silu(x)` to `x * sigmoid(x)` and `hardswish(x)` to `x * hardsigmoid(x)`, which have equal values.

    A DPU rounds both the gate and the product; the result of a single operator would be rounded only once.
    """
    gate = call(gm, _GATES[target_name(node)], node.args[0], like=node)
    return call(gm, _aten.mul.Tensor, node.args[0], gate, like=node)
