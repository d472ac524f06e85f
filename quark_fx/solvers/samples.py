"""Statistics of activations: the range of each channel, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
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
from quark_fx.rescale.scale_sites import ScaledInput
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
        ends = [end for r in self.ranges.values() for end in (r.low, r.high) if end is not None]
        tensors = [*ends, *(x for pairs in self.samples.values() for _, x in pairs)]
        moved = dict(zip(map(id, tensors), accelerator.moved(tensors, torch.device(device), copy=copy), strict=True))

        def on(x: Tensor | None) -> Tensor | None:
            return None if x is None else moved[id(x)]

        ranges = {fold: replace(r, low=on(r.low), high=on(r.high)) for fold, r in self.ranges.items()}
        samples = {part: [(f, moved[id(x)]) for f, x in pairs] for part, pairs in self.samples.items()}
        return replace(self, ranges=ranges, samples=samples)


def remember(gm: GraphModule, inputs: Iterable[ScaledInput], context: Context) -> dict[tuple[Node, int], Remembered]:
    """Run the calibration batches once; return statistics of operators' inputs, by value and dimension of the channels.

    Samples depend on the position of a batch in the data of all ranks, so the number of ranks does not matter.

    Args:
        gm: Graph to run; unchanged.
        inputs: Inputs of operators, of `gm` or of the graph it was copied from.
        context: Context of the run.
    """
    context.data.require_batches()
    readers: dict[tuple[Node, int], list[Linear]] = {}
    for scaled in inputs:
        readers.setdefault((scaled.value, scaled.axis), []).append(scaled.linear)
    parts = {
        CALIBRATION: Part.of(context.data.calibration, context),
        VALIDATION: Part.of(context.data.validation, context),
    }
    slabs = Slabs()
    watches = {key: _Watch(key[1], linears, parts, slabs) for key, linears in readers.items()}
    nodes = named_nodes(gm)
    with watching(gm, ((nodes[value.name], watch) for (value, _), watch in watches.items())):
        run_batches(gm, context)
    statistics = {}
    for key, watch in watches.items():
        # Sending a view sends its whole storage, which here is a slab.
        ours = watch.remembered if context.ranks.alone else watch.remembered.to("cpu", copy=True)
        statistics[key] = context.ranks.fold(ours, Remembered.merge).to(device_of(gm))
    return statistics


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


class _Watch(nn.Module):
    """Collect statistics of a value while batches run in order.

    Args:
        axis: Dimension of the channels.
        readers: Operators with this input.
        parts: Parts of the data.
        slabs: Memory for the statistics.

    Attributes:
        least: Positions that one output of a reader depends on, along each dimension except samples and channels;
            `None` for all.
    """

    def __init__(self, axis: int, readers: Sequence[Linear], parts: Mapping[str, Part], slabs: Slabs) -> None:
        super().__init__()
        self.remembered = Remembered(axis, axis > 0 and not any(linear.stacked for linear in readers))
        windows = [_window(linear) for linear in readers]
        window_sizes = [window for window in windows if window is not None]
        self.least = (
            list(map(max, zip_longest(*window_sizes, fillvalue=1))) if len(window_sizes) == len(windows) else None
        )
        self.parts, self.slabs, self.batches = parts, slabs, 0

    def forward(self, x: Tensor) -> None:
        for name, part in self.parts.items():
            if (number := part.numbers.get(self.batches)) is None:
                continue
            tuned = name == CALIBRATION
            pieces = -(-_FOLDS // part.count) if tuned and self.remembered.divisible else 1
            for i, piece in enumerate(x.tensor_split(pieces) if pieces > 1 else (x,)):
                if len(piece):
                    fold = (number * pieces + i) * _FOLDS // (part.count * pieces) if tuned else None
                    if fold is not None:
                        self.remembered.widen(fold, piece, self.slabs)
                    self._keep(name, fold, piece, number, part.count, pieces)
        self.batches += 1

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


__all__ = ["CALIBRATION", "POSITIONS", "VALIDATION", "Part", "Remembered", "Sample", "remember"]
