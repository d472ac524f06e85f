"""Compute products of values measured at run time in integers."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, made_by, replace_node
from quark_fx.export.to_onnx.rules.dynamic_codes import is_measured
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("MatMul")
def multiply_integers(model: ir.Model, node: ir.Node) -> bool:
    """Rewrite the product of dynamically quantized activations and an integer matrix as `MatMulInteger`.

    `MatMul(DQ(a), DQ(b))` with scales `s_a` and `s_b` is `MatMulInteger(a, b) * (s_a * s_b)`, which ONNX
    Runtime runs as one kernel.
    """
    a, b = (made_by(value, "DequantizeLinear") for value in node.inputs)
    if a is None or b is None or not is_measured(a):
        return False
    _require_per_column(b)
    product = ir.node("MatMulInteger", [a.inputs[0], b.inputs[0], a.inputs[2], *b.inputs[2:]])
    real = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT})
    scale = ir.node("Mul", [a.inputs[1], b.inputs[1]])
    result = ir.node("Mul", [real.outputs[0], scale.outputs[0]])
    product.outputs[0].dtype = ir.DataType.INT32
    result.outputs[0].dtype = ir.DataType.FLOAT
    real.outputs[0].dtype = scale.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.insert_before(node, [product, real, scale, result])
    result.outputs[0].shape, result.outputs[0].dtype = node.outputs[0].shape, ir.DataType.FLOAT
    replace_node(node, result.outputs[0])
    return True


def _require_per_column(dequantize: ir.Node) -> None:
    """Raise `DeclinedError` unless the node dequantizes a constant 8-bit matrix with one scale, or one per column."""
    codes, scale = dequantize.inputs[:2]
    if scale is None or codes is None or codes.const_value is None:
        raise DeclinedError("its weight is no constant")
    if codes.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        raise DeclinedError("its weight has no codes of 8 bits")
    rank = scale.shape.rank() if scale.shape is not None else 0
    if dequantize.attributes.get_int("block_size", 0) or (rank and dequantize.attributes.get_int("axis", 1) % 2 != 1):
        raise DeclinedError("its weight has scales along the axis that is summed over")
