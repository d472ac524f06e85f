"""Hard sigmoids as computed by a DPU."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.graph.nodes import call, target_name
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import module_name

FACTOR = 2731 / 16384 * 6
"""Ratio of a DPU's multiplier, `2731 / 2**14`, to one sixth."""


@graph_pass(exact=False, after=("spell_out_swish", "harden_sigmoids"))
def use_dpu_hard_sigmoids(gm: GraphModule, context: Context | None = None) -> int:
    """Multiply every hard sigmoid by `6 * 2731 / 2**14 = 1.00012`, the ratio of a DPU's result; return the count.

    Source:
        AMD Quark for ONNX, `ConvertHardSigmoidToDPUVersion`.
    """
    done = 0
    for node in list(gm.graph.nodes):
        if target_name(node) != "aten.hardsigmoid.default":
            continue
        if [(target_name(user), user.args[1:]) for user in node.users] == [("aten.mul.Scalar", (FACTOR,))]:
            continue
        with gm.graph.inserting_after(node):
            scaled = call(gm, torch.ops.aten.mul.Scalar, node, FACTOR, like=node)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        if context is not None:
            context.note(Change(module_name(node), f"multiplied by {FACTOR:.6g}"))
        done += 1
    return done
