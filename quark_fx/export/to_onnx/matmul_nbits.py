"""The format `matmul_nbits`: weight-only products as `MatMulNBits`, and embeddings as `GatherBlockQuantized`.

Both operators, of the domain `com.microsoft`, are described in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. The CPU kernels support further types,
which were measured on ONNX Runtime 1.31.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from quark_fx.checkpoints.words import pack
from quark_fx.errors import Declined, ExportError
from quark_fx.export.to_onnx.edit import (
    Kept,
    add_array,
    added_vector,
    array_of,
    erase_unread,
    made_by,
    operand,
    permutation,
    producer_of,
    put_node,
    without_trailing_none,
)
from quark_fx.export.to_onnx.formats import CONTRIB
from quark_fx.export.to_onnx.stored_codes import FORMATS, StoredCodes, dequantized, stem
from quark_fx.numbers.formats import IntFormat
from quark_fx.numbers.quantized_tensor import QuantizedTensor

Array = np.ndarray[Any, Any]

_BLOCKS = (16, 32, 64, 128, 256)
"""Numbers of values per scale that the kernels of both operators support."""

_BITS = (2, 4, 8)


def use_matmul_nbits(model: ir.Model, accuracy_level: int) -> tuple[Kept, ...]:
    """Rewrite the products and embedding lookups of weight-only matrices; return the weights that were not rewritten.

    Raises:
        ExportError: If no weight can be rewritten, the group size of a weight is not supported, or `accuracy_level`
            does not apply because no product is written.
    """
    left_alone, done = [], 0
    for node in list(model.graph):
        if (beyond := _beyond(node)) is not None:
            left_alone.append(beyond)
            continue
        table = _looked_up(node)
        weight = table or _multiplied(node)
        if weight is None:
            continue
        try:
            if table is not None:
                _use_gather(model, node, table)
            else:
                _use_product(model, node, weight, accuracy_level)
            done += 1
        except Declined as declined:
            left_alone.append(Kept(weight.name, node.op_type, declined.reason))
    _share_tables(model)
    erase_unread(model)
    if not done:
        why = "".join(f"\n  {k.name} ({k.operator}): {k.reason}" for k in left_alone)
        raise ExportError(
            "format='matmul_nbits' is for weights of 2, 4 or 8 bits and float activations; this model has none:"
            f"{why or ' no weight is quantized to integers (see qmodel.report())'}\n"
            "Use format='qdq', or a weight-only configuration such as 'int4_weight_only'."
        )
    if accuracy_level and not any(node.op_type == "MatMulNBits" for node in model.graph):
        raise ExportError(f"accuracy_level={accuracy_level} applies to MatMulNBits, but this model has none; drop it")
    return tuple(left_alone)


def _beyond(node: ir.Node) -> Kept | None:
    """Return a record of a weight that a node reads without a `DequantizeLinear`; `None` for any other node."""
    if node.op_type == "MatMulInteger":
        turned = made_by(node.inputs[1], "Transpose")
        codes, operator = (turned or node).inputs[0 if turned else 1], node.op_type
        reason = "its activation is quantized"
    elif node.op_type == "DequantizeBlocks":
        codes, operator = node.inputs[0], _reader(node)
        reason = f"it is in blocks of {node.attributes.get_string('format', '')}"
    else:
        return None
    return Kept(stem(codes), operator, reason) if codes is not None and array_of(codes) is not None else None


def _reader(node: ir.Node) -> str:
    """Return the operator that reads the output of `node`, following transposes and casts."""
    reader = next((use.node for use in node.outputs[0].uses()), None)
    if reader is None:
        return str(node.op_type)
    return _reader(reader) if reader.op_type in ("Transpose", "Cast") else str(reader.op_type)


# Weights -------------------------------------------------------------------------------------------------------------


def packed(codes: Tensor, bits: int) -> Array:
    """Pack each row of `codes` into bytes, lowest bits first; the last byte of a row is padded with zeros."""
    words = pack(codes, bits)
    filled: Array = words.view(torch.uint8)[:, : -(-codes.shape[1] * bits // 8)].numpy()
    return filled


def block_size(group: int, columns: int) -> int | None:
    """Return the block size with which the kernels can store groups of `group` columns; `None` if there is none.

    >>> block_size(128, 512), block_size(48, 512), block_size(24, 512), block_size(40, 40)
    (128, 16, None, 64)
    """
    if group >= columns:  # one group per row: the smallest block that holds it, or the largest block
        return next((size for size in _BLOCKS if size >= columns), _BLOCKS[-1])
    return next((size for size in reversed(_BLOCKS) if group % size == 0), None)


def read_blocks(weight: StoredCodes, *, axis: int) -> QuantizedTensor:
    """Return a constant matrix in the layout of the kernels.

    Args:
        weight: Matrix.
        axis: Dimension of the matrix that indexes its rows.

    Returns:
        Unsigned codes of shape (rows, columns), with a scale and a zero point for each block of a row.

    Raises:
        Declined: If the kernels do not support the matrix.
        ExportError: If the kernels support the matrix, but not its group size.
    """
    codes = array_of(weight.codes)
    if codes is None or codes.ndim != 2:
        raise Declined("it is not a constant matrix")
    if (stored := weight.read()) is None:
        raise Declined("its scales or zero points are computed in the graph")
    fmt = weight.format
    if not fmt.is_integer or fmt.bits not in _BITS:
        raise Declined(f"its codes are {str(weight.codes.dtype).lower()}")
    if stored.axis is not None and (stored.axis == axis) == bool(stored.block_size):
        raise Declined("its scales vary along its columns")
    rows, columns = stored.codes.shape[axis], stored.codes.shape[1 - axis]
    group = min(stored.block_size or columns, columns)
    size = block_size(group, columns)
    if size is None:
        raise ExportError(
            f"{weight.name}: ONNX Runtime has no weight-only kernel for groups of {group}; use a group_size of 16, 32, "
            "64, 128, 256 or another multiple of 16, or format='qdq'"
        )
    blocks, offset = -(-columns // size), 1 << (fmt.bits - 1) if fmt.signed else 0

    def per_block(values: Tensor) -> Tensor:
        matrix = (values if axis == 0 else values.t()) if values.dim() == 2 else values.reshape(-1, 1)
        groups = matrix.expand(rows, -(-columns // group))
        return groups.repeat_interleave(blocks if group == columns else group // size, dim=1)[:, :blocks].contiguous()

    unsigned = (stored.codes if axis == 0 else stored.codes.t()).int() + offset
    zero_point = per_block(stored.zero_point) + offset
    return QuantizedTensor.of(unsigned, per_block(stored.scale), zero_point, IntFormat(fmt.bits, False), 1, size)


def packed_zero_point(blocks: QuantizedTensor) -> Array | None:
    """Return the zero points, packed per row; `None` if all are the kernels' default, `2 ** (bits - 1)`."""
    bits = blocks.format.bits
    return None if bool((blocks.zero_point == 1 << (bits - 1)).all()) else packed(blocks.zero_point, bits)


