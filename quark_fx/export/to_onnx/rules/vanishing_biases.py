"""Give every convolution a bias, for OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, array_of, made_by
from quark_fx.export.to_onnx.rules.rule import onnx_rule

_VANISHING = np.float32(1e-30)
"""Nonzero, or OpenVINO would drop it, but too small to change any sum."""


@onnx_rule("Conv", "ConvTranspose", runtime="openvino")
def give_every_convolution_a_bias(model: ir.Model, node: ir.Node) -> bool:
    """Give a convolution without a bias, or with a bias of zeros, a negligible one.

    OpenVINO 2026.4 fuses the scale of the sums with the next operator. With several readers, it loses the scale for
    some of them, and with it the addition of a residual block. A bias in between prevents the fusion.
    """
    made = node.outputs[0]
    channels = made.shape[1] if made.shape is not None else None
    if not isinstance(channels, int) or _shifts(node.inputs[2] if len(node.inputs) > 2 else None):
        return False
    bias = add_array(model, f"vanishing_{channels}", np.full(channels, _VANISHING))
    node.resize_inputs(3)
    node.replace_input_with(2, bias)
    return True


def _shifts(bias: ir.Value | None) -> bool:
    """Tell whether a bias exists and is nonzero somewhere; a bias from a folded batch norm may be zero."""
    source = made_by(bias, "DequantizeLinear")
    values = array_of(source.inputs[0] if source is not None else bias) if bias is not None else None
    return bias is not None and (values is None or bool(values.any()))
