"""Quantize values with a range measured at run time only once."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import made_by, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("QuantizeLinear")
def fuse_dynamic_quantization(model: ir.Model, node: ir.Node) -> bool:
    """Reuse the codes that `DynamicQuantizeLinear` already computes instead of quantizing a second time."""
    measured = made_by(node.inputs[1], "DynamicQuantizeLinear")
    if measured is None or measured.inputs[0] is not node.inputs[0]:
        return False
    for use in list(node.outputs[0].uses()):
        if use.node.op_type == "DequantizeLinear":
            use.node.replace_input_with(2, measured.outputs[2])
    replace_node(node, measured.outputs[0])
    return True


def is_measured(dequantize: ir.Node) -> bool:
    """Tell whether the scale of a dequantizer comes from a `DynamicQuantizeLinear`."""
    return (
        dequantize.op_type == "DequantizeLinear" and made_by(dequantize.inputs[1], "DynamicQuantizeLinear") is not None
    )
