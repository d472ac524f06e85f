"""Cut a graph where few live values cross, and extract the span between two cuts as a module.

No rule depends on the kind of model: a cut is a position in the topological order, and its interface consists of the
values computed before it and read after it. Residual blocks, inverted residuals, and the halves of a transformer layer
are spans between positions that a single activation crosses.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import results_of, value_of
from quark_fx.graph.operators import BRANCH, operator_row
from quark_fx.plan.placement import module_name

_LONGEST_SPAN = 8
"""Largest number of weighted operators that a value can span and still count as live at a cut. Longer spans, such as an
encoder's output, a table of relative positions, or a skip connection across the graph, are not counted."""

_LARGEST_BLOCK = 16
"""Largest number of weighted operators in a block. A longer span that no single value crosses is cut where the fewest
values cross."""


class Unit(StrEnum):
    """Granularity of the cuts."""

    BLOCK = "block"
    """Cut where one activation is live or, in a span of many operators, where the fewest activations are live."""
    OPERATOR = "operator"
    """Cut before every weighted operator; consecutive operators with the same input stay together."""


@dataclass(frozen=True)
class Block:
    """Span of a graph between two cuts.

    Attributes:
        name: Module that contains all weighted operators of the block or, if only the whole model does, the module of
            the first operator.
        inputs: Names of the values that enter, in graph order.
        outputs: Names of the values that leave.
        operators: Names of the nodes of the block's weighted operators.
        shared: Names among `inputs` and `outputs` that depend on no weighted operator (masks, positions, sizes), so
            quantization does not change them.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    shared: frozenset[str]

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the outputs that the block computes and that quantization may change."""
        return tuple(name for name in self.outputs if name not in self.inputs and name not in self.shared)


def find_blocks(gm: GraphModule, unit: Unit = Unit.BLOCK) -> list[Block]:
    """Cut `gm` into blocks that, run one after another, compute the same outputs.

    The time is linear in the size of the graph, except for collecting the inputs and outputs of each block. A graph
    without weighted operators is one block.
    """
    return _Cuts(gm).blocks(unit)


