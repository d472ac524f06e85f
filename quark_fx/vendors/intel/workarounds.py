"""Workarounds for faults of OpenVINO, in the form of rows of `quark_fx.export.to_onnx.workarounds`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import (
    add_array,
    array_of,
    made_by,
    operand,
    permutation,
    replace_node,
    shape_of,
    stored_array,
)
from quark_fx.export.to_onnx.workarounds import Workaround, register_workaround
from quark_fx.targets.onnxruntime import MOVES

_VANISHING = np.float32(1e-30)
"""Value of an added bias: nonzero, because OpenVINO would drop a bias of zeros, but too small to change any sum."""


def _lacks_bias(node: ir.Node) -> bool:
    """Tell whether a convolution lacks a bias or has a bias of zeros, for example from a folded batch norm."""
    shape, bias = node.outputs[0].shape, node.inputs[2] if len(node.inputs) > 2 else None
    source = made_by(bias, "DequantizeLinear")
    values = array_of(source.inputs[0] if source is not None else bias)
    absent = bias is None or (values is not None and not values.any())
    return absent and shape is not None and isinstance(shape[1], int)


def _add_vanishing_bias(model: ir.Model, node: ir.Node) -> None:
    channels = shape_of(node.outputs[0])[1]
    assert isinstance(channels, int)
    node.resize_inputs(3)
    node.replace_input_with(2, add_array(model, f"vanishing_{channels}", np.full(channels, _VANISHING)))


def _makes_signed_codes_of_convolution(node: ir.Node) -> bool:
    point, codes = node.inputs[2] if len(node.inputs) > 2 else None, node.outputs[0]
    zero = array_of(point)
    if point is None or zero is None or zero.dtype != np.int8 or not _is_convolved(codes) or codes.is_graph_output():
        return False
    return all(_dequantizes(reader, point) for reader, _ in codes.uses())


def _dequantizes(node: ir.Node, point: ir.Value) -> bool:
    """Tell whether a node dequantizes codes whose zero point is `point`."""
    return node.op_type == "DequantizeLinear" and len(node.inputs) > 2 and node.inputs[2] is point


def _is_convolved(value: ir.Value) -> bool:
    """Tell whether a convolution reads a value, possibly through `MOVES`, quantizers, and dequantizers."""
    for reader, _ in value.uses():
        if reader.op_type in ("Conv", "ConvTranspose"):
            return True
        if reader.op_type in (*MOVES, "QuantizeLinear", "DequantizeLinear") and _is_convolved(reader.outputs[0]):
            return True
    return False


def _store_unsigned(model: ir.Model, node: ir.Node) -> None:
    """Replace int8 codes by uint8 codes that are 128 larger.

    Matrix products keep signed codes, for which zero points are not necessary.
    """
    zero, codes = stored_array(node.inputs[2]), node.outputs[0]
    name = f"{node.name or codes.name}_zero_point_unsigned"
    unsigned = add_array(model, name, (zero.astype(np.int16) + 128).astype(np.uint8))
    for one in (node, *(reader for reader, _ in codes.uses())):
        one.replace_input_with(2, unsigned)
    node.attributes.pop("output_dtype", None)  # the zero point determines the type
    codes.dtype = ir.DataType.UINT8


_SHIFTED = ("Conv", "ConvTranspose", "BatchNormalization", "Add", "Sub", "Mul", "Div", "Relu", "Clip")
"""Operators that add a bias or scale channels, and activation functions that may follow them."""


def _rounds_free_sizes(node: ir.Node) -> bool:
    """Tell whether a quantizer reads a value of varying sizes that an operator of `_SHIFTED` computes."""
    value = node.inputs[0]
    free = value is not None and (value.shape is None or not all(isinstance(size, int) for size in value.shape))
    return free and made_by(value, *_SHIFTED) is not None


def _keep_bias(model: ir.Model, node: ir.Node) -> None:
    """Insert a leaky ReLU of slope 1, which changes no value, and which OpenVINO fuses into the convolution."""
    _put_leaky_relu(node, 0)


_WEIGHT = {"MatMul": 1, "Gemm": 1, "Gather": 0}
"""Input number of the weight of products and lookups."""
_STEPS = ("Transpose", "Reshape", "Cast", "DequantizeLinear")
"""Operators between a stored weight and its reader that OpenVINO fuses into the reader."""


def _source(node: ir.Node) -> tuple[ir.Value | None, ir.Node | None, int | None]:
    """Return the stored weight of a product or lookup, its dequantizer, and one axis of the stored weight.

    The axis is the one that a product sums, or the rows of a table; `None` after a reshape.
    """
    value = node.inputs[_WEIGHT[node.op_type]]
    axis: int | None = 0
    if node.op_type != "Gather" and value is not None and value.shape is not None:
        axis = value.shape.rank() - (1 if node.attributes.get_int("transB", 0) else 2)
    dequantizer = None
    while (step := made_by(value, *_STEPS)) is not None:
        value = operand(step)
        if step.op_type == "Reshape" or value.shape is None:
            axis = None
        elif step.op_type == "Transpose" and axis is not None and axis >= 0:
            axis = permutation(step, value.shape.rank())[axis]
        elif step.op_type == "DequantizeLinear":
            dequantizer = step
    return (value if value is not None and value.is_initializer() else None), dequantizer, axis


def _products(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the products whose weight is a stored value."""
    for reader, index in value.uses():
        if reader.op_type in ("MatMul", "Gemm") and index == 1:
            yield reader
        elif reader.op_type in _STEPS and index == 0:
            yield from _products(reader.outputs[0])


