"""Remove zero points of zero that nothing requires."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_initializer
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("DequantizeLinear")
def settle_zero_point(model: ir.Model, node: ir.Node) -> bool:
    """Drop a zero point of zero, the default, if the scale is an array.

    Two cases need an explicit zero point in the shape of the scale: ONNX Runtime's fusion of `Gemm`, and int8 weights,
    which `session.x64quantprecision` converts to uint8 with a zero point of that shape or not at all.
    """
    scale, zero_point = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if scale is None or scale.shape is None or zero_point is None or zero_point.const_value is None:
        return False
    if not scale.shape.rank() or zero_point.const_value.numpy().any():
        return False
    dtype = zero_point.const_value.dtype
    blocks = node.attributes.get_int("block_size", 0)
    gemm = any(use.node.op_type == "Gemm" for use in node.outputs[0].uses())
    if not blocks and (dtype == ir.DataType.INT8 or (gemm and dtype != ir.DataType.INT32)):
        zeros = np.zeros(scale.shape.numpy(), dtype=dtype.numpy())
        name = f"{node.name}_zero_point"
        node.replace_input_with(2, add_initializer(model, name, ir.Tensor(zeros, dtype=dtype, name=name)))
    else:
        node.resize_inputs(2)
    return True