def packed_blocks(blocks: QuantizedTensor) -> Array:
    """Return the packed codes, shape `(rows, blocks, block * bits / 8)`; the last block is padded with zeros."""
    missing = blocks.scale.shape[1] * blocks.block_size - blocks.codes.shape[1]
    filled = torch.nn.functional.pad(blocks.codes, (0, missing))
    return packed(filled, blocks.format.bits).reshape(*blocks.scale.shape, -1)


# Products ------------------------------------------------------------------------------------------------------------


def _multiplied(node: ir.Node) -> StoredCodes | None:
    """Return the dequantized weight that `node` reads, possibly through transposes and casts; `None` if none."""
    if node.op_type in ("Transpose", "Cast"):
        return None
    return next((weight for value in node.inputs if (weight := _constant_behind(value)) is not None), None)


def _constant_behind(value: ir.Value | None) -> StoredCodes | None:
    steps: list[ir.Node] = []
    while (step := made_by(value, "Transpose", "Cast")) is not None:
        steps.append(step)
        value = step.inputs[0]
    weight = dequantized(made_by(value, "DequantizeLinear"))
    array = array_of(weight.codes) if weight is not None else None
    if weight is None or array is None or array.ndim < 2:
        return None
    order = stored = tuple(range(array.ndim))
    for step in reversed(steps):
        order = tuple(order[axis] for axis in permutation(step, array.ndim)) if step.op_type == "Transpose" else order
    if order not in (stored, (*stored[:-2], stored[-1], stored[-2])):
        return None
    cast = any(step.op_type == "Cast" for step in steps)
    return replace(weight, turned=order != stored, cast=cast)


