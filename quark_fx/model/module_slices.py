"""Modules without parameters that passes rewrote, and what the quantized graph computes in their place.

A call of a module with one floating-point input and one result is a piece of the graph between two nodes. What passes
make of it carries the module's path, so the piece of the quantized graph that ends with the result and begins where
that path does computes the same call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from quark_fx.graph.nodes import is_activation, module_calls, module_path, parameter


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module that reads no parameter, in a float graph.

    Attributes:
        path: of the module.
        entry: its one input; outside of the call.
        result: its one result.
        nodes: all that the call computes.
    """

    path: str
    entry: Node
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class ModuleSlice:
    """The nodes of a quantized graph that compute a call.

    Attributes:
        entry: what they read besides constants; outside.
        result: what they compute.
        nodes: in graph order, those of constants among them.
    """

    entry: Node
    result: Node
    nodes: tuple[Node, ...]

    def module(self, gm: GraphModule) -> GraphModule:
        """Return a module of one input that computes the slice, with tensors of its own."""
        graph, tensors = Graph(), {}
        copies = {self.entry: graph.placeholder("x")}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
            if node.op == "get_attr":
                tensors[str(node.target)] = parameter(gm, node).detach().clone()
        graph.output(copies[self.result])
        return GraphModule(tensors, graph, class_name="ModuleSlice")


def calls_without_parameters(graph: Graph) -> dict[Node, ModuleCall]:
    """Return the innermost calls of modules with one floating-point input and one result, by that result."""
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for key in module_calls(node):
            calls.setdefault(key, []).append(node)
    found = {}
    for key, nodes in calls.items():
        inside = frozenset(nodes)
        # Constants that are no parameters of the model are what a pass computes with.
        read = {n for node in nodes for n in node.all_input_nodes if not is_made_up(n)} - inside
        results = [node for node in nodes if not inside.issuperset(node.users)]
        if len(read) != 1 or len(results) != 1 or next(reversed(module_calls(results[0]))) != key:
            continue
        entry = read.pop()
        if is_activation(entry):
            found[results[0]] = ModuleCall(module_path(results[0]), entry, results[0], inside)
    return found


def is_made_up(node: Node) -> bool:
    """Tell whether a node reads a tensor of a pass, not of the model."""
    return node.op == "get_attr" and "parameter" not in node.meta


def slice_of(result: Node, path: str) -> ModuleSlice | None:
    """Return what a module of a quantized graph computes `result` with; `None` if that is not one input alone."""
    inside, entries, pending = set[Node](), set[Node](), [result]
    while pending:
        node = pending.pop()
        if node.op == "get_attr" or (node.op == "call_function" and _within(path, module_calls(node).values())):
            if node not in inside:
                inside.add(node)
                pending += node.all_input_nodes
        else:
            entries.add(node)
    if result not in inside or len(entries) != 1:
        return None
    return ModuleSlice(entries.pop(), result, tuple(node for node in result.graph.nodes if node in inside))


def _within(path: str, others: Iterable[str]) -> bool:
    return any(f"{other}.".startswith(f"{path}.") for other in others)


__all__ = ["ModuleCall", "ModuleSlice", "calls_without_parameters", "slice_of"]
