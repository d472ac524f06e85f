"""Context of a run, which each pass gets besides the graph: calibration data, cache, plan, notes for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.checkpoint import Checkpoint
from quark_fx.engine.known import Known
from quark_fx.engine.ranks import Ranks
from quark_fx.errors import PassError
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.qparams import QParams
from quark_fx.plan.placement import Plan, PlannedOperator
from quark_fx.plan.report import Histogram, Row
from quark_fx.system import accelerator

if TYPE_CHECKING:
    from quark_fx.engine.guidance import Guidance

T = TypeVar("T")

_HALVINGS = 7
"""Largest number of halvings; pieces are then as small as on a CPU, where their size is chosen for its caches."""


@dataclass
class Calibrated:
    """Plan of a run and results of its calibration; passes between calibration and conversion may change them.

    Attributes:
        plan: Plan by which the float graph will be quantized.
        float_graph: Copy of the float graph, for passes of the quantized stage.
        values: Quantization parameters of activations, by observed node and spec.
        constants: Quantization parameters of weights and biases that are fixed before rounding, by operator and
            constant. Observers compute the parameters of the other constants.
    """

    plan: Plan
    float_graph: GraphModule
    values: dict[tuple[Node, TensorSpec], QParams] = field(default_factory=dict)
    constants: dict[tuple[Node, Node], QParams] = field(default_factory=dict)

    @cached_property
    def by_node(self) -> Mapping[str, PlannedOperator]:
        """Planned operators, by the names of their nodes."""
        return {op.node.name: op for op in self.plan.operators}


class _MovedError(PassError, AttributeError):
    """Error for a name that earlier versions had; as an `AttributeError`, it makes `hasattr` return False."""


_EARLIER = {
    "tuning": "calibration",
    "held_out": "validation",
    "holds_out": "has_validation",
    "whole_batches": "flat_batches",
}
"""Attributes that `Context` had in earlier versions, with their current names in `CalibrationData`."""


@dataclass
class Context:
    """State of a run that its passes share.

    Attributes:
        config: Configuration of the run.
        data: Calibration batches, and the cache that holds them and activations.
        device: Device that blocks run on; the cache returns tensors on it.
        by_block: Whether the graph is stored elsewhere, on another device or on disk. If so, it runs block by block,
            never as a whole.
        progress: Whether to show progress bars.
        checkpoint: Storage of finished blocks, if the run can be resumed.
        calibrated: Plan, set by the pass of the planned stage, with the results of calibration.
        all_samples_learned: Whether a pass also learned from the validation samples. If so, the errors that later
            passes measure on them are not errors on unseen data.
        rows: Rows of the report, set by conversion.
        histograms: Histograms of activations, from observers that count values.
        changes: Changes that the running pass has noted so far.
        remark: Text of the running pass for its row of the report.
        guidance: Sensitivity of the end loss to each operator's errors, measured when a pass first requests it.
        halvings: Number of times that pieces of weights were halved because device memory ran out.
        known: Results of earlier runs on the same float graph and batches, if runs share them.
        importance: Contents of importance matrices by their paths: for each weight, the sum of the squares of its
            inputs and the number of rows, as flat tensors on the host.
    """

    config: QuantConfig
    data: CalibrationData
    device: torch.device
    progress: bool = False
    checkpoint: Checkpoint | None = None
    calibrated: Calibrated | None = None
    rows: list[Row] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    all_samples_learned: bool = False
    by_block: bool = False
    changes: list[Change] = field(default_factory=list)
    remark: str = ""
    guidance: Guidance | None = None
    known: Known | None = None
    importance: dict[str, Mapping[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    halvings: int = 0
    _walks: int = 0

    @property
    def cache(self) -> ActivationCache:
        """The cache of batches and activations."""
        return self.data.cache

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return self.data.ranks

    @property
    def planned(self) -> Calibrated:
        """The plan of the run, its float graph, and the results of calibration.

        Raises:
            PassError: If the pass of the planned stage did not set a plan.
        """
        if self.calibrated is None:
            raise PassError(
                "the plan is missing; a pass of the planned stage must set context.calibrated to "
                "Calibrated(plan_quantization(gm, context.config), copy_graph(gm)); see `insert_observers`"
            )
        return self.calibrated

    @property
    def plan(self) -> Mapping[str, PlannedOperator]:
        """The planned operators by the names of their nodes; empty before there is a plan."""
        return {} if self.calibrated is None else self.calibrated.by_node

    @property
    def float_graph(self) -> GraphModule:
        """The graph before conversion."""
        return self.planned.float_graph

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError`; for a name that belongs to the calibration data, the message has the new spelling."""
        now = _EARLIER.get(name, name)
        of_data = {field.name for field in fields(CalibrationData)} | vars(CalibrationData).keys()
        if now in of_data and not now.startswith("_"):
            raise _MovedError(f"Context has no {name}; use the calibration data instead: context.data.{now}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def with_room(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, a function without side effects; if device memory runs out, free some and retry.

        First, activations move to the host and stay there; then the pieces in which weights are rounded are halved. The
        report notes both. Neither changes the result, so each rank recovers separately, and `work` must not contain a
        collective.

        Raises:
            OutOfMemoryError: If memory runs out even with the smallest pieces.
        """
        while True:
            try:
                with accelerator.smaller_pieces(self.halvings), self.ranks.apart():
                    return work()
            except torch.OutOfMemoryError as error:
                if self.halvings == _HALVINGS:
                    raise torch.OutOfMemoryError(
                        f"{error}; activations are already on the host, and weights are already rounded in the "
                        "smallest pieces: pass `calibration_data` in batches of fewer or shorter samples, or a "
                        "`device` with more memory"
                    ) from error
            # Outside of the handler, because the exception keeps the tensors of `work` alive.
            if moved := self.cache.offload():
                what = f"full; {moved / 2**20:.1f} MiB of activations moved to the host"
            else:
                self.halvings += 1
                what = f"full; weights are rounded in pieces of 1/{1 << self.halvings} the size"
            accelerator.return_unused(self.device)
            self.note(Change("device memory", what, changed=False))

    def note(self, change: Change) -> None:
        """Add a row to the report of the pass that is running."""
        self.changes.append(change)

    def take_changes(self) -> list[Change]:
        """Return the rows noted since the last call, and clear them."""
        changes, self.changes = self.changes, []
        return changes

    def keep_block(self, walk: int, block: int, tensors: Mapping[str, Tensor], changes: Sequence[Change]) -> None:
        """Write the tensors and the changes of a block to the checkpoint, if there is one, on the first rank.

        Raises:
            CalibrationError: On all ranks, if the file cannot be written.
        """
        if (checkpoint := self.checkpoint) is not None:
            self.ranks.first(lambda: checkpoint.save(walk, block, tensors, changes))

    def next_walk(self) -> int:
        """Count a walk over the blocks; return the number of earlier walks, which is part of checkpoint file names."""
        self._walks += 1
        return self._walks - 1


__all__ = ["Calibrated", "Context"]