def _use_product(model: ir.Model, node: ir.Node, weight: StoredCodes, accuracy_level: int) -> None:
    x = operand(node)
    turned = weight.turned ^ _require_plain_product(node)
    blocks = read_blocks(weight, axis=0 if turned else 1)
    scale = _in_type_of(x, blocks.scale.numpy(), weight)
    bias, last = _bias(model, node, len(blocks.codes))
    zero_point = packed_zero_point(blocks)
    inputs = [
        x,
        add_array(model, f"{weight.name}_blocks", packed_blocks(blocks)),
        add_array(model, f"{weight.name}_block_scales", scale),
        None if zero_point is None else add_array(model, f"{weight.name}_block_zero_points", zero_point),
        None,
        bias,
    ]
    rows, columns = blocks.codes.shape
    attributes = {"K": columns, "N": rows, "bits": blocks.format.bits, "block_size": blocks.block_size}
    attributes |= {"accuracy_level": accuracy_level} if accuracy_level else {}
    new = ir.node("MatMulNBits", without_trailing_none(inputs), attributes, domain=CONTRIB, name=node.name)
    put_node(last, new)


def _require_plain_product(node: ir.Node) -> bool:
    """Return whether the product transposes its weight; raise if the kernel does not support the product."""
    if node.op_type not in ("MatMul", "Gemm"):
        raise Declined(f"ONNX Runtime has no weight-only kernel for {node.op_type}")
    if _constant_behind(node.inputs[1]) is None:
        raise Declined("the weight is the left factor")
    cast = made_by(node.inputs[0], "Cast")
    activation = made_by(node.inputs[0] if cast is None else cast.inputs[0], "DequantizeLinear")
    if activation is not None and _looked_up(activation) is None:
        raise Declined("its activation is quantized")
    get = node.attributes.get_float
    if node.attributes.get_int("transA", 0) or get("alpha", 1.0) != 1 or get("beta", 1.0) != 1:
        raise Declined("its Gemm transposes or scales more than the weight")
    return bool(node.attributes.get_int("transB", 0))


def _in_type_of(x: ir.Value, scale: Array, weight: StoredCodes) -> Array:
    """Return the scales in the type of the activation, as the kernel requires."""
    if not weight.cast:
        return scale
    if x.dtype is not None and x.dtype != ir.DataType.FLOAT16:
        raise Declined(f"the model computes in {x.dtype.name.lower()}; quantize model.float()")
    narrow = scale.astype(np.float16)
    if x.dtype is None or not np.array_equal(narrow, scale):
        raise Declined("the model computes in float16 and its scales are not; set scale='float16'")
    return narrow


def _bias(model: ir.Model, node: ir.Node, channels: int) -> tuple[ir.Value | None, ir.Node]:
    """Return the constant vector that is added to a product (`None` if none is), and the node that adds it."""
    if node.op_type == "MatMul":
        return added_vector(model, node, channels)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    array = array_of(bias)
    if bias is not None and (array is None or array.shape != (channels,)):
        raise Declined("its Gemm adds something other than a constant vector")
    return bias, node


# Embeddings ----------------------------------------------------------------------------------------------------------


def _looked_up(node: ir.Node) -> StoredCodes | None:
    """Return the weight whose rows `node` looks up, dequantized before or after the `Gather`, or by arithmetic."""
    if node.op_type == "Gather":
        return _constant_behind(node.inputs[0])
    if node.op_type == "DequantizeLinear":
        gather = made_by(node.inputs[0], "Gather")
        return _rows_dequantized(node, gather) if gather is not None else None
    return _rows(node) if node.op_type == "Mul" else None


