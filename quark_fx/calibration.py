"""Run calibration batches through a graph whose values are watched by observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from tqdm.auto import tqdm

from quark_fx.config import TensorSpec
from quark_fx.errors import CalibrationError, QuarkError
from quark_fx.graph import describe
from quark_fx.observers import Observer
from quark_fx.placement import Plan
from quark_fx.qparams import QParams


class Watch(nn.Module):
    """The place in a graph where one observer lives while batches run."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def forward(self, x: Tensor) -> None:
        self.observer = self.observer.observe(x.reshape(1, -1))


def insert_observers(gm: GraphModule, plan: Plan) -> dict[tuple[Node, TensorSpec], Watch]:
    """Insert a `Watch` after every value the plan observes; return them by (source, spec)."""
    watches = {}
    for index, (source, spec) in enumerate(plan.observed):
        assert spec.observer is not None
        watch = watches[source, spec] = Watch(spec.observer)
        gm.add_submodule(f"watch_{index}", watch)
        with gm.graph.inserting_after(source):
            gm.graph.call_module(f"watch_{index}", (source,))
    gm.recompile()
    return watches


def remove_observers(gm: GraphModule) -> None:
    """Remove every `Watch` from the graph."""
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Watch):
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
    gm.recompile()


def calibrate(
    gm: GraphModule,
    plan: Plan,
    batches: Iterable[Any],
    flatten: Callable[[Any], list[Any]],
    *,
    progress: bool = True,
) -> dict[tuple[Node, TensorSpec], QParams]:
    """Observe `batches` and return the parameters of every (source, spec) of the plan.

    Args:
        gm: the graph; observers are inserted for the run and removed again.
        plan: what to observe.
        batches: calibration batches, of any and of differing batch sizes; read once.
        flatten: turns a batch into the graph's flat inputs, raising for one that does not fit.
        progress: show a progress bar.

    Raises:
        CalibrationError: if there is no batch, a batch does not fit, or a value is not finite; the
            message names the batch, or the operator and the user's source line.
    """
    if not plan.observed:
        return {}
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    quantized = [index for index, node in enumerate(places) if any(source is node for source, _ in plan.observed)]
    watches = insert_observers(gm, plan)
    finite: list[Tensor] = []
    try:
        with torch.no_grad():
            for batch in tqdm(batches, desc="calibrate", unit="batch", disable=not progress, leave=False):
                leaves = _inputs(flatten, batch, len(finite))
                # Read at the end, so that no batch waits for the device. A mask may hold infinities.
                finite.append(_are_finite([leaves[i] for i in quantized]))
                gm(*leaves)
    finally:
        remove_observers(gm)
    if not finite:
        raise CalibrationError("the calibration data holds no batch; pass at least one (a generator can be read once)")
    for batch_index, flags in enumerate(finite):
        for flag, position in zip(flags.tolist(), quantized, strict=True):
            if not flag:
                raise CalibrationError(
                    f"calibration batch {batch_index}: input {places[position].target} holds NaN or infinity; remove "
                    "such samples"
                )
    return {key: _qparams(key, watch) for key, watch in watches.items()}


def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Return one flag per tensor, on their device."""
    return torch.stack([torch.isfinite(x).all() for x in tensors]) if tensors else torch.empty(0, dtype=torch.bool)


def _inputs(flatten: Callable[[Any], list[Any]], batch: Any, index: int) -> list[Any]:
    try:
        leaves = flatten(batch)
    except QuarkError as error:
        raise CalibrationError(f"calibration batch {index} does not fit: {error}") from error
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.numel():
            raise CalibrationError(f"calibration batch {index}: input {position} is empty, shape {tuple(leaf.shape)}")
    return leaves


def _qparams(key: tuple[Node, TensorSpec], watch: Watch) -> QParams:
    source, spec = key
    try:
        return watch.observer.qparams(spec.scheme)
    except ValueError as error:
        raise CalibrationError(
            f"{describe(source)} cannot be quantized: {error}; check the model's weights and the calibration data, or "
            "exclude the operator"
        ) from error
