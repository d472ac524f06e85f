"""Effect of rounding noise on the outputs of a model, and values that depend on random numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import describe, results_of
from quark_fx.graph.operators import named_argument

_UNITS = 4
"""Half width of the noise in units of the last place: sums in another order differ by about as much."""


class RoundingNoise(TorchDispatchMode):
    """Adds noise of a few units of the last place to the floats that operators compute; codes stay exact."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(value.alias_info is not None for value in func._schema.returns):  # views, and writes into an argument
            return result
        return self.disturbed(result)

    def disturbed(self, values: Any) -> Any:
        """Return values with noise on floats; what it would make infinite stays as it is."""

        def disturb(value: Tensor) -> Tensor:
            if not is_float(value.dtype):
                return value
            noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value.device) * 2 - 1
            moved = (value * (1 + _UNITS * torch.finfo(value.dtype).eps * noise)).to(value.dtype)
            return torch.where(moved.isfinite(), moved, value)

        return tree_map_only(Tensor, disturb, values)


def disturbed_outputs(gm: GraphModule, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Run a graph on a batch with each operator rounding a little differently."""
    noise = RoundingNoise(seed)
    with torch.no_grad():
        inputs = noise.disturbed(list(leaves))
        with noise:
            return list(gm(*inputs))


def random_draws(gm: GraphModule, output_names: Sequence[str], nodes: Collection[str] = ()) -> dict[str, str]:
    """Return the node that draws the random numbers a value depends on, by name, for outputs and for some nodes.

    An output that is called like one of the nodes stands for itself.
    """
    draws: dict[str, str] = {}
    for node in gm.graph.nodes:
        before = next((draws[one.name] for one in node.all_input_nodes if one.name in draws), "")
        if where := before or (describe(node) if _draws(node) else ""):
            draws[node.name] = where
    found = {name: draws.get(name) for name in nodes}
    for name, node in zip(output_names, results_of(gm), strict=True):
        found[name] = draws.get(node.name) if isinstance(node, Node) else None
    return {name: where for name, where in found.items() if where is not None}


def _draws(node: Node) -> bool:
    """Tell whether a node draws random numbers: operators with dropout do only where it is on."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    options = {argument.name for argument in node.target._schema.arguments}
    switches = options & {"dropout_p", "dropout", "train", "training"}
    return all(named_argument(node, name) for name in switches)
