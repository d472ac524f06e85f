"""Take the mean error that quantization causes out of the biases."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.block_walk import BlockRun, walk_blocks
from quark_fx.blocks import Unit, extract
from quark_fx.context import Context
from quark_fx.graph import named_nodes, placeholders, set_parameter, tensor_of
from quark_fx.operators import argument, clamp_bounds
from quark_fx.pass_manager import Change, Stage, graph_pass
from quark_fx.quantized_weights import QuantizedWeight, add_bias, quantized_weights, shared_codes
from quark_fx.specs import enum_member


class Means(StrEnum):
    """Where the mean error of an output comes from."""

    EMPIRICAL = "empirical"
    """Float and quantized outputs on calibration data, everything before quantized and corrected."""
    ANALYTIC = "analytic"
    """The batch norm folded into the operator before: its activations are normal, and clamped."""


@graph_pass(exact=False, stage=Stage.QUANTIZED)
@dataclass(frozen=True, kw_only=True)
class BiasCorrection:
    """Add to each bias the mean, per output channel, of what quantization takes from the operator's output.

    Not after `AdaRound` or `AdaQuant`, whose error contains the mean already. An operator without a bias gets one.

    Args:
        means: `"empirical"`, sequentially on calibration data, kept where the error on unseen batches falls; or
            `"analytic"`, `(W - Q(W)) E[x]` with `E[x]` of a clamped normal distribution, without data, for operators
            that a batch norm (folded by `fold_batch_norm`) and at most a clamp lie before.

    Source:
        Nagel et al. 2019, section 4.2 and appendix C; sequential correction as in section 4.2.2 of Banner et al. 2019.
    """

    means: Means = Means.EMPIRICAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "means", enum_member(Means, self.means))

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Correct the biases of `gm`; return how many changed."""
        shared = shared_codes(gm)
        for weight in quantized_weights(gm, context.plan):
            add_bias(gm, weight)
        if self.means is Means.ANALYTIC:
            return _correct_analytically(gm, context)
        return sum(
            _correct_on_data(run, weight, context)
            for run in walk_blocks(gm, context, unit=Unit.OPERATOR, label="bias correction")
            for weight in quantized_weights(run.module, context.plan)
            if weight.bias is not None and weight.codes not in shared
        )


def _correct_on_data(run: BlockRun, weight: QuantizedWeight, context: Context) -> bool:
    began = time.perf_counter()
    before = run.held_out_error()
    old = weight.bias_tensors(run.module, weight.bias_value(run.module))
    shift = _mean_error(run, weight, context)
    for name, value in weight.bias_tensors(run.module, weight.bias_value(run.module) + shift).items():
        run.store(name, value)
    after = run.held_out_error()
    kept = after < before
    if not kept:
        for name, value in old.items():
            run.store(name, value)
    what = "corrected" if kept else "left: unseen batches disagree"
    seconds = time.perf_counter() - began
    context.note(Change(name=weight.name, what=what, before=before, after=min(before, after), seconds=seconds))
    return kept


def _mean_error(run: BlockRun, weight: QuantizedWeight, context: Context) -> Tensor:
    """Return the mean of float minus quantized output over the tuning batches, one value per output channel."""
    quantized = extract(run.module, placeholders(run.module), [weight.node])
    real = extract(run.reference, placeholders(run.reference), [named_nodes(run.reference)[weight.node.name]])
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in context.tuning:
            (y,), (t,) = quantized(*run.inputs(batch)), real(*run.reference_inputs(batch))
            error = (t.float() - y.float()).movedim(weight.channel_dim(y), 0).flatten(1)
            total = total + error.sum(1).double().cpu()
            count += error.shape[1]
    return (total / count).float().to(context.device)


def _correct_analytically(gm: GraphModule, context: Context) -> int:
    assert context.float_graph is not None
    reference = named_nodes(context.float_graph)
    corrected = 0
    for weight in quantized_weights(gm, context.plan):
        mean = _expected_input(reference[weight.node.name], weight)
        if weight.bias is None or mean is None:
            reason = "no bias" if weight.bias is None else "no batch norm (and at most a clamp) before it"
            context.note(Change(name=weight.name, what=f"left: {reason}"))
            continue
        lost = tensor_of(context.float_graph, weight.weight).detach().float() - weight.value(gm)
        groups = mean.numel() // lost.shape[weight.row.input_axis]
        per_group = lost.movedim((weight.row.output_axis, weight.row.input_axis), (0, 1)).flatten(2).sum(2)
        shift = (per_group.reshape(groups, -1, per_group.shape[1]) @ mean.reshape(groups, -1, 1)).flatten()
        for name, value in weight.bias_tensors(gm, weight.bias_value(gm) + shift).items():
            set_parameter(gm, name, value)
        context.note(Change(name=weight.name, what=f"corrected by up to {float(shift.abs().max()):.3g}"))
        corrected += 1
    return corrected


def _expected_input(node: Node, weight: QuantizedWeight) -> Tensor | None:
    """Return the mean of each input channel, from the batch norm before and the clamp between."""
    source = argument(node, weight.row.activations[0])
    bounds = clamp_bounds(source)
    norm = source if bounds is None else source.args[0]
    statistics = norm.meta.get("batch_norm") if isinstance(norm, Node) else None
    if statistics is None:
        return None
    mean, deviation = statistics
    return clamped_mean(mean, deviation, *(bounds or (None, None)))


def clamped_mean(mean: Tensor, deviation: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return the mean of a normal variable clamped to `[low, high]`; `None` is no bound.

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
    result: Tensor = inside + (low or 0.0) * below + (high or 0.0) * above
    return result


__all__ = ["BiasCorrection", "Means", "clamped_mean"]
