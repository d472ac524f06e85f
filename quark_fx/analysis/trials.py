"""`Trials`: errors of several configurations of one captured model, relative to its float outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from quark_fx.analysis.switches import NO_FLOATS, SwitchedGraph
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.block_walk import compute_weights, relative_error
from quark_fx.engine.calibration import fast_layout
from quark_fx.engine.calibration_data import Positions, without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.known import Known
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.evaluation.tasks import divergence_of
from quark_fx.graph.nodes import named_nodes
from quark_fx.graph.pass_manager import GraphPass, Stage, copy_graph, pass_stage, run_passes, takes_context
from quark_fx.plan.placement import Plan
from quark_fx.plan.report import Row
from quark_fx.session import Session, divided
from quark_fx.system.isolation import without_warnings
from quark_fx.system.names import unknown

_AT_ONCE = 8
"""Number of samples that run together, limited because a backward pass keeps the activations of all samples."""


def divergence(outputs: Sequence[Any], targets: Sequence[Any]) -> Tensor:
    """Return the mean KL divergence of the class probabilities from those in the float model, in nats.

    Args:
        outputs: Outputs of the quantized model; the last dimension of the first float output holds logits.
        targets: Outputs of the float model, with the same shapes.
    """
    y, target = next((y, t) for y, t in zip(outputs, targets, strict=True) if _holds_floats(t))
    y, target = (x.float().flatten(0, -2).log_softmax(-1) for x in (y, target))
    return divergence_of(y, target) / len(y)


def _holds_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


METRICS: Mapping[str, Callable[[Sequence[Any], Sequence[Any]], Tensor]] = {"error": relative_error, "kl": divergence}
"""Functions that compare outputs with the outputs of the float model, by metric name."""


Metric = Callable[[Sequence[Any], Sequence[Any]], Tensor]
"""Function of two lists, the flat outputs of the quantized and of the float model, to a differentiable scalar."""


def metric_of(given: Any) -> tuple[str, Metric]:
    """Return the name and the function of a metric.

    Args:
        given: Name in `METRICS`, or a function.

    Raises:
        ConfigError: If a name is not in `METRICS`.
    """
    if callable(given):
        name = str(getattr(given, "__name__", type(given).__name__))
        return f"{name}()" if name in METRICS else name, _checked(given)
    if not isinstance(given, str) or given not in METRICS:
        raise unknown("metric", given, METRICS)
    return given, METRICS[given]


def _checked(metric: Callable[..., Any]) -> Metric:
    """Wrap a user's metric, and check that its results are differentiable scalars."""

    def compare(outputs: Sequence[Any], targets: Sequence[Any]) -> Tensor:
        value: Any = metric(outputs, targets)
        derived = any(isinstance(y, Tensor) and y.requires_grad for y in outputs)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ConfigError(
                f"metric returned {type(value).__name__}{shape}; it must take two lists, the outputs of the quantized "
                "and of the float model, and return a floating-point tensor with one value, larger for larger errors"
            )
        if derived and not value.requires_grad:
            raise ConfigError(
                "metric is not differentiable, but the analysis needs its gradient to attribute the error; compute the "
                "metric with differentiable torch functions, without argmax, item(), detach() or numpy"
            )
        return value.reshape(())

    return compare


@dataclass(frozen=True)
class Converted:
    """A float graph and its conversion.

    Attributes:
        float_graph: Float graph after its passes.
        gm: Converted graph.
        plan: Plan of the conversion; its nodes belong to a graph that conversion rewrote.
        rows: Rows of the report, one per operator of the plan.
    """

    float_graph: GraphModule
    gm: GraphModule
    plan: Plan
    rows: list[Row]


