"""Propagate the gradient of a loss from a graph's outputs back to any of its values, block by block.

A batch runs forward first, and only the inputs of each block are stored. The backward pass recomputes each block, so
that memory holds the values of one block at a time, at the cost of a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.block_walk import Streams, lift, release
from quark_fx.engine.blocks import Block
from quark_fx.engine.context import Context
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import results_of, set_parameter, stored_tensors, tensor_of
from quark_fx.graph.straight_through import run_with_gradients
from quark_fx.system.memory import give_back, is_shortage


class NoGradientError(CalibrationError):
    """Error for an operator in the backward pass that is not differentiable."""


@dataclass
class BackWalk:
    """Forward and backward passes through a graph, one batch at a time.

    Weights on another device are copied again for each batch, unless the cache has room for the copies. `close` drops
    the copies.

    Attributes:
        gm: Graph, float or quantized.
        blocks: Blocks of the graph, in order.
        nodes: Nodes of the graph, by the names that the blocks use.
        context: Context with the batches.
        watched: Names of operators whose outputs get gradients.
        tensors: Names of stored tensors that get gradients, one from each block that uses them.
        stream: Name of the stream that the cache stores the values under.
        changed: Replacements for stored tensors of the graph, by their names.
    """

    gm: GraphModule
    blocks: Sequence[Block]
    nodes: Mapping[str, Node]
    context: Context
    watched: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    stream: str = "float"
    changed: dict[str, Tensor] = field(default_factory=dict)
    _streams: Streams = field(init=False)

    def forward(self, batch: int, *, keep: bool = True) -> list[Any]:
        """Return the outputs of the graph for a batch; store the inputs of each block if `keep` is set."""
        self._streams = streams = Streams(self.gm, self.context, [batch], (self.stream,))
        for block in self.blocks:
            part = self.context.with_room(partial(self._lifted, block))
            streams.advance(self.stream, block, part)
            release(part)
            if not keep:
                streams.forget(set(block.inputs) - set(block.outputs))
        results = [node if name is None else streams.value(self.stream, name, batch) for name, node in self._results()]
        streams.forget(set(self.blocks[-1].outputs) - (set(self.blocks[-1].inputs) if keep else set()))
        return results

    def backward(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and gradients of `watched` values and of `tensors`, from the last block to the first.

        Args:
            gradients: Gradients of the loss with respect to the results of `forward`; `None` for zero.

        Raises:
            NoGradientError: If an operator is not differentiable; the message names its block.
        """
        pending: dict[str, Tensor] = {}
        for (name, _), gradient in zip(self._results(), gradients, strict=True):
            if name is not None and gradient is not None:
                pending[name] = pending[name] + gradient if name in pending else gradient
        streams, (batch,) = self._streams, self._streams.batches
        for index in reversed(range(len(self.blocks))):
            give_back()
            block, before = self.blocks[index], self.blocks[index - 1].inputs if index else ()
            entering = streams.values(self.stream, block.inputs, batch)
            streams.forget(set(block.inputs) - set(before))
            if pending:
                pending, by_name = self.context.with_room(partial(self._through, block, entering, pending))
                yield from by_name.items()

    def close(self) -> None:
        """Drop the copies of weights on the device."""
        self.context.cache.drop_copies()

    def _lifted(self, block: Block, also: Sequence[str] = ()) -> GraphModule:
        """Return a block on the device; it returns the values named in `also` after its outputs."""
        return lift(self.gm, block, self.nodes, self.context.device, also=also, moved=self._moved)

    def _moved(self, name: str, tensor: Tensor) -> Tensor:
        return self.context.cache.copy_of((self.stream, name), self.changed.get(name, tensor))

    def _results(self) -> list[tuple[str | None, Any]]:
        """Return a name and a value for each result: the name in the last block's outputs, `None` for a constant."""
        names = {self.nodes[name]: name for name in self.blocks[-1].outputs}
        return [(names[node] if isinstance(node, Node) else None, node) for node in results_of(self.gm)]

    def _through(
        self, block: Block, entering: Sequence[Any], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients of a block's inputs, and of its watched values and tensors."""
        also = [name for name in block.operators if name in self.watched]
        part = self._lifted(block, also)
        leaves = {n: _leaf(v) for n, v in zip(block.inputs, entering, strict=True)}
        try:
            return self._differentiated(block, part, leaves, also, gradients)
        finally:
            release(part)

    def _differentiated(
        self,
        block: Block,
        part: GraphModule,
        leaves: Mapping[str, Any],
        also: Sequence[str],
        gradients: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients that `_through` returns, given the block's module.

        Args:
            block: Block of the graph.
            part: Module of the block, which returns the block's outputs and then the values of `also`.
            leaves: Names and values of the block's inputs.
            also: Names of the block's watched operators.
            gradients: Gradients of the block's outputs, by their names.
        """
        tensors = {name: _own_leaf(part, name) for name in stored_tensors(part) if name in self.tensors}
        with torch.enable_grad():
            outputs = run_with_gradients(part, *leaves.values())
        results = dict(zip((*block.outputs, *also), outputs, strict=True))
        ends = [(results[n], gradients[n]) for n in block.outputs if n in gradients and _has_gradient(results[n])]
        variables = {n: v for n, v in leaves.items() if _has_gradient(v)}
        variables |= {n: results[n] for n in also if _has_gradient(results[n])} | tensors
        by_name: dict[str, Tensor] = {}
        if ends and variables:
            try:
                values = torch.autograd.grad(
                    [end for end, _ in ends],
                    list(variables.values()),
                    [g.to(end.dtype) for end, g in ends],
                    allow_unused=True,
                )
            except (RuntimeError, NotImplementedError) as error:
                if is_shortage(error):
                    raise
                raise NoGradientError(
                    f"the gradient of the model's predictions cannot be computed through {block.name or 'the model'}: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            by_name = {n: g for n, g in zip(variables, values, strict=True) if g is not None}
        return {n: g for n, g in by_name.items() if n in leaves}, {n: g for n, g in by_name.items() if n not in leaves}


def _leaf(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _own_leaf(part: GraphModule, name: str) -> Tensor:
    """Make a tensor of a block a leaf that requires a gradient; it shares memory with the whole graph's tensor."""
    set_parameter(part, name, tensor_of(part, name))
    return tensor_of(part, name).requires_grad_()


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


__all__ = ["BackWalk", "NoGradientError"]
