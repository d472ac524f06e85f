"""Remove attributes with default values."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.rules.rule import onnx_rule

_DEFAULTS = (("axis", 1), ("block_size", 0), ("output_dtype", 0), ("saturate", 1))


@onnx_rule("QuantizeLinear", "DequantizeLinear")
def drop_default_attributes(model: ir.Model, node: ir.Node) -> bool:
    """Remove attributes of a quantizer with their default value, and the axis of a single scale."""
    scale = node.inputs[1]
    scalar = scale is not None and scale.shape is not None and not scale.shape.rank()
    dropped = [
        name
        for name, default in _DEFAULTS
        if name in node.attributes and ((scalar and name == "axis") or node.attributes.get_int(name) == default)
    ]
    for name in dropped:
        del node.attributes[name]
    return bool(dropped)
