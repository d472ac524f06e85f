"""Plan the quantization, insert observers, and measure the ranges of activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.calibration import insert_watches, remove_watches, run_batches
from quark_fx.engine.calibration_data import first_sample
from quark_fx.engine.context import Calibrated, Context
from quark_fx.engine.known import Known, Value
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import describe, device_of, placeholders
from quark_fx.graph.pass_manager import Stage, copy_graph, graph_pass
from quark_fx.numbers.qparams import QParams
from quark_fx.observers import Observer
from quark_fx.observers.base import ObserverError, naming_observer, observed, per_channel
from quark_fx.observers.reading import HistogramObserver
from quark_fx.plan.placement import Plan, module_name, plan_quantization, require_finite_floats, require_finite_weights
from quark_fx.plan.report import Histogram
from quark_fx.system import accelerator
from quark_fx.system.isolation import warn


@graph_pass(stage=Stage.PLANNED, distributed=True)
def insert_observers(gm: GraphModule, context: Context) -> int:
    """Plan the quantization of `gm`, insert an observer for every value with a static range, and return their number.

    The plan is stored in `context.calibrated`, with a copy of the graph.

    Raises:
        CalibrationError: If a weight that stays in float is not finite.
    """
    plan = plan_quantization(gm, context.config)
    require_finite_floats(gm, plan.operators)
    context.calibrated = Calibrated(plan, copy_graph(gm, lazy=True))
    watched = plan.observed.items()
    return len(insert_watches(gm, [(node, _Watch(spec, describe(node), dims)) for (node, spec), dims in watched]))


@graph_pass(stage=Stage.OBSERVED, distributed=True)
def calibrate(gm: GraphModule, context: Context) -> int:
    """Run the calibration data, compute scales from the observers, and remove the observers; return their number.

    The data does not run without observers, or if a `Session` has run it before.

    Raises:
        CalibrationError: If batches are missing, a value is not finite, or an index exceeds its table; the message
            names the batch, or the operator and the user's source line.
    """
    watches = watches_in(gm)
    if watches:
        calibration = context.planned
        observe_batches(gm, context)
        calibration.values = read_observers(gm, calibration.plan, context.known)
        context.histograms = _histograms_of(gm, calibration.values)
        remove_watches(gm, watches)
    return len(watches)


class _Watch(nn.Module):
    """Module that passes a value of the graph to its observer while batches run.

    Attributes:
        spec: Spec of the quantization parameters.
        observer: Observer that has seen the data so far.
        place: Description of the value, for error messages.
        separate: Dimensions along which the scale of the value varies; empty for one scale.
        is_done: True if the observer needs no more data.
    """

    def __init__(self, spec: TensorSpec, place: str, separate: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.spec, self.observer, self.is_done, self.place = spec, spec.new_observer, False, place
        self.separate = separate

    def value(self, call: Node) -> Value:
        """Return the value that the watch observes; `call` is the node that calls the watch."""
        source = call.all_input_nodes[0]
        return Value(source.name, self.separate, source.meta["val"].dtype)

    def forward(self, x: Tensor) -> None:
        if self.is_done:
            return
        if self.separate:
            rest = [dim for dim in range(x.dim()) if dim not in self.separate]
            rows = math.prod(x.shape[dim] for dim in self.separate)
            self._observe(x.permute(*self.separate, *rest).reshape(rows, -1))
            return
        # The order of values does not matter, so they are read in memory order, without a copy.
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x = x.permute(0, 2, 3, 1)
        self._observe(x.reshape(1, -1))

    def _observe(self, x: Tensor) -> None:
        try:
            self.observer = observed(self.observer, x)
        except ValueError as error:
            raise _unusable(self.place, error) from error


def watches_in(gm: GraphModule) -> dict[Node, _Watch]:
    """Return the watches in a graph, by the node that calls each."""
    calls = {node: gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"}
    return {node: watch for node, watch in calls.items() if isinstance(watch, _Watch)}


def observe_batches(gm: GraphModule, context: Context) -> None:
    """Run every batch through the observers in a graph, and merge the observers of all ranks.

    Raises:
        CalibrationError: If batches are missing, an input is not finite, or an index exceeds its table; the message
            names the batch.
    """
    watches = watches_in(gm)
    results = Known() if context.known is None else context.known
    leaders = _leaders(watches, results, ahead=context.known is not None)
    folds = [call for call, watch in watches.items() if leaders.get(watch) is watch]
    for watch in watches.values():
        watch.is_done = leaders.get(watch) is not watch
    if not folds:
        return
    places = placeholders(gm)
    quantized = [index for index, node in enumerate(places) if any(call.args[0] is node for call in watches)]
    failing: list[Tensor] = []
    nonzero: list[Tensor] = []

    def look(leaves: list[Any]) -> None:
        # The results are read at the end, so that no batch waits for the device. Inputs that are not quantized are not
        # checked, because a mask may contain infinities.
        failing.append(_stacked([first_sample(~leaves[i].isfinite()) for i in quantized]))
        nonzero.append(_stacked([leaves[i].any() for i in quantized]))

    run_batches(gm, context, look)
    if not failing:
        raise CalibrationError(
            "the calibration data contains no batch; pass at least one (a generator can be read only once)"
        )
    failed = [
        CalibrationError(
            f"calibration batch {context.data.number_of(batch)}: input {places[position].target} holds NaN or "
            f"infinity in sample {context.data.first_sample_of(batch) + sample}; remove such samples"
        )
        for batch, samples in enumerate(torch.stack(failing).tolist())
        for sample, position in zip(samples, quantized, strict=True)
        if sample >= 0
    ]
    context.ranks.raise_first(failed[0] if failed else None)
    for position, has_nonzero in zip(quantized, torch.stack(nonzero).any(0).tolist(), strict=True):
        if not has_nonzero:
            warn(
                f"input {places[position].target} is all zeros in the calibration data, so its range cannot be "
                "calibrated; pass batches of real inputs"
            )
    sources = [call.all_input_nodes[0] for call in folds]
    observers = context.ranks.fold([watches[call].observer for call in folds], partial(_merge, sources))
    for call, observer in zip(folds, observers, strict=True):
        watches[call].observer = observer
        results.seen.setdefault(watches[call].value(call), []).append(observer)
    for watch, leader in leaders.items():
        watch.observer = watch.spec.new_observer.reading(leader.observer) or leader.observer


def _leaders(watches: Mapping[Node, _Watch], results: Known, *, ahead: bool) -> dict[_Watch, _Watch]:
    """Return, for each watch, the watch whose observer will see the batches: itself, or another watch of its value.

    A watch whose data is in `results` gets an observer with that data, and is not in the returned dictionary.

    Args:
        watches: Watches, by the node that calls each.
        results: Observers from earlier runs.
        ahead: Whether to collect more general data, from which the observers of later runs can be derived.
    """
    begun, leaders = dict[Value, list[_Watch]](), dict[_Watch, _Watch]()
    for call, watch in watches.items():
        value = watch.value(call)
        if (observer := results.reading(value, watch.observer)) is not None:
            watch.observer = observer
            continue
        candidates = begun.setdefault(value, [])
        sees = (other for other in candidates if value.reading(watch.observer, other.observer) is not None)
        leaders[watch] = leader = next(sees, watch)
        if leader is watch:
            watch.observer = value.fold(watch.observer) if ahead else watch.observer
            candidates.append(watch)
    return leaders


def read_observers(gm: GraphModule, plan: Plan, known: Known | None = None) -> dict[tuple[Node, TensorSpec], QParams]:
    """Return the quantization parameters of every observed value, by node and spec.

    Args:
        gm: Graph with observers.
        plan: Plan that the observers were inserted for.
        known: Parameters from earlier calls; new parameters are added.

    Raises:
        CalibrationError: If a range is not finite; the message names the operator and the user's source line.
    """
    watches = watches_in(gm)
    try:
        qparams = [_qparams(call, watch, known) for call, watch in watches.items()]
    except CalibrationError:
        require_finite_weights(gm, plan.operators)  # a weight that is not finite is a clearer cause
        raise
    # The tensors are copied, because the user gets the graph's tensors, and `known` must not share memory with them.
    parts = iter(accelerator.moved([p for q in qparams for p in (q.scale, q.zero_point)], device_of(gm), copy=True))
    return {
        (call.all_input_nodes[0], watch.spec): QParams(*pair)
        for (call, watch), pair in zip(watches.items(), zip(parts, parts, strict=True), strict=True)
    }


_BINS = 64
"""Bins of a histogram in the report, from the smallest value to the largest."""


def _histograms_of(gm: GraphModule, values: Mapping[tuple[Node, TensorSpec], QParams]) -> list[Histogram]:
    """Return the histograms of a graph's histogram observers, with the ranges they chose.

    Args:
        gm: Graph with observers.
        values: Result of `read_observers`.
    """
    histograms = []
    for call, watch in watches_in(gm).items():
        if (
            not watch.separate
            and isinstance(watch.observer, HistogramObserver)
            and watch.observer.histogram is not None
        ):
            source = call.all_input_nodes[0]
            bins = watch.observer.collected()
            counts, middles = bins.counts[0].cpu(), bins.centers[0].cpu()
            used = middles[counts > 0]
            if not used.numel():
                continue
            coarse = torch.histogram(middles, _BINS, range=(float(used.min()), float(used.max())), weight=counts)
            chosen = values[source, watch.spec]
            low, high = map(float, watch.spec.scheme.clip_range(chosen.scale.double(), chosen.zero_point))
            edges, heights = (tuple(part.tolist()) for part in (coarse.bin_edges, coarse.hist))
            histograms.append(Histogram(module_name(source), edges, heights, low, high))
    return histograms


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.empty(0, dtype=torch.int64)


def _unusable(place: str, error: ValueError) -> CalibrationError:
    advice = "check the model's weights and the calibration data, or exclude the operator"
    if isinstance(error, ObserverError):
        advice = error.remedy
    return CalibrationError(f"{place} cannot be quantized: {error}; {advice}")


def _merge(sources: Sequence[Node], ours: Sequence[Observer], theirs: Sequence[Observer]) -> list[Observer]:
    """Merge the observers of two ranks, pair by pair."""
    merged = []
    for source, a, b in zip(sources, ours, theirs, strict=True):
        try:
            with naming_observer(a):
                merged.append(a.merge(b))
        except ValueError as error:
            raise CalibrationError(
                f"{describe(source)}: the observations of the ranks cannot be merged: {error}"
            ) from error
    return merged


def _qparams(call: Node, watch: _Watch, results: Known | None) -> QParams:
    source = call.all_input_nodes[0]
    key, ranges = (watch.value(call), watch.spec), {} if results is None else results.ranges
    if key in ranges:
        return ranges[key]
    try:
        with naming_observer(watch.observer):
            qparams = watch.observer.qparams(watch.spec.scheme)
        channels = math.prod(source.meta["val"].shape[dim] for dim in watch.separate)
        return ranges.setdefault(key, per_channel(watch.observer, qparams, channels))
    except ValueError as error:
        raise _unusable(describe(source), error) from error


__all__ = ["calibrate", "insert_observers", "observe_batches", "read_observers", "watches_in"]
