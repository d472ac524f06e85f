"""Replace sigmoids by hard sigmoids."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule


@graph_rule("aten.sigmoid.default", exact=False, after=("spell_out_swish",))
def harden_sigmoids(_: GraphModule, node: Node) -> Node:
    """Replace every sigmoid by `hardsigmoid(x) = clamp(x / 6 + 1/2, 0, 1)`.

    The two differ by up to 0.0692 (at ±1.32): train or fine-tune with it, or measure the loss of accuracy. A DPU
    supports only hard sigmoids.

    Source:
        AMD Quark for ONNX, `ConvertSigmoidToHardSigmoid`.
    """
    node.target = torch.ops.aten.hardsigmoid.default
    return node
