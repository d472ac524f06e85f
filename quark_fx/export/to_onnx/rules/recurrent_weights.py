"""Let ONNX Runtime dequantize the weights of recurrent layers when it loads a file."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, array_of, made_by, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("LSTM", "GRU", "RNN", runtime="onnxruntime")
def dequantize_once(model: ir.Model, node: ir.Node) -> bool:
    """Rewrite the `DequantizeLinear` of a recurrent layer's 8-bit weight as `Cast` and `Mul`.

    ONNX Runtime folds these at load time, but computes a `DequantizeLinear` in every run. Its kernels also rearrange a
    constant weight at load time, which makes them faster.
    """
    return sum(_spell_out(model, node, position) for position in (1, 2)) > 0


def _spell_out(model: ir.Model, node: ir.Node, position: int) -> bool:
    shaped = made_by(node.inputs[position], "Reshape")
    source = made_by(shaped.inputs[0], "DequantizeLinear") if shaped is not None else None
    if source is None or source.domain or source.attributes.get_int("block_size", 0):
        return False
    codes, scale = array_of(source.inputs[0]), array_of(source.inputs[1])
    points = array_of(source.inputs[2]) if len(source.inputs) > 2 else None
    if codes is None or scale is None or codes.dtype.itemsize != 1 or codes.dtype.kind not in "iu":
        return False
    values, added = ir.node("Cast", source.inputs[:1], {"to": ir.DataType.FLOAT}), []
    if points is not None and points.any():
        zero = add_array(model, f"{node.name}_zero_point", np.atleast_1d(points).astype(np.float32)[:, None])
        added.append(ir.node("Sub", [values.outputs[0], zero]))
    factor = add_array(model, f"{node.name}_scale", np.atleast_1d(scale)[:, None])
    added.append(ir.node("Mul", [(added or [values])[-1].outputs[0], factor]))
    for new in (values, *added):
        new.outputs[0].shape, new.outputs[0].dtype = source.outputs[0].shape, ir.DataType.FLOAT
    model.graph.insert_before(source, [values, *added])
    replace_node(source, added[-1].outputs[0])
    return True
