"""Evaluate scales on samples of activations, with activations and weights quantized.

Ranges and samples of operators' inputs come from one pass over the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, reduce
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import device_of, named_nodes, set_parameter
from quark_fx.numbers import ops
from quark_fx.numbers.qparams import QParams, affine_qparams
from quark_fx.numbers.sampling import spread_indices
from quark_fx.observers import MinMax
from quark_fx.plan.placement import Coded
from quark_fx.plan.weights import observe_tensor, quantize_tensor
from quark_fx.rescale.components import Means, largest_per_component, per_element
from quark_fx.rescale.planned_sites import PlannedSite, Reader
from quark_fx.rescale.scale_walk import ScaledInput
from quark_fx.solvers.scaling import ScaleOf, Trial
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
class _Remembered:
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

    def merge(self, other: _Remembered) -> _Remembered:
        """Return the statistics of the data of both; the data of `other` comes second."""
        samples = {part: pairs + other.samples[part] for part, pairs in self.samples.items()}
        folds = {**self.ranges, **other.ranges}
        ranges = {fold: self.ranges.get(fold, MinMax()).merge(other.ranges.get(fold, MinMax())) for fold in folds}
        return replace(self, ranges=ranges, samples=samples)

    def to(self, device: torch.device | str, *, copy: bool = False) -> _Remembered:
        """Return the statistics on a device; with `copy`, in new memory. Waits once for each dtype."""
        ends = [end for extremes in self.ranges.values() for end in extremes.ends]
        tensors = [*ends, *(x for pairs in self.samples.values() for _, x in pairs)]
        moved = iter(accelerator.moved(tensors, torch.device(device), copy=copy))
        ranges = {fold: MinMax(low=next(moved), high=next(moved)) for fold in self.ranges}
        samples = {part: [(fold, next(moved)) for fold, _ in pairs] for part, pairs in self.samples.items()}
        return replace(self, ranges=ranges, samples=samples)


def _remember(gm: GraphModule, inputs: Iterable[ScaledInput], context: Context) -> dict[Value, _Remembered]:
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
        statistics[key] = context.ranks.fold(ours, _Remembered.merge).to(device_of(gm))
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
        self.remembered = _Remembered(axis, axis > 0 and not any(linear.stacked for linear in readers))
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


_CHOICE = "choice"
"""Part of the calibration samples that scales are chosen by."""

_FEW = 96
"""Approximate number of positions in that part; few suffice, because good scales differ by less than they gain."""


class SampleTrial(Trial):
    """A site and the outputs of its quantized operators on samples; activations and weights are quantized.

    Scales and ranges are measured on other folds of the calibration data than the samples they are evaluated on.
    """

    unread = "not every operator that reads it multiplies codes by codes, or data chooses its rows"
    gain = 0.85  # a smaller gain may be chance

    def __init__(self, gm: GraphModule, site: PlannedSite, measurements: Mapping[Value, _Remembered]) -> None:
        self.operators = [_Operator.of(gm, r, measurements[r.scaled.value, r.scaled.axis]) for r in site.readers]
        self.producers = [
            (producer, _Reference([producer.value(gm)]))
            for producer in site.producers
            if producer.operator.weight.granularity is Granularity.TENSOR
        ]
        has_pairs = any(w.operator.pairs is not None for w in (*site.readers, *site.producers))
        self.limits = [True, False] if has_pairs else [True]
        largest = _largest(((op.reader.labels, op.weight.abs()) for op in self.operators), site.site.channels)
        inputs = [(op.reader.scaled.labels, op.statistics) for op in self.operators]
        self.seen_without = cache(lambda fold: SampledSite(site.site.channels, inputs, fold, largest))
        self.seen = self.seen_without(None)

    @classmethod
    def reads(cls, operator: Coded) -> bool:
        """Tell whether an operator's input is quantized, and the same in every run on one batch."""
        # The rows that an expert reads depend on the data, so samples of its activation may not be its real input.
        return operator.kind != "experts" and operator.input is not None and not operator.input.is_cast

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, label: str
    ) -> Iterator[tuple[int, Mapping[Value, _Remembered]]]:
        """Sample the inputs of all sites' readers in one forward pass."""
        statistics = _remember(gm, (r.scaled for site in sites.values() for r in site.readers), context)
        del gm  # a scaled site replaces tensors, and `gm` would keep the old ones alive
        yield from ((number, statistics) for number in sites)

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return the needs of a run: the samples of all sites' inputs, and one forward pass."""
        read = {op.node.args[0]: sizes.matrices.get(op.node.name) for op in sizes.coded if cls.reads(op)}
        matrices, most = [m for m in read.values() if m], sum(POSITIONS.values())
        sample_bytes = int(sum(FLOAT32 * min(sizes.batches * m.rows, most) * m.groups * m.inputs for m in matrices))
        # A trial holds the weight scaled, rounded, limited, and unscaled, its outputs, and the reference outputs.
        tried = max((4 * m.target + 2 * FLOAT32 * most * m.groups * m.outputs for m in matrices), default=0)
        working = sample_bytes + max(sizes.forward, sizes.weight_bytes + tried)
        return Need((Moment(working),), held=sizes.weight_bytes, operations=sizes.forward_operations)

    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the errors on a few samples.

        Limits on pairs of codes are ignored: which pairs exceed a limit changes with every scale by chance, and few
        samples would show that as a gain.
        """
        return [self._errors(scale_of, [_CHOICE], [False])[0] for scale_of in scales]

    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return the errors on all samples, with the target's limits on pairs of codes and without."""
        return [self._errors(scale_of, [VALIDATION, CALIBRATION], self.limits) for scale_of in scales]

    def _errors(self, scale_of: ScaleOf, parts: Sequence[str], limits: Sequence[bool]) -> list[float]:
        """Return the relative squared error for each of `limits` and each part of the samples.

        It covers the outputs, and the weights that produce the activation if these share one scale per tensor.
        """
        scales = cache(lambda without: scale_of(self.seen_without(without)).to(self.operators[0].weight.device))
        totals = [[0.0] * len(parts) for _ in limits]
        for operator in self.operators:
            weights = operator.rounded_weights(scales(None), limits)
            for i, part in enumerate(parts):
                read = list(operator.in_codes(part, scales))  # identical with and without pair limits
                for total, weight in zip(totals, weights, strict=True):
                    total[i] += operator.outputs[part].error(operator.run(read, weight))
        for producer, reference in self.producers:
            factor, (real,) = per_element(producer.labels, scales(None)), reference.values
            for total, weight in zip(totals, _rounded(real.float() / factor, producer.operator, limits), strict=True):
                weight_error = reference.error([weight * factor])
                total[:] = [error + weight_error for error in total]
        return [error for total in totals for error in total]


