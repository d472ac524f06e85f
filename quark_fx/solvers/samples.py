"""Ranges and samples of operators' inputs, collected in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import device_of, named_nodes
from quark_fx.numbers.sampling import spread_indices
from quark_fx.observers import MinMax
from quark_fx.rescale.planned_sites import PlannedSite
from quark_fx.system import accelerator
from quark_fx.system.memory import Slabs

CALIBRATION, VALIDATION = range(2)
"""Indices of the parts of the data."""

POSITIONS = (384, 192)
"""Approximate number of positions sampled from each part; with little data, a sixth of all, but at least `_FEWEST`."""

_FEWEST = 128

_BATCHES = 16
"""Largest number of batches that samples come from; each gives at least one sample, or a window of a sample."""

_FOLDS = 4
"""Number of folds of the calibration data; each is evaluated with scales and ranges measured on the other folds."""

_GOLDEN = 0.618
"""Golden ratio conjugate; the fractional parts of its multiples are spread evenly over the unit interval."""

Sample = tuple[int | None, Tensor]
"""Fold (`None` for validation data), and samples of an activation in that fold."""

Value = tuple[Node, int]
"""Node of a value, and the dimension of its channels."""


class _Watch(nn.Module):
    """Module that passes a value to a function while batches run in order, once per part of the data with the batch."""

    def __init__(self, observe: Callable[[Tensor, int, int], None], parts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.observe, self.parts, self.batch = observe, parts, 0

    def forward(self, x: Tensor) -> None:
        for part, batches in enumerate(self.parts):
            if self.batch in batches:
                self.observe(x, part, self.batch)
        self.batch += 1


def watch_inputs(
    gm: GraphModule,
    sites: Iterable[PlannedSite],
    context: Context,
    observe: Callable[[Value, Tensor, int, int], None],
) -> None:
    """Run the calibration batches once, and observe each value that operators of the sites read.

    Args:
        gm: Graph of the sites, or a copy of it; unchanged.
        sites: Sites.
        context: Context of the run.
        observe: Function that is called with a value, its tensor, the part of the data, and the index of the batch on
            this rank.
    """
    context.data.require_batches()
    values = dict.fromkeys((r.scaled.value, r.scaled.axis) for site in sites for r in site.readers)
    nodes, parts = named_nodes(gm), (context.data.calibration, context.data.validation)
    with watching(gm, ((nodes[value[0].name], _Watch(partial(observe, value), parts)) for value in values)):
        run_batches(gm, context)


@dataclass(frozen=True)
class Samples:
    """Ranges and samples of an activation. The class is a fold: results of parts of the data can be merged.

    Attributes:
        axis: Dimension of the channels.
        divisible: True if dimension 0 counts samples.
        window: Positions that one output of a reader depends on, along each dimension except samples and channels;
            `None` for all.
        ranges: Range of each channel, by fold of the calibration data.
        samples: Samples of each part of the data, in order.
    """

    axis: int
    divisible: bool
    window: Sequence[int] | None = None
    ranges: dict[int, MinMax] = field(default_factory=dict)
    samples: tuple[list[Sample], ...] = field(default_factory=lambda: ([], []))

    @classmethod
    def measure(cls, gm: GraphModule, sites: Sequence[PlannedSite], context: Context) -> dict[Value, Samples]:
        """Run the calibration batches once; return the ranges and samples of operators' inputs.

        Samples depend on the position of a batch in the data of all ranks, so the number of ranks does not matter.

        Args:
            gm, sites, context: Arguments of `watch_inputs`.
        """
        readers: dict[Value, list[Linear]] = {}
        for scaled in (reader.scaled for site in sites for reader in site.readers):
            readers.setdefault((scaled.value, scaled.axis), []).append(scaled.linear)
        measured = {value: cls._of(value[1], linears) for value, linears in readers.items()}
        parts = [context.data.numbered(batches) for batches in (context.data.calibration, context.data.validation)]
        slabs = Slabs()

        def observe(value: Value, x: Tensor, part: int, batch: int) -> None:
            numbers, count = parts[part]
            measured[value].observe(x, part, numbers[batch], count, slabs)

        watch_inputs(gm, sites, context, observe)
        for value, samples in measured.items():
            ours = samples if context.ranks.alone else samples.to("cpu")
            measured[value] = context.ranks.fold(ours, lambda a, b: a.merge(b)).to(device_of(gm))
        return measured

    @classmethod
    def _of(cls, axis: int, readers: Sequence[Linear]) -> Samples:
        """Return empty samples for a value that `readers` read."""
        windows = [
            [(size - 1) * step + 1 for size, step in zip(linear.kernel, linear.dilation, strict=True)]
            for linear in readers
            if linear.matrices is not None
        ]
        is_windowed = len(windows) == len(readers)
        window = [*map(max, zip_longest(*windows, fillvalue=1))] if is_windowed else None
        return cls(axis, axis > 0 and not any(linear.stacked for linear in readers), window)

    def range(self, without: int | None) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value per channel over all folds but `without`, unless it is the only one."""
        extremes = reduce(MinMax.merge, (ends for fold, ends in self.ranges.items() if self._counts(fold, without)))
        low, high = extremes.ends
        return low.float(), high.float()

    def calibration_samples(self, without: int | None) -> list[Tensor]:
        """Return the calibration samples of all folds but `without`, unless it is the only one."""
        return [x for fold, x in self.samples[CALIBRATION] if self._counts(fold, without)]

    def _counts(self, fold: int | None, without: int | None) -> bool:
        return fold != without or len(self.ranges) == 1

    def observe(self, x: Tensor, part: int, number: int, count: int, slabs: Slabs) -> None:
        """Add batch `number` of the `count` batches in a part of the data."""
        learned = part == CALIBRATION
        pieces = -(-_FOLDS // count) if learned and self.divisible else 1
        for i, piece in enumerate(x.tensor_split(pieces) if pieces > 1 else (x,)):
            if len(piece):
                fold = (number * pieces + i) * _FOLDS // (count * pieces) if learned else None
                if fold is not None:
                    self.widen(fold, piece, slabs)
                if number in spread_indices(count, _BATCHES).tolist():
                    sample = self._cut(piece, part, number, count, pieces)
                    self.samples[part].append((fold, slabs.empty_like(sample).copy_(sample)))

    def widen(self, fold: int, x: Tensor, slabs: Slabs) -> None:
        """Extend the range of a fold, in place, to include the values of `x`."""
        if not x.numel():
            return
        rows = x.movedim(self.axis, -1).reshape(-1, x.shape[self.axis])
        low, high = self.ranges.get(fold, MinMax()).observe(rows.mT).ends
        if fold not in self.ranges:
            self.ranges[fold] = MinMax(low=slabs.empty_like(low), high=slabs.empty_like(high))
        for end, now in zip(self.ranges[fold].ends, (low, high), strict=True):
            end.copy_(now)

    def _cut(self, x: Tensor, part: int, number: int, count: int, pieces: int) -> Tensor:
        """Return the first samples of a piece of a batch, or a window of one sample, at a place set by `number`."""
        if not self.divisible:
            return x
        each = max(1, x[:1].numel() // x.shape[self.axis])
        quota = min(POSITIONS[part], max(_FEWEST, each * len(x) * pieces * count // 6))
        positions = quota / (min(count, _BATCHES) * pieces)
        x = x[: max(1, int(positions // each))]
        share = positions * x.shape[self.axis] / x.numel()
        if share >= 1 or self.window is None:
            return x
        dims = [dim for dim in range(1, x.dim()) if dim != self.axis]
        for dim, least in zip_longest(dims, self.window[: len(dims)], fillvalue=1):
            size = x.shape[dim]
            length = min(size, max(least, round(size * share ** (1 / len(dims)))))
            x = x.narrow(dim, int((size - length + 1) * (number * _GOLDEN % 1)), length)
        return x

    def merge(self, other: Samples) -> Samples:
        """Return the ranges and samples of `self` and `other` together; the data of `other` comes second."""
        samples = tuple(ours + theirs for ours, theirs in zip(self.samples, other.samples, strict=True))
        folds = {**self.ranges, **other.ranges}
        ranges = {fold: self.ranges.get(fold, MinMax()).merge(other.ranges.get(fold, MinMax())) for fold in folds}
        return replace(self, ranges=ranges, samples=samples)

    def to(self, device: torch.device | str) -> Samples:
        """Return the ranges and samples on a device; wait once for each dtype."""
        ends = [end for extremes in self.ranges.values() for end in extremes.ends]
        tensors = [*ends, *(x for pairs in self.samples for _, x in pairs)]
        moved = iter(accelerator.moved(tensors, torch.device(device), copy=False))
        ranges = {fold: MinMax(low=next(moved), high=next(moved)) for fold in self.ranges}
        samples = tuple([(fold, next(moved)) for fold, _ in pairs] for pairs in self.samples)
        return replace(self, ranges=ranges, samples=samples)


__all__ = ["CALIBRATION", "POSITIONS", "VALIDATION", "Sample", "Samples", "Value", "watch_inputs"]
