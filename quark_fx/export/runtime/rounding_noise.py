"""Effect of rounding noise on the outputs of a model, and outputs that depend on the order of equal values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import argument, row_by_target
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


class _RoundedInputs(Interpreter):
    """Interpreter that rounds the inputs of products with a weight to 8 bits, in blocks with one scale.

    Args:
        gm: Graph to run.
        block_size: Number of consecutive input channels in a block; inputs that it does not divide stay as they are.
    """

    def __init__(self, gm: GraphModule, block_size: int) -> None:
        super().__init__(gm)
        self.block_size = block_size
        self.computed = set[Node]()  # from the inputs of the graph
        for node in gm.graph.nodes:
            if node.op == "placeholder" or any(source in self.computed for source in node.all_input_nodes):
                self.computed.add(node)

    def run_node(self, n: Node) -> Any:
        row = row_by_target(n)
        weight = None if row is None or row.weight is None else argument(n, row.weight)
        if row is not None and row.kind in _PRODUCTS and weight not in self.computed:
            activation = argument(n, row.activations[0])
            self.env[activation], exact = self.rounded(self.env[activation]), self.env[activation]
            try:
                return super().run_node(n)
            finally:
                self.env[activation] = exact
        return super().run_node(n)

    def rounded(self, value: Tensor) -> Tensor:
        if value.shape[-1] % self.block_size or not value.numel():
            return value
        blocks: Tensor = value.unflatten(-1, (-1, self.block_size))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(value.dtype).tiny)
        codes = (blocks / scale).round()
        return (codes * scale).flatten(-2)


_PRODUCTS = ("linear", "experts")
"""Operator families that llama.cpp computes from codes."""


def outputs_with_rounded_inputs(gm: GraphModule, leaves: Sequence[Any], block_size: int) -> list[Any]:
    """Return the outputs of a graph whose products with weights read inputs rounded to 8 bits, as in llama.cpp."""
    with torch.no_grad():
        return list(_RoundedInputs(gm, block_size).run(*leaves))


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
