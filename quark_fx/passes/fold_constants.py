"""Compute once what is made of parameters alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.graph.nodes import buffer_names, erase_dead, get_attr, is_floating, is_parameter, parameter, target_name
from quark_fx.graph.operators import MOVING, operator_row
from quark_fx.graph.pass_manager import graph_pass
from quark_fx.graph.provenance import note_folded


@graph_pass()
def fold_constants(gm: GraphModule) -> int:
    """Replace floating-point values made of parameters alone by new parameters.

    So the weight of a module under weight or spectral norm, computed in every forward pass, becomes a weight.
    Data movement stays, as a transposed weight is found where it is stored, and so do operators with a row in the
    table: the rows of an embedding that a constant selects are quantized like others.
    """
    folded = 0
    for node in list(gm.graph.nodes):
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs or not all(is_parameter(n) for n in inputs):
            continue
        if target_name(node) in MOVING or operator_row(node) is not None or not is_floating(gm, node):
            continue
        with torch.no_grad():
            value = _evaluate(gm, node)
        with gm.graph.inserting_before(node):
            constant = get_attr(gm, _name(inputs[0]), value)
            note_folded(constant, node, value)
            node.replace_all_uses_with(constant)
        if buffer_names(gm).issuperset(str(n.target) for n in inputs):
            gm.meta["buffers"] = buffer_names(gm) | {str(constant.target)}
        gm.graph.erase_node(node)
        folded += 1
    erase_dead(gm)
    return folded


def _evaluate(gm: GraphModule, node: Node) -> Tensor:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: parameter(gm, n))
    value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _name(source: Node) -> str:
    """Name the result after the module: `conv.parametrizations.weight.original0` makes `conv.weight`."""
    module, found, rest = str(source.target).partition(".parametrizations.")
    if found:
        return f"{module}.{rest.partition('.')[0]}"
    owner, _, leaf = str(source.target).rpartition(".")
    return f"{owner}.{leaf.removesuffix('_v').removesuffix('_g')}" if owner else leaf
