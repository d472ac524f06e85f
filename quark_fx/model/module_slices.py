"""Modules that passes rewrote, and the piece of the quantized graph that computes each of their calls.

A call of a module with one floating-point input and one result is a piece of the graph between two nodes. Nodes that
passes put in its place carry the module's path, so the nodes of the quantized graph that carry the path and lead to the
result compute the same call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from quark_fx.graph.nodes import is_activation, module_calls, module_path, parameter


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module in a float graph, with one input and one result.

    Attributes:
        path: Path of the module.
        entry: Only input of the call, a node outside of it.
        result: Only result of the call.
        nodes: All nodes of the call.
    """

    path: str
    entry: Node
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class ModuleSlice:
    """The nodes of a quantized graph that compute a call.

    Attributes:
        entry: Only input of the slice other than constants, a node outside of it.
        result: Node of the slice with the result of the call.
        nodes: Nodes of the slice in graph order, including constants.
    """

    entry: Node
    result: Node
    nodes: tuple[Node, ...]

    def module(self, gm: GraphModule) -> GraphModule:
        """Return a module with one input that computes the slice, with copies of its tensors."""
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
    """Return the innermost calls of modules with one floating-point input and one result, keyed by the result.

    Calls that use parameters of the model are skipped.
    """
    calls = (_call_of(key, nodes, parameters=False) for key, nodes in _nodes_by_call(graph).items())
    return {call.result: call for call in calls if call is not None and _innermost(call)}


def calls_around(graph: Graph, node: Node, outermost: int | None = None) -> Iterator[ModuleCall]:
    """Yield the calls with one tensor as input and one result that contain `node`, innermost first.

    The calls may read parameters. Modules with several calls are skipped.

    Args:
        graph: Float graph.
        node: Any node.
        outermost: Number of calls to consider, counted from the outermost one; all by default.
    """
    calls = _nodes_by_call(graph)
    paths = Counter(module_calls(nodes[0])[key] for key, nodes in calls.items())
    for key, path in reversed([*module_calls(node).items()][:outermost]):
        call = _call_of(key, calls[key], parameters=True)
        if call is not None and paths[path] == 1:
            yield replace(call, path=path)


def _nodes_by_call(graph: Graph) -> dict[str, list[Node]]:
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for key in module_calls(node):
            calls.setdefault(key, []).append(node)
    return calls


def _call_of(key: str, nodes: list[Node], *, parameters: bool) -> ModuleCall | None:
    """Return a call if it has one input, floating-point unless `parameters` is true, and one result; else `None`."""
    inside = frozenset(nodes)
    # Constants that are not parameters of the model were added by a pass.
    read = {n for node in nodes for n in node.all_input_nodes if not is_made_up(n)} - inside
    if parameters:
        read = {n for n in read if n.op != "get_attr"}
    results = [node for node in nodes if node.op != "get_attr" and not inside.issuperset(node.users)]
    if len(read) != 1 or len(results) != 1:
        return None
    entry = read.pop()
    if not is_activation(entry) and not (parameters and isinstance(entry.meta.get("val"), Tensor)):
        return None
    return ModuleCall(module_calls(results[0])[key], entry, results[0], inside)


def _innermost(call: ModuleCall) -> bool:
    return module_path(call.result) == call.path


def is_made_up(node: Node) -> bool:
    """Tell whether a node reads a tensor that a pass added."""
    return node.op == "get_attr" and "parameter" not in node.meta


def slice_of(result: Node, path: str) -> ModuleSlice | None:
    """Return the slice in which a module of a quantized graph computes `result`; `None` if it has several inputs."""
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


def _within(path: str, paths: Iterable[str]) -> bool:
    return any(f"{other}.".startswith(f"{path}.") for other in paths)


__all__ = ["ModuleCall", "ModuleSlice", "calls_around", "calls_without_parameters", "slice_of"]
