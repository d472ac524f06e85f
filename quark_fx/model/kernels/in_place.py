"""An Inductor pass that lets oneDNN's convolution overwrite the codes that it adds."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from quark_fx.model.kernels.residual import CONVOLVE_ONTO, in_place_arguments, in_place_kernel


class AddInPlace(CustomGraphPass):
    """An Inductor pass that replaces `convolve_onto` with oneDNN's kernel if nothing reads the added codes later."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is not CONVOLVE_ONTO or not _is_last(node.args[6], node):
                continue
            with graph.inserting_before(node):
                call = graph.call_function(in_place_kernel(), in_place_arguments(*node.args))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)

    def uuid(self) -> Any:
        """Return a key that changes with the version of this pass, for caches of compiled graphs."""
        return get_hash_for_files((__file__,))


def _is_last(onto: Any, reader: Node) -> bool:
    """Tell whether `reader` uses `onto` only as the codes to add, no node reads it later, and it is not a view."""
    if onto is reader.args[0] or not _is_fresh(onto):
        return False
    return all(user is reader or (user < reader and _is_fresh(user)) for user in onto.users)


def _is_fresh(node: Node) -> bool:
    """Tell whether a node returns new memory, not a view."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)


__all__ = ["AddInPlace"]
