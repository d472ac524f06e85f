"""Correct biases by the mean error that quantization causes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import QuantizedWeight, StoredBias
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, named_nodes, parameter, set_parameter, tensor_of
from quark_fx.graph.operators import clamp_bounds, given_bounds
from quark_fx.graph.pass_manager import Change
from quark_fx.solvers.folds import Mean, OutputError
from quark_fx.solvers.slots import own_biases
from quark_fx.solvers.solver import Bias, Proposal, Solver, solver


class Means(StrEnum):
    """Source of an output's mean error."""

    EMPIRICAL = "empirical"
    """Float and quantized outputs on calibration data, with all earlier operators quantized and corrected."""
    ANALYTIC = "analytic"
    """Batch norm folded into the previous operator; activations are assumed to be normal, then clamped."""


@solver
@dataclass(frozen=True, kw_only=True)
class BiasCorrection(Solver):
    """Add the mean quantization error of an operator's output, per output channel, to its bias.

    Do not use it after `AdaRound` or `AdaQuant`, whose objective already includes the mean.

    Args:
        means: Source of the mean error. `"empirical"`: calibration data, operator by operator; a correction is kept if
            the error on validation batches decreases. `"analytic"`: `(W - Q(W)) E[x]`, with `E[x]` of a clamped normal
            distribution, without data, for operators after a batch norm (folded by `fold_batch_norm`) and at most one
            clamp.

    Source:
        Nagel et al. 2019, section 4.2 and appendix C; sequential correction as in section 4.2.2 of Banner et al. 2019.
    """

    chooses: ClassVar = Bias
    means: Means = Means.EMPIRICAL

    @property
    def reads(self) -> OutputError:
        """Mean error of each output channel."""
        return OutputError(Mean())

    def solve(self, now: Bias, seen: Mean) -> Proposal:
        """Return the bias plus the mean error."""
        return Proposal(replace(now, value=now.value + seen.value))

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Correct the biases of `gm`; return the number of changed biases."""
        if self.means is Means.EMPIRICAL:
            return super().__call__(gm, context)
        for weight, bias in own_biases(gm, context, self):
            _correct_analytically(gm, weight, bias, context)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: none if the pass uses no data."""
        return super().needs(sizes) if self.means is Means.EMPIRICAL else Need()


def _correct_analytically(gm: GraphModule, weight: QuantizedWeight, bias: StoredBias, context: Context) -> None:
    node = named_nodes(context.float_graph)[weight.node.name]
    linear = weight.linear.at(node)
    mean = _expected_input(context.float_graph, linear)
    lost = tensor_of(context.float_graph, weight.weight).detach().float() - weight.value(gm)
    shift = None if mean is None else linear.response(lost, mean)
    if shift is None:
        reason = "no batch norm (and at most a clamp) before it" if mean is None else "its response is not constant"
        context.note(Change.skipped(weight.name, reason))
        return
    for name, value in bias.tensors(gm, bias.value(gm) + shift).items():
        set_parameter(gm, name, value)
    context.note(Change(weight.name, f"corrected by up to {float(shift.abs().max()):.3g}"))


def _expected_input(gm: GraphModule, linear: Linear) -> Tensor | None:
    """Return the mean of each input channel, given the preceding batch norm and the clamp after it."""
    source = linear.activation
    bounds = _bounds(gm, source)
    norm: Any = source if bounds is None else source.args[0]
    producer = Linear.of(norm) if isinstance(norm, Node) and "batch_norm" in norm.meta else None
    if producer is None:
        return None
    rank = norm.meta["val"].dim()
    if producer.channel_dim(rank) != linear.channel_dim(rank):
        return None  # the operator sums over positions, not over channels
    mean, deviation = norm.meta["batch_norm"]
    return _clamped_mean(mean, deviation, *(bounds or (None, None)))


Bound = float | Tensor | None


def _bounds(gm: GraphModule, node: Node) -> tuple[Bound, Bound] | None:
    """Return the constant bounds of a clamp; equalization may have made them per channel."""
    bounds = given_bounds(node)
    if clamp_bounds(node) is not None or bounds is None:
        return bounds
    if not all(bound is None or is_parameter(bound) for bound in bounds):
        return None
    values = (None if bound is None else parameter(gm, bound).detach().float().flatten() for bound in bounds)
    return tuple(values)  # type: ignore[return-value]


def _clamped_mean(mean: Tensor, deviation: Tensor, low: Bound, high: Bound) -> Tensor:
    """Return the mean of a normal variable clamped to `[low, high]`; `None` means unbounded.

    Args:
        mean: Mean of the variable, shape (channels,).
        deviation: Standard deviation of the variable, of either sign, shape (channels,).
        low: Lower bound, a number or shape (channels,).
        high: Upper bound, a number or shape (channels,).

    Returns:
        The means, shape (channels,).

    Source:
        Nagel et al. 2019, appendix C.
    """
    deviation = deviation.abs().clamp_min(torch.finfo(torch.float32).tiny)
    normal = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    infinite = torch.full_like(mean, torch.inf)
    a = -infinite if low is None else (low - mean) / deviation
    b = infinite if high is None else (high - mean) / deviation
    density_a, density_b = normal.log_prob(a).exp(), normal.log_prob(b).exp()
    below, above = normal.cdf(a), 1 - normal.cdf(b)
    inside = mean * (1 - below - above) + deviation * (density_a - density_b)
    cut = (0.0 if low is None else low) * below + (0.0 if high is None else high) * above
    result: Tensor = inside + cut
    return result


__all__ = ["BiasCorrection", "Means"]
