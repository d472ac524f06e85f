"""Sample inputs of a graph: a small part of a batch, or synthetic values of the right shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.graph.nodes import placeholders, static_size
from quark_fx.graph.signature import Signature

Sample = tuple[Any, ...]
"""Flat inputs of a graph, on the CPU."""


def sample_of(gm: GraphModule, signature: Signature, leaves: Sequence[Any]) -> Sample:
    """Copy a batch to the CPU, cut to its first samples if all inputs share one dynamic batch dimension."""
    count = None if signature.compares_batches else _fewest(gm)
    return tuple(
        leaf[slice(count) if leaf.dim() else ...].detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )


def made_up_sample(gm: GraphModule) -> Sample:
    """Return inputs of the captured shapes: normal floats, and zeros for other types."""
    generator = torch.Generator().manual_seed(0)

    def made_up(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
        if value.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(value.dtype)
        return torch.zeros(shape, dtype=value.dtype)

    return tuple(made_up(node.meta["val"]) for node in placeholders(gm))


def _fewest(gm: GraphModule) -> int | None:
    """Return the smallest batch size of the graph; `None` if its inputs do not share a dynamic batch dimension."""
    values = [node.meta["val"] for node in placeholders(gm)]
    shapes: list[list[Any]] = [list(value.shape) for value in values if isinstance(value, Tensor) and value.dim()]
    if not shapes or any(static_size(shape[0]) is not None for shape in shapes):
        return None
    batch = shapes[0][0].node
    other_sizes = [size.node.expr for shape in shapes for size in shape[1:] if static_size(size) is None]
    shared = batch.expr.is_Symbol and all(shape[0].node.expr == batch.expr for shape in shapes)
    if not shared or any(batch.expr in size.free_symbols for size in other_sizes):
        return None
    limits = batch.shape_env.var_to_range.get(batch.expr)
    lower = int(limits.lower) if limits is not None and limits.lower.is_finite else 0
    return max(2, lower)  # torch captures a dimension of size 1 as fixed
