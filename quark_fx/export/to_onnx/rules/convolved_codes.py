"""Codes that convolutions read are unsigned, for OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, add_array, constant_of
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES


@onnx_rule("QuantizeLinear", runtime="openvino")
def count_convolved_codes_from_zero(model: ir.Model, node: ir.Node) -> bool:
    """Store int8 codes that a convolution reads as uint8 ones, 128 larger: the same numbers.

    OpenVINO 2026.4 rounds in front of concatenations what the graph rounds behind them, and where codes are signed,
    convolutions compute something else then. Products of matrices keep signed codes, which have no zero points.
    """
    zero = constant_of(node.inputs[2] if len(node.inputs) > 2 else None)
    if zero is None or zero.dtype != np.int8 or not _is_convolved(node.outputs[0]):
        return False
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if any(reader.op_type != "DequantizeLinear" for reader in readers):
        raise DeclinedError("something else than a dequantizer reads its codes")
    shifted = (zero.astype(np.int16) + 128).astype(np.uint8)
    point = add_array(model, f"{node.name}_from_zero", shifted)
    for one in (node, *readers):
        one.replace_input_with(2, point)
    node.outputs[0].dtype = ir.DataType.UINT8
    return True


def _is_convolved(value: ir.Value) -> bool:
    """Tell whether a convolution reads a value, or what is moved or rounded of it."""
    for reader, _ in value.uses():
        if reader.op_type in ("Conv", "ConvTranspose"):
            return True
        if reader.op_type in (*MOVES, "QuantizeLinear", "DequantizeLinear") and _is_convolved(reader.outputs[0]):
            return True
    return False
