"""Write products of values measured at run time as `MatMul`, which can become integer products."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, made_by, replace_node
from quark_fx.export.to_onnx.rules.dynamic_codes import is_measured
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.export.to_onnx.rules.transposed_weights import is_constant, transpose_dequantized


@onnx_rule("Gemm")
def split_dynamic_gemm(model: ir.Model, node: ir.Node) -> bool:
    """Rewrite a `Gemm` of dynamically quantized activations as `MatMul` and `Add`, for `multiply_integers`.

    ONNX Runtime does not have an integer `Gemm` with a float bias.
    """
    a, b = (made_by(value, "DequantizeLinear") for value in node.inputs[:2])
    if a is None or b is None or not is_measured(a) or b.attributes.get_int("block_size", 0):
        return False
    if node.attributes.get_int("transA", 0) or any(node.attributes.get_float(f, 1.0) != 1 for f in ("alpha", "beta")):
        raise DeclinedError("it transposes its activation, or multiplies the product or the bias by a number")
    if node.attributes.get_int("transB", 0):
        if not is_constant(b):
            raise DeclinedError("its weight is no constant matrix")
        transpose_dequantized(b)
    last = ir.node("MatMul", node.inputs[:2])
    added = [last]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        last = ir.node("Add", [last.outputs[0], node.inputs[2]])
        added.append(last)
    for new in added:
        new.outputs[0].shape, new.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    model.graph.insert_before(node, added)
    replace_node(node, last.outputs[0])
    return True
