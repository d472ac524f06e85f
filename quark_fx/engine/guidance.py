"""How sensitive the end loss is to an error in each row of an operator's output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.engine.back_walk import BackWalk, NoGradientError
from quark_fx.engine.blocks import Unit, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes
from quark_fx.plan.placement import Coded

_ENOUGH = 8
"""Effective rows per input, of all batches, that are enough: the excess error over infinite data is about inputs over
rows."""

_POWERS = (0.5, 0.375, 0.25, 0.125)
"""Powers of the weights to try, in this order; if none leaves enough effective rows, all rows weigh the same, and the
report says so. Weights themselves (1) lose more than equal ones at 2 bits: a row's gradient is one draw, and holds for
small errors only."""


@dataclass(frozen=True)
class Guidance:
    """The root mean square, over output channels, of the end loss's gradient at each row that an operator makes.

    A Hessian whose rows are weighted by the mean square is, averaged over outputs, that of the end loss, where `sum of
    x x'` is that of the operator's own squared error. The root is half way between the two. Few rows may have nearly
    all of the weight (the first token of a text, which the others attend to), and a Hessian of so few rows does not
    hold for other data: the mean square is raised to the largest power up to the root at which the effective number of
    rows, `(sum of w)**2 / sum of w**2`, is enough for the inputs.

    Attributes:
        weights: by operator's node and batch, float32, the shape of the output without its channels; 1 on average.
        reasons: why an operator has none, by its node.

    Source:
        Kim et al. 2025 (GuidedQuant), equation 6 with one group of outputs; the gradient is a draw from the model's own
        predictions (`EndLoss.sampled`) instead of that of the data's labels, and the power is ours.
    """

    weights: dict[tuple[str, int], Tensor]
    reasons: dict[str, str]

    @classmethod
    def measure(cls, gm: GraphModule, context: Context) -> Self:
        """Run every calibration batch through a float graph and back; return the weights of all quantized operators.

        If the gradient does not pass an operator, none has weights, and the reason names the block.

        Raises:
            CalibrationError: if there is no data.
        """
        context.require_batches()
        coded = [op for op in context.plan.values() if isinstance(op, Coded)]
        linears = {op.node.name: op.linear for op in coded if op.linear is not None and op.linear.matrices is not None}
        kernels = {name: bool(linear.kernel_axes) for name, linear in linears.items()}
        inputs = {name: math.prod(linear.shape) // linear.shape[linear.output_axis] for name, linear in linears.items()}
        loss, weights = EndLoss.of(gm), dict[tuple[str, int], Tensor]()
        walk = BackWalk(gm, find_blocks(gm, Unit.BLOCK), named_nodes(gm), context, watched=frozenset(kernels))
        generator, blocked = torch.Generator(context.device), ""
        batches = range(len(context.batches))
        for batch in tqdm(batches, desc="guidance", unit="batch", disable=not context.progress, leave=False):
            generator.manual_seed(context.first + batch)
            gradients = loss.sampled(walk.forward(batch), context.kept_positions(batch), generator)
            try:
                for name, gradient in walk.backward(gradients):
                    weights[name, batch] = gradient.float().square().mean(1 if kernels[name] else -1)
            except NoGradientError as error:
                blocked = str(error)
                break
        if blocked := next(filter(None, context.ranks.gather(blocked)), ""):
            return cls({}, dict.fromkeys(kernels, blocked))
        return cls(*_tempered(weights, inputs, context))

    def of(self, operator: str, batch: int) -> Tensor | None:
        """Return the weights of an operator's rows, `None` if it has none (`missing`)."""
        return self.weights.get((operator, batch))

    def missing(self, linear: Linear) -> str:
        """Say why an operator's rows cannot be weighted; empty if they can."""
        if linear.offsets_at is not None:  # the quantized model may send a token elsewhere than the float one
            return "data chooses its rows"
        return self.reasons.get(linear.node.name, "")


def guidance_of(context: Context) -> Guidance:
    """Return the guidance of a run, which is measured once, on the float graph; every rank has to ask for it.

    Raises:
        CalibrationError: as `Guidance.measure`.
    """
    if context.guidance is None:
        context.guidance = Guidance.measure(context.float_graph, context)
    return context.guidance


def _tempered(
    weights: dict[tuple[str, int], Tensor], inputs: Mapping[str, int], context: Context
) -> tuple[dict[tuple[str, int], Tensor], dict[str, str]]:
    """Return powers of the weights over their mean, over all ranks, and why operators have none.

    Args:
        weights: squared gradients, by operator and batch.
        inputs: of each operator; of a stack, those of all its matrices, whose rows are counted together, too.
        context: of the run.
    """
    # Of each power: the sum, and that of squares, which float32 has no room for; at last the number of rows.
    sums = torch.zeros(len(inputs), 2 * len(_POWERS) + 1, dtype=torch.float64, device=context.device)
    for i, name in enumerate(inputs):
        for batch in range(len(context.batches)):
            if (found := weights.get((name, batch))) is not None:
                raised = torch.stack([found.double() ** power for power in _POWERS]).flatten(1)
                count = torch.full_like(raised[:1, 0], raised.shape[1])
                sums[i] += torch.cat((raised.sum(1), raised.square().sum(1), count))
    context.ranks.add(sums)
    chosen, reasons = dict[str, tuple[float, float]](), dict[str, str]()
    for name, (*found, count) in zip(inputs, sums.tolist(), strict=True):
        totals, squares = found[: len(_POWERS)], found[len(_POWERS) :]
        least, rows = _ENOUGH * inputs[name], zip(_POWERS, totals, squares, strict=True)
        powers = [(p, total / count) for p, total, square in rows if 0 < least * square < total * total < math.inf]
        if powers:
            chosen[name] = powers[0]
        elif not math.isfinite(sum(totals)):
            reasons[name] = "its gradient is not finite"
        else:
            reasons[name] = "predictions depend on too few rows" if totals[0] else "no prediction depends on it"
    pairs = ((key, w, chosen[key[0]]) for key, w in weights.items() if key[0] in chosen)
    return {key: w**power / mean for key, w, (power, mean) in pairs}, reasons


__all__ = ["Guidance", "guidance_of"]
