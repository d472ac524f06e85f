"""Operators that servers run as one kernel, such as query, key, and value: they read one value in one module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from torch.fx import Node

from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import KEEPS_ORDER, motion

if TYPE_CHECKING:
    from quark_fx.plan.placement import PlannedOperator

_EXPERTS = "experts"


def siblings(operators: Iterable[PlannedOperator]) -> list[list[PlannedOperator]]:
    """Return each group of siblings, in graph order.

    Siblings are matrix products of one module that read the same value, except products with a role (such as routers
    and heads), and the stacks of experts of one module.
    """
    groups: dict[Hashable, list[PlannedOperator]] = {}
    for op in operators:
        key = shared_with_siblings(op)
        if key is not None and not op.roles:
            groups.setdefault(key, []).append(op)
    return [group for group in groups.values() if len(group) > 1]


def shared_with_siblings(op: PlannedOperator) -> Hashable:
    """Return a key that is equal for siblings only; `None` for an operator that cannot have siblings."""
    return (_EXPERTS, _owner(op)) if op.kind == _EXPERTS else value_read(op)


def value_read(op: PlannedOperator) -> Hashable:
    """Return a key that matrix products of one module share if they read the same value; `None` for other operators."""
    linear = Linear.of(op.node)
    return None if linear is None or linear.kernel else ("value", _whole(linear.activation), _owner(op))


def _owner(op: PlannedOperator) -> str:
    return op.name.rpartition(".")[0]


def _whole(value: Node) -> Node:
    while motion(value) in KEEPS_ORDER:
        (value,) = value.all_input_nodes[:1]
    return value


__all__ = ["shared_with_siblings", "siblings", "value_read"]