def _reads_scales_along_other_axis(node: ir.Node) -> bool:
    """Tell whether scales vary along another axis than OpenVINO expects.

    It expects scales of outputs or of groups of summed values for a product, and scales of rows for a table.
    """
    value, dequantizer, axis = _source(node)
    if value is None or dequantizer is None or all(size == 1 for size in shape_of(operand(dequantizer, 1))):
        return False
    if axis is None:
        return True
    varies: int = dequantizer.attributes.get_int("axis", 1) % shape_of(value).rank()
    groups = dequantizer.attributes.get_int("block_size", 0) > 0
    if node.op_type == "Gather":
        return not groups and varies != axis
    return varies != axis if groups else varies == axis


def _reads_square_untransposed(node: ir.Node) -> bool:
    """Tell whether a product reads a square weight as it is stored, and another product reads it transposed."""
    value, _, axis = _source(node)
    if value is None or axis is None:
        return False
    shape = shape_of(value)
    rank = shape.rank()
    if rank < 2 or shape[-1] != shape[-2] or axis != rank - 2:
        return False
    return any(_source(other)[2] == rank - 1 for other in _products(value))


def _compute_at_load(model: ir.Model, node: ir.Node) -> None:
    """Insert a leaky ReLU of slope 1 after the weight, so that OpenVINO dequantizes it once, at load time."""
    _put_leaky_relu(node, _WEIGHT[node.op_type])


def _put_leaky_relu(node: ir.Node, index: int) -> None:
    value = operand(node, index)
    same = ir.node("LeakyRelu", [value], attributes={"alpha": 1.0})
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    node.prepend(same)
    node.replace_input_with(index, same.outputs[0])


def _pads_in_circles(node: ir.Node) -> bool:
    pads = array_of(node.inputs[1])
    return node.attributes.get_string("mode", "constant") == "wrap" and pads is not None and not (pads < 0).any()


def _slice_and_join(model: ir.Model, node: ir.Node) -> None:
    value, pads, output = operand(node), stored_array(node.inputs[1]), node.outputs[0]
    axes = array_of(node.inputs[3]) if len(node.inputs) > 3 else None
    for axis, (before, after) in enumerate(pads.reshape(2, -1).T.tolist()):
        along = axis if axes is None else int(axes[axis])
        parts = [_slice(model, node, value, -before, np.iinfo(np.int64).max, along)] if before else []
        parts += [value] + ([_slice(model, node, value, 0, after, along)] if after else [])
        if len(parts) > 1:
            joined = ir.node("Concat", parts, attributes={"axis": along})
            joined.outputs[0].type = output.type
            node.prepend(joined)
            value = joined.outputs[0]
    value.shape = output.shape
    replace_node(node, value)


def _slice(model: ir.Model, node: ir.Node, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    bounds = [add_array(model, f"{node.name}_slice", np.array([bound], np.int64)) for bound in (start, end, axis)]
    part = ir.node("Slice", [value, *bounds])
    part.outputs[0].type = value.type
    node.prepend(part)
    return part.outputs[0]


_fault = partial(Workaround, runtime="openvino", versions=("2026.4",))

_ROWS = {
    "convolution without a bias": _fault(
        fault="fuses the scale of the sums with the next operator, and loses it for some readers if there are several",
        operators=("Conv", "ConvTranspose"),
        condition=_lacks_bias,
        rewrite=_add_vanishing_bias,
    ),
    "signed codes of a convolution": _fault(
        fault="moves requantization before Concat; convolutions of signed codes then return wrong values on processors "
        "without AMX",
        operators=("QuantizeLinear",),
        condition=_makes_signed_codes_of_convolution,
        rewrite=_store_unsigned,
    ),
    "rounded values of free sizes": _fault(
        fault="measures sizes at a convolution before its bias, which then moves into the quantizer: all channels get "
        "the bias of the first",
        operators=("QuantizeLinear",),
        condition=_rounds_free_sizes,
        rewrite=_keep_bias,
    ),
    "scales along another axis": _fault(
        fault="applies the scales of a product's summed values to its outputs, and the scales of a table's columns to "
        "its rows: wrong results, a crash, or, for groups, a file that does not load",
        operators=("MatMul", "Gemm", "Gather"),
        condition=_reads_scales_along_other_axis,
        rewrite=_compute_at_load,
    ),
    "square weight read in two directions": _fault(
        fault="multiplies by the weight in the same direction twice if one product reads it transposed, in float too",
        operators=("MatMul", "Gemm"),
        condition=_reads_square_untransposed,
        rewrite=_compute_at_load,
    ),
    "circular padding": _fault(
        fault="does not support the mode",
        operators=("Pad",),
        condition=_pads_in_circles,
        rewrite=_slice_and_join,
    ),
}
for _name, _row in _ROWS.items():
    register_workaround(_name, _row)
