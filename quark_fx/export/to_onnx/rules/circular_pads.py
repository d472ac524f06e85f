"""Write circular padding as slices for OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, add_array, constant_of, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule

_END = np.iinfo(np.int64).max


@onnx_rule("Pad", runtime="openvino")
def spell_out_circular_pad(model: ir.Model, node: ir.Node) -> bool:
    """Write a circular `Pad` as a `Concat` of slices: OpenVINO 2026.4 does not support the mode."""
    value, pads = node.inputs[0], constant_of(node.inputs[1])
    if node.attributes.get_string("mode", "constant") != "wrap" or value is None:
        return False
    axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
    if pads is None or (pads < 0).any():
        raise DeclinedError("its padding is computed, or negative")
    made, dtype = node.outputs[0], value.type
    for axis, (before, after) in enumerate(pads.reshape(2, -1).T.tolist()):
        along = axis if axes is None else int(axes[axis])
        parts = [_slice(model, node, value, -before, _END, along)] if before else []
        parts += [value] + ([_slice(model, node, value, 0, after, along)] if after else [])
        if len(parts) > 1:
            joined = ir.node("Concat", parts, attributes={"axis": along})
            joined.outputs[0].type = dtype
            model.graph.insert_before(node, [joined])
            value = joined.outputs[0]
    value.shape = made.shape
    replace_node(node, value)
    return True


def _slice(model: ir.Model, node: ir.Node, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    bounds = [add_array(model, f"{node.name}_slice", np.array([bound], np.int64)) for bound in (start, end, axis)]
    part = ir.node("Slice", [value, *bounds])
    part.outputs[0].type = value.type
    model.graph.insert_before(node, [part])
    return part.outputs[0]
