"""Effect of rounding noise on the outputs of a model, and values that depend on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import describe, results_of, target_name
from quark_fx.graph.operators import named_argument
from quark_fx.plan.roles import CHOOSING, PLACES

_UNITS = 4
"""Half width of the noise in units of the last place, about the effect of another order of summation."""


class RoundingNoise(TorchDispatchMode):
    """Add noise of a few units of the last place to the floats that operators compute; codes stay exact."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in _ORDERING:
            args = (self.untied(args[0]), *args[1:])
        result = func(*args, **(kwargs or {}))
        if any(value.alias_info is not None for value in func._schema.returns):  # views, and writes into an argument
            return result
        return self.disturbed(result)

    def untied(self, value: Tensor) -> Tensor:
        """Return floats with noise relative to the largest, so that equal values are ordered differently."""
        if not is_float(value.dtype) or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value) * 2 - 1
        moved = value + _UNITS * torch.finfo(value.dtype).eps * value.abs().amax() * noise
        return torch.where(moved.isfinite(), moved, value)

    def disturbed(self, values: Any) -> Any:
        """Return values with noise on floats; values that the noise would make infinite stay unchanged."""

        def disturb(value: Tensor) -> Tensor:
            if not is_float(value.dtype):
                return value
            noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value.device) * 2 - 1
            moved = (value * (1 + _UNITS * torch.finfo(value.dtype).eps * noise)).to(value.dtype)
            return torch.where(moved.isfinite(), moved, value)

        return tree_map_only(Tensor, disturb, values)


def disturbed_outputs(gm: GraphModule, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Run a graph on a batch with slightly different rounding in each operator."""
    noise = RoundingNoise(seed)
    with torch.no_grad():
        inputs = noise.disturbed(list(leaves))
        with noise:
            return list(gm(*inputs))


def random_draws(gm: GraphModule, output_names: Sequence[str], nodes: Collection[str] = ()) -> dict[str, str]:
    """Return the node that draws the random numbers that each named output or node depends on.

    An output takes precedence over a node of the same name.
    """
    return _sources(gm, output_names, nodes, _draws)


def orderings(gm: GraphModule, output_names: Sequence[str]) -> dict[str, str]:
    """Return, for each output that depends on the order of equal values, the operator that orders them."""
    return _sources(gm, output_names, (), lambda node: target_name(node) in _ORDERING)


_ORDERING = (
    PLACES
    | CHOOSING
    | {"aten.argmin.default", "aten.min.dim", "aten.kthvalue.default", "aten.median.default", "aten.median.dim"}
    | {"aten.mode.default"}
)
"""Operators whose indices depend on the order of equal values; runtimes choose differently."""


def _sources(
    gm: GraphModule, output_names: Sequence[str], nodes: Collection[str], is_source: Callable[[Node], bool]
) -> dict[str, str]:
    """Return the first source, if any, that each named value depends on."""
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
    """Tell whether a node draws random numbers; operators with dropout draw only if it is on."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    options = {argument.name for argument in node.target._schema.arguments}
    switches = options & {"dropout_p", "dropout", "train", "training"}
    return all(named_argument(node, name) for name in switches)
