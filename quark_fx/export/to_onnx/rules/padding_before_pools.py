"""Keep padding with zeros apart from the pool after it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import constant_of, made_by, put_same_behind
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("MaxPool", "AveragePool", runtime="onnxruntime")
def keep_padding_from_pool(model: ir.Model, node: ir.Node) -> bool:
    """Prevent ONNX Runtime from fusing padding with zeros into a pool if this changes the result.

    A maximum pool pads with -inf, which loses the zeros. An average pool with `ceil_mode` divides by another count.
    Neither supports padding as wide as its window. A `Max` of one value, which changes nothing, prevents the fusion.
    """
    pad = made_by(node.inputs[0], "Pad")
    if pad is None or pad.attributes.get_string("mode", "constant") != "constant":
        return False
    if node.op_type == "MaxPool" and _is_minus_infinity(pad.inputs[2] if len(pad.inputs) > 2 else None):
        return False
    if node.op_type == "AveragePool" and not node.attributes.get_int("ceil_mode", 0) and _fits_window(pad, node):
        return False
    node.replace_input_with(0, put_same_behind(pad.outputs[0]))
    return True


def _is_minus_infinity(value: ir.Value | None) -> bool:
    array = constant_of(value)
    return array is not None and bool(np.isneginf(array.astype(np.float32)).all())


def _fits_window(pad: ir.Node, pool: ir.Node) -> bool:
    """Tell whether the padding on each side is smaller than the window of a pool."""
    kernel, pads = pool.attributes.get_ints("kernel_shape", ()), constant_of(pad.inputs[1])
    if pads is None or not kernel:
        return False
    sides = pads.reshape(2, -1)
    return sides.shape[1] >= len(kernel) and bool((sides[:, -len(kernel) :] < np.asarray(kernel)).all())
