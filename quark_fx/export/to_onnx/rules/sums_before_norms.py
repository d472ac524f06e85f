"""Keep sums apart from the layer normalizations that follow."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, made_by
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("LayerNormalization", runtime="onnxruntime")
def keep_sum_from_norm(model: ir.Model, node: ir.Node) -> bool:
    """Write a sum that only a layer normalization reads as `Sum`, which ONNX Runtime does not fuse with it.

    On a processor, the fused kernel, `SkipLayerNormalization`, takes six times as long as the two separate ones.
    """
    add = made_by(node.inputs[0], "Add")
    if add is None:
        return False
    if len(add.outputs[0].uses()) != 1 or add.outputs[0].is_graph_output():
        raise DeclinedError("something else reads the sum")
    add.op_type = "Sum"
    return True
