"""Effect of rounding noise on the outputs of a graph, and values that depend on random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import describe, results_of
from quark_fx.graph.operators import named_argument

_UNITS = 4
"""Half width of the noise in units of the last place: sums in another order differ by about as much."""


class _Disturbed(Interpreter):
    """Runs a graph with noise of a few units of the last place on its inputs and computed floats; codes stay exact."""

    def __init__(self, gm: GraphModule, seed: int) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "call_function") or not isinstance(value, Tensor) or not is_float(value.dtype):
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value.device) * 2 - 1
        return (value * (1 + _UNITS * torch.finfo(value.dtype).eps * noise)).to(value.dtype)


def disturbed_outputs(gm: GraphModule, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Run a graph on a batch with each operator rounding a little differently."""
    with torch.no_grad():
        return list(_Disturbed(gm, seed).run(*leaves))


def random_draws(gm: GraphModule, output_names: Sequence[str]) -> dict[str, str]:
    """Return the node that draws the random numbers a value depends on, by the name of each node and output."""
    draws: dict[str, str] = {}
    for node in gm.graph.nodes:
        before = next((draws[one.name] for one in node.all_input_nodes if one.name in draws), "")
        if where := before or (describe(node) if _draws(node) else ""):
            draws[node.name] = where
    outputs = zip(output_names, results_of(gm), strict=True)
    return draws | {name: draws[node.name] for name, node in outputs if isinstance(node, Node) and node.name in draws}


def _draws(node: Node) -> bool:
    """Tell whether a node draws random numbers: operators with dropout do only where it is on."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    options = {argument.name for argument in node.target._schema.arguments}
    switches = options & {"dropout_p", "dropout", "train", "training"}
    return all(named_argument(node, name) for name in switches)
