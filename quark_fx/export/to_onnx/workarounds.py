"""Defects of runtimes that files are written around: one row each, with the pattern and its replacement.

`register_workaround` adds a row, in this package or outside of it.

A test runs each pattern without its row and expects the fault, so that a row can go when its runtime is repaired.
Patterns and rewrites for ONNX Runtime are in `onnxruntime_workarounds`, those for OpenVINO below the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx import onnxruntime_workarounds as ort
from quark_fx.export.to_onnx.edit import (
    add_array,
    array_of,
    constant_of,
    erase_unread,
    made_by,
    operand,
    replace_node,
    shape_of,
    stored_array,
)
from quark_fx.system.registry import Registry
from quark_fx.targets.onnxruntime import MOVES


@dataclass(frozen=True, kw_only=True)
class Workaround:
    """A pattern that a runtime does not run as it should, and its replacement. Calling it rewrites a model in place.

    Attributes:
        runtime: `OnnxFiles.runtime` of the targets that need it.
        versions: Measured versions that have the fault, for readers. The rewrite runs for all: a file may go to any
            version.
        fault: Effect of the pattern in the runtime.
        source: Change or report of the runtime that explains the fault; empty if none is known.
        operators: Types of nodes at which the pattern ends.
        condition: Function that tells whether such a node ends the pattern.
        rewrite: Function that replaces the pattern by an equal one.
        before_formats: Whether the rewrites of formats have to see the replacement, too.
    """

    runtime: str
    versions: tuple[str, ...]
    fault: str
    operators: tuple[str, ...]
    condition: Callable[[ir.Node], object]
    rewrite: Callable[[ir.Model, ir.Node], None]
    source: str = ""
    before_formats: bool = False

    def __call__(self, model: ir.Model) -> None:
        """Replace the pattern everywhere in the main graph."""
        done = False
        for node in list(model.graph):
            if node.op_type in self.operators and node.graph is not None and self.condition(node):
                self.rewrite(model, node)
                done = True
        if done:
            erase_unread(model)


WORKAROUNDS: Registry[Workaround, Workaround] = Registry("workaround", error=ExportError)
"""Every workaround under its name, in the order in which they run."""
_add = WORKAROUNDS.add


def register_workaround(name: str, row: Workaround) -> Workaround:
    """Register a workaround for the files of all targets with its `runtime`. It runs after those registered before it.

    A module can register a name again, for example from a notebook cell.

    Raises:
        ExportError: If another module has registered a workaround under that name.
    """
    return _add(row, name, depth=2)


# OpenVINO ------------------------------------------------------------------------------------------------------------


_VANISHING = np.float32(1e-30)
"""Nonzero, or OpenVINO would drop it, but too small to change any sum."""


def _lacks_bias(node: ir.Node) -> bool:
    """Tell whether a convolution lacks a bias, or has one of zeros, as a folded batch norm may leave it."""
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
    zero = constant_of(point)
    if point is None or zero is None or zero.dtype != np.int8 or not _is_convolved(codes) or codes.is_graph_output():
        return False
    return all(_dequantizes(reader, point) for reader, _ in codes.uses())


def _dequantizes(node: ir.Node, point: ir.Value) -> bool:
    """Tell whether a node dequantizes codes whose zero point is `point`."""
    return node.op_type == "DequantizeLinear" and len(node.inputs) > 2 and node.inputs[2] is point


def _is_convolved(value: ir.Value) -> bool:
    """Tell whether a convolution reads a value, possibly after moves, quantizers, and dequantizers."""
    for reader, _ in value.uses():
        if reader.op_type in ("Conv", "ConvTranspose"):
            return True
        if reader.op_type in (*MOVES, "QuantizeLinear", "DequantizeLinear") and _is_convolved(reader.outputs[0]):
            return True
    return False


def _store_unsigned(model: ir.Model, node: ir.Node) -> None:
    """Store int8 codes as uint8 codes, 128 larger. Matrix products keep signed codes, which need no zero points."""
    zero, codes = stored_array(node.inputs[2]), node.outputs[0]
    name = f"{node.name or codes.name}_zero_point_unsigned"
    unsigned = add_array(model, name, (zero.astype(np.int16) + 128).astype(np.uint8))
    for one in (node, *(reader for reader, _ in codes.uses())):
        one.replace_input_with(2, unsigned)
    node.attributes.pop("output_dtype", None)  # the zero point says it
    codes.dtype = ir.DataType.UINT8


def _resized(node: ir.Node) -> list[int]:
    """Return the inputs of a `Concat` of codes that are resized to a size that varies."""
    if not any(_is_moved_from(value, "DequantizeLinear") for value in node.inputs):
        return []
    return [
        index
        for index, value in enumerate(node.inputs)
        if value is not None
        and value.shape is not None
        and value.shape.rank() >= 3
        and not all(isinstance(size, int) for size in value.shape[2:])
        and _is_moved_from(value, "Resize")
        and made_by(value, "MaxPool") is None
    ]


def _is_moved_from(value: ir.Value | None, operator: str) -> bool:
    """Tell whether an `operator` makes a value, possibly followed by operators that move values."""
    while (mover := made_by(value, *MOVES)) is not None:
        value = mover.inputs[0]
    return made_by(value, operator) is not None


def _pool_one_value(model: ir.Model, node: ir.Node) -> None:
    """Insert maximum pools with a window of one value, which change nothing."""
    for index in _resized(node):
        value = operand(node, index)
        same = ir.node("MaxPool", [value], attributes={"kernel_shape": [1] * (shape_of(value).rank() - 2)})
        same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
        node.prepend(same)
        node.replace_input_with(index, same.outputs[0])


def _pads_in_circles(node: ir.Node) -> bool:
    pads = constant_of(node.inputs[1])
    return node.attributes.get_string("mode", "constant") == "wrap" and pads is not None and not (pads < 0).any()


def _slice_and_join(model: ir.Model, node: ir.Node) -> None:
    value, pads, output = operand(node), stored_array(node.inputs[1]), node.outputs[0]
    axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
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


# The table -----------------------------------------------------------------------------------------------------------

MEASURED = ("1.31", "1.32")
"""Versions of ONNX Runtime in which every pattern was run."""

_PULLS = "https://github.com/microsoft/onnxruntime/pull/"

_ROWS = {
    "row scales": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="treats the scales of rows as scales of columns: wrong results, or an error if the sizes differ",
        operators=("MatMul", "Gemm"),
        condition=ort.has_row_scales,
        rewrite=ort.spell_out_row_scales,
        before_formats=True,
    ),
    "average pool beyond the rim": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="its integer kernel divides by an incorrect count at the rim",
        source=_PULLS + "29629",
        operators=("AveragePool",),
        condition=ort.counts_beyond_rim,
        rewrite=ort.settle_average_pool,
        before_formats=True,
    ),
    "moved signed codes": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="quantizes the moved values again with the zero point of uint8, and refuses the graph",
        operators=("DequantizeLinear",),
        condition=ort.moves_signed_codes,
        rewrite=ort.repeat_pair,
        before_formats=True,
    ),
    "arithmetic of bfloat16": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="has no kernels",
        operators=ort.ARITHMETIC,
        condition=ort.reads_bfloat16,
        rewrite=ort.compute_in_float,
    ),
    "sum before a layer normalization": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="fuses the two to SkipLayerNormalization, which takes six times as long on a processor",
        operators=("LayerNormalization",),
        condition=ort.sums_before_norm,
        rewrite=ort.spell_as_sum,
    ),
    "product before float": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="runs a Gemm of codes in float if it has a float bias, or an activation function follows",
        operators=("Gemm",),
        condition=ort.is_float_after_codes,
        rewrite=ort.split_product,
    ),
    "padding before a pool": Workaround(
        runtime="onnxruntime",
        versions=("1.31",),
        fault="makes zeros the padding of the pool, which is -inf for a maximum, and has another count for an average; "
        "refuses padding as wide as the window",
        source=_PULLS + "18136",
        operators=("MaxPool", "AveragePool"),
        condition=ort.is_padded_otherwise,
        rewrite=ort.keep_apart,
    ),
    "cubic resize to a smaller size": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="moves a Transpose across it; the kernel then fails, because it shrinks only the last two axes",
        source=_PULLS + "24385",
        operators=("Resize",),
        condition=ort.shrinks_by_cubes,
        rewrite=ort.copy_first,
    ),
    "product before a sum": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="fuses the two to a Gemm, which runs in float; for other ranks than 2, it also reshapes the codes, and "
        "refuses signed ones as in 'moved signed codes'",
        operators=("MatMul",),
        condition=ort.becomes_gemm,
        rewrite=ort.keep_product_from_sum,
    ),
    "weights of recurrent layers": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="dequantizes the weights in every run instead of at load time, when its kernels rearrange constants",
        operators=("LSTM", "GRU", "RNN"),
        condition=ort.recurrent_weights,
        rewrite=ort.dequantize_once,
    ),
    "convolution without a bias": Workaround(
        runtime="openvino",
        versions=("2026.4",),
        fault="fuses the scale of the sums with the next operator, and loses it for some of several readers",
        operators=("Conv", "ConvTranspose"),
        condition=_lacks_bias,
        rewrite=_add_vanishing_bias,
    ),
    "signed codes of a convolution": Workaround(
        runtime="openvino",
        versions=("2026.4",),
        fault="moves requantization before Concat; convolutions of signed codes then return wrong values on processors "
        "without AMX",
        operators=("QuantizeLinear",),
        condition=_makes_signed_codes_of_convolution,
        rewrite=_store_unsigned,
    ),
    "resized values next to codes": Workaround(
        runtime="openvino",
        versions=("2026.4",),
        fault="adds the bias of the first channel to all channels of the convolution that makes the codes",
        operators=("Concat",),
        condition=_resized,
        rewrite=_pool_one_value,
    ),
    "circular padding": Workaround(
        runtime="openvino",
        versions=("2026.4",),
        fault="does not support the mode",
        operators=("Pad",),
        condition=_pads_in_circles,
        rewrite=_slice_and_join,
    ),
    "values rounded twice": Workaround(
        runtime="onnxruntime",
        versions=("1.32",),
        fault="rounds once, with a scale of its own, where a value is rounded with two scales one after the other",
        operators=("QuantizeLinear",),
        condition=ort.is_rounded_again,
        rewrite=ort.keep_apart,
    ),
    "float weights": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="rounds float weights of quantized operators to int8 with one scale per tensor, and float biases to "
        "int32 without checking that they fit",
        source=_PULLS + "22969",
        operators=("Conv", "ConvTranspose", "Gemm", "MatMul"),
        condition=ort.is_rounded,
        rewrite=ort.keep_floats,
    ),
}
for _name, _row in _ROWS.items():
    register_workaround(_name, _row)

__all__ = ["MEASURED", "WORKAROUNDS", "Workaround", "register_workaround"]
