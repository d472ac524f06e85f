"""An ONNX format of one file: a runtime of your own dequantizes weights with its operator, `Unpack`.

Importing this file registers it: `qfx.export.onnx(qmodel, path, format="unpack")`.
"""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import Kept
from quark_fx.export.to_onnx.formats import FormatOptions, OnnxFormat, register_onnx_format

DOMAIN = "com.example"


def _use_unpack(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    """Replace the operator where the codes are constant; return the weights that it does not support."""
    kept = []
    for node in model.graph:
        if node.op_type != "DequantizeLinear" or node.inputs[0] is None or node.inputs[0].const_value is None:
            continue
        if node.attributes.get_int("block_size", 0):
            kept.append(Kept(str(node.inputs[0].name), node.op_type, "Unpack has one scale per channel, not per block"))
        else:
            node.op_type, node.domain = "Unpack", DOMAIN
    return tuple(kept)


def _use_standard(model: ir.Model) -> ir.Model:
    """Return the model with an operator that ONNX Runtime has, for `verify`."""
    for node in model.graph:
        if node.domain == DOMAIN:
            node.op_type, node.domain = "DequantizeLinear", ""
    return model


UNPACK = register_onnx_format(
    "unpack", OnnxFormat(rewrite=_use_unpack, standard=_use_standard, choices={"domain": (DOMAIN,)})
)
