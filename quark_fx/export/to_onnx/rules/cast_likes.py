"""Store constants in the type of the value that they are cast like."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, constant_of, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("CastLike")
def fold_cast_like(model: ir.Model, node: ir.Node) -> bool:
    """Store a constant, such as a bound of a clamp, in the type of the value that it is cast like."""
    source, like = node.inputs
    constant = constant_of(source)
    if constant is None or like is None or like.dtype is None:
        return False
    replace_node(node, add_array(model, f"{node.name}_constant", constant.astype(like.dtype.numpy())))
    return True
