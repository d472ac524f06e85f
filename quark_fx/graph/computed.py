"""Values computed from parameters alone, and the operators that use them as weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.graph.nodes import is_parameter, parameter
from quark_fx.graph.operators import argument, permutation, row_by_target, unsupported_positions


def computed_constants(graph: Graph) -> frozenset[Node]:
    """Return the calls that depend on no graph input and give the same result every time."""
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not _is_deterministic(node):
            continue
        if all(is_constant(n, constants) for n in node.all_input_nodes):
            constants.add(node)
    return frozenset(constants)


def _is_deterministic(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    return not (schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)


def is_constant(node: Node, constants: Collection[Node]) -> bool:
    """Tell whether a node is a parameter, or one of the `computed_constants` of its graph."""
    return node.op == "get_attr" or node in constants


def calls_of(value: Node) -> list[Node]:
    """Return the calls that compute a constant, in an order in which they can run; none for a parameter."""
    calls: dict[Node, None] = {}
    pending = [value]
    while pending:
        node = pending[-1]
        fresh = [n for n in reversed(node.all_input_nodes) if n not in calls and n.op != "get_attr"]
        pending += fresh
        if not fresh:
            pending.pop()
            if node.op != "get_attr":
                calls[node] = None
    return list(calls)


def constant_value(gm: GraphModule, value: Node, *, wide: bool = False) -> Tensor:
    """Compute a constant; the result may share memory with a parameter.

    Args:
        gm: Graph.
        value: Parameter, or one of the `computed_constants`.
        wide: Whether parameters in half precision are read as float32.
    """
    calls = calls_of(value)
    values: dict[Node, Any] = {}
    readers = {n: sum(n in call.all_input_nodes for call in calls) for n in calls}

    def operand(n: Node) -> Any:
        if n in values:
            return values[n]
        stored = parameter(gm, n).detach()
        return stored.float() if wide and stored.is_floating_point() and stored.element_size() == 2 else stored

    with torch.no_grad():
        for call in calls:
            args, kwargs = map_arg((call.args, call.kwargs), operand)
            values[call] = call.target(*args, **kwargs)  # type: ignore[operator]
            for n in call.all_input_nodes:
                if n in values:
                    readers[n] -= 1
                    if not readers[n]:
                        del values[n]
        constant: Tensor = operand(value)
    return constant


def weight_arguments(node: Node) -> tuple[Node, ...]:
    """Return the operands of an operator at the positions of weights, stored or computed."""
    row = row_by_target(node)
    positions: Iterable[int] = unsupported_positions(node)
    if row is not None and row.weight is not None:
        positions = (row.weight,)
    return _nodes_at(node, positions)


def bias_arguments(node: Node) -> tuple[Node, ...]:
    """Return the biases of an operator, stored or computed."""
    row = row_by_target(node)
    return () if row is None or row.bias is None else _nodes_at(node, (row.bias,))


def _nodes_at(node: Node, positions: Iterable[int]) -> tuple[Node, ...]:
    arguments = (argument(node, position) for position in positions)
    flat = (value for entry in arguments for value in (entry if isinstance(entry, list | tuple) else (entry,)))
    return tuple(value for value in flat if isinstance(value, Node))


def before_transpositions(value: Node) -> Node:
    """Return the value before the transpositions that produce a weight; operators look for a parameter there."""
    while value.op == "call_function" and len(value.users) == 1 and permutation(value) is not None:
        (value,) = value.all_input_nodes
    return value


def parameters_of(value: Node, through: Collection[Node]) -> list[Node]:
    """Return the `get_attr` nodes that a value is computed from, in order, looking through the calls in `through`."""
    parameters: dict[Node, None] = {}
    pending, visited = [value], {value}
    while pending:
        node = pending.pop()
        if is_parameter(node):
            parameters[node] = None
        elif node in through:
            fresh = [n for n in reversed(node.all_input_nodes) if n not in visited]
            visited.update(fresh)
            pending += fresh
    return list(parameters)


__all__ = [
    *("before_transpositions", "bias_arguments", "calls_of", "computed_constants", "constant_value", "is_constant"),
    *("parameters_of", "weight_arguments"),
]
