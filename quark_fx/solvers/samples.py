"""Statistics of operators' inputs from one pass over the data: the range of each channel, and samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import device_of, named_nodes
from quark_fx.numbers.sampling import spread_indices
from quark_fx.observers import MinMax
from quark_fx.rescale.scale_walk import ScaledInput
from quark_fx.system import accelerator
from quark_fx.system.memory import Slabs

CALIBRATION, VALIDATION = "calibration", "validation"
"""Parts of the data."""

POSITIONS = {CALIBRATION: 384, VALIDATION: 192}
"""Approximate number of positions sampled from each part; with little data, a sixth of it, at least `_FEWEST`."""

_FEWEST = 128

_BATCHES = 16
"""Largest number of batches that samples come from; each gives at least one sample, or a window of one."""

_FOLDS = 4
"""Folds of the calibration data; each is evaluated with scales and ranges measured on the others."""

_GOLDEN = 0.618
"""Golden ratio conjugate; the fractional parts of its multiples are spread evenly over the unit interval."""

Sample = tuple[int | None, Tensor]
"""Samples of an activation and their fold, `None` for validation data."""

Value = tuple[Node, int]
"""A value of a graph and the dimension of its channels."""


@dataclass(frozen=True)
class Part:
    """Part of the data: the index within it of each batch of this rank, and the number of its batches on all ranks."""

    numbers: Mapping[int, int]
    count: int

    @classmethod
    def of(cls, batches: Sequence[int], context: Context) -> Part:
        """Return the part that contains these batches of this rank."""
        counts = context.ranks.gather(len(batches))
        first = sum(counts[: context.ranks.index])
        return cls({batch: first + i for i, batch in enumerate(batches)}, sum(counts))


class InputWatch(nn.Module, ABC):
    """Collects statistics of a value while batches run in order.

    Args:
        parts: Parts of the data.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self.parts, self.batches = parts, 0

    def forward(self, x: Tensor) -> None:
        for name, part in self.parts.items():
            if self.batches in part.numbers:
                self.observe(x, name, self.batches)
        self.batches += 1

    @abstractmethod
    def observe(self, x: Tensor, part: str, batch: int) -> None:
        """Add the values of a batch of this rank, which belongs to a part of the data."""


W = TypeVar("W", bound=InputWatch)


def watch_inputs(
    gm: GraphModule,
    inputs: Iterable[ScaledInput],
    context: Context,
    new_watch: Callable[[Value, Sequence[Linear], Mapping[str, Part]], W],
) -> dict[Value, W]:
    """Run the calibration batches once; return the watch of each value, in the order of `inputs`.

    Args:
        gm: Graph to run; unchanged.
        inputs: Inputs of operators, of `gm` or of the graph it was copied from.
        context: Context of the run.
        new_watch: Function that returns the watch of a value, given the value, the operators that read it, and the
            parts of the data.
    """
    context.data.require_batches()
    readers: dict[Value, list[Linear]] = {}
    for scaled in inputs:
        readers.setdefault((scaled.value, scaled.axis), []).append(scaled.linear)
    batches = {CALIBRATION: context.data.calibration, VALIDATION: context.data.validation}
    parts = {name: Part.of(numbers, context) for name, numbers in batches.items()}
    watches, nodes = {key: new_watch(key, linears, parts) for key, linears in readers.items()}, named_nodes(gm)
    with watching(gm, ((nodes[value.name], watch) for (value, _), watch in watches.items())):
        run_batches(gm, context)
    return watches


