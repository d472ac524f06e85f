"""Effect of rounding noise on the outputs of a model, and outputs that depend on the order of equal values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import target_name
from quark_fx.graph.random_draws import sources_of
from quark_fx.plan.roles import CHOOSING, PLACES

_UNITS = 4
"""Largest noise, in units in the last place: about the effect of another order of summation."""


class RoundingNoise(TorchDispatchMode):
    """Dispatch mode that adds noise of a few units in the last place to the floats that operators compute.

    Integers, such as codes, stay exact.
    """

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
        """Return floats with noise relative to the largest magnitude, so that equal values are ordered randomly."""
        if not is_float(value.dtype) or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value) * 2 - 1
        moved = value + _UNITS * torch.finfo(value.dtype).eps * value.abs().amax() * noise
        return torch.where(moved.isfinite(), moved, value)

    def disturbed(self, values: Any) -> Any:
        """Return a tree of values with noise on its float tensors; elements that would become infinite stay as is."""

        def disturb(value: Tensor) -> Tensor:
            if not is_float(value.dtype):
                return value
            noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float32).to(value.device) * 2 - 1
            moved = (value * (1 + _UNITS * torch.finfo(value.dtype).eps * noise)).to(value.dtype)
            return torch.where(moved.isfinite(), moved, value)

        return tree_map_only(Tensor, disturb, values)


def disturbed_outputs(gm: GraphModule, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Return the outputs of a graph for the flat inputs `leaves`, with slightly different rounding in each operator."""
    noise = RoundingNoise(seed)
    with torch.no_grad():
        inputs = noise.disturbed(list(leaves))
        with noise:
            return list(gm(*inputs))


def orderings(gm: GraphModule, output_names: Sequence[str]) -> dict[str, str]:
    """Return, for each output that depends on the order of equal values, the operator that orders them."""
    return sources_of(gm, output_names, (), lambda node: target_name(node) in _ORDERING)


_ORDERING = (
    PLACES
    | CHOOSING
    | {"aten.argmin.default", "aten.min.dim", "aten.kthvalue.default", "aten.median.default", "aten.median.dim"}
    | {"aten.mode.default"}
)
"""Operators that return indices and may choose any of several equal values; runtimes choose differently."""
