"""Constants of a quantized graph: tensors, cast tensors, and dequantized codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.quantized_weights import stored_tensor
from quark_fx.graph.nodes import (
    CAST,
    DEQUANTIZE,
    EMBEDDING,
    is_parameter,
    parameter,
    target_name,
    tensor_names,
    value_of,
)
from quark_fx.numbers.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class Constant:
    """The form of a parameter in the quantized graph.

    Attributes:
        names: Names of the constant's tensors in the quantized graph; constants with equal names are the same constant.
        stored: Quantized tensor, or values, possibly in a floating-point dtype that differs from `dtype`.
        dtype: Dtype of the dequantized or cast values.
    """

    names: tuple[str, ...]
    stored: Tensor | QuantizedTensor
    dtype: torch.dtype

    @property
    def quantized(self) -> QuantizedTensor | None:
        """The quantized tensor; `None` if the constant is not quantized."""
        return self.stored if isinstance(self.stored, QuantizedTensor) else None

    @property
    def tensor(self) -> Tensor:
        """The codes of a quantized constant, or the values in their stored dtype."""
        return self.stored.codes if isinstance(self.stored, QuantizedTensor) else self.stored

    @property
    def is_float(self) -> bool:
        """True if the values are stored in `dtype`, neither quantized nor cast."""
        return isinstance(self.stored, Tensor) and self.stored.dtype == self.dtype

    def value(self) -> Tensor:
        """Return the values in `dtype`."""
        if isinstance(self.stored, QuantizedTensor):
            return self.stored.dequantize(self.dtype)
        return self.stored.to(self.dtype)


def constant_of(gm: GraphModule, node: Node) -> Constant | None:
    """Return the constant that a node computes: a tensor, a cast tensor, or dequantized codes; else `None`."""
    if node.op == "get_attr":
        value = parameter(gm, node)
        return Constant((str(node.target),), value, value.dtype)
    if target_name(node) == CAST and is_parameter(node.args[0]):
        inner = constant_of(gm, node.args[0])
        return inner and replace(inner, dtype=value_of(gm, node).dtype)
    if target_name(node) != DEQUANTIZE or not all(is_parameter(n) for n in node.args[:3]):
        return None
    return _codes(gm, *node.args)


def _codes(gm: GraphModule, *args: Any) -> Constant:
    dtype = args[6] if len(args) > 6 else torch.float32
    return Constant(tuple(str(n.target) for n in args[:3]), stored_tensor(gm, args), dtype)


def parameter_name(gm: GraphModule, codes: str) -> str:
    """Return the name of the captured model's parameter whose codes `gm` stores under the name `codes`."""
    codes = tensor_names(gm).get(codes, codes)
    return codes.removesuffix("_codes") if codes.endswith("_codes") else codes.rpartition("_codes_")[0] or codes


def table_of(gm: GraphModule, node: Node) -> tuple[Node, Constant] | None:
    """Return the embedding lookup and its table for a node that dequantizes or casts the rows; else `None`."""
    codes: Any = node.args[0] if target_name(node) in (DEQUANTIZE, CAST) else None
    if codes is None or target_name(codes) != EMBEDDING or not is_parameter(codes.args[0]):
        return None
    if target_name(node) == CAST:
        stored = codes.args[0]
        return codes, Constant((str(stored.target),), parameter(gm, stored), value_of(gm, node).dtype)
    axis: int | None = None
    tables = []
    for rows in node.all_input_nodes[1:3]:
        per_row = target_name(rows) == EMBEDDING
        table_node: Any = rows.args[0] if per_row else rows
        whole = is_parameter(table_node)
        if per_row:
            axis = 1 if whole else 0
        tables.append(table_node if whole else table_node.args[0])
    block = int(node.args[5]) if axis == 1 and len(node.args) > 5 else 0  # type: ignore[arg-type]
    arguments: Any = node.args
    return codes, _codes(gm, codes.args[0], *tables, arguments[3], axis, block, *arguments[6:])


__all__ = ["Constant", "constant_of", "parameter_name", "table_of"]
