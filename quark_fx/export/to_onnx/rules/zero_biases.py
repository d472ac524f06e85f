"""Drop the zeros that torch writes for convolutions without a bias."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import constant_of, made_by
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Conv")
def drop_zero_bias(model: ir.Model, node: ir.Node) -> bool:
    """Drop the zeros that torch writes for a convolution without a bias, one per row of the dequantized weight.

    They would be computed at run time and not be recognized as a constant, and the weight would have a second reader.
    """
    zeros = made_by(node.inputs[2], "Expand") if len(node.inputs) > 2 else None
    constant = constant_of(zeros.inputs[0]) if zeros is not None else None
    if constant is None or constant.any():
        return False
    node.resize_inputs(2)
    return True
