"""Constants are stored in the type of what they are compared with."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, constant_of, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("CastLike")
def fold_cast_like(model: ir.Model, node: ir.Node) -> bool:
    """Store a constant in the type of the value it is cast like: the bounds of a clamp, which then alone reads it."""
    source, like = node.inputs
    constant = constant_of(source)
    if constant is None or like is None or like.dtype is None:
        return False
    replace_node(node, add_array(model, f"{node.name}_constant", constant.astype(like.dtype.numpy())))
    return True
