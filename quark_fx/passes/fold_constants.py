"""Fold values computed from parameters alone into constants."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.graph.computed import (
    before_transpositions,
    bias_arguments,
    calls_of,
    computed_constants,
    constant_value,
    parameters_of,
    weight_arguments,
)
from quark_fx.graph.nodes import (
    buffer_names,
    get_attr,
    is_floating,
    parameter,
    value_of,
)
from quark_fx.graph.operators import Motion, motion, moves, row_by_target
from quark_fx.graph.pass_manager import graph_pass
from quark_fx.graph.provenance import note_folded

LARGEST = 1 << 26
"""Size in bytes up to which a constant is folded even if it is larger than twice the parameters it is computed from."""


@graph_pass()
def fold_constants(gm: GraphModule) -> int:
    """Replace floating-point values computed from parameters alone by new parameters.

    Afterwards, every such value that an operator multiplies by, looks rows up in, or adds is a weight or a bias. Such
    values are weights with a weight, spectral, or orthogonal norm, standardized kernels, slices and concatenations of
    parameters, and products of parameters. A transposed parameter stays as it is, because operators find the parameter
    before the transposition. Values with other readers are folded up to the last operator that is not data movement. A
    constant that takes more than 64 MiB, and more than twice the bytes of its parameters, stays computed; the report
    names its readers.
    """
    constants = computed_constants(gm.graph)
    count = 0
    for node in _targets(gm, constants):
        sources = parameters_of(node, constants)
        if not sources or not is_floating(gm, node) or not _fits(gm, node, sources):
            continue
        value = _own_value(gm, node, sources)
        main = max(sources, key=lambda n: parameter(gm, n).numel())
        name = _name(main)
        with gm.graph.inserting_before(node):
            constant = get_attr(gm, name, value)
        note_folded(gm, constant, calls_of(node), main, name)
        if buffer_names(gm).issuperset(str(n.target) for n in sources):
            gm.meta["buffers"] = buffer_names(gm) | {str(constant.target)}
        node.replace_all_uses_with(constant)
        count += 1
    return count


def _targets(gm: GraphModule, constants: Collection[Node]) -> Iterator[Node]:
    """Yield the values to fold, in graph order."""
    targets: set[Node] = set()
    for node in gm.graph.nodes:
        if node in constants and _is_lookup(node):
            targets.update(_weights(node, constants))
        elif node.op != "get_attr" and node not in constants:
            operands = set(node.all_input_nodes) - {*weight_arguments(node), *bias_arguments(node)}
            targets.update(_weights(node, constants), _computed(operands, constants))
    return (node for node in list(gm.graph.nodes) if node in targets)


def _weights(node: Node, constants: Collection[Node]) -> Iterator[Node]:
    """Yield the computed weights and biases of an operator, before transpositions."""
    as_it_is = _is_lookup(node) or any(isinstance(argument, list | tuple) for argument in node.args)
    for value in weight_arguments(node):
        source = value if as_it_is else before_transpositions(value)
        if source in constants:
            yield source
    yield from (value for value in bias_arguments(node) if value in constants)


def _computed(values: Collection[Node], constants: Collection[Node]) -> Iterator[Node]:
    """Yield the last computations that produce `values`, ignoring data movement after them.

    A lookup counts as a computation, because the graph would perform it in every run.
    """
    pending, visited = [value for value in values if value in constants], set(values)
    while pending:
        node = pending.pop()
        if (moves(node) and motion(node) is not Motion.LOOK_UP) or not _holds_floats(node):
            fresh = [n for n in node.all_input_nodes if n in constants and n not in visited]
            visited.update(fresh)
            pending += fresh
        elif not _is_lookup(node) and _has_parameters_alone(node):
            yield node


def _is_lookup(node: Node) -> bool:
    """Tell whether a node looks rows up in a table; the table is quantized even if the indices are constant."""
    row = row_by_target(node)
    return row is not None and not row.activations


def _holds_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_parameters_alone(node: Node) -> bool:
    """Tell whether a constant is computed from parameters alone, without values such as masks or position ranges."""
    return all(call.all_input_nodes for call in calls_of(node))


def _fits(gm: GraphModule, node: Node, sources: Collection[Node]) -> bool:
    value = value_of(gm, node)
    size = math.prod(value.shape) * value.element_size()
    return bool(size <= max(LARGEST, 2 * sum(parameter(gm, n).nbytes for n in sources)))


def _own_value(gm: GraphModule, node: Node, sources: Collection[Node]) -> Tensor:
    """Return the value of a constant in memory that no parameter shares."""
    value = constant_value(gm, node).contiguous()
    tensors = [parameter(gm, n) for n in sources]
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_meta}
    return value.clone() if value.untyped_storage().data_ptr() in memory else value


def _name(source: Node) -> str:
    """Return a name for a constant: `conv.weight` if its source is `conv.parametrizations.weight.original0`."""
    module, separator, rest = str(source.target).partition(".parametrizations.")
    if separator:
        return f"{module}.{rest.partition('.')[0]}"
    owner, dot, leaf = str(source.target).rpartition(".")
    for suffix in ("_v", "_g", "_orig"):
        leaf = leaf.removesuffix(suffix)
    return owner + dot + leaf
