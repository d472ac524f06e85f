"""The float graph of a quantized graph: the computations of the model's modules, without codes and quantizers.

Conversion marks the nodes it adds (`quark_fx.graph.provenance`), so the view copies all other nodes. It records the
effect of the added nodes separately: the parameter of each constant, and the rounding of a value for each consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import (
    CAST,
    DEQUANTIZE,
    EMBEDDING,
    QUANTIZE,
    describe,
    is_parameter,
    parameter,
    results_of,
    target_name,
    value_of,
)
from quark_fx.graph.operators import BRANCH, argument
from quark_fx.graph.provenance import CONVERT
from quark_fx.model.constants import Constant, constant_of, table_of
from quark_fx.model.rounded_modules import SPLIT, Activation, Branch, Factor

_CLAMP = torch.ops.aten.clamp.default

_REST, _SUM, _PRODUCT = "aten.sub.Tensor", "aten.add.Tensor", "aten.linear.default"
"""Operators that `LowRank` adds: the rest of a value, the sum of an operator and its branch, and their products."""


class FloatView:
    """A quantized graph without the nodes added by conversion.

    Attributes:
        graph: Copy of the quantized graph without these nodes.
        constants: Constants, keyed by `get_attr` nodes of the copy, which have the notes on the parameters.
        rounded: Rounding of a value for a consumer, keyed by both nodes of the copy.
        branches: Branch that is added to the result of an operator, keyed by the operator's node in the copy.
        originals: Nodes of the quantized graph, keyed by nodes of the copy.

    Raises:
        QuarkError: If an operator reads a value twice with different rounding.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graph = Graph()
        self.constants: dict[Node, Constant] = {}
        self.rounded: dict[tuple[Node, Node], Activation] = {}
        self.branches: dict[Node, Branch] = {}
        self.originals: dict[Node, Node] = {}
        self._gm = gm
        self._values: dict[Node, tuple[Node, Activation | None]] = {}
        self._named: dict[str, Node] = {}
        self._read_as_is: set[tuple[Node, Node]] = set()
        for node in gm.graph.nodes:
            if node.op == "output":
                reader = self.graph.output(tuple(map(self._value, results_of(gm))))
                self._note_reader(reader, node)
            elif not self._undo(node):
                self._values[node] = self._copy(node, node, self._value), None
        for copy in reversed(list(self.graph.nodes)):
            if not copy.users and copy.op in ("call_function", "get_attr"):
                self.graph.erase_node(copy)
        self.constants = {node: constant for node, constant in self.constants.items() if node.users}

    def value_of(self, node: Node) -> Node:
        """Return the node of the view for a node of the quantized graph: for a quantizer, its unrounded input."""
        return self._values[node][0]

    def _value(self, node: Any) -> Any:
        return self._values[node][0] if isinstance(node, Node) else node

    def _copy(self, node: Node, like: Node, value: Callable[[Node], Node]) -> Node:
        """Copy a call; `like` is the node of the quantized graph with its result."""
        copy = self.graph.node_copy(node, value)
        copy.meta = dict(like.meta)
        self.originals[copy], self._named[node.name] = like, copy
        self._note_reader(copy, node)
        return copy

    def _note_reader(self, reader: Node, node: Node) -> None:
        """Record the rounding of the inputs of `node`, which is `reader` in the view."""
        for read in node.all_input_nodes:
            value, activation = self._values.get(read, (None, None))
            if value is None:
                continue
            if activation is None:
                self._read_as_is.add((value, reader))
            first = self.rounded.setdefault((value, reader), activation) if activation is not None else None
            either = (value, reader) in self.rounded and (value, reader) in self._read_as_is
            if either or (first is not None and activation is not None and not first.same_as(activation)):
                raise _rounded_differently(reader)

    def _undo(self, node: Node) -> bool:
        """Record a constant or a rounded value; return true if the node is not part of the view."""
        converted, name = node.meta.get("made_by") == CONVERT, target_name(node)
        if node.op == "get_attr" or name == DEQUANTIZE or (name == CAST and converted):
            if (table := table_of(self._gm, node)) is not None:
                lookup, constant = table
                codes: Any = lookup.args[0]
                rows = self._constant(codes, constant)
                self._values[node] = self._copy(lookup, node, lambda n: rows if n is codes else self._value(n)), None
            elif (stored := constant_of(self._gm, node)) is not None:
                self._values[node] = self._constant(node, stored), None
            elif name == DEQUANTIZE or (_is_cast_by_conversion(node.args[0]) and node.args[0] not in self._values):
                self._values[node] = self._rounded(node)  # the second of two casts; the first one is not recorded
            return True
        if node.meta.get("factor"):
            value, *factors = node.all_input_nodes
            self._values[node] = self._multiplied(node, value, Factor(name, self._tensors(factors)))
            return True
        if BRANCH in node.meta and name in (_REST, _SUM, _PRODUCT):
            self._undo_branch(node)
            return True
        # If codes lack a lookup kernel, the table is dequantized before the lookup, which is the model's operator.
        is_lookup = name == EMBEDDING and target_name(node.args[0]) == DEQUANTIZE  # type: ignore[arg-type]
        return (converted and not is_lookup) or name == QUANTIZE

    def _undo_branch(self, node: Node) -> None:
        """Record the directions that are split off a value, or the branch parallel to an operator."""
        operand: Any = node.args[1]  # a product, or a constant in a product
        if target_name(node) == _REST:
            value, parts = node.args[0], operand.args[0]
            directions = Factor(SPLIT, self._tensors((parts.args[1], operand.args[1])))
            self._values[node] = self._multiplied(node, cast(Node, value), directions)
        elif target_name(node) == _SUM:
            operator, rounded = self._values[cast(Node, node.args[0])]
            self._values[node] = operator, None
            self.branches[operator] = Branch(parameter(self._gm, operand.args[1]), rounded)

    def _multiplied(self, node: Node, value: Node, factor: Factor) -> tuple[Node, Activation]:
        """Return the source and the factors of a multiplied value, which must not be rounded before the product."""
        source, before = self._values[value]
        if before is not None and before.rounds:
            raise _rounded_differently(node)
        factors = before.factors if before is not None else ()
        return source, Activation(factors=(*factors, factor))

    def _tensors(self, constants: Iterable[Node]) -> tuple[Tensor, ...]:
        return tuple(parameter(self._gm, constant) for constant in constants)

    def _constant(self, node: Node, constant: Constant) -> Node:
        tensor = node
        while tensor.op != "get_attr":
            tensor = tensor.all_input_nodes[0]
        copy = self.graph.get_attr(str(tensor.meta.get("parameter", tensor.target)))
        copy.meta = tensor.meta | {"val": node.meta.get("val")}  # the fake tensor of the values, not of the codes
        self.constants[copy] = constant
        return copy

    def _from_last(self, value: Node, axis: int | None) -> int | None:
        return None if axis is None else axis - value_of(self._gm, value).dim()

    def _rounded(self, node: Node) -> tuple[Node, Activation]:
        """Return the counterpart in the view of the value that a node rounds, and how the node rounds it."""
        inner = node.all_input_nodes[0]
        source = inner.all_input_nodes[0]
        if target_name(node) == CAST:
            activation = Activation(cast=value_of(self._gm, inner).dtype)
        else:
            scale, zero_point, fmt = cast(tuple[Node, Node, str], inner.args[1:4])
            if is_parameter(scale) and is_parameter(zero_point):
                stored = parameter(self._gm, scale), parameter(self._gm, zero_point)
                axis, block = argument(inner, 4), argument(inner, 5) or 0
                activation = Activation(fmt, *stored, "", self._from_last(source, axis), block)
            else:
                measured = scale.all_input_nodes[0]
                _, _, symmetry, axis, *rest = cast(tuple[Any, ...], measured.args)
                activation = Activation(fmt, None, None, symmetry, self._from_last(source, axis), *rest)
                activation = replace(activation, rank=value_of(self._gm, source).dim())
        value, before = self._values[source]
        for name, stack in inner.meta.get("absorbed", ()):
            if name not in self._named:
                clamp = self.graph.call_function(_CLAMP, (value, 0))
                clamp.meta = {**source.meta, "nn_module_stack": stack, "made_by": ""}
                self.originals[clamp], self._named[name] = source, clamp
                if before is not None:
                    self.rounded[value, clamp] = before
            value, before = self._named[name], None
        if before is not None and not before.rounds:
            activation = replace(activation, factors=before.factors)
        elif before is not None and not before.same_as(activation):
            raise _rounded_differently(node)
        return value, activation


def _is_cast_by_conversion(node: Any) -> bool:
    return target_name(node) == CAST and node.meta.get("made_by") == CONVERT


def _rounded_differently(node: Node) -> QuarkError:
    return QuarkError(
        f"{describe(node)} reads a value that is rounded in several ways, which modules cannot reproduce; call the "
        "quantized model itself, or use the same specs for all operators that read this value"
    )


__all__ = ["FloatView"]
