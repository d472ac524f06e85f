"""Extraction of single operators as models, with the inputs that they read in the whole model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from quark_fx.graph.nodes import parameter


@dataclass(frozen=True)
class IsolatedOperator:
    """An operator as a separate model.

    Attributes:
        module: Model that computes the operator's result from `inputs`; its weights are parameters.
        inputs: Values that the operator read in the whole model.
        key: Text that is equal for operators with the same computation on tensors of the same shapes and dtypes.
    """

    module: GraphModule
    inputs: tuple[Tensor, ...]
    key: str


def isolate_operators(gm: GraphModule, nodes: Iterable[Node], leaves: Sequence[Any]) -> dict[Node, IsolatedOperator]:
    """Return operators of a graph as separate models; operators with equal keys share one model and its inputs.

    Args:
        gm: Float graph.
        nodes: Operators of the graph.
        leaves: Flat inputs of the graph.
    """
    constant = _constants(gm)
    extractor = _Extractor(gm, {node: _part(node, constant) for node in nodes}, constant)
    with torch.no_grad():
        extractor.run(*leaves)
    return extractor.operators


class _Extractor(Interpreter):
    """Interpreter that extracts operators while it runs the graph, when their inputs are available."""

    def __init__(self, gm: GraphModule, parts: Mapping[Node, Sequence[Node]], constant: set[Node]) -> None:
        super().__init__(gm)
        self.gm, self.parts, self.constant = gm, parts, constant
        self.operators, self.by_key = dict[Node, IsolatedOperator](), dict[str, IsolatedOperator]()

    def run_node(self, n: Node) -> Any:
        if n in self.parts:
            one = _extracted(self.gm, n, self.parts[n], self.constant, self.env)
            self.operators[n] = self.by_key.setdefault(one.key, one)
        return super().run_node(n)


def _constants(gm: GraphModule) -> set[Node]:
    """Return the nodes that do not depend on the inputs of the graph."""
    constants: set[Node] = set()
    for node in gm.graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes and constants.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or computed:
            constants.add(node)
    return constants


def _part(node: Node, constant: set[Node]) -> list[Node]:
    """Return an operator, the nodes that compute its weights, and its inputs, in graph order."""
    nodes, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in nodes:
                nodes.add(source)
                pending += [source] if source in constant else []
    return [n for n in node.graph.nodes if n in nodes]


def _extracted(
    gm: GraphModule, node: Node, part: Sequence[Node], constant: set[Node], values: Mapping[Node, Any]
) -> IsolatedOperator:
    graph, root, copies, inputs, shapes = Graph(), nn.Module(), dict[Node, Any](), list[Tensor](), list[str]()
    for n in part:
        if n.op == "get_attr":
            name, tensor = f"w{len(copies)}", parameter(gm, n).detach()
            root.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            copies[n] = graph.get_attr(name)
            shapes.append(_shape(tensor))
        elif n not in constant and n is not node:
            value = values[n]
            if isinstance(value, Tensor):
                copies[n] = graph.placeholder(f"x{len(copies)}")
                inputs.append(value)
                shapes.append(_shape(value))
            else:  # a size, which is the same in every call with these inputs
                copies[n] = value
        else:
            arguments = map_arg((n.args, n.kwargs), lambda source: copies[source])
            copies[n] = graph.call_function(n.target, *arguments)  # type: ignore[arg-type]
    result = copies[node]
    several = isinstance(node.meta.get("val"), tuple | list)
    graph.output(tuple(_items(graph, result, node)) if several else result)
    module = GraphModule(root, graph)
    return IsolatedOperator(module.eval(), tuple(inputs), f"{graph} {shapes}")


def _items(graph: Graph, result: Node, node: Node) -> list[Node]:
    return [graph.call_function(operator.getitem, (result, i)) for i in range(len(node.meta["val"]))]


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


__all__ = ["IsolatedOperator", "isolate_operators"]
