"""How much the end loss minds an error in each row that an operator makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.engine.back_walk import BackWalk
from quark_fx.engine.blocks import Unit, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes
from quark_fx.plan.placement import Coded

_ENOUGH = 8
"""Effective rows per input that are enough: the excess error over infinite data is about inputs / rows."""

_POWERS = (1.0, 0.75, 0.5, 0.25, 0.125)
"""That weights are raised to; where none is small enough, all rows count alike."""


@dataclass(frozen=True)
class Guidance:
    """The mean square, over output channels, of the end loss's gradient at each row that an operator makes.

    A Hessian whose rows are weighted by it is, averaged over outputs, that of the end loss, where `sum of x x'` is that
    of the operator's own squared error. A few rows may have nearly all of the weight (the first token of a text, which
    the others attend to), and a Hessian of so few rows says nothing of other data: weights are raised to the largest
    power at which the effective number of rows, `(sum of w)**2 / sum of w**2`, is enough for the inputs.

    Attributes:
        weights: by operator's node and batch, float32, the shape of the output without its channels; 1 on average.

    Source:
        Kim et al. 2025 (GuidedQuant), equation 6 with one group of outputs; the gradient is that of labels which the
        model draws from its own predictions instead of the data's.
    """

    weights: dict[tuple[str, int], Tensor]

    @classmethod
    def measure(cls, gm: GraphModule, context: Context) -> Self:
        """Run every calibration batch through a float graph and back; return the weights of all quantized operators.

        Raises:
            CalibrationError: if there is no data, or the gradient ends on its way; the message names where.
        """
        context.require_batches()
        coded = [op for op in context.plan.values() if isinstance(op, Coded)]
        linears = {op.node.name: op.linear for op in coded if op.linear is not None}
        kernels = {name: bool(linear.kernel_axes) for name, linear in linears.items()}
        inputs = {name: math.prod(linear.shape) // linear.shape[linear.output_axis] for name, linear in linears.items()}
        loss, weights = EndLoss.of(gm), dict[tuple[str, int], Tensor]()
        walk = BackWalk(gm, find_blocks(gm, Unit.BLOCK), named_nodes(gm), context, watched=frozenset(kernels))
        generator = torch.Generator(context.device)
        batches = range(len(context.batches))
        for batch in tqdm(batches, desc="guidance", unit="batch", disable=not context.progress, leave=False):
            generator.manual_seed(context.first + batch)
            gradients = loss.sampled(walk.forward(batch), context.kept_positions(batch), generator)
            for name, gradient in walk.backward(gradients):
                weights[name, batch] = gradient.float().square().mean(1 if kernels[name] else -1)
        return cls(_tempered(weights, inputs, context))

    def of(self, operator: str, batch: int) -> Tensor | None:
        """Return the weights of an operator's rows; `None` for one whose output no result depends on."""
        return self.weights.get((operator, batch))

    def missing(self, linear: Linear) -> str:
        """Say why an operator's rows cannot be weighted; empty if they can."""
        if linear.offsets_at is not None:  # the quantized model may send a token elsewhere than the float one
            return "data chooses its rows"
        known = any(name == linear.node.name for name, _ in self.weights)
        return "" if known else "no prediction depends on it"


def guidance_of(context: Context) -> Guidance:
    """Return the guidance of a run, which is measured once, on the float graph; every rank has to ask for it.

    Raises:
        CalibrationError: as `Guidance.measure`.
    """
    if context.guidance is None:
        assert context.float_graph is not None
        context.guidance = Guidance.measure(context.float_graph, context)
    return context.guidance


def _tempered(
    weights: dict[tuple[str, int], Tensor], inputs: Mapping[str, int], context: Context
) -> dict[tuple[str, int], Tensor]:
    """Return powers of the weights over their mean, over all ranks; of operators whose weights are all zero none.

    Args:
        weights: squared gradients, by operator and batch.
        inputs: columns of each operator's Hessian.
        context: of the run.
    """
    sums = torch.zeros(len(inputs), len(_POWERS), 2, dtype=torch.float32, device=context.device)
    rows = dict.fromkeys(inputs, 0)
    for i, name in enumerate(inputs):
        for batch in range(len(context.batches)):
            if (found := weights.get((name, batch))) is not None:
                raised = torch.stack([found**power for power in _POWERS]).flatten(1)
                sums[i] += torch.stack((raised.sum(1), raised.square().sum(1)), dim=1)
                rows[name] += found.numel()
    counts = torch.tensor(list(rows.values()), dtype=torch.int64)
    context.ranks.add(sums, counts)
    chosen = {}
    for name, count, found in zip(inputs, counts.tolist(), sums.tolist(), strict=True):
        usable = (
            (p, s / count) for p, (s, q) in zip(_POWERS, found, strict=True) if s * s > _ENOUGH * inputs[name] * q
        )
        if found[0][0] > 0:
            chosen[name] = next(usable, (0.0, 1.0))
    return {
        (name, batch): w ** chosen[name][0] / chosen[name][1] for (name, batch), w in weights.items() if name in chosen
    }


__all__ = ["Guidance", "guidance_of"]
