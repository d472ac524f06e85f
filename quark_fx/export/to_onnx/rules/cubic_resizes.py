"""Keep transpositions before a cubic resize."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import constant_of, made_by
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Resize", runtime="onnxruntime")
def keep_transpose_from_resize(model: ir.Model, node: ir.Node) -> bool:
    """Prevent ONNX Runtime from moving a `Transpose` across a cubic `Resize` to a smaller size.

    Its kernel shrinks only the last two axes; it fails on the middle two, which are height and width in the layout of
    its integer convolutions. ONNX Runtime does not move a `Transpose` across an `Einsum`; this one copies its input.
    """
    value = node.inputs[0]
    if node.attributes.get_string("mode", "nearest") != "cubic" or node.attributes.get_int("antialias", 0):
        return False
    if value is None or made_by(value, "Einsum") or _enlarges(node):
        return False
    same = ir.node("Einsum", [value], attributes={"equation": "...->..."})
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    model.graph.insert_before(node, [same])
    node.replace_input_with(0, same.outputs[0])
    return True


def _enlarges(node: ir.Node) -> bool:
    """Tell whether it is certain that a `Resize` shrinks no axis."""
    scales = constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if scales is not None and scales.size:
        return bool((scales >= 1).all())
    before, after = (value.shape if value is not None else None for value in (node.inputs[0], node.outputs[0]))
    if before is None or after is None:
        return False
    return all(
        old == new or (isinstance(old, int) and isinstance(new, int) and new >= old)
        for old, new in zip(before, after, strict=True)
    )
