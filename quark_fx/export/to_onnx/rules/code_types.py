"""Give codes the type of their zero point."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Cast", "QuantizeLinear", "DynamicQuantizeLinear")
def type_codes(model: ir.Model, node: ir.Node) -> bool:
    """Give the output of a node the type of its zero point or attribute: torch stores 4-bit codes in bytes.

    This includes codes from a cast, which quantizes with one scale per row.
    """
    made, zero_point = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    dtype = made.dtype or ir.DataType.UINT8  # of DynamicQuantizeLinear
    if node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
    elif node.op_type == "QuantizeLinear":
        if zero_point is None or zero_point.dtype is None:
            return False
        dtype = zero_point.dtype
    changes = bool(made.dtype != dtype)
    made.dtype = dtype
    return changes
