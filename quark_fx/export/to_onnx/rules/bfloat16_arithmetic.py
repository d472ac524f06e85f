"""Arithmetic of bfloat16 within a float32 model runs in float32."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import put_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule

_OPERATORS = ("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Abs", "Sqrt", "Exp", "Log", "Max", "Min", "Sum")


@onnx_rule(*_OPERATORS, "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", runtime="onnxruntime")
def compute_bfloat16_in_float(model: ir.Model, node: ir.Node) -> bool:
    """Compute in float32 and round the result to bfloat16, like torch; ONNX Runtime lacks bfloat16 kernels on a CPU."""
    bfloat16 = ir.DataType.BFLOAT16
    if all(value.dtype != bfloat16 for value in _operands(node)):
        return False
    operands = [
        _cast(node, value, ir.DataType.FLOAT) if value.dtype == bfloat16 else value for value in _operands(node)
    ]
    new = ir.node(node.op_type, operands, node.attributes, name=node.name)
    if node.outputs[0].dtype == bfloat16:
        new.outputs[0].shape, new.outputs[0].dtype = node.outputs[0].shape, ir.DataType.FLOAT
        node.prepend(new)
        new = ir.node("Cast", new.outputs, {"to": bfloat16})
    put_node(node, new)
    return True


def _operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _cast(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": dtype})
    cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, dtype
    node.prepend(cast)
    return cast.outputs[0]
