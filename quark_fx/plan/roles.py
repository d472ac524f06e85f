"""Roles of operators in their model: heads, routers, depthwise convolutions, and low-rank adapters.

Patterns can select operators by role (`"op:head"`). The structure of the graph determines a role, not the name of a
module or class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from quark_fx.graph.attention import is_pointwise
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import CAST, target_name
from quark_fx.graph.operators import BRANCH, PADS, Motion, motion, moves, operator_row

HEAD = "head"
"""Role of an operator whose output the model returns, such as a language model's projection to its vocabulary."""

ROUTER = "router"
"""Role of an operator whose largest outputs are chosen by index, such as the router of a mixture of experts."""

DEPTHWISE = "depthwise"
"""Role of a depthwise convolution, such as the short convolution over tokens in a state-space layer."""

ADAPTER = "adapter"
"""Role of the two operators of a low-rank branch that is added to the output of another operator (LoRA)."""

ROLES = (HEAD, ROUTER, DEPTHWISE, ADAPTER)

_NORMALIZING = frozenset({"aten.softmax.int", "aten.log_softmax.int"})

_SQUASHING = _NORMALIZING | frozenset(
    f"aten.{name}"
    for name in (
        *("tanh.default", "sigmoid.default", "clamp.default"),
        *("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"),
    )
)
"""Operators applied to scores before the largest scores are chosen, with numbers as their only other operands."""

_SCALING = frozenset({"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"})

_ADDING = frozenset({"aten.add.Tensor"})

_REDUCING = frozenset(
    f"aten.{name}"
    for name in (
        *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "logsumexp.default"),
        *("amax.default", "amin.default", "max.default", "min.default"),
    )
)
"""Operators that compute one element from several."""

_FILLED = frozenset(f"aten.{name}_like.default" for name in ("zeros", "ones", "full"))
"""Operators that read only the shape of their input."""

PLACES = frozenset({"aten.argmax.default", "aten.argsort.default", "aten.argsort.stable"})

CHOOSING = frozenset({"aten.topk.default", "aten.max.dim", "aten.sort.default", "aten.sort.stable"})
"""Operators that return the largest values and their indices."""

_REPLACING = frozenset(
    f"aten.{name}"
    for name in ("where.ScalarOther", "where.ScalarSelf", "min.dim", "kthvalue.default", "argmin.default")
)
"""Operators that select elements, or replace elements with a number, but do not make their input a router's output."""

_KEEPING = PADS | PLACES | CHOOSING | _NORMALIZING | _REDUCING | _REPLACING | {CAST}
"""Operators after a head: the model returns their output, and the operator before them still counts as the head."""


@dataclass(frozen=True, eq=False)
class Uses:
    """Sets of a graph's values by their use; each is computed once, in time linear in the graph."""

    graph: Graph

    @cached_property
    def chosen_from(self) -> frozenset[Node]:
        """Values whose largest elements are chosen by index, directly or after elementwise operators."""
        pending, values = [node for node in self.graph.nodes if _chooses(node)], set[Node]()
        while pending:
            node = pending.pop()
            fresh = [value for value in node.all_input_nodes if value not in values]
            values.update(fresh)
            pending += [n for n in fresh if _is_scored_with(n)]
        return frozenset(values)

    @cached_property
    def returned(self) -> frozenset[Node]:
        """Values that the model returns, directly or after moving, selecting, reducing, or changing their elements."""
        pending = list(self.graph.output_node().all_input_nodes)
        values = set(pending)
        while pending:
            node = pending.pop()
            fresh = [value for value in node.all_input_nodes if value not in values and _keeps(node, value)]
            values.update(fresh)
            pending += fresh
        return frozenset(values)

    @cached_property
    def multiplied(self) -> frozenset[Node]:
        """Values from which the input of a weighted operator, or of a product of activations, is computed."""
        pending = [node for node in self.graph.nodes if BRANCH not in node.meta and operator_row(node) is not None]
        values = set[Node]()
        while pending:
            fresh = [value for value in pending.pop().all_input_nodes if value not in values]
            values.update(fresh)
            pending += [value for value in fresh if BRANCH not in value.meta]
        return frozenset(values)


