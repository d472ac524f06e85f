"""Run the quantized and the float graph on the same batch, and compare their outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.back_walk import BackWalk
from quark_fx.engine.block_walk import walk_float_blocks
from quark_fx.engine.blocks import Unit, carriers, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import named_nodes, placeholders

_LAST = "inputs of the last block"
"""Stream of the cached float inputs of the last block. They are smaller than predictions, which are recomputed."""


class SideBySide:
    """Difference between the outputs of a quantized graph and of the float graph, with its gradients.

    One block's values at a time are in memory, as in a `BackWalk`.

    Args:
        gm: Quantized graph.
        context: Context with `float_graph`, from which `gm` was converted.
        tensors: Names of tensors of `gm` to differentiate.

    Raises:
        CalibrationError: If calibration data is missing, or none of the model's outputs is a floating-point tensor.
    """

    def __init__(self, gm: GraphModule, context: Context, tensors: Collection[str] = ()) -> None:
        reference = context.float_graph
        blocks, nodes = find_blocks(reference, Unit.BLOCK), named_nodes(reference)
        self._context, self._loss = context, EndLoss.of(reference)
        if all(logits is None for logits in self._loss.predictions):
            raise CalibrationError(
                "the model returns no floating-point tensor, so an end loss cannot be computed; return logits, or "
                "leave out the pass"
            )
        self._float = BackWalk(reference, blocks[-1:], nodes, context, stream=_LAST)
        self._quantized = BackWalk(gm, blocks, carriers(gm), context, tensors=frozenset(tensors), stream="quantized")
        inputs = {node.name for node in placeholders(reference)}  # in the cache already
        names = [name for name in blocks[-1].inputs if name not in inputs]
        self._keys = [(_LAST, name, batch) for name in names for batch in range(len(context.data.batches))]
        for run in walk_float_blocks(reference, context, label="predictions"):
            if run.block.inputs == blocks[-1].inputs:
                for batch in range(len(context.data.batches)):
                    values = context.with_room(partial(run.inputs, batch))
                    for name, value in zip(run.block.inputs, values, strict=True):
                        if name not in inputs:
                            context.with_room(partial(context.cache.put, (_LAST, name, batch), value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._quantized.close()
        for key in self._keys:
            self._context.cache.drop(key)

    def run_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Run the quantized graph with other tensors from now on, given with their names; its own do not change."""
        self._quantized.changed.update(tensors)

    def loss(self, batch: int) -> Tensor:
        """Return the sums of a batch that the end loss is computed from (`EndLoss.compared`)."""
        return self._compared(batch, keep=False)[0]

    def gradients(self, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the result of `loss`, and the gradients of this batch's loss with respect to the named tensors.

        Raises:
            CalibrationError: If an operator is not differentiable; the message names its block.
        """
        sums, gradients = self._compared(batch, keep=True)
        by_name: dict[str, Tensor] = {}
        for name, gradient in self._quantized.backward(gradients):
            by_name[name] = by_name[name] + gradient if name in by_name else gradient
        return sums, by_name

    def _compared(self, batch: int, *, keep: bool) -> tuple[Tensor, list[Any]]:
        float_results, results = self._float.forward(batch, keep=True), self._quantized.forward(batch, keep=keep)
        return self._loss.compared(results, float_results, self._context.data.kept_positions(batch))

    @property
    def count(self) -> int:
        """Number of results with a loss, equal to the rows that `loss` returns."""
        return sum(logits is not None for logits in self._loss.predictions)


__all__ = ["SideBySide"]
