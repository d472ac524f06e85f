"""Run calibration batches through a graph whose values are watched by observers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from tqdm.auto import tqdm

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.engine.block_walk import run_blocks, running
from quark_fx.engine.context import Context
from quark_fx.engine.known import Known, Value
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import describe, device_of, is_parameter, parameter, placeholders, set_parameter, target_name
from quark_fx.numbers.qparams import QParams
from quark_fx.observers import Observer
from quark_fx.observers.reading import HistogramObserver
from quark_fx.plan.placement import Plan, module_name, require_finite_weights
from quark_fx.plan.report import Histogram
from quark_fx.system import accelerator
from quark_fx.system.isolation import warn


class Watch(nn.Module):
    """The module that hands a value of the graph to its observer while batches run.

    Attributes:
        spec: what the parameters of the value are for.
        observer: what it saw so far.
        tokens: of a value that has a scale per channel, the dimension that counts tokens; the first one counts samples.
        is_done: it saw all that it needs.
    """

    def __init__(self, spec: TensorSpec, tokens: int | None = None) -> None:
        super().__init__()
        self.spec, self.observer, self.is_done = spec, spec.new_observer, False
        self.tokens = tokens if spec.granularity is Granularity.CHANNEL else None

    def value(self, call: Node) -> Value:
        """Return what it sees where `call` calls it."""
        source = call.all_input_nodes[0]
        return Value(source.name, self.tokens, source.meta["val"].dtype)

    def forward(self, x: Tensor) -> None:
        if self.is_done:
            return
        if self.tokens is not None:
            kept = [dim for dim in range(1, x.dim()) if dim != self.tokens]
            rest = [0, self.tokens] if self.tokens else [0]
            self.observer = self.observer.observe(
                x.permute(*kept, *rest).reshape(math.prod(x.shape[d] for d in kept), -1)
            )
            return
        # The order of values does not matter, so they are taken as they lie in memory, without a copy.
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x = x.permute(0, 2, 3, 1)
        self.observer = self.observer.observe(x.reshape(1, -1))


def insert_watches(gm: GraphModule, watches: Iterable[tuple[Node, nn.Module]]) -> list[Node]:
    """Call each module on the value of its node whenever the graph runs; return the calls."""
    inserted = []
    for index, (source, watch) in enumerate(watches):
        name = f"watch_{index}"
        gm.add_submodule(name, watch)
        after = source if source.op != "placeholder" else placeholders(gm)[-1]
        with gm.graph.inserting_after(after):
            inserted.append(gm.graph.call_module(name, (source,)))
    gm.recompile()
    return inserted


def remove_watches(gm: GraphModule, calls: Iterable[Node]) -> None:
    """Take out what `insert_watches` returned."""
    for node in calls:
        gm.graph.erase_node(node)
        gm.delete_submodule(str(node.target))
    gm.recompile()


@contextmanager
def watching(gm: GraphModule, watches: Iterable[tuple[Node, nn.Module]]) -> Iterator[None]:
    """Call each module on the value of its node whenever the graph runs, meanwhile."""
    inserted = insert_watches(gm, watches)
    try:
        yield
    finally:
        remove_watches(gm, inserted)


def watches_in(gm: GraphModule) -> dict[Node, Watch]:
    """Return the observers in a graph by the node that calls each."""
    calls = {node: gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"}
    return {node: watch for node, watch in calls.items() if isinstance(watch, Watch)}


def observe_batches(gm: GraphModule, context: Context) -> None:
    """Run every batch through the observers in a graph, and merge what all ranks saw.

    Raises:
        CalibrationError: if there is no batch, an input is not finite, or an index beyond its table; the message names
            the batch.
    """
    watches = watches_in(gm)
    known = Known() if context.known is None else context.known
    leaders = _leaders(watches, known, ahead=context.known is not None)
    folds = [call for call, watch in watches.items() if leaders.get(watch) is watch]
    for watch in watches.values():
        watch.is_done = leaders.get(watch) is not watch
    if not folds:
        return
    places = placeholders(gm)
    quantized = [index for index, node in enumerate(places) if any(call.args[0] is node for call in watches)]
    finite: list[Tensor] = []
    nonzero: list[Tensor] = []

    def look(leaves: list[Any]) -> None:
        # Read at the end, so that no batch waits for the device. A mask may hold infinities.
        finite.append(_are_finite([leaves[i] for i in quantized]))
        nonzero.append(_flags([leaves[i].any() for i in quantized]))

    run_batches(gm, context, look)
    if not finite:
        raise CalibrationError("the calibration data holds no batch; pass at least one (a generator can be read once)")
    failed = [
        CalibrationError(
            f"calibration batch {context.data.number_of(batch)}: input {places[position].target} holds NaN or "
            "infinity; remove such samples"
        )
        for batch, flags in enumerate(torch.stack(finite).tolist())
        for flag, position in zip(flags, quantized, strict=True)
        if not flag
    ]
    context.ranks.raise_first(failed[0] if failed else None)
    for position, found in zip(quantized, torch.stack(nonzero).any(0).tolist(), strict=True):
        if not found:
            warn(
                f"input {places[position].target} is all zeros in the calibration data, so its range cannot be "
                "calibrated; pass batches of real inputs"
            )
    sources = [call.all_input_nodes[0] for call in folds]
    seen = context.ranks.fold([watches[call].observer for call in folds], partial(_merge, sources))
    for call, observer in zip(folds, seen, strict=True):
        watches[call].observer = observer
        known.seen.setdefault(watches[call].value(call), []).append(observer)
    for watch, leader in leaders.items():
        watch.observer = watch.spec.new_observer.reading(leader.observer) or leader.observer


def _leaders(watches: Mapping[Node, Watch], known: Known, *, ahead: bool) -> dict[Watch, Watch]:
    """Return which watch has to see the batches for each, itself or another of the same value.

    Watches of what is known get it, and have none.

    Args:
        watches: by the node that calls each.
        known: what was seen before.
        ahead: fold what tells later runs more.
    """
    begun, leaders = dict[Value, list[Watch]](), dict[Watch, Watch]()
    for call, watch in watches.items():
        value = watch.value(call)
        if (found := known.reading(value, watch.observer)) is not None:
            watch.observer = found
            continue
        others = begun.setdefault(value, [])
        sees = (other for other in others if value.reading(watch.observer, other.observer) is not None)
        leaders[watch] = leader = next(sees, watch)
        if leader is watch:
            watch.observer = value.fold(watch.observer) if ahead else watch.observer
            others.append(watch)
    return leaders


def read_observers(gm: GraphModule, plan: Plan, known: Known | None = None) -> dict[tuple[Node, TensorSpec], QParams]:
    """Return the parameters of every value that is observed, by its node and spec.

    Args:
        gm: the graph with observers.
        plan: that they were made for.
        known: what was read off before, and where to put what is read.

    Raises:
        CalibrationError: if a range is not finite; the message names the operator and the user's source line.
    """
    watches = watches_in(gm)
    try:
        found = [_qparams(call, watch, known) for call, watch in watches.items()]
    except CalibrationError:
        require_finite_weights(gm, plan.operators)  # which say more than what was made with them
        raise
    # What is known stays apart from the graph, whose tensors the user gets.
    parts = iter(accelerator.moved([p for q in found for p in (q.scale, q.zero_point)], device_of(gm), copy=True))
    return {
        (call.all_input_nodes[0], watch.spec): QParams(*pair)
        for (call, watch), pair in zip(watches.items(), zip(parts, parts, strict=True), strict=True)
    }


_BINS = 64
"""Bins of a histogram that is kept for the report, from the smallest value to the largest."""


def histograms_of(gm: GraphModule, values: Mapping[tuple[Node, TensorSpec], QParams]) -> list[Histogram]:
    """Return what the observers of a graph that count values saw, and the ranges they chose.

    Args:
        gm: the graph.
        values: what `read_observers` returned.
    """
    found = []
    for call, watch in watches_in(gm).items():
        whole = watch.tokens is None
        if whole and isinstance(watch.observer, HistogramObserver) and watch.observer.histogram is not None:
            source = call.all_input_nodes[0]
            bins = watch.observer.collected()
            counts, middles = bins.counts[0].cpu(), bins.centers[0].cpu()
            used = middles[counts > 0]
            if not used.numel():
                continue
            coarse = torch.histogram(middles, _BINS, range=(float(used.min()), float(used.max())), weight=counts)
            chosen = values[source, watch.spec]
            low, high = map(float, watch.spec.scheme.clip_range(chosen.scale.double(), chosen.zero_point))
            edges, kept = (tuple(part.tolist()) for part in (coarse.bin_edges, coarse.hist))
            found.append(Histogram(module_name(source), edges, kept, low, high))
    return found


def run_batches(gm: GraphModule, context: Context, look: Callable[[list[Any]], None] | None = None) -> None:
    """Run a graph on every batch for the sake of what watches it; block by block if it lies elsewhere.

    Args:
        gm: the graph.
        context: of the run.
        look: called with the flat inputs of each batch.
    """
    batches = context.data.flat_batches(context.device if context.by_block else device_of(gm))
    if context.by_block:
        if look is not None:
            for leaves in batches:
                look(leaves)
        run_blocks(gm, context)
        return
    bar = tqdm(batches, desc="calibrate", unit="batch", disable=not context.progress, leave=False)
    with torch.no_grad(), fast_layout(gm) as lay_out:
        for batch, leaves in enumerate(bar):
            if look is not None:
                look(leaves)
            with running(context.data.number_of(batch)):
                gm(*map(lay_out, leaves))


@contextmanager
def fast_layout(gm: GraphModule) -> Iterator[Callable[[Any], Any]]:
    """Keep the weights of 2-D convolutions channels-last meanwhile; yield what lays an input out likewise.

    On a CPU a deep network runs a quarter faster so. Only an operator that asks for strides could tell the difference.
    """
    names = [target_name(node) for node in gm.graph.nodes]
    convolutions = [node for node in gm.graph.nodes if target_name(node).startswith("aten.conv2d.")]
    nodes = [node.args[1] for node in convolutions if is_parameter(node.args[1])]
    weights = {str(node.target): parameter(gm, node) for node in nodes}
    if "aten.as_strided.default" in names or not all(weight.is_cpu for weight in weights.values()):
        weights = {}

    def lay_out(x: Any) -> Any:
        image = bool(weights) and isinstance(x, Tensor) and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if image else x

    try:
        for name, weight in weights.items():
            set_parameter(gm, name, weight.contiguous(memory_format=torch.channels_last))
        yield lay_out
    finally:
        for name, weight in weights.items():
            set_parameter(gm, name, weight)


def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Return one flag per tensor, on their device."""
    return _flags([torch.isfinite(x).all() for x in tensors])


def _flags(flags: list[Tensor]) -> Tensor:
    return torch.stack(flags) if flags else torch.empty(0, dtype=torch.bool)


def _merge(sources: Sequence[Node], ours: Sequence[Observer], theirs: Sequence[Observer]) -> list[Observer]:
    """Return what the observers of two ranks saw together."""
    merged = []
    for source, a, b in zip(sources, ours, theirs, strict=True):
        try:
            merged.append(a.merge(b))
        except ValueError as error:
            raise CalibrationError(
                f"{describe(source)}: what the ranks observed does not go together: {error}"
            ) from error
    return merged


def _qparams(call: Node, watch: Watch, known: Known | None) -> QParams:
    source = call.all_input_nodes[0]
    key, ranges = (watch.value(call), watch.spec), {} if known is None else known.ranges
    if key in ranges:
        return ranges[key]
    try:
        return ranges.setdefault(key, watch.observer.qparams(watch.spec.scheme))
    except ValueError as error:
        raise CalibrationError(
            f"{describe(source)} cannot be quantized: {error}; check the model's weights and the calibration data, or "
            "exclude the operator"
        ) from error
