"""Keep weights with scales along the summed axis out of integer products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, array_of, made_by, stored_array
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("MatMul", "Gemm", runtime="onnxruntime")
def spell_out_row_scales(model: ir.Model, node: ir.Node) -> bool:
    """Dequantize a weight by casts and products if its scales vary along the summed axis.

    This is so for one reader of a weight that is read both ways. ONNX Runtime fuses its `DequantizeLinear` with the
    product anyway, and treats the scales as scales of columns.
    """
    weight = made_by(node.inputs[1], "DequantizeLinear")
    if weight is None or made_by(node.inputs[0], "DequantizeLinear") is None:
        return False
    codes, scale = weight.inputs[:2]
    summed = 1 if node.attributes.get_int("transB", 0) else 0
    axis = weight.attributes.get_int("axis", 1)
    if codes is None or array_of(codes) is None or scale is None or scale.shape is None or len(scale.shape) != 1:
        return False
    if codes.shape is None or len(codes.shape) != 2 or axis % 2 != summed:
        return False
    node.replace_input_with(1, _spelled_out(model, weight, axis % 2))
    return True


def _spelled_out(model: ir.Model, weight: ir.Node, axis: int) -> ir.Value:
    """Insert the arithmetic of a `DequantizeLinear` with a scale per index of `axis`, and return its result."""
    shape = [-1 if dim == axis else 1 for dim in range(2)]
    parameters = []
    for value in weight.inputs[1:]:
        array = stored_array(value).astype(np.float32)
        parameters.append(add_array(model, f"{weight.name}_parameter", array.reshape(shape) if array.ndim else array))
    steps = [ir.node("Cast", [weight.inputs[0]], {"to": ir.DataType.FLOAT})]
    if len(parameters) > 1:
        steps.append(ir.node("Sub", [steps[-1].outputs[0], parameters[1]]))
    steps.append(ir.node("Mul", [steps[-1].outputs[0], parameters[0]]))
    for step in steps:
        step.outputs[0].shape, step.outputs[0].type = weight.outputs[0].shape, weight.outputs[0].type
    weight.append(steps)
    return steps[-1].outputs[0]
