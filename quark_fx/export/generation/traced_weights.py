"""Rewrites of the nodes around `DequantizeLinear` in graphs from `transformers`, before and after the conversion."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, array_of, erase_unread, made_by, operand, put_node, stored_array

_SCALE = re.compile(r"(?:(.+)\.)?parametrizations\.(\w+)\.0\.scale")
"""Pattern of the names that `torch.nn.utils.parametrize` gives to the scale of a parameter."""


def name_codes(model: ir.Model) -> int:
    """Name the codes and the scale of each weight after its parameter, and return the number of new names."""
    named = 0
    for node in model.graph:
        codes, scale = node.inputs[:2] if node.op_type == "DequantizeLinear" else (None, None)
        match = _SCALE.fullmatch(scale.name or "") if scale is not None else None
        if codes is None or not codes.is_initializer() or scale is None or match is None:
            continue
        name = ".".join(filter(None, match.groups()))
        for value, new in ((codes, f"{name}_codes"), (scale, f"{name}_scale")):
            if new not in model.graph.initializers:
                value.name = new
                named += 1
    return named


def split_fused_products(model: ir.Model) -> int:
    """Rewrite each `FusedMatMul` (`com.microsoft`) with a quantized weight as standard operators; return the count."""
    done = 0
    for node in list(model.graph):
        get = node.attributes.get_int
        weight = made_by(node.inputs[1], "DequantizeLinear") if node.op_type == "FusedMatMul" else None
        rank = _rank(weight.inputs[0]) if weight is not None else 0
        if rank < 2 or any(get(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            continue  # `_split` handles only `transB`, which a vector cannot have
        _split(model, node, rank)
        done += 1
    return done


def _rank(value: ir.Value | None) -> int:
    """Return the rank of a value; 0 if the rank is unknown."""
    return value.shape.rank() if value is not None and value.shape is not None else 0


def _split(model: ir.Model, node: ir.Node, rank: int) -> None:
    """Replace a `FusedMatMul` by `MatMul`, with `Transpose` for `transB` and `Mul` for `alpha` where needed.

    Args:
        model: Graph, changed in place.
        node: Node to replace.
        rank: Number of dimensions of its weight.
    """
    x, weight = node.inputs[:2]
    steps = []
    if node.attributes.get_int("transB", 0):
        steps.append(ir.node("Transpose", [weight], {"perm": [*range(rank - 2), rank - 1, rank - 2]}))
        weight = steps[-1].outputs[0]
    product = ir.node("MatMul", [x, weight], name=node.name)
    alpha = node.attributes.get_float("alpha", 1.0)
    model.graph.insert_before(node, steps)
    if alpha == 1:
        put_node(node, product)
        return
    output = product.outputs[0]
    output.shape, output.type = node.outputs[0].shape, node.outputs[0].type
    model.graph.insert_before(node, [product])
    put_node(node, ir.node("Mul", [output, add_array(model, f"{node.name}_alpha", np.array(alpha, np.float32))]))


PREPARATIONS: tuple[Callable[[ir.Model], int], ...] = (name_codes, split_fused_products)
"""Rewrites to apply, in this order, before a graph is converted to a format."""


def look_up_codes(model: ir.Model) -> int:
    """Make each `Gather` look up rows of 8-bit codes and dequantize only these rows, instead of the whole matrix.

    This applies to matrices with one scale, or one scale per row. The function returns the number of rewrites.
    """
    done = 0
    for node in list(model.graph):
        table = made_by(node.inputs[0], "DequantizeLinear") if node.op_type == "Gather" else None
        if table is None or node.attributes.get_int("axis", 0) or table.attributes.get_int("block_size", 0):
            continue
        codes = array_of(table.inputs[0])
        scales = [array_of(value) for value in table.inputs[1:]]
        rows = all(s is not None and (not s.ndim or table.attributes.get_int("axis", 1) == 0) for s in scales)
        if codes is None or codes.ndim != 2 or codes.dtype not in (np.int8, np.uint8) or not rows:
            continue
        _look_up(model, node, table)
        done += 1
    erase_unread(model)
    return done


def _look_up(model: ir.Model, gather: ir.Node, table: ir.Node) -> None:
    """Replace `gather` by `(Cast(Gather(codes)) - zero_point) * scale`, where `table` dequantizes the codes."""
    stored, index = operand(table), gather.inputs[1]
    codes = ir.node("Gather", [stored, index], {"axis": 0})
    steps = [codes, ir.node("Cast", [codes.outputs[0]], {"to": ir.DataType.FLOAT})]
    for operator, value in reversed(list(zip(("Mul", "Sub"), table.inputs[1:], strict=False))):
        array = stored_array(value)
        name = f"{stored.name}_{operator.lower()}"
        column = add_array(model, name, array.astype(np.float32).reshape(-1, 1) if array.ndim else array.astype("f4"))
        product = steps[-1].outputs[0]
        if array.ndim:
            steps.append(ir.node("Gather", [column, index], {"axis": 0}))
            column = steps[-1].outputs[0]
        steps.append(ir.node(operator, [product, column]))
    for step in steps[1:]:
        step.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.insert_before(gather, steps[:-1])
    put_node(gather, steps[-1])
