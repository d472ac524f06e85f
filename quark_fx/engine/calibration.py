"""Run calibration batches through a graph whose values are watched by observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from tqdm.auto import tqdm

from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.block_walk import run_blocks, running
from quark_fx.engine.context import Context
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import describe, device_of, is_parameter, parameter, placeholders, set_parameter, target_name
from quark_fx.numbers.qparams import QParams
from quark_fx.observers import Observer
from quark_fx.plan.placement import Plan, require_finite_weights
from quark_fx.system.isolation import warn


class Watch(nn.Module):
    """The place in a graph where one observer lives while batches run."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def forward(self, x: Tensor) -> None:
        # The order of values does not matter, so they are taken as they lie in memory, without a copy.
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x = x.permute(0, 2, 3, 1)
        self.observer = self.observer.observe(x.reshape(1, -1))


def observers_of(plan: Plan) -> dict[tuple[Node, TensorSpec], Watch]:
    """Return a fresh `Watch` for every value the plan observes."""
    watches = {}
    for source, spec in plan.observed:
        assert spec.observer is not None
        watches[source, spec] = Watch(spec.observer)
    return watches


@contextmanager
def watching(gm: GraphModule, watches: Iterable[tuple[Node, nn.Module]]) -> Iterator[None]:
    """Call each module on the value of its node whenever the graph runs, meanwhile."""
    inserted = []
    try:
        for index, (source, watch) in enumerate(watches):
            name = f"watch_{index}"
            gm.add_submodule(name, watch)
            after = source if source.op != "placeholder" else placeholders(gm)[-1]
            with gm.graph.inserting_after(after):
                inserted.append(gm.graph.call_module(name, (source,)))
        gm.recompile()
        yield
    finally:
        for node in inserted:
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
        gm.recompile()


def calibrate(
    gm: GraphModule,
    plan: Plan,
    batches: Iterable[list[Any]],
    *,
    progress: bool = True,
    context: Context | None = None,
    ranks: Ranks = ALONE,
) -> dict[tuple[Node, TensorSpec], QParams]:
    """Observe `batches` and return the parameters of every (source, spec) of the plan.

    Args:
        gm: the graph; observers are inserted for the run and removed again.
        plan: what to observe.
        batches: the flat inputs of each calibration batch, of any and of differing batch sizes; read once.
        progress: show a progress bar.
        context: run block by block instead, on the context's device and with its copy of the batches.
        ranks: who saw the other batches.

    Raises:
        CalibrationError: if there is no batch, a value is not finite, or an index beyond its table; the message
            names the batch, or the operator and the user's source line.
    """
    if not plan.observed:
        return {}
    places = placeholders(gm)
    quantized = [index for index, node in enumerate(places) if any(source is node for source, _ in plan.observed)]
    watches = observers_of(plan)
    finite: list[Tensor] = []
    nonzero: list[Tensor] = []
    sources = [(source, watch) for (source, _), watch in watches.items()]
    layout = fast_layout(gm) if context is None else nullcontext(lambda x: x)
    with watching(gm, sources), torch.no_grad(), layout as lay_out:
        bar = tqdm(batches, desc="calibrate", unit="batch", disable=not progress or context is not None, leave=False)
        for leaves in bar:
            # Read at the end, so that no batch waits for the device. A mask may hold infinities.
            finite.append(_are_finite([leaves[i] for i in quantized]))
            nonzero.append(_flags([leaves[i].any() for i in quantized]))
            if context is None:
                with running(len(finite) - 1):
                    gm(*map(lay_out, leaves))
        if context is not None:
            run_blocks(gm, context)
    if not finite:
        raise CalibrationError("the calibration data holds no batch; pass at least one (a generator can be read once)")
    for batch_index, flags in enumerate(finite):
        for flag, position in zip(flags.tolist(), quantized, strict=True):
            if not flag:
                raise CalibrationError(
                    f"calibration batch {batch_index}: input {places[position].target} holds NaN or infinity; remove "
                    "such samples"
                )
    for position, found in zip(quantized, torch.stack(nonzero).any(0).tolist(), strict=True):
        if not found:
            warn(
                f"input {places[position].target} is all zeros in the calibration data, so its range cannot be "
                "calibrated; pass batches of real inputs"
            )
    seen = ranks.fold(
        [watch.observer for watch in watches.values()], partial(_merge, [source for source, _ in sources])
    )
    for watch, observer in zip(watches.values(), seen, strict=True):
        watch.observer = observer
    home = device_of(gm)
    try:
        return {key: _qparams(key, watch, home) for key, watch in watches.items()}
    except CalibrationError:
        require_finite_weights(gm, plan.operators)  # which say more than what was made with them
        raise


def run_batches(gm: GraphModule, context: Context) -> None:
    """Run a graph on every batch for the sake of what watches it; block by block if it lies elsewhere."""
    if context.by_block:
        run_blocks(gm, context)
        return
    with torch.no_grad(), fast_layout(gm) as lay_out:
        for batch in range(len(context.batches)):
            with running(batch):
                gm(*map(lay_out, context.inputs(batch)))


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


def _qparams(key: tuple[Node, TensorSpec], watch: Watch, home: torch.device) -> QParams:
    source, spec = key
    try:
        found = watch.observer.qparams(spec.scheme)
        return QParams(found.scale.to(home), found.zero_point.to(home))
    except ValueError as error:
        raise CalibrationError(
            f"{describe(source)} cannot be quantized: {error}; check the model's weights and the calibration data, or "
            "exclude the operator"
        ) from error