class _Cuts:
    """Live values at each position of a graph.

    Attributes:
        nodes: Nodes in topological order; a cut *at* `i` is before `nodes[i]`.
        weighted: Positions of the weighted operators.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.weighted = [i for i, node in enumerate(self.nodes) if _is_weighted(node)]
        varies, deep = _reached(self.nodes, _is_placeholder), _reached(self.nodes, _is_weighted)
        self.shared = varies - deep
        self.crossing = [node for node in self.nodes if node in varies and node.users and node.op != "output"]
        self.last = {node: max(self.position[user] for user in node.users) for node in self.crossing}
        self.count = self._live_counts()

    def _live_counts(self) -> list[int]:
        """Return the number of live activations at each position; a tuple counts `len(nodes)`, so no cut crosses it."""
        change = [0] * (len(self.nodes) + 1)
        for node in self.crossing:
            first, last = self.position[node] + 1, self.last[node]
            weight = 1
            if isinstance(value_of(self.gm, node), tuple | list):
                weight = len(self.nodes)
            elif node in self.shared or self._travels(node):
                weight = 0
            change[first] += weight
            change[last + 1] -= weight
        total, counts = 0, []
        for step in change:
            total += step
            counts.append(total)
        return counts

    def _travels(self, node: Node) -> bool:
        return self._size(self.position[node] + 1, self.last[node] + 1) > _LONGEST_SPAN

    def blocks(self, unit: Unit) -> list[Block]:
        pairs = [pair for pair in itertools.pairwise(self.weighted) if not self._read_alike(*pair)]
        cuts = [self._best_gap(before, at) for before, at in pairs]
        fine = [cut for cut in cuts if self.count[cut] < len(self.nodes)]
        chosen = fine if unit is Unit.OPERATOR else self._coarse(fine)
        start = 1 + max((i for i, node in enumerate(self.nodes) if _is_placeholder(node)), default=-1)
        edges = [start, *chosen, len(self.nodes) - 1]
        return [self._block(a, b) for a, b in itertools.pairwise(edges)]

    def _best_gap(self, before: int, at: int) -> int:
        """Return the position between two weighted operators that the fewest values cross; of several, the last."""
        return min(range(before + 1, at + 1), key=lambda i: (self.count[i], -i))

    def _read_alike(self, before: int, at: int) -> bool:
        value = _activation(self.nodes[at])
        return value is not None and _activation(self.nodes[before]) is value

    def _coarse(self, fine: list[int]) -> list[int]:
        """Return the cuts that at most one activation crosses, and as few more as `_LARGEST_BLOCK` requires."""
        chosen: list[int] = []
        start, pending = 0, list[int]()
        for cut in [*fine, len(self.nodes)]:
            pending.append(cut)
            if cut < len(self.nodes) and self.count[cut] > 1:
                continue
            while self._size(start, cut) > _LARGEST_BLOCK:
                reach = [i for i in pending[:-1] if self._size(start, i) <= _LARGEST_BLOCK]
                if not reach:
                    break
                # Prefer a cut in the second half of the longest allowed block, even if more values cross it.
                reach = [i for i in reach if self._size(start, i) >= _LARGEST_BLOCK // 2] or reach[-1:]
                start = min(reach, key=lambda i: (self.count[i], -i))
                chosen.append(start)
                pending = [i for i in pending if i > start]
            if cut < len(self.nodes):
                chosen.append(cut)
            start, pending = cut, []
        return chosen

    def _size(self, start: int, end: int) -> int:
        """Return the number of weighted operators from `start` to before `end`."""
        return bisect_left(self.weighted, end) - bisect_left(self.weighted, start)

    def _block(self, start: int, end: int) -> Block:
        operators = [self.nodes[i] for i in self.weighted if start <= i < end]
        inputs, outputs = self._live(start), self._live(end)
        shared = frozenset(node.name for node in (*inputs, *outputs) if node in self.shared)
        return Block(
            _common_module(operators),
            tuple(node.name for node in inputs),
            tuple(node.name for node in outputs),
            tuple(node.name for node in operators),
            shared,
        )

    def _live(self, at: int) -> list[Node]:
        if at == len(self.nodes) - 1:
            results = [node for node in results_of(self.gm) if isinstance(node, Node)]
            return list(dict.fromkeys(results))
        return [node for node in self.crossing if self.position[node] < at <= self.last[node]]


def _is_placeholder(node: Node) -> bool:
    return node.op == "placeholder"


def _is_weighted(node: Node) -> bool:
    row = operator_row(node)
    return row is not None and row.weight is not None and BRANCH not in node.meta


def _activation(node: Node) -> object:
    """Return the activation that a weighted operator multiplies, or `None` if it multiplies none, like an embedding."""
    linear = Linear.of(node)
    return None if linear is None else linear.activation


def _reached(nodes: Sequence[Node], starts: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes for which `starts` is true, and all nodes that depend on them."""
    dependents: set[Node] = set()
    for node in nodes:
        if starts(node) or any(source in dependents for source in node.all_input_nodes):
            dependents.add(node)
    return dependents


def _common_module(operators: Iterable[Node]) -> str:
    paths = [module_name(node).split(".") for node in operators]
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared or paths[0])


def extract(
    gm: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node], *, watches: Iterable[Node] = ()
) -> GraphModule:
    """Return a module that computes `outputs` from `inputs`, sharing the tensors of `gm`.

    Args:
        gm: Functional graph.
        inputs: Values that become the module's parameters, in order.
        outputs: Values that the module returns, as a tuple. They may depend only on `inputs` and on constants.
        watches: Calls whose results nothing reads; each is copied if the module contains its argument.
    """
    needed = _needed(inputs, outputs)
    needed.update(node for node in watches if node.args[0] in needed or node.args[0] in inputs)
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in needed:
            assert node.op != "placeholder", f"{node} is not computed from {inputs}"
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(map_arg(tuple(outputs), lambda n: copied[n]))
    block = GraphModule(gm, graph)
    block.meta["fake_mode"] = gm.meta.get("fake_mode")
    return block


def between(gm: GraphModule, inputs: Collection[Node], outputs: Iterable[Node]) -> list[Node]:
    """Return, in graph order, the nodes between `inputs` and `outputs`; `inputs` are excluded, `outputs` included."""
    needed = _needed(inputs, outputs)
    return [node for node in gm.graph.nodes if node in needed]


def _needed(inputs: Collection[Node], outputs: Iterable[Node]) -> set[Node]:
    needed: set[Node] = set()
    pending = [node for node in outputs if node not in inputs]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(source for source in node.all_input_nodes if source not in inputs)
    return needed


def carriers(gm: GraphModule) -> Mapping[str, Node]:
    """Map names to nodes of a graph; the name of a value computed in integers maps to the node of its real value."""
    named = {node.name: node for node in gm.graph.nodes}
    return named | {node.meta["carries"]: node for node in gm.graph.nodes if "carries" in node.meta}


__all__ = ["Block", "Unit", "between", "carriers", "extract", "find_blocks"]
