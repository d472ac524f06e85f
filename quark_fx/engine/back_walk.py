"""Carry the gradient of a loss from what a graph returns back to any value in it, block by block.

A batch goes forward first, and only what enters each block is kept. On the way back each block is computed again, so
that one block's values at a time are in memory, at the cost of a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.block_walk import lift, release, running
from quark_fx.engine.blocks import Block
from quark_fx.engine.context import Context
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import results_of
from quark_fx.system.memory import give_back


@dataclass
class BackWalk:
    """A float graph on its way forward and back, one batch at a time.

    Attributes:
        gm: the graph.
        blocks: of it, in order.
        nodes: its nodes, by the names that the blocks use.
        context: with the batches.
        watched: names of operators, for the gradients of what they make.
    """

    gm: GraphModule
    blocks: Sequence[Block]
    nodes: Mapping[str, Node]
    context: Context
    watched: frozenset[str] = frozenset()

    def forward(self, batch: int) -> list[Any]:
        """Return what the graph makes of a batch, and keep what enters each block."""
        cache, results = self.context.cache, list[Any]()
        values = dict(zip(self.blocks[0].inputs, self._given(batch), strict=True))
        for index, block in enumerate(self.blocks):
            give_back()
            for name in block.inputs:
                cache.put(("entering", index, name), values[name])
            part = lift(self.gm, block, self.nodes, self.context.device)
            with torch.no_grad(), running(self.context.number_of(batch)):
                results = list(part(*(values[name] for name in block.inputs)))
            values = dict(zip(block.outputs, results, strict=True))
            release(part)
        return [result if name is None else values[name] for name, result in self._results()]

    def backward(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of watched values by name, those of the last block first.

        Args:
            gradients: of the loss with respect to what `forward` returned; `None` for none.

        Raises:
            CalibrationError: if an operator has no gradient; the message names its block.
        """
        pending: dict[str, Tensor] = {}
        for (name, _), gradient in zip(self._results(), gradients, strict=True):
            if name is not None and gradient is not None:
                pending[name] = pending[name] + gradient if name in pending else gradient
        for index, block in reversed(list(enumerate(self.blocks))):
            give_back()
            entering = [self.context.cache.get(("entering", index, name)) for name in block.inputs]
            self.forget(index)
            pending, found = self._through(block, entering, pending)
            yield from found.items()
            if not pending:
                break
        self.forget()

    def forget(self, index: int | None = None) -> None:
        """Let go of what enters a block; default: all blocks."""
        for i in range(len(self.blocks)) if index is None else (index,):
            for name in self.blocks[i].inputs:
                self.context.cache.drop(("entering", i, name))

    def _results(self) -> list[tuple[str | None, Any]]:
        """Return what the graph returns, with the names that the last block has for nodes."""
        names = {self.nodes[name]: name for name in self.blocks[-1].outputs}
        return [(names[node] if isinstance(node, Node) else None, node) for node in results_of(self.gm)]

    def _given(self, batch: int) -> list[Any]:
        order = {node.name: i for i, node in enumerate(n for n in self.gm.graph.nodes if n.op == "placeholder")}
        return [self.context.input(batch, order[name]) for name in self.blocks[0].inputs]

    def _through(
        self, block: Block, entering: Sequence[Any], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients of what enters a block, and those of what is asked for in it."""
        also = [name for name in block.operators if name in self.watched]
        part = lift(self.gm, block, self.nodes, self.context.device, also=also)
        leaves = {n: _leaf(v) for n, v in zip(block.inputs, entering, strict=True)}
        with torch.enable_grad():
            made = part(*leaves.values())
        results = dict(zip((*block.outputs, *also), made, strict=True))
        ends = [(results[n], gradients[n]) for n in block.outputs if n in gradients and _has_gradient(results[n])]
        wanted = {n: v for n, v in leaves.items() if _has_gradient(v)}
        wanted |= {n: results[n] for n in also if _has_gradient(results[n])}
        found: dict[str, Tensor] = {}
        if ends and wanted:
            try:
                values = torch.autograd.grad(
                    [end for end, _ in ends],
                    list(wanted.values()),
                    [g.to(end.dtype) for end, g in ends],
                    allow_unused=True,
                )
            except (RuntimeError, NotImplementedError) as error:
                raise CalibrationError(
                    f"the gradient of the model's predictions does not pass {block.name or 'the model'}: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            found = {n: g for n, g in zip(wanted, values, strict=True) if g is not None}
        release(part)
        return {n: g for n, g in found.items() if n in leaves}, {n: g for n, g in found.items() if n not in leaves}


def _leaf(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


__all__ = ["BackWalk"]
