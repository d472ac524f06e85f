"""Keep resized values apart from a concatenation, for OpenVINO."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import made_by
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES


@onnx_rule("Concat", runtime="openvino")
def keep_resize_from_concat(model: ir.Model, node: ir.Node) -> bool:
    """Prevent OpenVINO from concatenating codes with values that are resized to a size that varies.

    OpenVINO 2026.4 then adds the bias of the first channel to every channel of the convolution that makes the codes,
    wherever they are read. A maximum pool with a window of one value, which changes nothing, prevents this.
    """
    if not any(_is_moved_from(value, "DequantizeLinear") for value in node.inputs):
        return False
    done = False
    for index, value in enumerate(node.inputs):
        if value is None or value.shape is None or value.shape.rank() < 3 or not _is_moved_from(value, "Resize"):
            continue
        if all(isinstance(size, int) for size in value.shape[2:]) or made_by(value, "MaxPool") is not None:
            continue
        same = ir.node("MaxPool", [value], attributes={"kernel_shape": [1] * (value.shape.rank() - 2)})
        same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
        model.graph.insert_before(node, [same])
        node.replace_input_with(index, same.outputs[0])
        done = True
    return done


def _is_moved_from(value: ir.Value | None, operator: str) -> bool:
    """Tell whether an `operator` makes a value, possibly followed by operators that move values."""
    while (mover := made_by(value, *MOVES)) is not None:
        value = mover.inputs[0]
    return made_by(value, operator) is not None
