"""How much the end loss minds an error in each row that an operator makes."""

from __future__ import annotations

from collections.abc import Iterable
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


@dataclass(frozen=True)
class Guidance:
    """The mean square, over output channels, of the end loss's gradient at each row that an operator makes.

    A Hessian whose rows are weighted by it is, averaged over outputs, that of the end loss, where `sum of x x'` is that
    of the operator's own squared error.

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
        kernels = {op.node.name: bool(op.linear.kernel_axes) for op in coded if op.linear is not None}
        loss, weights = EndLoss.of(gm), dict[tuple[str, int], Tensor]()
        walk = BackWalk(gm, find_blocks(gm, Unit.BLOCK), named_nodes(gm), context, watched=frozenset(kernels))
        generator = torch.Generator(context.device)
        batches = range(len(context.batches))
        for batch in tqdm(batches, desc="guidance", unit="batch", disable=not context.progress, leave=False):
            generator.manual_seed(context.first + batch)
            gradients = loss.sampled(walk.forward(batch), context.kept_positions(batch), generator)
            for name, gradient in walk.backward(gradients):
                weights[name, batch] = gradient.float().square().mean(1 if kernels[name] else -1)
        return cls(_normalized(weights, kernels, context))

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


def _normalized(
    weights: dict[tuple[str, int], Tensor], operators: Iterable[str], context: Context
) -> dict[tuple[str, int], Tensor]:
    """Return the weights of each operator over their mean, that of all ranks; of those that are all zero none."""
    names = list(operators)
    sums = torch.zeros(len(names), 2, dtype=torch.float32, device=context.device)
    for i, name in enumerate(names):
        for batch in range(len(context.batches)):
            if (found := weights.get((name, batch))) is not None:
                sums[i] += torch.stack((found.sum(), torch.full_like(found.sum(), found.numel())))
    context.ranks.add(sums)
    means = {name: total / count for name, total, count in zip(names, *sums.cpu().unbind(1), strict=True)}
    return {key: w / means[key[0]].to(w.device) for key, w in weights.items() if float(means[key[0]]) > 0}


__all__ = ["Guidance", "guidance_of"]
