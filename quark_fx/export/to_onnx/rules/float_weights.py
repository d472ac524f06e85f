"""Prevent ONNX Runtime from rounding float weights and biases.

At load time, ONNX Runtime (`WeightBiasQuantization`, one of its basic optimizations) looks for a `Conv`,
`ConvTranspose`, or `Gemm` that reads a `DequantizeLinear` with one scale and whose result is quantized. It rounds a
float weight there to int8 with one scale per tensor, and a float bias to int32 at the scale of the product, without
checking that the bias fits. It looks at the graph after its own fusions: of `MatMul` and `Add`, of `Pad` and `Conv`,
and of a `DequantizeLinear` that it moves past a `Transpose`.

Two equivalent forms do not match, at no cost: an activation dequantized with equal scales per channel, and the bias of
a `Gemm` as a matrix of one row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import (
    add_array,
    array_of,
    constant_of,
    made_by,
    only_reader,
    operand,
    put_same_behind,
    stored_array,
)
from quark_fx.export.to_onnx.rules.rule import onnx_rule
from quark_fx.targets.onnxruntime import MOVES

_CONVOLUTIONS = ("Conv", "ConvTranspose")

_INT32_MAX = np.iinfo(np.int32).max


@onnx_rule(*_CONVOLUTIONS, "Gemm", "MatMul", runtime="onnxruntime")
def keep_floats(model: ir.Model, node: ir.Node) -> bool:
    """Rewrite an operator with a float weight, or a bias that overflows int32, so that ONNX Runtime does not round it.

    A float bias of an integer weight is left to ONNX Runtime if it fits int32 and the codes have 8 bits: at the scale
    of the product, it is rounded as precisely as the sum.
    """
    if node.op_type == "MatMul":
        return _vector_of_one_row(model, node)
    return _is_at_risk(node) and (_bias_of_one_row if node.op_type == "Gemm" else _spread_scale)(model, node)


def _is_at_risk(node: ir.Node) -> bool:
    """Tell whether ONNX Runtime would round the weight of `node`, or round its bias to an unfit scale."""
    source = _dequantizer(node.inputs[0])
    if source is None:
        return False
    weight = made_by(node.inputs[1], "DequantizeLinear")
    if weight is None:
        return True
    bias = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is None:
        return False
    scales = array_of(source.inputs[1]), array_of(weight.inputs[1])
    if node.op_type == "ConvTranspose" or any(scale is None for scale in scales):
        return True  # ONNX Runtime does not have an integer kernel that could be lost
    if _is_narrow(source) or _is_narrow(weight):
        return True  # the scale of the product is too coarse for the bias
    step = np.asarray(scales[0], np.float64) * np.asarray(scales[1], np.float64)
    return step.size not in (1, bias.size) or bool((np.abs(bias / step.reshape(-1)) > _INT32_MAX).any())


def _is_narrow(dequantizer: ir.Node) -> bool:
    """Tell whether a dequantizer reads codes of fewer than 8 bits, possibly stored in bytes."""
    codes = dequantizer.inputs[0]
    stored = None if codes is None else codes.const_value
    if stored is None:
        return made_by(codes, "Clip") is not None
    if stored.dtype.bitwidth < 8:
        return True
    values = stored.numpy()
    return values.dtype.kind in "iu" and int(values.max(initial=0)) - int(values.min(initial=0)) < 128


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """Return the `DequantizeLinear` that makes `value`, past operators that ONNX Runtime moves it past."""
    node = value.producer() if value is not None else None
    while node is not None and (node.op_type in MOVES or _pads_with_codes(node)):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _pads_with_codes(node: ir.Node) -> bool:
    """Tell whether a node pads with zeros or values of its input, which all have a code; other values may not."""
    if node.op_type != "Pad":
        return False
    if node.attributes.get_string("mode", "constant") != "constant":
        return True
    value = node.inputs[2] if len(node.inputs) > 2 else None
    array = constant_of(value)
    return value is None or (array is not None and not bool(array.any()))


def _spread_scale(model: ir.Model, node: ir.Node) -> bool:
    """Let a convolution read an activation that is dequantized with one scale per channel."""
    reader = node
    while (pad := made_by(reader.inputs[0], "Pad")) is not None:
        reader = pad  # ONNX Runtime fuses it into the convolution
    value, source = operand(reader), _dequantizer(reader.inputs[0])
    assert source is not None
    weight, scale = node.inputs[1], array_of(source.inputs[1])
    sizes = weight.shape.numpy() if weight is not None and weight.shape is not None else ()
    if scale is None or scale.size != 1 or not sizes:
        return False
    channels = int(sizes[0]) if node.op_type == "ConvTranspose" else int(sizes[1]) * node.attributes.get_int("group", 1)
    constants = []
    for given in source.inputs[1:]:
        array = stored_array(given)
        constants.append(add_array(model, f"{node.name}_channel_scale", np.broadcast_to(array.reshape(1), channels)))
    codes, new = operand(source), []
    if value.producer() is not source:
        again = ir.node("QuantizeLinear", [value, *source.inputs[1:]], domain=source.domain)
        again.outputs[0].shape, again.outputs[0].type = value.shape, codes.type
        codes = again.outputs[0]
        new.append(again)
    apart = ir.node("DequantizeLinear", [codes, *constants], {"axis": 1}, domain=source.domain)
    apart.outputs[0].shape, apart.outputs[0].type = value.shape, value.type
    reader.prepend([*new, apart])
    reader.replace_input_with(0, apart.outputs[0])
    return True


def _bias_of_one_row(model: ir.Model, node: ir.Node) -> bool:
    bias = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if len(node.inputs) > 2 and node.inputs[2] is not None and (bias is None or bias.ndim != 1):
        return False
    row = np.zeros((1, 1), np.float32) if bias is None else bias.reshape(1, -1)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, add_array(model, f"{node.name}_bias_row", row))
    return True


def _vector_of_one_row(model: ir.Model, node: ir.Node) -> bool:
    """Add a vector to a product as a matrix of one row: ONNX Runtime fuses a product plus a vector into a `Gemm`."""
    if _dequantizer(node.inputs[0]) is None or made_by(node.inputs[1], "DequantizeLinear") is not None:
        return False
    add = only_reader(node.outputs[0])
    if add is None or add.op_type != "Add":
        return False
    summed = add.outputs[0].shape
    for index, value in enumerate(add.inputs):
        array = array_of(value)
        if array is not None and array.ndim == 1:
            if summed is None or summed.rank() < 2:  # a row would turn a vector into a matrix
                add.replace_input_with(1 - index, put_same_behind(node.outputs[0]))
                return True
            add.replace_input_with(index, add_array(model, f"{node.name}_bias_row", array.reshape(1, -1)))
            return True
    return False
