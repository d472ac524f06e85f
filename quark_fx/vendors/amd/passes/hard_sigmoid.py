"""Replace sigmoids by hard sigmoids, and compute hard sigmoids in a DPU's arithmetic."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call, target_name

FACTOR = 2731 / 16384 * 6
"""Ratio of a DPU's approximation of 1/6, `2731 / 2**14`, to 1/6."""


@graph_rule("aten.sigmoid.default", exact=False, after=("spell_out_swish",))
def harden_sigmoids(_: GraphModule, node: Node) -> Node:
    """Replace every sigmoid by `hardsigmoid(x) = clamp(x / 6 + 1/2, 0, 1)`.

    The two functions differ by up to 0.0692 (at ±1.32): train or fine-tune the model with hard sigmoids, or measure the
    loss of accuracy. A DPU supports only hard sigmoids.

    Source:
        AMD Quark for ONNX, `ConvertSigmoidToHardSigmoid`.
    """
    node.target = torch.ops.aten.hardsigmoid.default
    return node


@graph_rule("aten.hardsigmoid.default", exact=False, after=("spell_out_swish", "harden_sigmoids"))
def use_dpu_hard_sigmoids(gm: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Multiply every hard sigmoid by `6 * 2731 / 2**14 = 1.00012`, the ratio of a DPU's result to the exact result.

    Source:
        AMD Quark for ONNX, `ConvertHardSigmoidToDPUVersion`.
    """
    if [(target_name(user), user.args[1:]) for user in node.users] == [("aten.mul.Scalar", (FACTOR,))]:
        return None
    return call(gm, torch.ops.aten.mul.Scalar, node, FACTOR, like=node), f"multiplied by {FACTOR:.6g}"
