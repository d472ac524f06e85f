"""Run calibration batches through a graph while modules watch its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from tqdm.auto import tqdm

from quark_fx.engine.block_walk import running, walk_float_blocks
from quark_fx.engine.context import Context
from quark_fx.graph.nodes import device_of, is_parameter, parameter, placeholders, set_parameter, target_name


def insert_watches(gm: GraphModule, watches: Iterable[tuple[Node, nn.Module]]) -> list[Node]:
    """Insert calls that pass the value of each node to its module whenever the graph runs; return the calls."""
    inserted = []
    for index, (source, watch) in enumerate(watches):
        name = f"watch_{index}"
        gm.add_submodule(name, watch)
        after = source if source.op != "placeholder" else placeholders(gm)[-1]
        with gm.graph.inserting_after(after):
            inserted.append(gm.graph.call_module(name, (source,)))
    gm.recompile()
    return inserted


def remove_watches(gm: GraphModule, calls: Iterable[Node]) -> None:
    """Remove the calls that `insert_watches` returned."""
    for node in calls:
        gm.graph.erase_node(node)
        gm.delete_submodule(str(node.target))
    gm.recompile()


@contextmanager
def watching(gm: GraphModule, watches: Iterable[tuple[Node, nn.Module]]) -> Iterator[None]:
    """Within the context, pass the value of each node to its module whenever the graph runs."""
    inserted = insert_watches(gm, watches)
    try:
        yield
    finally:
        remove_watches(gm, inserted)


def run_batches(gm: GraphModule, context: Context, look: Callable[[list[Any]], None] | None = None) -> None:
    """Run a graph with watches on every batch, block by block if the context requires it.

    Args:
        gm: Graph with watches.
        context: Context of the run.
        look: Function that is called with the flat inputs of each batch.
    """
    batches = context.data.flat_batches(context.device if context.by_block else device_of(gm))
    if context.by_block:
        if look is not None:
            for leaves in batches:
                look(leaves)
        watched = {node.name: node for node in gm.graph.nodes if node.op == "call_module"}
        for _ in walk_float_blocks(gm, context, label="calibrate", watched=watched):
            pass
        return
    bar = tqdm(batches, desc="calibrate", unit="batch", disable=not context.progress, leave=False)
    with torch.no_grad(), fast_layout(gm) as lay_out:
        for batch, leaves in enumerate(bar):
            if look is not None:
                look(leaves)
            with running(context.data.number_of(batch)):
                gm(*map(lay_out, leaves))


@contextmanager
def fast_layout(gm: GraphModule) -> Iterator[Callable[[Any], Any]]:
    """Within the context, store weights of 2-D convolutions channels-last; yield a function that converts inputs.

    On a CPU, a deep network runs a quarter faster this way. Only an operator that reads strides could return another
    result, so a graph with `as_strided` is left unchanged.
    """
    names = [target_name(node) for node in gm.graph.nodes]
    convolutions = [node for node in gm.graph.nodes if target_name(node).startswith("aten.conv2d.")]
    nodes = [node.args[1] for node in convolutions if is_parameter(node.args[1])]
    weights = {str(node.target): parameter(gm, node) for node in nodes}
    if "aten.as_strided.default" in names or not all(weight.is_cpu for weight in weights.values()):
        weights = {}

    def lay_out(x: Any) -> Any:
        image = bool(weights) and isinstance(x, Tensor) and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if image else x

    try:
        for name, weight in weights.items():
            set_parameter(gm, name, weight.contiguous(memory_format=torch.channels_last))
        yield lay_out
    finally:
        for name, weight in weights.items():
            set_parameter(gm, name, weight)
