"""ONNX lowering of `index_put`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import onnx_ir as ir
from onnxscript import opset21

from quark_fx.export.to_onnx.table import lowers

op: Any = opset21


@lowers("aten.index_put.default")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Write values at indices, or add one for each occurrence of an index.

    `ScatterND` indexes the first dimensions, so the indexed dimensions are transposed to the front and back. A mask is
    replaced by the indices of its nonzero elements.
    """
    chosen = [place for place, index in enumerate(indices) if index is not None]
    parts = [indices[place] for place in chosen]
    masked = [part for part in parts if part.dtype == ir.DataType.BOOL]
    if masked:
        width, broadcast = len(masked[0].shape), 1
        where = op.Transpose(op.NonZero(masked[0]), perm=[1, 0])
    else:
        width, broadcast = len(parts), max(len(part.shape) for part in parts)
        parts = [op.Cast(part, to=ir.DataType.INT64) for part in parts]
        sizes = op.Shape(reduce(op.Add, parts))
        columns = [op.Unsqueeze(op.Expand(part, sizes), [-1]) for part in parts]
        where = columns[0] if width == 1 else op.Concat(*columns, axis=-1)
    first, rank = chosen[0], len(x.shape)
    dims = list(range(first, first + width)) if masked else chosen
    others = [dim for dim in range(rank) if dim not in dims]
    order = [*dims, *others]
    moved = x if order == sorted(order) else op.Transpose(x, perm=order)
    tail = op.Shape(moved, start=width)
    heads = op.Shape(where, start=0, end=-1)
    before = first if dims == list(range(first, first + width)) else 0  # torch puts separated dimensions first
    if before:
        sizes = op.Concat(
            op.Shape(moved, start=width, end=width + before), heads, op.Shape(moved, start=width + before), axis=0
        )
        values = op.Expand(values, sizes)
        rest = range(before + broadcast, broadcast + len(others))
        values = op.Transpose(values, perm=[*range(before, before + broadcast), *range(before), *rest])
    else:
        values = op.Expand(values, op.Concat(heads, tail, axis=0))
    made = op.ScatterND(moved, where, values, reduction="add" if accumulate else "none")
    return made if moved is x else op.Transpose(made, perm=[order.index(dim) for dim in range(rank)])


__all__ = ["index_put"]
