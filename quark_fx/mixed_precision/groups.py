"""Groups of operators that get the same format."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from quark_fx.config.quant_config import QuantConfig
from quark_fx.graph.nodes import value_of
from quark_fx.plan.placement import PlannedOperator, plan_quantization
from quark_fx.plan.report import Row, stored_size
from quark_fx.plan.siblings import shared_with_siblings


@dataclass(frozen=True)
class Group:
    """Operators that get the same candidate. A stack of experts is one operator.

    Attributes:
        places: Indices of the operators in the plan, increasing.
        names: Names of the operators' modules, without duplicates.
        weights: Number of values of each weight; the keys are names of weights.
    """

    places: tuple[int, ...]
    names: tuple[str, ...]
    weights: dict[str, int]

    def size(self, rows: Sequence[Row]) -> int:
        """Return the size of the group's weights in bytes, as a report counts it.

        Args:
            rows: Report rows of all operators of the plan.
        """
        return stored_size([rows[i] for i in self.places])


def groups_of(gm: GraphModule) -> tuple[list[PlannedOperator], list[Group]]:
    """Return the operators of a float graph, and their groups, in graph order.

    A group contains operators with the same name, which patterns cannot distinguish; operators that share a weight; and
    siblings, which servers fuse, such as the query, key, and value projections, or the stacks of experts of one module.
    """
    operators = plan_quantization(gm, QuantConfig(), quiet=True).operators
    owner = list(range(len(operators)))
    first: dict[Hashable, int] = {}

    def root(place: int) -> int:
        while owner[place] != place:
            place = owner[place]
        return place

    for place, op in enumerate(operators):
        for key in _shared(op):
            one, other = sorted((root(first.setdefault(key, place)), root(place)))
            owner[other] = one
    members: dict[int, list[int]] = {}
    for place in range(len(operators)):
        members.setdefault(root(place), []).append(place)
    return operators, [_group(gm, operators, places) for places in members.values()]


def _shared(op: PlannedOperator) -> Iterator[Hashable]:
    """Yield the keys of an operator; operators with a common key belong to the same group."""
    yield "name", op.name
    weight = getattr(op, "weight_node", None)
    if weight is not None:
        yield "weight", str(weight.target)
    if (shared := shared_with_siblings(op)) is not None:
        yield shared


def _group(gm: GraphModule, operators: Sequence[PlannedOperator], places: Sequence[int]) -> Group:
    names = dict.fromkeys(operators[i].name for i in places)
    nodes = (getattr(operators[i], "weight_node", None) for i in places)
    weights = {str(node.target): int(value_of(gm, node).numel()) for node in nodes if node is not None}
    return Group(tuple(places), tuple(names), weights)


__all__ = ["Group", "groups_of"]
