"""Converted graph with a switch for each rounding that can turn the rounding off or measure its gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.engine.block_walk import compute_weights
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import (
    erase_dead,
    is_parameter,
    named_nodes,
    parameter,
    set_parameter,
    target_name,
)
from quark_fx.graph.pass_manager import copy_graph
from quark_fx.graph.straight_through import quantize_of, run_with_gradients
from quark_fx.plan.placement import Coded, Plan, Quantized, module_name

NO_FLOATS = "the model returns no floating-point output that depends on its inputs; return logits instead"
"""Message for models whose outputs do not have a measurable error."""


@dataclass(frozen=True)
class RoundedValue:
    """A value or constant that is rounded.

    Attributes:
        value: Name of the value's node in the float graph.
        operators: Names of the operators to which the value's error is attributed: its quantized consumers, or if there
            are none, its producer.
        module: Name of the module that computes the value.
        kind: Operator kind of the value's producer.
        is_weight: Whether the value is a weight or a bias.
    """

    value: str
    operators: tuple[str, ...]
    module: str
    kind: str
    is_weight: bool


class _Switch(nn.Module):
    """Interpolation between a float value and its rounded value; the gradient of `share` is the rounding's derivative.

    At `share` 1, the output is the rounded value; at 0, the float value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.ones((), dtype=torch.float32, requires_grad=True)

    def forward(self, rounded: Tensor, value: Tensor) -> Tensor:
        return rounded + (self.share - 1) * (rounded - value).detach()


@dataclass(frozen=True)
class _Pair:
    """A rounding in the converted graph.

    Attributes:
        value: Node in the float graph.
        source: Float value in the converted graph.
        rounded: Rounded value in the converted graph.
        readers: Nodes of the float graph that consume the rounded value.
    """

    value: Node
    source: Node
    rounded: Node
    readers: list[Node]


class SwitchedGraph:
    """A converted graph in which every rounding can be turned off.

    Nodes of both graphs are matched by their names. If an operator's input differs from its input in the float graph,
    the input is a rounded value.

    Args:
        float_graph: Graph before conversion.
        gm: Graph after conversion.
        plan: Plan of the conversion.

    Attributes:
        rounded: Rounded values, in graph order.
    """

    def __init__(self, float_graph: GraphModule, gm: GraphModule, plan: Plan) -> None:
        self._float_graph, self._float = float_graph, named_nodes(float_graph)
        self._gm = copy_graph(gm)
        compute_weights(self._gm)
        self._nodes, self._pairs = named_nodes(self._gm), dict[Node, _Pair]()
        for name, node in self._float.items():
            if (now := self._nodes.get(name)) is not None:
                for value, rounded in zip(_arguments(node), _arguments(now), strict=True):
                    if value.name != rounded.name:
                        self._add(value, rounded).readers.append(node)
        order = {node: i for i, node in enumerate(self._gm.graph.nodes)}
        pairs = sorted(self._pairs.values(), key=lambda pair: order[pair.rounded])
        self.rounded = _described(pairs, plan)
        self._calls = [self._insert(pair, f"switch_{i}") for i, pair in enumerate(pairs)]
        erase_dead(self._gm)
        self._gm.recompile()

    def _add(self, value: Node, rounded: Node) -> _Pair:
        if rounded not in self._pairs:
            source = _source(rounded)
            if source is not None and source.op == "call_function" and source.name not in self._float:
                self._add(value, source)  # an embedding of codes, or a value that is rounded twice
            else:
                source = self._original(value)
            self._pairs[rounded] = _Pair(value, source, rounded, [])
        return self._pairs[rounded]

    def _original(self, value: Node) -> Node:
        """Return the node of a float value in the converted graph; if there is none, add the value's computation."""
        if value.name not in self._nodes:
            inputs = {node: self._original(node) for node in value.all_input_nodes}
            if is_parameter(value):
                set_parameter(self._gm, str(value.target), parameter(self._float_graph, value))
            graph = self._gm.graph
            # Insert the node as early as possible: another reader of it may come earlier in the graph.
            with (
                graph.inserting_after(max(inputs.values()))
                if inputs
                else graph.inserting_before(next(iter(graph.nodes)))
            ):
                self._nodes[value.name] = graph.node_copy(value, lambda node: inputs[node])
        return self._nodes[value.name]

    def _insert(self, pair: _Pair, name: str) -> Node:
        self._gm.add_submodule(name, _Switch())
        with self._gm.graph.inserting_after(pair.rounded):
            call = self._gm.graph.call_module(name, (pair.rounded, pair.source))
        call.meta = dict(pair.rounded.meta)
        pair.rounded.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
        return call

    def only(self, wanted: Collection[int]) -> GraphModule:
        """Return the float graph in which only some values are rounded.

        Args:
            wanted: Indices of these values in `rounded`.
        """
        gm = copy_graph(self._gm)
        nodes = named_nodes(gm)
        for place, call in enumerate(self._calls):
            node = nodes[call.name]
            node.replace_all_uses_with(node.args[0 if place in wanted else 1])  # type: ignore[arg-type]
            gm.graph.erase_node(node)
        erase_dead(gm)
        gm.recompile()
        return gm

    def run(self, leaves: Sequence[Any], share: float = 1.0) -> Sequence[Any]:
        """Run the graph with all values rounded, and record what `gradients` needs.

        Args:
            leaves: Flat inputs.
            share: Fraction of the rounding errors to apply, from 0 (float) to 1.

        Returns:
            Outputs of the graph.
        """
        for switch in self._switches:
            switch.share.data.fill_(share)
        outputs: Sequence[Any] = run_with_gradients(self._gm, *leaves)
        return outputs

    @property
    def _switches(self) -> list[_Switch]:
        modules = (self._gm.get_submodule(str(call.target)) for call in self._calls)
        return [switch for switch in modules if isinstance(switch, _Switch)]

    def gradients(self, loss: Tensor) -> Tensor:
        """Return the derivative of a loss with respect to the rounding of each value in `rounded`, float64, shape (n,).

        Raises:
            ConfigError: If the loss does not depend on the rounded values.
        """
        if not self._calls:
            return torch.zeros(0, dtype=torch.float64)
        if not loss.requires_grad:
            raise ConfigError(NO_FLOATS)
        slopes = torch.autograd.grad(loss, [switch.share for switch in self._switches], allow_unused=True)
        return torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g.double().cpu() for g in slopes])


