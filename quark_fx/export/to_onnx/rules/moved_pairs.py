"""Quantize moved signed codes again, so that ONNX Runtime does not."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import operand
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES

SIGNED = frozenset({ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16})


@onnx_rule("DequantizeLinear", runtime="onnxruntime")
def repeat_moved_pair(model: ir.Model, node: ir.Node) -> bool:
    """Quantize a moved value of a signed type again, which changes nothing because its values already have codes.

    To move integers, ONNX Runtime does this itself, but gives the new node the zero point of uint8 and then rejects
    the graph.
    """
    codes, scale = node.inputs[:2]
    if codes is None or codes.const_value is not None or codes.dtype not in SIGNED:
        return False
    if scale is None or scale.shape is None or scale.shape.rank():
        return False
    movers = [use.node for use in node.outputs[0].uses() if use.node.op_type in MOVES]
    return sum(_repeat(model, node, mover) for mover in movers) > 0


def _repeat(model: ir.Model, dequantize: ir.Node, mover: ir.Node) -> bool:
    codes, parameters = operand(dequantize), dequantize.inputs[1:]
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