@dataclass(frozen=True, eq=False)
class SampledSite:
    """Measurements of a site from samples. All tensors have shape (components,).

    Attributes:
        components: Number of components of the site.
        inputs: Component of each channel, and statistics of the activation, per operator with this input.
        without: Fold to leave out.
        largest_weight: Largest magnitude of those operators' weights.
    """

    components: int
    inputs: Sequence[tuple[Tensor, _Remembered]]
    without: int | None
    largest_weight: Tensor

    @cached_property
    def largest(self) -> Tensor:
        """Largest magnitude of the activation."""
        ends = ((labels, statistics.range(self.without)) for labels, statistics in self.inputs)
        return _largest(((labels, torch.maximum(-low, high)) for labels, (low, high) in ends), self.components)

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of the activation's samples."""
        moments = [Means.of_none(self.components) for _ in range(2)]
        for labels, statistics in self.inputs:
            for x in statistics.calibration_samples(self.without):
                rows = x.float().movedim(statistics.axis, -1)
                for power, moment in enumerate(moments, 1):
                    moment.add(labels.expand(rows.shape), rows**power)
        mean, square = (moment.means for moment in moments)
        return (square - mean.square()).clamp_min(0).sqrt().to(self.largest_weight.device)


def _largest(pairs: Iterable[tuple[Tensor, Tensor]], components: int) -> Tensor:
    """Return the largest value of each component, shape (components,)."""
    return torch.stack([largest_per_component(labels, values, components) for labels, values in pairs]).amax(0)