@dataclass(frozen=True)
class Remembered:
    """Ranges and samples of an activation. The class is a fold: parts of the data merge to the result of all of it.

    Attributes:
        axis: Dimension of the channels.
        divisible: True if dimension 0 counts samples.
        ranges: Range of each channel, by fold of the calibration data.
        samples: Samples by part of the data, in its order.
    """

    axis: int
    divisible: bool
    ranges: dict[int, MinMax] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {part: [] for part in POSITIONS})

    def range(self, without: int | None) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value per channel, over all folds but `without` if there are others."""
        extremes = reduce(MinMax.merge, (ends for fold, ends in self.ranges.items() if self._counts(fold, without)))
        low, high = extremes.ends
        return low.float(), high.float()

    def calibration_samples(self, without: int | None) -> list[Tensor]:
        """Return the calibration samples of all folds but `without` if there are others."""
        return [x for fold, x in self.samples[CALIBRATION] if self._counts(fold, without)]

    def _counts(self, fold: int | None, without: int | None) -> bool:
        return fold != without or len(self.ranges) == 1

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

    def merge(self, other: Remembered) -> Remembered:
        """Return the statistics of the data of both; the data of `other` comes second."""
        samples = {part: pairs + other.samples[part] for part, pairs in self.samples.items()}
        folds = {**self.ranges, **other.ranges}
        ranges = {fold: self.ranges.get(fold, MinMax()).merge(other.ranges.get(fold, MinMax())) for fold in folds}
        return replace(self, ranges=ranges, samples=samples)

    def to(self, device: torch.device | str, *, copy: bool = False) -> Remembered:
        """Return the statistics on a device; with `copy`, in new memory. Waits once for each dtype."""
        ends = [end for extremes in self.ranges.values() for end in extremes.ends]
        tensors = [*ends, *(x for pairs in self.samples.values() for _, x in pairs)]
        moved = iter(accelerator.moved(tensors, torch.device(device), copy=copy))
        ranges = {fold: MinMax(low=next(moved), high=next(moved)) for fold in self.ranges}
        samples = {part: [(fold, next(moved)) for fold, _ in pairs] for part, pairs in self.samples.items()}
        return replace(self, ranges=ranges, samples=samples)


def remember(gm: GraphModule, inputs: Iterable[ScaledInput], context: Context) -> dict[Value, Remembered]:
    """Run the calibration batches once; return ranges and samples of operators' inputs.

    Samples depend on the position of a batch in the data of all ranks, so the number of ranks does not matter.

    Args:
        gm, inputs, context: Arguments of `watch_inputs`.
    """
    slabs, statistics = Slabs(), {}
    watches = watch_inputs(gm, inputs, context, partial(_SampleWatch, slabs))
    for key, watch in watches.items():
        # Sending a view sends its whole storage, which here is a slab.
        ours = watch.remembered if context.ranks.alone else watch.remembered.to("cpu", copy=True)
        statistics[key] = context.ranks.fold(ours, Remembered.merge).to(device_of(gm))
    return statistics


class _SampleWatch(InputWatch):
    """Collects ranges and samples of a value.

    Args:
        slabs: Memory for the statistics.
        value: Value to watch.
        readers: Operators that read it.
        parts: Parts of the data.

    Attributes:
        least: Positions that one output of a reader depends on, along each dimension except samples and channels;
            `None` for all.
    """

    def __init__(self, slabs: Slabs, value: Value, readers: Sequence[Linear], parts: Mapping[str, Part]) -> None:
        super().__init__(parts)
        _, axis = value
        self.remembered = Remembered(axis, axis > 0 and not any(linear.stacked for linear in readers))
        self.slabs, windows = slabs, [_window(linear) for linear in readers]
        sizes = [window for window in windows if window is not None]
        self.least = [*map(max, zip_longest(*sizes, fillvalue=1))] if len(sizes) == len(windows) else None

    def observe(self, x: Tensor, part: str, batch: int) -> None:
        number, count, learned = self.parts[part].numbers[batch], self.parts[part].count, part == CALIBRATION
        pieces = -(-_FOLDS // count) if learned and self.remembered.divisible else 1
        for i, piece in enumerate(x.tensor_split(pieces) if pieces > 1 else (x,)):
            if len(piece):
                fold = (number * pieces + i) * _FOLDS // (count * pieces) if learned else None
                if fold is not None:
                    self.remembered.widen(fold, piece, self.slabs)
                self._keep(part, fold, piece, number, count, pieces)

    def _keep(self, part: str, fold: int | None, x: Tensor, number: int, count: int, pieces: int) -> None:
        batches = spread_indices(count, _BATCHES).tolist()
        if number not in batches:
            return
        each = max(1, x[:1].numel() // x.shape[self.remembered.axis])
        quota = min(POSITIONS[part], max(_FEWEST, each * len(x) * pieces * count // 6))
        positions = quota / (len(batches) * pieces)
        if self.remembered.divisible:
            x = self._cut(x[: max(1, int(positions // each))], positions, number)
        self.remembered.samples[part].append((fold, self.slabs.empty_like(x).copy_(x)))

    def _cut(self, x: Tensor, positions: float, number: int) -> Tensor:
        """Return about `positions` adjacent positions of one sample, at another place for each batch."""
        axis = self.remembered.axis
        dims = [dim for dim in range(1, x.dim()) if dim != axis]
        share = positions * x.shape[axis] / x.numel()
        if share >= 1 or self.least is None:
            return x
        for dim, least in zip_longest(dims, self.least[: len(dims)], fillvalue=1):
            size = x.shape[dim]
            length = min(size, max(least, round(size * share ** (1 / len(dims)))))
            x = x.narrow(dim, int((size - length + 1) * (number * _GOLDEN % 1)), length)
        return x


def _window(linear: Linear) -> tuple[int, ...] | None:
    """Return the positions that one output depends on, along each dimension except samples and channels."""
    if linear.matrices is None:
        return None
    return tuple((size - 1) * step + 1 for size, step in zip(linear.kernel, linear.dilation, strict=True))


__all__ = ["CALIBRATION", "POSITIONS", "VALIDATION", "InputWatch", "Part", "Remembered", "Sample", "Value"]
__all__ += ["remember", "watch_inputs"]
