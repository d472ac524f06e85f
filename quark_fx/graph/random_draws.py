"""Values that depend on random numbers, or on nodes that meet another condition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from quark_fx.graph.nodes import describe, results_of
from quark_fx.graph.operators import named_argument


def random_draws(gm: GraphModule, output_names: Sequence[str], nodes: Collection[str] = ()) -> dict[str, str]:
    """Return, for each named output or node that depends on random numbers, a description of the node that draws them.

    An output takes precedence over a node of the same name.
    """
    return sources_of(gm, output_names, nodes, _draws)


def sources_of(
    gm: GraphModule, output_names: Sequence[str], nodes: Collection[str], is_source: Callable[[Node], bool]
) -> dict[str, str]:
    """Return, for each named value that depends on a node for which `is_source` holds, a description of that node.

    An output takes precedence over a node of the same name.
    """
    sources: dict[str, str] = {}
    for node in gm.graph.nodes:
        before = next((sources[one.name] for one in node.all_input_nodes if one.name in sources), "")
        if where := before or (describe(node) if is_source(node) else ""):
            sources[node.name] = where
    results = {name: sources.get(name) for name in nodes}
    for name, node in zip(output_names, results_of(gm), strict=True):
        results[name] = sources.get(node.name) if isinstance(node, Node) else None
    return {name: where for name, where in results.items() if where is not None}


def _draws(node: Node) -> bool:
    """Tell whether a node draws random numbers; operators with dropout draw only if dropout is on."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    options = {argument.name for argument in node.target._schema.arguments}
    switches = options & {"dropout_p", "dropout", "train", "training"}
    return all(named_argument(node, name) for name in switches)


__all__ = ["random_draws", "sources_of"]
