"""Inputs and attributes that the vendor's kernels require of quantizers, and codes that standard quantizers lack.

Measured on the operator library of AMD Quark 0.13: always three inputs; scales along dimension 0 by default (the
standard says 1); codes of 8, 16, or 32 bits or in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, add_initializer, dtype_of, operand, put_node, shape_of, stored_array

HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_NARROW = {ir.DataType[f"{sign}INT{bits}"]: ir.DataType[f"{sign}INT8"] for sign in ("", "U") for bits in (2, 4)}
"""The stored types of codes narrower than a byte."""

CODES = HALVES | _NARROW.keys() | {ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32)}
"""The supported types of codes."""


def settle_quantizers(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Add zero point and axis to quantizers and dequantizers, and store codes narrower than a byte in bytes."""
    for node in nodes:
        quantizes = node.op_type == "QuantizeLinear"
        codes, scale = node.outputs[0] if quantizes else operand(node), operand(node, 1)
        if len(node.inputs) < 3:
            dtype = dtype_of(codes)
            kind = dtype.name.lower()
            zeros = ir.Tensor(np.zeros(shape_of(scale).numpy(), dtype.numpy()), dtype=dtype)
            node.resize_inputs(3)
            node.replace_input_with(2, add_initializer(model, f"{node.name}_zero_{kind}", zeros))
        if shape_of(scale).rank():
            node.attributes["axis"] = ir.AttrInt64("axis", node.attributes.get_int("axis", 1))
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.const_value is not None and value.dtype in _NARROW:
                _widen(value)
        if node.op_type == "QuantizeLinear" and node.outputs[0].dtype in _NARROW:
            _clip(model, node)


def _widen(value: ir.Value) -> None:
    """Store a constant of codes in bytes."""
    dtype = _NARROW[dtype_of(value)]
    value.const_value = ir.Tensor(stored_array(value).astype(dtype.numpy()), dtype=dtype, name=value.name)
    value.dtype = dtype


def _clip(model: ir.Model, node: ir.Node) -> None:
    """Clip the codes of a quantizer, now bytes, to their former range."""
    codes = node.outputs[0]
    narrow = dtype_of(codes)
    codes.dtype = wide = _NARROW[narrow]
    kind = wide.numpy()
    limits = [add_array(model, f"code_{limit}_{kind}", np.asarray(limit, kind)) for limit in (narrow.min, narrow.max)]
    clip = ir.node("Clip", [codes, *limits])
    (clipped,) = clip.outputs
    clipped.name, codes.name = codes.name, f"{codes.name}_wide"
    clipped.dtype, clipped.shape = wide, codes.shape
    for use in list(codes.uses()):
        if use.node is not clip:
            use.node.replace_input_with(use.idx, clipped)
    node.append(clip)


def spell_out_codes(model: ir.Model) -> None:
    """Write quantizers to 32 bits, and quantizers and dequantizers of half precision, in standard operators."""
    for node in list(model.graph):
        zero_point = node.inputs[2] if len(node.inputs) > 2 else None
        dtype = zero_point.dtype if zero_point is not None else None
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain or dtype is None:
            continue
        quantizes = node.op_type == "QuantizeLinear"
        if dtype in HALVES:
            target = dtype if quantizes else ir.DataType.FLOAT
            put_node(node, ir.node("Cast", node.inputs[:1], {"to": target}))
        elif dtype == ir.DataType.INT32 and quantizes:
            _quantize_to_int32(model, node)


def _quantize_to_int32(model: ir.Model, node: ir.Node) -> None:
    """Write a quantizer with one scale in doubles: an int64 `Clip` below 2**31 lets 2**31 pass in ONNX Runtime 1.31."""
    x, scale, zero_point = node.inputs
    info = np.iinfo(np.int32)
    limits = [add_array(model, f"int32_{limit}", np.asarray(limit, np.float64)) for limit in (info.min, info.max)]
    steps = [ir.node("Div", [x, scale])]
    steps.append(ir.node("Round", steps[-1].outputs))
    steps.append(ir.node("Cast", steps[-1].outputs, {"to": ir.DataType.DOUBLE}))
    point = ir.node("Cast", [zero_point], {"to": ir.DataType.DOUBLE})
    steps += [point, ir.node("Add", [steps[-1].outputs[0], point.outputs[0]])]
    steps.append(ir.node("Clip", [steps[-1].outputs[0], *limits]))
    node.prepend(steps)
    put_node(node, ir.node("Cast", steps[-1].outputs, {"to": ir.DataType.INT32}))
