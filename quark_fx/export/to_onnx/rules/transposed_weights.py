"""Store transposed weights transposed, and remove transpositions that move nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, made_by, operand, permutation, replace_node, shape_of
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Transpose")
def drop_idle_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Remove a `Transpose` that keeps the order of axes; each remaining one of a matrix exchanges rows and columns."""
    value = operand(node)
    order = permutation(node, 2 if value.shape is None else value.shape.rank())
    if list(order) != sorted(order):
        return False
    if node.outputs[0].is_graph_output() and (value.is_graph_output() or value.producer() is None):
        return False  # an output needs a separate value
    replace_node(node, value)
    return True


@onnx_rule("Transpose", "Gemm")
def transpose_weight(model: ir.Model, node: ir.Node) -> bool:
    """Store a transposed weight transposed: `Transpose(DequantizeLinear(codes))` hides the codes from kernels.

    This also rewrites `Gemm(transB=1)` for weights in blocks.
    """
    gemm = node.op_type == "Gemm"
    dequantize = made_by(node.inputs[1] if gemm else node.inputs[0], "DequantizeLinear")
    if dequantize is None or not is_constant(dequantize):
        return False
    if gemm and not (node.attributes.get_int("transB", 0) and dequantize.attributes.get_int("block_size", 0)):
        return False
    rank = shape_of(operand(dequantize)).rank()
    transpose_dequantized(dequantize, (1, 0) if gemm else permutation(node, rank))
    if gemm:
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
    else:
        replace_node(node, dequantize.outputs[0])
    return True


def is_constant(dequantize: ir.Node) -> bool:
    """Tell whether a node dequantizes a stored weight of known rank."""
    stored = all(value is None or value.const_value is not None for value in dequantize.inputs)
    codes = dequantize.inputs[0]
    return stored and codes is not None and codes.shape is not None


def transpose_dequantized(node: ir.Node, order: Sequence[int] = (1, 0)) -> None:
    """Transpose the constants of a weight's `DequantizeLinear` in place.

    Args:
        node: The `DequantizeLinear`.
        order: Permutation of the axes, in the convention of `Transpose`.

    Raises:
        DeclinedError: If another node reads the weight or one of the constants, such as a tied embedding.
    """
    constants = [value for value in node.inputs if value is not None]
    if len(node.outputs[0].uses()) != 1 or not all(_may_transpose(value) for value in constants):
        raise DeclinedError("something else reads the weight as it is")
    rank = shape_of(constants[0]).rank()
    for value in constants:
        tensor = value.const_value
        assert tensor is not None
        if rank > 1 and tensor.shape.rank() == rank:
            transposed = np.ascontiguousarray(tensor.numpy().transpose(order))
            value.const_value = ir.Tensor(transposed, dtype=tensor.dtype, name=tensor.name)
            value.shape = ir.Shape(transposed.shape)
    if "axis" in node.attributes:
        axis = node.attributes["axis"].as_int() % rank
        node.attributes["axis"] = ir.AttrInt64("axis", order.index(axis))
    if (shape := node.outputs[0].shape) is not None:
        node.outputs[0].shape = ir.Shape([shape[axis] for axis in order])


def _may_transpose(value: ir.Value) -> bool:
    """Tell whether only one node reads a constant; scalars and vectors may be shared, because they do not change."""
    return len(value.uses()) == 1 or (value.shape is not None and value.shape.rank() < 2)