def roles_of(node: Node, uses: Uses | None = None) -> tuple[str, ...]:
    """Return the roles of a weighted operator.

    Args:
        node: The operator.
        uses: Uses of the values of the operator's graph. Default: computed here.
    """
    uses = uses or Uses(node.graph)
    roles = [DEPTHWISE] if _is_depthwise(node) else []
    if base_of_adapter(node) is not None:
        roles.append(ADAPTER)
    elif _is_head(node, uses):
        roles.append(HEAD)
    elif node in uses.chosen_from:
        roles.append(ROUTER)
    return tuple(roles)


def base_of_adapter(node: Node) -> Node | None:
    """Return the operator whose output a low-rank branch is added to, if `node` is part of the branch, else `None`.

    The branch is two products with fewer channels between them than at either end, and only factors between them:
    `x @ w + (x @ a) @ b * scale`.
    """
    up = node
    if (steps := _after_scaling(node)) is not None and Linear.of(steps) is not None:
        up = steps  # `node` is the first of the two
    second = Linear.of(up)
    first = None if second is None else Linear.of(_unscaled(second.activation))
    if first is None or second is None or node not in (first.node, up) or _after_scaling(first.node) is not up:
        return None
    total = _after_scaling(up)
    if total is None or target_name(total) not in _ADDING:
        return None
    source, rank = _unscaled(first.activation), first.shape[first.output_axis]
    for term in _terms(total):
        base = Linear.of(term)
        if base is None or term is up or _unscaled(base.activation) is not source:
            continue
        if rank < min(base.shape[base.output_axis], base.groups * base.shape[base.input_axis]):
            return term
    return None


def _after_scaling(node: Node) -> Node | None:
    """Return the only consumer of a value, after factors and casts; `None` if it has several."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not _scales(user):
            return user
        node = user
    return None


def _unscaled(value: Node) -> Node:
    while _scales(value):
        (value,) = value.all_input_nodes
    return value


def _scales(node: Node) -> bool:
    return target_name(node) in _SCALING | {CAST} and len(node.all_input_nodes) == 1


def _terms(total: Node) -> Iterator[Node]:
    """Yield the terms of a sum before scalar factors and casts; a sum that is also used elsewhere is one term."""
    for value in total.all_input_nodes:
        value = _unscaled(value)
        if target_name(value) in _ADDING and len(value.users) == 1:
            yield from _terms(value)
        else:
            yield value


def _is_depthwise(node: Node) -> bool:
    linear = Linear.of(node)
    return linear is not None and linear.kind == "conv" and linear.groups > 1 and linear.shape[1] == 1


def _is_scored_with(node: Node) -> bool:
    """Tell whether a node's output can stand for its input when the largest elements are chosen; a lookup cannot."""
    moved = moves(node) and motion(node) is not Motion.LOOK_UP
    return moved or target_name(node) in _SQUASHING | {CAST} or is_pointwise(node)


def _chooses(node: Node) -> bool:
    """Tell whether a node returns the indices of the largest elements, not only their values."""
    name = target_name(node)
    return name in PLACES or (name in CHOOSING and any(result.args[1] == 1 for result in node.users))


def _is_head(node: Node, uses: Uses) -> bool:
    """Tell whether the model returns the operator's output, and no other weighted operator reads it."""
    single = isinstance(node.meta.get("val"), torch.Tensor)  # a recurrent layer also returns its state
    return single and node in uses.returned and node not in uses.multiplied


def _keeps(node: Node, value: Node) -> bool:
    """Tell whether the result of a node still counts as the output `value`, after moving, reducing, or changing it."""
    name = target_name(node)
    if motion(node) is not None or name in _KEEPING or BRANCH in node.meta:
        return True
    if not is_pointwise(node):
        return False
    operands = (other for other in node.all_input_nodes if other is not value)
    return all(_is_constant(other) or not _holds_floats(other) or _is_branch(other) for other in operands)


def _is_branch(value: Node) -> bool:
    return base_of_adapter(_unscaled(value)) is not None


def _is_constant(node: Node) -> bool:
    while (moves(node) or target_name(node) == CAST) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    filled = target_name(node) in _FILLED or not any(map(_is_tensor, node.all_input_nodes))
    return node.op == "get_attr" or (node.op == "call_function" and filled)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _holds_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


__all__ = ["ADAPTER", "DEPTHWISE", "HEAD", "ROLES", "ROUTER", "Uses", "base_of_adapter", "roles_of"]
