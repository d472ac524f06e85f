"""What a pass may ask for besides the graph: calibration data, memory, a place to note what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from quark_fx.engine.guidance import Guidance


@dataclass
class Calibrated:
    """What is planned and what calibration found, for passes between it and conversion to change.

    Attributes:
        plan: how the float graph will be quantized.
        float_graph: a copy of that graph, for passes of the quantized stage.
        values: parameters of activations, by the node that was observed and its spec.
        constants: parameters of weights and biases that are settled before they are rounded, by operator and
            constant; the others are found by their observers.
    """

    plan: Plan
    float_graph: GraphModule
    values: dict[tuple[Node, TensorSpec], QParams] = field(default_factory=dict)
    constants: dict[tuple[Node, Node], QParams] = field(default_factory=dict)

    @cached_property
    def by_node(self) -> Mapping[str, PlannedOperator]:
        """The planned operators by the names of their nodes."""
        return {op.node.name: op for op in self.plan.operators}


@dataclass
class Context:
    """The run that passes are part of.

    Attributes:
        config: what the model is quantized with.
        data: Calibration batches, and the cache that holds them and activations.
        device: where blocks run; tensors come from the cache on it.
        by_block: the graph lies elsewhere, on another device or on disk: it is run block by block, never as a whole.
        progress: show progress bars.
        checkpoint: finished blocks, if the run can be resumed.
        calibrated: the plan, once there is one, and its scales, once they are calibrated.
        all_samples_learned: a pass also learned from the validation samples, so the errors that later passes measure
            on them are not on unseen data.
        rows: of the report, once the graph is converted.
        histograms: of activations, where observers count values.
        changes: what the pass that is running noted so far.
        remark: what the pass that is running says could be done besides.
        guidance: how sensitive the end loss is to each operator's errors; measured when a pass first asks for it.
        halvings: how often pieces of weights were halved, for lack of device memory.
        known: what runs before found out about the same float graph on the same batches, where runs share that.
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
        """The plan of the run, the graph it is of, and what calibration found.

        Raises:
            PassError: if the pass of the planned stage made none.
        """
        if self.calibrated is None:
            raise PassError(
                "there is no plan; a pass of the planned stage puts Calibrated(plan_quantization(gm, context.config), "
                "copy_graph(gm)) into context.calibrated, as `insert_observers` does"
            )
        return self.calibrated

    @property
    def plan(self) -> Mapping[str, PlannedOperator]:
        """How each operator is quantized, by the name of its node; empty before anything is planned."""
        return {} if self.calibrated is None else self.calibrated.by_node

    @property
    def float_graph(self) -> GraphModule:
        """The graph before conversion."""
        return self.planned.float_graph

    def note(self, change: Change) -> None:
        """Add a row to the report of the pass that is running."""
        self.changes.append(change)

    def take_changes(self) -> list[Change]:
        """Return the rows noted since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def keep_block(self, walk: int, block: int, tensors: Mapping[str, Tensor], changes: Sequence[Change]) -> None:
        """Write what a block learned to the checkpoint, if there is one, on the first rank.

        Raises:
            CalibrationError: in all ranks, if it cannot be written.
        """
        if (checkpoint := self.checkpoint) is not None:
            self.ranks.first(lambda: checkpoint.save(walk, block, tensors, changes))

    def next_walk(self) -> int:
        """Return how many walks over the blocks were begun before: with the block, the name of a checkpoint."""
        self._walks += 1
        return self._walks - 1


__all__ = ["Calibrated", "Context"]
