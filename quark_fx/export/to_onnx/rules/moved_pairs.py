"""Signed codes that are moved are quantized again, by this package and not by ONNX Runtime."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import made_by, only_reader, put_same_behind
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES

_SIGNED = frozenset({ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16})


@onnx_rule("DequantizeLinear", runtime="onnxruntime")
def repeat_moved_pair(model: ir.Model, node: ir.Node) -> bool:
    """Quantize a moved value of a signed type again, which changes nothing: its values are codes already.

    ONNX Runtime does so itself to move integers, but gives the new node the zero point of uint8 and then
    refuses the graph.
    """
    codes, scale = node.inputs[:2]
    if codes is None or codes.const_value is not None or codes.dtype not in _SIGNED:
        return False
    if scale is None or scale.shape is None or scale.shape.rank():
        return False
    movers = [use.node for use in node.outputs[0].uses() if use.node.op_type in MOVES]
    return sum(_repeat(model, node, mover) for mover in movers) > 0


@onnx_rule("MatMul", runtime="onnxruntime")
def keep_signed_product_from_sum(model: ir.Model, node: ir.Node) -> bool:
    """Keep ONNX Runtime from writing a product of a signed vector or stack, and its bias, as a `Gemm`.

    It reshapes the codes to a matrix first and quantizes them again, with the mistake that `repeat_moved_pair`
    describes. It does so where all sizes are fixed; a maximum of one value, which changes nothing, prevents it.
    """
    value, reader = node.inputs[0], only_reader(node.outputs[0])
    dequantize = made_by(value, "DequantizeLinear")
    if dequantize is None or value is None or value.shape is None or reader is None or reader.op_type != "Add":
        return False
    codes = dequantize.inputs[0]
    if codes is None or codes.dtype not in _SIGNED:
        return False
    if value.shape.rank() == 2 or not all(isinstance(size, int) for size in value.shape):
        return False
    reader.replace_input_with(list(reader.inputs).index(node.outputs[0]), put_same_behind(node.outputs[0]))
    return True


def _repeat(model: ir.Model, dequantize: ir.Node, mover: ir.Node) -> bool:
    codes, *parameters = dequantize.inputs
    assert codes is not None
    moved = mover.outputs[0]
    leaves = moved.is_graph_output()
    if not leaves and all(use.node.op_type == "QuantizeLinear" for use in moved.uses()):
        return False
    again = ir.node("QuantizeLinear", [moved, *parameters])
    pair = ir.node("DequantizeLinear", [again.outputs[0], *parameters])
    again.outputs[0].shape, again.outputs[0].type = moved.shape, codes.type
    pair.outputs[0].shape, pair.outputs[0].type = moved.shape, moved.type
    for use in list(moved.uses()):
        if use.node is not again:
            use.node.replace_input_with(use.idx, pair.outputs[0])
    if leaves:
        pair.outputs[0].name, moved.name = moved.name, f"{moved.name}_moved"
        for index, output in enumerate(model.graph.outputs):
            if output is moved:
                model.graph.outputs[index] = pair.outputs[0]
    model.graph.insert_after(mover, [again, pair])
    repeat_moved_pair.rewrite(model, pair)
    return True
