"""Measure how sensitive the end loss is to errors of an operator's output, per row and jointly over channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.engine.back_walk import BackWalk, NoGradientError
from quark_fx.engine.blocks import Unit, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.engine.sizes import FLOAT32, Matrices
from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes
from quark_fx.plan.placement import Coded
from quark_fx.system import accelerator

_ENOUGH = 8
"""Least number of effective rows per input, over all batches: `inputs / rows` is about the excess error relative to
infinite data."""

_TOGETHER = 1024
"""Largest size of a run of output channels, whose errors are combined; the size divides the number of channels."""

_SMALLEST = 1e-18
"""Lower limit of the norm that a row's gradient is divided by; squares of smaller values are 0 in float32."""

_POWERS = (0.5, 0.375, 0.25, 0.125)
"""Powers of the weights to try, in this order; if none leaves enough effective rows, all rows are weighted equally, and
the report says so. The weights themselves (power 1) are worse than equal weights at 2 bits, because a row's gradient is
a single sample, and is valid only for small errors."""


@dataclass(frozen=True)
class Guidance:
    """Root mean square, over output channels, of the end loss's gradient at each output row of an operator.

    A Hessian whose rows are weighted by the mean square is, averaged over outputs, the Hessian of the end loss, while
    the sum of `x x'` is the Hessian of the operator's own squared error. The root is a compromise. A few rows may have
    nearly all of the weight (such as the first token of a text, which the other tokens attend to), and a Hessian of so
    few rows does not generalize. Therefore, the mean square is raised to the largest power, up to the root, at which
    the effective number of rows, `(sum of w)**2 / sum of w**2`, is large enough for the number of inputs.

    `outputs` describes which channels' errors add up and which cancel. It is based on the sum of `g g'` over rows,
    whose gradients `g` are normalized so that a few rows cannot dominate. The end loss from errors `E` in a weight is
    about `tr(outputs E h E')`, where `h` is the Hessian of the inputs.

    Attributes:
        weights: Row weights by the name of the operator's node and index of the batch, float32, in the shape of the
            output without channels; 1 on average.
        reasons: Reason that an operator lacks weights, by the name of its node.
        outputs: Average of the sum of `g g'` and the identity, by the name of the operator's node, float32, shape
            (runs, n, n) for runs of `n` channels; the diagonal is 1 on average. Only for operators with one matrix;
            `None` if not measured.
        alone: Reason that an operator lacks `outputs`, by the name of its node.

    Source:
        Kim et al. 2025 (GuidedQuant), equation 6 with one group of outputs; the gradient is sampled from the model's
        own predictions (`EndLoss.sampled`) instead of using the data's labels, and the power is ours. `outputs`: Tseng
        et al. 2025 (YAQA), whose two sides are weighted by each other; normalization and the identity are ours.
    """

    weights: dict[tuple[str, int], Tensor]
    reasons: dict[str, str]
    outputs: dict[str, Tensor] | None = None
    alone: dict[str, str] = field(default_factory=dict)

    @classmethod
    def measure(cls, gm: GraphModule, context: Context, *, outputs: bool) -> Self:
        """Run every calibration batch forward and backward through a float graph; return the guidance.

        If an operator is not differentiable, no operator has weights, and the reason names the block.

        Args:
            gm: Float graph.
            context: Context of the run.
            outputs: Whether to measure `Guidance.outputs` as well.

        Raises:
            CalibrationError: If calibration data is missing.
        """
        context.data.require_batches()
        coded = [op for op in context.plan.values() if isinstance(op, Coded)]
        linears = {op.node.name: op.linear for op in coded if op.linear is not None and op.linear.matrices is not None}
        kernels = {name: bool(linear.kernel_axes) for name, linear in linears.items()}
        inputs = {name: math.prod(linear.shape) // linear.shape[linear.output_axis] for name, linear in linears.items()}
        loss, weights = EndLoss.of(gm), dict[tuple[str, int], Tensor]()
        single = {name: linear for name, linear in linears.items() if outputs and _is_single(linear)}
        together = {name: _no_rows(linear, context.device) for name, linear in single.items()}
        walk = BackWalk(gm, find_blocks(gm, Unit.BLOCK), named_nodes(gm), context, watched=frozenset(kernels))
        generator, blocked = accelerator.new_generator(context.device), ""
        batches = range(len(context.data.batches))
        for batch in tqdm(batches, desc="guidance", unit="batch", disable=not context.progress, leave=False):
            generator.manual_seed(context.data.first + batch)
            gradients = loss.sampled(walk.forward(batch), context.data.kept_positions(batch), generator)
            try:
                for name, gradient in walk.backward(gradients):
                    rows = gradient.float().movedim(1 if kernels[name] else -1, -1)
                    weights[name, batch] = rows.square().mean(-1)
                    if name in together:
                        _add_together(together[name], rows.flatten(0, -2))
            except NoGradientError as error:
                blocked = str(error)
                break
        walk.close()
        if blocked := next(filter(None, context.ranks.gather(blocked)), ""):
            reasons = dict.fromkeys(kernels, blocked)
            return cls({}, reasons, {} if outputs else None, reasons)
        context.ranks.add(*together.values())
        alone = _unusable(together)
        usable = {name: sums for name, sums in together.items() if name not in alone}
        for sums in usable.values():
            _shrink(sums)
        return cls(*_tempered(weights, inputs, context), usable if outputs else None, alone)

    def of(self, operator: str, batch: int) -> Tensor | None:
        """Return the weights of an operator's rows in a batch, or `None` if they are missing (see `missing`)."""
        return self.weights.get((operator, batch))

    def missing(self, linear: Linear) -> str:
        """Return the reason that an operator's rows cannot be weighted; empty if they can."""
        if linear.offsets_at is not None:  # the quantized model may route a token differently from the float model
            return "which rows it multiplies depends on the data"
        return self.reasons.get(linear.node.name, "")

    def together(self, linear: Linear) -> Tensor:
        """Return the `outputs` of an operator; raise `Declined` if they are missing."""
        sums = (self.outputs or {}).get(linear.node.name)
        if sums is None:
            raise Declined(self.alone.get(linear.node.name, "it has several matrices"))
        return sums


def _is_single(linear: Linear) -> bool:
    """Return whether an operator has one matrix, whose rows are its output channels."""
    return linear.matrices is not None and linear.matrices.groups == 1 and not linear.matrices.stacked


def _no_rows(linear: Linear, device: torch.device) -> Tensor:
    """Return zeros for `_add_together`, shape (runs, n, n) for runs of `n` output channels."""
    channels = linear.shape[linear.output_axis]
    size = _run(channels)
    return torch.zeros(channels // size, size, size, dtype=torch.float32, device=device)


def _run(channels: int) -> int:
    return next(n for n in range(min(_TOGETHER, channels), 0, -1) if channels % n == 0)


def together_bytes(matrices: Matrices) -> int:
    """Return the bytes of `Guidance.outputs` for an operator."""
    return FLOAT32 * matrices.outputs * _run(matrices.outputs) * (matrices.groups == 1)


def _add_together(sums: Tensor, rows: Tensor) -> None:
    """Add `g g'` to `sums` for each row `g` of `rows`, normalized; `rows` has shape (rows, channels)."""
    alike = (rows / rows.norm(dim=-1, keepdim=True).clamp_min(_SMALLEST)).unflatten(-1, sums.shape[:2]).movedim(1, 0)
    sums.baddbmm_(alike.mT, alike)


def _unusable(together: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for each operator with unusable sums, the reason that they are unusable; waits for the device once."""
    sizes = accelerator.read([sums.diagonal(dim1=-2, dim2=-1).sum() for sums in together.values()])
    traces = dict(zip(together, sizes, strict=True))
    reasons = {name: "its gradient is not finite" for name, size in traces.items() if not math.isfinite(size)}
    return reasons | {name: "no prediction depends on it" for name, size in traces.items() if size == 0}


def _shrink(sums: Tensor) -> None:
    """Normalize sums to a mean diagonal of 1, and average them with the identity."""
    # The sums alone are overconfident: a row's gradient is a single sample, and the two sides of an error are not
    # independent, although one matrix for all rows assumes that they are.
    sums /= sums.diagonal(dim1=-2, dim2=-1).mean()
    sums.diagonal(dim1=-2, dim2=-1).add_(1)
    sums /= 2


def _tempered(
    weights: dict[tuple[str, int], Tensor], inputs: Mapping[str, int], context: Context
) -> tuple[dict[tuple[str, int], Tensor], dict[str, str]]:
    """Return powers of the weights, normalized by their mean over all ranks, and the reasons that operators lack them.

    Args:
        weights: Mean squared gradients, by operator and batch.
        inputs: Number of inputs of each operator; for a stack of matrices, the total over all matrices, because their
            rows are counted together.
        context: Context of the run.
    """
    # Columns: the sum for each power, the sum of squares for each power (can overflow float32), and the number of rows.
    sums = torch.zeros(len(inputs), 2 * len(_POWERS) + 1, dtype=torch.float64, device=context.device)
    for i, name in enumerate(inputs):
        for batch in range(len(context.data.batches)):
            if (weight := weights.get((name, batch))) is not None:
                raised = torch.stack([weight.double() ** power for power in _POWERS]).flatten(1)
                count = torch.full_like(raised[:1, 0], raised.shape[1])
                sums[i] += torch.cat((raised.sum(1), raised.square().sum(1), count))
    context.ranks.add(sums)
    chosen, reasons = dict[str, tuple[float, float]](), dict[str, str]()
    for name, (*moments, count) in zip(inputs, sums.tolist(), strict=True):
        totals, squares = moments[: len(_POWERS)], moments[len(_POWERS) :]
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


__all__ = ["Guidance", "together_bytes"]
