"""Transposed weights are stored transposed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, made_by, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Transpose", "Gemm")
def transpose_weight(model: ir.Model, node: ir.Node) -> bool:
    """Store a transposed weight transposed: `Transpose(DequantizeLinear(codes))` hides the codes from kernels.

    Also turns `Gemm(transB=1)` around for weights in blocks.
    """
    gemm = node.op_type == "Gemm"
    dequantize = made_by(node.inputs[1] if gemm else node.inputs[0], "DequantizeLinear")
    if dequantize is None:
        return False
    if gemm and not (node.attributes.get_int("transB", 0) and dequantize.attributes.get_int("block_size", 0)):
        return False
    if not is_constant_matrix(dequantize):
        return False
    transpose_dequantized(dequantize)
    if gemm:
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
    else:
        replace_node(node, dequantize.outputs[0])
    return True


def is_constant_matrix(dequantize: ir.Node) -> bool:
    """Tell whether a node dequantizes a stored matrix."""
    stored = all(value is None or value.const_value is not None for value in dequantize.inputs)
    codes = dequantize.inputs[0]
    return stored and codes is not None and codes.shape is not None and codes.shape.rank() == 2


def transpose_dequantized(node: ir.Node) -> None:
    """Transpose the constants of a matrix's `DequantizeLinear` in place.

    Raises:
        DeclinedError: if something else reads the matrix or one of them, as a tied embedding does.
    """
    constants = [value for value in node.inputs if value is not None]
    if len(node.outputs[0].uses()) != 1 or not all(_may_transpose(value) for value in constants):
        raise DeclinedError("something else reads the weight as it is")
    for value in constants:
        tensor = value.const_value
        assert tensor is not None
        if tensor.shape.rank() == 2:
            transposed = np.ascontiguousarray(tensor.numpy().T)
            value.const_value = ir.Tensor(transposed, dtype=tensor.dtype, name=tensor.name)
            value.shape = ir.Shape(transposed.shape)
    if "axis" in node.attributes:
        axis = node.attributes["axis"].as_int() % 2
        node.attributes["axis"] = ir.AttrInt64("axis", 1 - axis)
    if (shape := node.outputs[0].shape) is not None:
        node.outputs[0].shape = ir.Shape([shape[1], shape[0]])


def _may_transpose(value: ir.Value) -> bool:
    """Tell whether nothing else reads a matrix; a scalar or vector that others read as well stays as it is."""
    return len(value.uses()) == 1 or (value.shape is not None and value.shape.rank() < 2)
