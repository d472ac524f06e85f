"""Store the codes that convolutions read unsigned, for OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, add_array, constant_of
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES


@onnx_rule("QuantizeLinear", runtime="openvino")
def store_convolution_inputs_unsigned(model: ir.Model, node: ir.Node) -> bool:
    """Store int8 codes that a convolution reads as uint8 codes, 128 larger, which represent the same values.

    OpenVINO 2026.4 moves requantization before `Concat`; convolutions of signed codes then return wrong values. Matrix
    products keep signed codes, which need no zero points.
    """
    point, codes = node.inputs[2] if len(node.inputs) > 2 else None, node.outputs[0]
    zero = constant_of(point)
    if point is None or zero is None or zero.dtype != np.int8 or not _is_convolved(codes):
        return False
    readers = [reader for reader, _ in codes.uses()]
    if codes.is_graph_output() or any(not _dequantizes(reader, point) for reader in readers):
        raise DeclinedError("something else than its own dequantizer reads its codes")
    name = f"{node.name or codes.name}_zero_point_unsigned"
    unsigned = add_array(model, name, (zero.astype(np.int16) + 128).astype(np.uint8))
    for one in (node, *readers):
        one.replace_input_with(2, unsigned)
    node.attributes.pop("output_dtype", None)  # the zero point says it
    codes.dtype = ir.DataType.UINT8
    return True


def _dequantizes(node: ir.Node, point: ir.Value) -> bool:
    """Tell whether a node dequantizes codes whose zero point is `point`."""
    return node.op_type == "DequantizeLinear" and len(node.inputs) > 2 and node.inputs[2] is point


def _is_convolved(value: ir.Value) -> bool:
    """Tell whether a convolution reads a value, possibly after moves, quantizers, and dequantizers."""
    for reader, _ in value.uses():
        if reader.op_type in ("Conv", "ConvTranspose"):
            return True
        if reader.op_type in (*MOVES, "QuantizeLinear", "DequantizeLinear") and _is_convolved(reader.outputs[0]):
            return True
    return False