@dataclass(frozen=True, eq=False)
class _Operator:
    """Operator that reads a site, with a module that computes it, its samples, and its float outputs of them."""

    reader: Reader
    spec: TensorSpec
    module: GraphModule
    weight: Tensor
    statistics: _Remembered
    samples: dict[str, list[Sample]]
    outputs: dict[str, _Reference]

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader, statistics: _Remembered) -> _Operator:
        """Build the operator and compute its float outputs."""
        samples, spec = statistics.samples[CALIBRATION], reader.operator.input
        assert spec is not None  # see `SampleTrial.reads`
        positions = sum(x.numel() // x.shape[statistics.axis] for _, x in samples)
        few = -(-len(samples) // max(1, positions // _FEW))
        choice = [samples[i] for i in spread_indices(len(samples), few).tolist()]
        module = extract(gm, [reader.scaled.value], [reader.scaled.reader])
        operator = cls(reader, spec, module, reader.value(gm), statistics, statistics.samples | {_CHOICE: choice}, {})
        for part, pairs in operator.samples.items():
            operator.outputs[part] = _Reference(operator.run([x for _, x in pairs]))
        return operator

    def run(self, inputs: Sequence[Tensor], weight: Tensor | None = None) -> list[Tensor]:
        """Return the operator's outputs, with another weight if given; inputs are joined into one batch if possible."""
        if weight is not None:
            set_parameter(self.module, str(self.reader.operator.weight_node.target), weight)
        joined = self.statistics.divisible and len({x.shape[1:] for x in inputs}) == 1
        with torch.no_grad():
            return [self.module(x)[0] for x in ([torch.cat(list(inputs))] if joined else inputs)]

    def rounded_weights(self, scale: Tensor, limits: Sequence[bool]) -> list[Tensor]:
        """Return the dequantized product of the weight and a scale, for each of `limits`."""
        scaled = self.weight.float() * per_element(self.reader.labels, scale)
        return [rounded.to(self.weight.dtype) for rounded in _rounded(scaled, self.reader.operator, limits)]

    def in_codes(self, part: str, scales: Callable[[int | None], Tensor]) -> Iterator[Tensor]:
        """Yield the samples, quantized and dequantized with the scale applied.

        Scale and range of a sample are measured without its fold, so the error estimates the error on new data.
        """
        divisors = cache(lambda without: per_element(self.reader.scaled.labels, scales(without)))
        ranges = cache(lambda without: self._qparams(divisors(without), without))
        for fold, x in self.samples[part]:
            scaled = self._divided(x, divisors(fold))
            if self.spec.dynamic:
                fmt, _, axis, block, *_ = measurement = self.spec.measurement(self.statistics.axis)
                rounded = ops.fake_quantize(scaled, *ops.dynamic_qparams(scaled, *measurement), fmt, axis, block)
            else:
                rounded = ops.rounded(scaled, ranges(fold), self.spec.scheme)
            yield self._divided(rounded, divisors(None) / divisors(fold)).to(x.dtype)

    def _qparams(self, divisor: Tensor, without: int | None) -> QParams:
        """Return the approximate quantization parameters that calibration would find for the divided activation."""
        spec = self.spec
        if isinstance(spec.observer, MinMax):
            low, high = self.statistics.range(without)
            return affine_qparams((low / divisor).min(), (high / divisor).max(), spec.scheme)
        observer = spec.new_observer
        for x in self.statistics.calibration_samples(without):
            observer = observer.observe(self._divided(x, divisor).reshape(1, -1))
        qparams = observer.qparams(spec.scheme)
        return QParams(qparams.scale.reshape(()), qparams.zero_point.reshape(()))

    def _divided(self, x: Tensor, divisor: Tensor) -> Tensor:
        return x.float() / divisor.reshape([-1 if dim == self.statistics.axis else 1 for dim in range(x.dim())])


def _rounded(weight: Tensor, operator: Coded, limits: Sequence[bool]) -> list[Tensor]:
    """Return the dequantized weight, with the target's limit on sums of pairs of codes or without."""
    spec, linear = operator.weight, operator.linear
    observed = None if spec.is_cast else observe_tensor(weight, spec, linear)
    bounds = (operator.pairs if limited else None for limited in limits)
    return [quantize_tensor(weight, spec, linear=linear, observed=observed, pairs=p).dequantize() for p in bounds]


@dataclass(frozen=True, eq=False)
class _Reference:
    """Reference values to compare others with."""

    values: list[Tensor]

    @cached_property
    def _power(self) -> float:
        return _squared(r.float() for r in self.values)

    def error(self, values: Sequence[Tensor]) -> float:
        """Return the squared error of other values, relative to the sum of squares of these."""
        noise = _squared(x.float() - r.float() for x, r in zip(values, self.values, strict=True))
        return noise / max(self._power, torch.finfo(torch.float32).tiny)


def _squared(values: Iterable[Tensor]) -> float:
    """Return the sum of all squares; waits for the device once."""
    sums = [x.square().sum() for x in values]
    return sum(torch.stack(sums).tolist()) if sums else 0.0


__all__ = ["SampleTrial", "SampledSite"]