def _arguments(node: Node) -> list[Node]:
    nodes: list[Node] = []
    map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def _source(rounded: Node) -> Node | None:
    """Return the input of a rounding; `None` for a constant, or an embedding that looks up codes."""
    if (codes := quantize_of(rounded)) is not None:
        return codes.args[0]  # type: ignore[return-value]
    inner = rounded.args[0] if rounded.op == "call_function" else None
    cast = isinstance(inner, Node) and target_name(inner) == target_name(rounded)
    return inner.args[0] if cast else None  # type: ignore[union-attr, return-value]


def _described(pairs: Sequence[_Pair], plan: Plan) -> list[RoundedValue]:
    """Return the rounded value of each pair; values that share a static scale also share their operators."""
    # Compare names, because the nodes of the plan belong to a graph that conversion rewrote.
    operators = {op.node.name for op in plan.operators if isinstance(op, Quantized)}
    weights: dict[str, list[str]] = {}
    for op in plan.operators:
        if isinstance(op, Coded) and op.linear is not None:
            weights.setdefault(op.weight_node.name, []).append(op.node.name)
    makers: dict[str, list[str]] = {}
    for node, value in plan.outputs.items():
        makers.setdefault(value.name, []).extend([node.name] * (node.name in operators))
    consumers: dict[str, dict[str, None]] = {}
    producers: dict[str, dict[str, None]] = {}
    for pair in pairs:
        key, names = _scale(pair.rounded), (node.name for node in pair.readers)
        consumers.setdefault(key, {}).update(dict.fromkeys(name for name in names if name in operators))
        producers.setdefault(key, {}).update(dict.fromkeys(makers.get(pair.value.name, ())))
    values = []
    for pair in pairs:
        value, key = pair.value, _scale(pair.rounded)
        looked_up = value.name in operators and pair.source.name == value.name and _source(pair.rounded) is None
        if looked_up:
            owners = [value.name]
        elif value.op == "get_attr":
            owners = weights.get(value.name) or [*consumers[key]]
        else:
            owners = [*(consumers[key] or producers[key])]
        kind = target_name(value).split(".")[1] if value.op == "call_function" else value.op
        is_weight = looked_up or value.op == "get_attr"
        values.append(RoundedValue(value.name, tuple(owners), module_name(value), kind, is_weight))
    return values


def _scale(rounded: Node) -> str:
    """Return the name of a rounded activation's static scale, or the name of the node for other roundings."""
    scale = rounded.args[1] if quantize_of(rounded) is not None else None
    return str(scale.target) if is_parameter(scale) else rounded.name


__all__ = ["NO_FLOATS", "RoundedValue", "SwitchedGraph"]
