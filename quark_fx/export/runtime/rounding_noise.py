"""Effect of rounding noise on the outputs of a model, and outputs that depend on the order of equal values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quark_fx.checkpoints.files import is_float
from quark_fx.graph.nodes import DEQUANTIZE, target_name
from quark_fx.graph.operators import argument, moves, row_by_target
from quark_fx.graph.random_draws import sources_of
from quark_fx.plan.roles import CHOOSING, PLACES

ROUNDINGS = 3
"""Number of runs of a batch with different rounding noise: several, because few codes are close to a tie."""

_COUNTING = ("aten.histc.default", "aten.bincount.default")
"""Operators that count; their results are whole numbers, also as floats."""

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
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if str(func) in _COUNTING or (read and not any(is_float(value.dtype) for value in read)):
            return result  # such as numbers of tokens, from which indices are computed
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


Run = tuple[Sequence[Any], list[Any]]
"""The flat inputs of a graph, and the outputs that it computes from them with other arithmetic."""


def runs_with_noise(gm: GraphModule, batches: Sequence[Sequence[Any]]) -> Iterator[Run]:
    """Yield runs of the first batch with different rounding noise."""
    for seed in range(ROUNDINGS):
        yield batches[0], disturbed_outputs(gm, batches[0], seed)


def runs_with_rounded_inputs(gm: GraphModule, batches: Sequence[Sequence[Any]], block_size: int) -> Iterator[Run]:
    """Yield a run of each batch in which the inputs of quantized matrices are rounded to 8 bits.

    Args:
        gm: Graph to run.
        batches: Flat inputs of each batch.
        block_size: Number of input channels with one scale, 256 or 32; 32 for matrices whose input channels 256 does
            not divide.
    """
    for leaves in batches:
        with torch.no_grad():
            yield leaves, list(_RoundedInputs(gm, block_size).run(*leaves))


class _RoundedInputs(Interpreter):
    """Interpreter that rounds the inputs of quantized matrices as `runs_with_rounded_inputs` says."""

    def __init__(self, gm: GraphModule, block_size: int) -> None:
        super().__init__(gm)
        self.sizes = (block_size, 32)

    def run_node(self, n: Node) -> Any:
        row = row_by_target(n)
        if row is None or row.weight is None or not row.activations or not _is_quantized(argument(n, row.weight)):
            return super().run_node(n)
        activation = argument(n, row.activations[0])
        self.env[activation], exact = self.rounded(self.env[activation]), self.env[activation]
        try:
            return super().run_node(n)
        finally:
            self.env[activation] = exact

    def rounded(self, value: Tensor) -> Tensor:
        size = next((size for size in self.sizes if value.shape[-1] % size == 0), None)
        if size is None or not value.numel():
            return value
        blocks: Tensor = value.unflatten(-1, (-1, size))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(value.dtype).tiny)
        codes = (blocks / scale).round()
        return (codes * scale).flatten(-2)


def _is_quantized(weight: Any) -> bool:
    """Tell whether a weight is computed from stored codes."""
    while isinstance(weight, Node) and moves(weight) and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    return target_name(weight) == DEQUANTIZE and weight.all_input_nodes[0].op == "get_attr"


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
