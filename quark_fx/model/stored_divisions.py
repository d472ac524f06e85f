"""Rewriting of integer divisions in a stored graph, so that no values can crash the process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import tensor_of
from quark_fx.model.stored_operators import arguments_of

_DIVISIONS = frozenset({"div", "divide", "floor_divide", "fmod", "lcm", "remainder"})
_OVERFLOWING = (torch.int32, torch.int64)
"""Dtypes that processors divide directly; narrower dtypes are divided in 32 bits."""


def guard_divisions(gm: GraphModule) -> None:
    """Clamp dividends so that no integer division overflows.

    The most negative integer divided by -1 does not fit its dtype, and the division crashes the process. Dividends are
    clamped to at least the most negative integer plus 1, except in divisions by constants other than -1. Kernels raise
    an error for a divisor of 0.

    Args:
        gm: Graph whose nodes have their fake values in `meta["val"]`.

    Raises:
        QuarkError: If the dividend is a size: no captured graph divides a size by a tensor.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if not _divides_integers(node):
            continue
        arguments, lowest = (
            arguments_of(node.target, node.args, node.kwargs),
            torch.iinfo(node.meta["val"].dtype).min + 1,
        )
        operands = ("self", "other") if node.target._opname == "lcm" else ("self",)
        if len(operands) == 1 and _is_safe(gm, arguments["other"]):
            continue
        for name in operands:
            arguments[name] = _at_least(lowest, arguments[name], node)
        positional = [argument.name for argument in node.target._schema.arguments][: len(node.args)]
        node.args, node.kwargs = tuple(map(arguments.pop, positional)), arguments
        changed = True
    if changed:
        gm.recompile()


def _divides_integers(node: Node) -> bool:
    target, value = node.target, node.meta.get("val")
    divides = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and target._opname in _DIVISIONS
    return divides and isinstance(value, Tensor) and value.dtype in _OVERFLOWING


def _is_safe(gm: GraphModule, divisor: Any) -> bool:
    """Tell whether a divisor is a constant other than -1."""
    if isinstance(divisor, Node):
        return divisor.op == "get_attr" and not bool((tensor_of(gm, str(divisor.target)) == -1).any())
    return bool(divisor != -1)


def _at_least(lowest: int, operand: Any, node: Node) -> Any:
    if not isinstance(operand, Node):
        return max(operand, lowest)
    value, dtype = operand.meta.get("val"), node.meta["val"].dtype
    if not isinstance(value, Tensor):
        raise QuarkError(f"the stored graph divides a size by a tensor at %{node.name}, which is not allowed")
    clamped = operand.target is torch.ops.aten.clamp.default and operand.args[1:] == (lowest,)
    if clamped or value.dtype.itemsize < dtype.itemsize:
        return operand
    if value.dtype != dtype:
        operand = _inserted(node, torch.ops.aten._to_copy.default, operand, dtype=dtype)
    return _inserted(node, torch.ops.aten.clamp.default, operand, lowest)


def _inserted(node: Node, target: Any, operand: Node, *args: Any, **kwargs: Any) -> Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, (operand, *args), kwargs)
    value: Tensor = operand.meta["val"]
    with node.graph.owning_module.meta["fake_mode"]:  # type: ignore[union-attr]
        new.meta = {"stack_trace": "", "val": target(value, *args, **kwargs)}
    return new


__all__ = ["guard_divisions"]
