"""Rewrite of `einsum` with a parameter to `matmul`, so that the parameter is a weight, or to `mul`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quark_fx.graph.computed import computed_constants, is_constant
from quark_fx.graph.nodes import call, static_size, target_name

_aten = torch.ops.aten


def spell_out_products(gm: GraphModule) -> None:
    """Rewrite each `einsum` of an activation and a value computed from parameters as a `matmul`, or as a `mul`.

    Indices shared by both operands and the result are batch dimensions; at most one is supported. Indices that the
    parameter shares with the result alone are output channels. An equation that scales each element of the activation
    becomes a `mul`. Other equations are left unchanged.
    """
    constants = computed_constants(gm.graph)
    for node in list(gm.graph.nodes):
        if target_name(node) == "aten.einsum.default":
            with gm.graph.inserting_before(node):
                product = _product(gm, node, constants)
            if product is not None:
                node.replace_all_uses_with(product)
                gm.graph.erase_node(node)


def _product(gm: GraphModule, node: Node, constants: Collection[Node]) -> Node | None:
    arguments: Any = node.args
    equation, operands = arguments[:2]
    if not isinstance(operands, list | tuple) or len(operands) != 2 or len(node.args) > 2 or node.kwargs:
        return None
    fixed = [isinstance(n, Node) and is_constant(n, constants) for n in operands]
    if sum(fixed) != 1:
        return None
    x, w = operands if fixed[1] else reversed(operands)
    terms = _terms(str(equation), [n.meta["val"].dim() for n in operands])
    if terms is None or not all(n.meta["val"].is_floating_point() for n in (x, w)):
        return None
    first, second, result = terms
    inputs, weights = (first, second) if fixed[1] else (second, first)
    stacked = [i for i in inputs if i in weights and i in result]
    summed = [i for i in inputs if i in weights and i not in result]
    rows, channels = ([i for i in a if i not in b] for a, b in ((inputs, weights), (weights, inputs)))
    sizes = dict(zip(weights, w.meta["val"].shape, strict=True))

    def step(target: Any, *args: Any) -> Node:
        return call(gm, target, *args, like=node)

    def ordered(value: Node, have: Sequence[str], want: Sequence[str]) -> Node:
        order = [have.index(i) for i in want]
        return value if order == sorted(order) else step(_aten.permute.default, value, order)

    if not summed and not channels and {*inputs} == {*result}:
        w = step(_aten.reshape.default, ordered(w, weights, stacked), [sizes.get(i, 1) for i in inputs])
        return ordered(step(_aten.mul.Tensor, x, w), inputs, result)
    if not summed or len(stacked) > 1 or not {*rows, *channels} <= {*result} or (stacked and not rows):
        return None
    input_sizes = dict(zip(inputs, map(static_size, x.meta["val"].shape), strict=True))
    if any(input_sizes[i] != sizes[i] for i in (*summed, *stacked)):
        return None  # an operand is broadcast along this index
    outer = [*rows[:-1], *stacked, *rows[-1:]]
    x = ordered(x, inputs, [*outer, *summed])
    if len(summed) > 1:
        x = step(_aten.flatten.using_ints, x, len(outer), -1)
    w = ordered(w, weights, [*stacked, *summed, *channels])
    matrix = [*(sizes[i] for i in stacked), math.prod(sizes[i] for i in summed), math.prod(sizes[i] for i in channels)]
    if len(summed) > 1 or len(channels) != 1:
        w = step(_aten.reshape.default, w, matrix)
    y = step(_aten.matmul.default, x, w)
    if len(channels) > 1:
        y = step(_aten.unflatten.int, y, -1, [sizes[i] for i in channels])
    elif not channels:
        y = step(_aten.squeeze.dim, y, -1)
    return ordered(y, [*outer, *channels], result)


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], list[str], list[str]] | None:
    """Return the indices of both operands and of the result; `None` if an index occurs twice in an operand."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    hidden = [
        rank - len(text.replace("...", "")) if "..." in text else 0 for text, rank in zip(operands, ranks, strict=True)
    ]
    names = [f"...{i}" for i in range(max(hidden))]
    listed = [_indices(text, names[len(names) - count :]) for text, count in zip(operands, hidden, strict=True)]
    if not arrow:
        letters = [i for indices in listed for i in indices if not i.startswith("...")]
        result = "..." + "".join(sorted(i for i in letters if letters.count(i) == 1))
    if any(len({*indices}) < len(indices) for indices in listed):
        return None
    return listed[0], listed[1], _indices(result, names)


def _indices(text: str, hidden: Sequence[str]) -> list[str]:
    before, dots, after = text.partition("...")
    return [*before, *(hidden if dots else ()), *after]


__all__ = ["spell_out_products"]