@dataclass
class Trials:
    """Conversions of a captured model with several configurations, and their errors on the same samples.

    Passes on the float graph run again only if a configuration has different ones, and only new ranges are calibrated.

    Attributes:
        session: Model and data.
        context: Context of the run.
        metric: Function that compares outputs; see `METRICS`.
        parts: Flat inputs of the samples on which errors are measured, a few samples per part. Parts that are all
            padding are dropped.
        names: Name of each part's batch, for messages.
        positions: Positions of each part that are not padding; `None` if the data does not have an attention mask.
        counts: Weight of each part in a mean: the number of its `positions`, or of its samples.
        forward_seconds: Duration of the float model's forward passes on all parts, in seconds.
    """

    session: Session
    context: Context
    metric: Metric
    parts: Sequence[list[Any]]
    names: Sequence[str]
    positions: Sequence[Positions | None] = field(init=False)
    counts: Sequence[int] = field(init=False)
    forward_seconds: float = 0.0
    _outputs: list[Sequence[Any]] = field(default_factory=list)
    _floats: dict[tuple[GraphPass, ...], tuple[GraphModule, Known]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Drop parts that are all padding.

        Raises:
            CalibrationError: If all parts are padding.
        """
        positions = map(self.context.data.positions_in, self.parts)
        parts = zip(self.parts, self.names, positions, strict=True)
        usable = [part for part in parts if part[2] is None or len(part[2].rows)]
        if not usable:
            raise CalibrationError(
                f"the samples used to measure errors, the last of {self.names[-1]}, are all padding (attention_mask is "
                "0); put samples with tokens there, or measure on more samples"
            )
        self.parts, self.names, self.positions = zip(*usable, strict=True)
        self.counts = [samples_in(part) if places is None else len(places.rows) for part, _, places in usable]

    def convert(self, config: QuantConfig) -> Converted:
        """Convert the model with a configuration, without the passes that learn codes."""
        context = replace(self.context, config=config, rows=[], calibrated=None, changes=[])
        floats = tuple(p for p in config.passes if pass_stage(p) is Stage.FLOAT)
        if floats not in self._floats:
            gm, records = self.session.rewritten(context)
            gm, _ = run_passes(gm, floats[len(records) :], context=context, in_place=True)
            self._floats[floats] = gm, self.session.known(context) or Known()
        float_graph, context.known = self._floats[floats]
        gm = copy_graph(float_graph, lazy=True)
        for p in single_passes(config):
            p(gm, context=context) if takes_context(p) else p(gm)
        gm.recompile()
        return Converted(float_graph, gm, context.planned.plan, context.rows)

    def compare(self, base: GraphModule, variants: Sequence[GraphModule]) -> list[float]:
        """Return the error of each variant of a graph.

        Nodes before the first change of a variant run once, for all variants. An error is infinite if a variant returns
        NaN or infinity for an output that is finite in float.

        Args:
            base: Graph of the model with computed weights.
            variants: Graphs whose nodes have the same names as the nodes of `base`, up to the first difference.
        """
        starts = [_shared(base, variant) if variant is not base else {} for variant in variants]
        needed = {node.name for start in starts for node, is_read in start.items() if is_read}
        totals = [list[float]() for _ in variants]
        for leaves, targets, positions in zip(self.parts, self.targets(), self.positions, strict=True):
            with torch.no_grad(), ExitStack() as stack:
                lay_out, *_ = [stack.enter_context(fast_layout(gm)) for gm in (base, *variants)]
                inputs = [*map(lay_out, leaves)]
                values = _Prefix(base, needed).values(inputs) if needed else {}
                for variant, start, total in zip(variants, starts, totals, strict=True):
                    computed = {node: values.get(node.name) for node in start}  # `None` for values that are not needed
                    outputs = Interpreter(variant).run(*inputs, initial_env=computed)
                    total.append(_finite_or_infinite(self.metric(unpadded(outputs, positions), targets)))
        return [self.mean(total) for total in totals]

    def error(self, config: QuantConfig) -> float:
        """Return the error of a configuration, without warnings."""
        with without_warnings():
            gm = self.convert(config).gm
            compute_weights(gm)
            return self.compare(gm, [gm])[0]

    def slopes(self, graph: SwitchedGraph, share: float = 1.0) -> tuple[float, Tensor]:
        """Return the error with all values rounded, and its derivatives with respect to each rounding, float64.

        Args:
            graph: Graph with switches; derivatives are in the order of `graph.rounded`.
            share: Fraction of the rounding errors to apply. If the error is quadratic in the rounding errors, the
                contribution of a value is its derivative divided by twice the fraction.
        """
        slopes, errors = torch.zeros(len(graph.rounded), dtype=torch.float64), list[float]()
        parts = zip(self.parts, self.targets(), self.positions, self.counts, strict=True)
        for leaves, targets, positions, count in parts:
            loss = self.metric(unpadded(graph.run(leaves, share), positions), targets)
            slopes += graph.gradients(loss) * count
            errors.append(_finite_or_infinite(loss.detach()))
        return self.mean(errors), slopes / sum(self.counts)

    def targets(self) -> list[Sequence[Any]]:
        """Return the outputs of the float model for each part, without padding.

        Raises:
            CalibrationError: If an output is NaN, infinite, or too large to square. Minus infinity, as in a mask, is
                allowed.
            ConfigError: If no output is a float tensor.
        """
        if not self._outputs:
            start = time.perf_counter()
            gm = self.session.captured.module
            with torch.no_grad(), fast_layout(gm) as lay_out:
                targets = [
                    unpadded(gm(*map(lay_out, leaves)), positions)
                    for leaves, positions in zip(self.parts, self.positions, strict=True)
                ]
            for outputs, name in zip(targets, self.names, strict=True):
                self._require_comparable(outputs, name)
            self._outputs = targets
            self.forward_seconds = time.perf_counter() - start
        return self._outputs

    def _require_comparable(self, outputs: Sequence[Any], batch: str) -> None:
        floats = [*filter(_holds_floats, outputs)]
        if not floats:
            raise ConfigError(NO_FLOATS)
        if not (all(map(_is_comparable, floats)) and bool(self.metric(outputs, outputs).isfinite())):
            raise CalibrationError(
                f"the float model's output is not finite on {batch}, or too large to square; remove such samples or "
                "check the model"
            )

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean of one value per part, weighted by `counts`."""
        return sum(value * count for value, count in zip(values, self.counts, strict=True)) / sum(self.counts)


def unpadded(values: Sequence[Any], positions: Positions | None) -> Sequence[Any]:
    """Remove padded positions from floating-point tensors in `values`; other values do not change."""
    if positions is None:
        return values
    return [without_padding(x, positions) if _holds_floats(x) and x.dim() else x for x in values]


def _finite_or_infinite(error: Tensor) -> float:
    """Return an error as a number, with infinity for NaN, so that a configuration that returns NaN never wins."""
    value = float(error)
    return value if math.isfinite(value) else math.inf


def _is_comparable(target: Tensor) -> bool:
    x = target.float()
    masked = x == -math.inf
    square = torch.where(masked, 0.0, x).square().sum()
    return bool(square.isfinite() & ~(masked.all() & masked.any()))


class _Prefix(Interpreter):
    """Interpreter that stops once it has computed all nodes whose names are in `names`."""

    def __init__(self, gm: GraphModule, names: set[str]) -> None:
        super().__init__(gm)
        self.names, self.computed = names, dict[str, Any]()

    def run_node(self, n: Node) -> Any:
        value = None if len(self.computed) == len(self.names) else super().run_node(n)
        if n.name in self.names:
            self.computed[n.name] = value
        return value

    def values(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the values of the nodes whose names are in `names`, keyed by name."""
        self.run(*inputs)
        return self.computed


def _shared(base: GraphModule, variant: GraphModule) -> dict[Node, bool]:
    """Return the calls of a variant before its first difference from `base`.

    The value of each call is True if a node after the difference reads it.
    """
    same, before = named_nodes(base), dict[Node, None]()
    for node in variant.graph.nodes:
        other = same.get(node.name)
        if (
            node.op == "output"
            or other is None
            or [n.name for n in other.all_input_nodes] != [n.name for n in node.all_input_nodes]
        ):
            break
        before[node] = None
    return {n: not before.keys() >= n.users.keys() for n in before if n.op == "call_function"}


def single_passes(config: QuantConfig) -> list[GraphPass]:
    """Return the passes that plan, calibrate, change scales, and convert, in order."""
    before, after = divided(config.passes)
    return [p for p in (*before, *after) if pass_stage(p) not in (Stage.FLOAT, Stage.QUANTIZED)]


def parts_of(context: Context, samples: int, *, divisible: bool) -> tuple[list[list[Any]], list[str]]:
    """Return flat inputs of the last `samples` samples, a few samples per part, and the name of each part's batch.

    If batches are not divisible into samples, parts are whole batches.
    """
    parts, names = list[list[Any]](), list[str]()
    for index in reversed(range(len(context.data.batches))):
        leaves = context.data.inputs(index)
        missing = samples - sum(map(samples_in, parts))
        if missing <= 0:
            break
        parts += reversed(list(_split(leaves, missing))) if divisible else [leaves]
        names += [f"calibration batch {context.data.number_of(index)}"] * (len(parts) - len(names))
    return parts[::-1], names[::-1]


def _split(leaves: list[Any], wanted: int) -> Iterator[list[Any]]:
    """Yield the last `wanted` samples of a batch, a few at a time."""
    count = samples_in(leaves)
    for start in range(max(0, count - wanted), count, _AT_ONCE):
        yield [leaf[start : start + _AT_ONCE] if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def samples_in(leaves: Sequence[Any]) -> int:
    """Return the number of samples in flat inputs."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


__all__ = [
    "METRICS",
    "Converted",
    "Metric",
    "Trials",
    "divergence",
    "metric_of",
    "parts_of",
    "samples_in",
    "single_passes",
    "unpadded",
]