def _rows_dequantized(node: ir.Node, gather: ir.Node) -> StoredCodes | None:
    """Match a dequantization of gathered codes with one scale for the table, or with gathered scales of each row."""
    parameters = []
    for value in node.inputs[1:]:
        cast = made_by(value, "Cast")
        lookup = made_by(value if cast is None else cast.inputs[0], "Gather")
        if lookup is not None and lookup.inputs[1] is not gather.inputs[1]:
            return None
        parameters.append(value if lookup is None else lookup.inputs[0])
    scale, zero_point = (*parameters, None)[:2]
    codes, group = gather.inputs[0], node.attributes.get_int("block_size", 0)
    if codes is None or scale is None or codes.dtype is None or array_of(codes) is None:
        return None
    if codes.dtype not in FORMATS:
        return None
    return StoredCodes(codes, scale, zero_point, 1 if group else 0, int(group or 0), FORMATS[codes.dtype])


def _rows(node: ir.Node) -> StoredCodes | None:
    """Match `(Cast(Gather(codes)) - Cast(zero_point)) * Gather(scale)`: one scale per row of the table."""
    difference, scale = made_by(node.inputs[0], "Sub"), made_by(node.inputs[1], "Gather")
    if difference is None or scale is None:
        return None
    cast, zero_cast = (made_by(value, "Cast") for value in difference.inputs)
    codes = made_by(cast.inputs[0], "Gather") if cast is not None else None
    if codes is None or zero_cast is None or codes.inputs[1] is not scale.inputs[1]:
        return None
    zero_point = zero_cast.inputs[0]
    if (gathered := made_by(zero_point, "Gather")) is not None:
        zero_point = _unsqueezed(gathered.inputs[0])
    table, rows = codes.inputs[0], _unsqueezed(scale.inputs[0])
    if table is None or rows is None or table.dtype is None or table.dtype not in FORMATS:
        return None
    if any(array_of(value) is None for value in (table, rows, zero_point)):
        return None
    return StoredCodes(table, rows, zero_point, 0, 0, FORMATS[table.dtype])


def _unsqueezed(value: ir.Value | None) -> ir.Value | None:
    node = made_by(value, "Unsqueeze")
    return node.inputs[0] if node is not None else value


def _gather_of(node: ir.Node) -> ir.Node:
    """Return the `Gather` that looks up the codes or, if dequantization comes first, the values."""
    while node.op_type != "Gather":
        node = producer_of(operand(node))
    return node


def _use_gather(model: ir.Model, node: ir.Node, weight: StoredCodes) -> None:
    gather = _gather_of(node)
    if gather.attributes.get_int("axis", 0) or weight.turned:
        raise Declined("the weight is not looked up by rows")
    if weight.cast or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
        raise Declined("the model does not compute in float32; quantize model.float()")
    blocks = read_blocks(weight, axis=0)
    bits = blocks.format.bits
    if blocks.codes.shape[1] * bits % 8:
        raise Declined(f"rows of {blocks.codes.shape[1]} codes of {bits} bits end within a byte")
    zero_point = packed_zero_point(blocks)
    inputs = [
        add_array(model, f"{weight.name}_rows", packed(blocks.codes, bits)),
        gather.inputs[1],
        add_array(model, f"{weight.name}_block_scales", blocks.scale.numpy()),
        None if zero_point is None else add_array(model, f"{weight.name}_block_zero_points", zero_point),
    ]
    attributes = {"bits": bits, "block_size": blocks.block_size, "gather_axis": 0, "quantize_axis": 1}
    name = gather.name
    new = ir.node("GatherBlockQuantized", without_trailing_none(inputs), attributes, domain=CONTRIB, name=name)
    put_node(node, new)


def _share_tables(model: ir.Model) -> None:
    """Let lookups in a matrix and products with it share its bytes, which the two kernels read in different shapes."""
    products = [node.inputs[1] for node in model.graph if node.op_type == "MatMulNBits"]
    for node in [node for node in model.graph if node.op_type == "GatherBlockQuantized"]:
        rows = array_of(node.inputs[0])
        for blocks in products:
            stored = array_of(blocks)
            if rows is None or stored is None or rows.size != stored.size or len(rows) != len(stored):
                continue
            if np.array_equal(rows, stored.reshape(rows.shape)):
                shape = add_array(model, f"{node.name}_shape", np.array(rows.shape, np.int64))
                flat = ir.node("Reshape", [blocks, shape])
                model.graph.insert_before(node, [flat])
                node.replace_input_with(0, flat.outputs[0])
                break
