"""What a pass may ask for besides the graph: calibration data, memory, a place to note what it did."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.checkpoint import Checkpoint
from quark_fx.engine.known import Known
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.errors import CalibrationError, PassError
from quark_fx.graph.pass_manager import Change, learns_from_data
from quark_fx.graph.signature import BatchShape, batch_shape
from quark_fx.numbers.qparams import QParams
from quark_fx.plan.placement import Plan, PlannedOperator
from quark_fx.plan.report import Histogram, Row
from quark_fx.system.isolation import warn

if TYPE_CHECKING:
    from quark_fx.engine.guidance import Guidance

_ONE_IN = 8
"""One sample in eight is validation data; one batch in eight, where batches cannot be divided."""


_MASK = "attention_mask"
"""The input that says which positions are no padding, as Hugging Face models call it; shape (batch, tokens)."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a batch that count.

    Attributes:
        shape: of all positions, (batch, tokens).
        rows: numbers of those that count, int64, of the flattened positions.
    """

    shape: torch.Size
    rows: Tensor

    @classmethod
    def of(cls, mask: Any) -> Positions | None:
        """Return the positions that an attention mask keeps, or `None` if it is not (batch, tokens); waits for it."""
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        return cls(mask.shape, mask.flatten().nonzero().flatten())


def without_padding(x: Tensor, kept: Positions | None) -> Tensor:
    """Return the rows of `x`, shape (rows, last dimension), but for those at positions that are padding.

    Args:
        x: at least one dimension.
        kept: which positions count; of values with other positions all do.
    """
    rows = x.reshape(-1, x.shape[-1])
    # Flattened positions are in the order of the mask; those of any other shape may not be.
    fits = kept is not None and (kept.shape == x.shape[:-1] or (x.dim() == 2 and kept.shape.numel() == len(rows)))
    return rows[kept.rows] if kept is not None and fits else rows


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
        cache: keeps calibration batches and activations, by budget.
        device: where blocks run; tensors come from the cache on it.
        ranks: the processes that share the data.
        by_block: the graph lies elsewhere, on another device or on disk: it is run block by block, never as a whole.
        progress: show progress bars.
        checkpoint: finished blocks, if the run can be resumed.
        calibrated: the plan, once there is one, and its scales, once they are calibrated.
        all_samples_learned: a pass also learned from the validation samples, so the errors that later passes measure
            on them are not on unseen data.
        rows: of the report, once the graph is converted.
        histograms: of activations, where observers count values.
        names: of the flat inputs, in order.
        changes: what the pass that is running noted so far.
        remark: what the pass that is running says could be done besides.
        guidance: how sensitive the end loss is to each operator's errors; measured when a pass first asks for it.
        batches: where each calibration batch lies: its index as it was given, and a slice of its samples.
        first: number of the first of them among the batches of all ranks.
        shapes: of each batch's flat inputs.
        unread: the flat inputs of the batches where these are not kept, because they are read once.
        halvings: how often pieces of weights were halved, for lack of device memory.
        known: what runs before found out about the same float graph on the same batches, where runs share that.
    """

    config: QuantConfig
    cache: ActivationCache
    device: torch.device
    progress: bool = False
    checkpoint: Checkpoint | None = None
    batches: list[tuple[int, slice | None]] = field(default_factory=list)
    shapes: list[BatchShape] = field(default_factory=list)
    first: int = 0
    unread: Iterable[list[Any]] = ()
    calibrated: Calibrated | None = None
    rows: list[Row] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    all_samples_learned: bool = False
    names: tuple[str, ...] = ()
    ranks: Ranks = ALONE
    by_block: bool = False
    changes: list[Change] = field(default_factory=list)
    remark: str = ""
    guidance: Guidance | None = None
    known: Known | None = None
    halvings: int = 0
    _kept: dict[tuple[int, int], Positions | None] = field(default_factory=dict)
    _walks: int = 0
    _given: int = 0
    _judging: int = 0

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

    def of(self, config: QuantConfig, *, divisible: bool) -> Context:
        """Return the context of a run with another configuration, on these batches, which are whole.

        What it keeps besides lies in a cache of its own.

        Args:
            config: of the run.
            divisible: as for `add_batches`.
        """
        other = Context(config, ActivationCache(self.cache.budget, self.device, base=self.cache), self.device)
        other.names, other.ranks, other.by_block = self.names, self.ranks, self.by_block
        other.batches, other.shapes = [*self.batches], [*self.shapes]
        other.divide(divisible=divisible)
        return other

    def add_batches(self, batches: Iterable[Sequence[Any]], *, divisible: bool = False) -> None:
        """Keep the flat inputs of calibration batches, and divide them (`divide`).

        Args:
            batches: the flat inputs of each.
            divisible: as for `divide`.

        Raises:
            CalibrationError: if a value is NaN; a mask may hold infinities.
        """
        self.keep_batches(batches)
        self.divide(divisible=divisible)

    def keep_batches(self, batches: Iterable[Sequence[Any]]) -> None:
        """Keep the flat inputs of calibration batches, which are whole as yet.

        Raises:
            CalibrationError: if a value is NaN; a mask may hold infinities.
        """
        for index, leaves in enumerate(batches):
            self.cache.put(("batch", index, "length"), len(leaves))
            require_no_nan(leaves, self.names, f"calibration batch {index}")
            for position, leaf in enumerate(leaves):
                # A loader may fill the same buffer again for the next batch.
                self.cache.put(("batch", index, position), leaf.clone() if isinstance(leaf, Tensor) else leaf)
            self.batches.append((index, None))
            self.shapes.append(batch_shape(leaves))

    def divide(self, *, divisible: bool) -> None:
        """Divide the batches into those to learn from and those to judge by.

        Args:
            divisible: dimension 0 of every tensor counts samples: the last eighth of these is held out, and a batch
                that belongs to both parts is divided.

        Raises:
            CalibrationError: if a mask leaves nothing.
        """
        self._judging = min(len(self.batches), max(1, len(self.batches) // _ONE_IN))
        if divisible:
            self._keep_validation_samples()
        kept = [self.kept_positions(batch) for batch in range(len(self.batches))]
        if kept and all(positions is not None and not len(positions.rows) for positions in kept):
            raise CalibrationError(f"{_MASK} leaves out every position of all calibration data; 1 stands for a token")
        self._given = len(self.batches)
        if not self.has_validation and any(map(learns_from_data, self.config.passes)):
            warn(
                "the calibration data is one sample, or one batch that cannot be divided: what passes learn from it is "
                "judged on it, too; pass more batches"
            )

    def _keep_validation_samples(self) -> None:
        """Make the last eighth of the samples validation data, however they are divided into batches."""
        sizes = [{shape[0] for shape in shapes if shape} for shapes in self.shapes]
        if any(len(found) != 1 for found in sizes):
            return
        counts = [found.pop() for found in sizes]
        if sum(counts) < 2:
            return
        wanted = max(1, sum(counts) // _ONE_IN)
        self._judging = 0
        while wanted >= counts[-1 - self._judging]:
            wanted -= counts[-1 - self._judging]
            self._judging += 1
        if wanted:  # a batch that belongs to both
            index = len(counts) - 1 - self._judging
            learned = counts[index] - wanted
            self.batches[index : index + 1] = [(index, slice(0, learned)), (index, slice(learned, counts[index]))]
            whole = self.shapes[index]
            self.shapes[index : index + 1] = [
                tuple((count, *shape[1:]) if shape else () for shape in whole) for count in (learned, wanted)
            ]
            self._judging += 1

    def keep_share(self) -> None:
        """Keep the batches of this rank, and nothing of the others'.

        Raises:
            CalibrationError: if there are fewer batches than ranks.
        """
        if self.ranks.alone or not self.batches:
            return
        if self.ranks.count > len(self.batches):
            raise CalibrationError(
                f"{len(self.batches)} calibration batches cannot be shared by {self.ranks.count} ranks; pass at least "
                "one for each, or start fewer"
            )
        every, self.batches = self.batches, list(self.ranks.share(self.batches))
        self.first = self.ranks.share(range(len(every)))[0]
        judging = self.ranks.share([index >= len(every) - self._judging for index in range(len(every))])
        self._judging = sum(judging)
        for batch in {batch for batch, _ in every} - {batch for batch, _ in self.batches}:
            for position in ("length", *range(self.cache.get(("batch", batch, "length")))):
                self.cache.drop(("batch", batch, position))

    def inputs(self, index: int) -> list[Any]:
        """Return the flat inputs of batch `index`, tensors on the device.

        Raises:
            CalibrationError: if there is no calibration data.
        """
        self.require_batches()
        batch, part = self.batches[index]
        return [_part(leaf, part) for leaf in self._leaves(batch)]

    def require_batches(self) -> None:
        """Raise `CalibrationError` if there is no calibration data."""
        if not self.batches:
            raise CalibrationError("a pass of this configuration learns from data; pass calibration_data")

    def input(self, index: int, position: int) -> Any:
        """Return one of the flat inputs of batch `index`, a tensor on the device."""
        return _part(self.cache.get(self.key_of_input(index, position)), self.batches[index][1])

    def key_of_input(self, index: int, position: int) -> Hashable:
        """Return the key that the cache has the whole of one of the flat inputs of batch `index` by."""
        return "batch", self.batches[index][0], position

    def number_of(self, index: int) -> int:
        """Return which of the user's batches batch `index` is, or is a part of."""
        return self.batches[index][0] if self.batches else index

    def kept_positions(self, batch: int) -> Positions | None:
        """Return which positions of batch `batch` are no padding, or `None` if the data does not say.

        They are looked up once, as the device is waited for then.
        """
        if _MASK not in self.names:
            return None
        index, part = self.batches[batch]
        key = index, 0 if part is None else part.start
        if key not in self._kept:
            self._kept[key] = Positions.of(self.input(batch, self.names.index(_MASK)))
        return self._kept[key]

    def positions_in(self, leaves: Sequence[Any]) -> Positions | None:
        """Return which positions of flat inputs are not padding, or `None` if the data does not say."""
        return Positions.of(leaves[self.names.index(_MASK)]) if _MASK in self.names else None

    def flat_batches(self, device: torch.device) -> Iterator[list[Any]]:
        """Yield the flat inputs of every batch, tensors on `device`; once, if they are not kept."""
        if not self.batches:
            yield from self.unread
        for index in range(len(self.batches)):
            yield [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs(index)]

    def _leaves(self, batch: int) -> list[Any]:
        return [self.cache.get(("batch", batch, i)) for i in range(self.cache.get(("batch", batch, "length")))]

    @property
    def calibration(self) -> list[int]:
        """The batches to learn from."""
        return list(range(len(self.batches) - self._judging)) if self.has_validation else [0]

    @property
    def validation(self) -> list[int]:
        """The batches to judge by: the last eighth of the samples, or of the batches where these cannot be divided."""
        return list(range(len(self.batches) - self._judging, len(self.batches)))

    @property
    def has_validation(self) -> bool:
        """Whether there is data to judge by that is not learned from."""
        return self._given != 1

    @property
    def judged_on(self) -> str:
        """The data that changes are judged by, for the report."""
        return "validation data" if self.has_validation else "the calibration data"

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


def require_no_nan(leaves: Sequence[Any], names: Sequence[str], batch: str) -> None:
    """Raise `CalibrationError` if a flat input holds NaN; a mask may hold infinities.

    Args:
        leaves: the flat inputs.
        names: of these, empty if they have none.
        batch: which these are, for the message.
    """
    if (position := with_nan(leaves)) is not None:
        name = names[position] if names else position
        raise CalibrationError(f"{batch}: input {name} holds NaN; remove such samples")


def with_nan(leaves: Sequence[Any]) -> int | None:
    """Return the position of the first flat input that holds NaN, `None` if none does."""
    floats = ((i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    return next((position for position, leaf in floats if bool(leaf.isnan().any())), None)


def _part(leaf: Any, part: slice | None) -> Any:
    return leaf if part is None or not isinstance(leaf, Tensor) or not leaf.dim() else leaf[part]


__all__ = [
    "Calibrated",
    "Context",
    "Positions",
    "require_no_nan",
    "with_nan",
    "without_padding",
]
