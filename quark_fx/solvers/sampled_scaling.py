"""Evaluate scales on samples of activations, with activations and weights quantized."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.engine.blocks import extract
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.graph.nodes import set_parameter
from quark_fx.numbers import ops
from quark_fx.numbers.qparams import QParams, affine_qparams
from quark_fx.numbers.sampling import spread_indices
from quark_fx.observers import MinMax
from quark_fx.plan.placement import Coded
from quark_fx.plan.weights import observe_tensor, quantize_tensor
from quark_fx.rescale.components import Means, largest_per_component, per_element
from quark_fx.rescale.planned_sites import Condition, PlannedSite, Reader
from quark_fx.solvers.samples import CALIBRATION, POSITIONS, VALIDATION, Sample, Samples, Value
from quark_fx.solvers.scaling import Measured, MeasuredSite, ScaleOf, ScalingSolver

_CHOICE = 2
"""Index of the samples that scales are chosen by, a subset of the calibration samples, after the parts of the data."""

_FEW = 96
"""Approximate number of positions in the samples that scales are chosen by; few are enough, because the errors of good
scales differ little compared with the error that each of them removes."""

_CODED_INPUT = Condition(
    # The rows that an expert reads depend on the data, so samples of its activation may not be its real input.
    lambda op: op.kind != "experts" and op.input is not None and not op.input.is_cast,
    "not every operator that reads it multiplies quantized inputs by quantized weights, or the data selects its rows",
)
"""Condition that an operator's input is quantized, and is the same in every run on one batch."""


class SampledScaling(ScalingSolver, ABC):
    """Base class of scaling solvers that minimize the error of the quantized operators on samples of their inputs.

    Activations and weights are quantized. Scales and ranges are measured on other folds of the calibration data than
    the samples that they are evaluated on. A scale is applied if it removes more than 15 % of the error, both on
    calibration and on validation samples. A subclass defines `grid`, and `scale` as a function of `SampleStatistics`.
    """

    @property
    def condition(self) -> Condition:
        """Condition that the inputs of the operators are quantized."""
        return _CODED_INPUT

    def measure(
        self, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, before: GraphModule
    ) -> Measured:
        """Sample the inputs of all sites' readers in one forward pass; yield the error of each site."""
        samples = Samples.measure(before, list(sites.values()), context)
        del before  # a scaled site replaces tensors, and `before` would keep the old ones alive
        yield from ((number, partial(self._site, gm, site, samples)) for number, site in sites.items())

    @staticmethod
    def _site(gm: GraphModule, site: PlannedSite, samples: Mapping[Value, Samples]) -> MeasuredSite:
        """Return the error of the site's operators on samples."""
        operators = [_Operator.of(gm, r, samples[r.scaled.value, r.scaled.axis]) for r in site.readers]
        producers = [
            (producer.operator, producer.labels, _Reference([producer.value(gm)]))
            for producer in site.producers
            if producer.operator.weight.granularity is Granularity.TENSOR
        ]
        largest = _largest(((op.reader.labels, op.weight.abs()) for op in operators), site.site.channels)
        inputs = [(op.reader.scaled.labels, op.statistics) for op in operators]
        statistics = cache(lambda fold: SampleStatistics(site.site.channels, inputs, fold, largest))

        def errors(scale: ScaleOf, parts: Sequence[int], limits: Sequence[bool]) -> list[Tensor]:
            """Return the relative squared error for each of `limits` and each part of the samples.

            The error covers the outputs of the readers, and weights of the producers that have one scale per tensor.
            """
            scales = cache(lambda without: scale(statistics(without)).to(operators[0].weight.device))
            totals = [[0.0] * len(parts) for _ in limits]
            for operator in operators:
                weights = operator.rounded_weights(scales(None), limits)
                for i, part in enumerate(parts):
                    read = list(operator.in_codes(part, scales))  # identical with and without pair limits
                    for total, weight in zip(totals, weights, strict=True):
                        total[i] += operator.outputs[part].error(operator.run(read, weight))
            for producer, labels, reference in producers:
                factor, (real,) = per_element(labels, scales(None)), reference.values
                for total, weight in zip(totals, _rounded(real.float() / factor, producer, limits), strict=True):
                    weight_error = reference.error([weight * factor])
                    total[:] = [error + weight_error for error in total]
            return [torch.tensor([error], dtype=torch.float64) for total in totals for error in total]

        # Which pairs of codes exceed a limit of the target changes with every scale by chance, and few samples would
        # show that as a gain. So scales are chosen without these limits, and must be better both with and without them.
        has_pairs = any(w.operator.pairs is not None for w in (*site.readers, *site.producers))
        limits = [True, False] if has_pairs else [True]
        return MeasuredSite(
            statistics(None),
            error=lambda scale: errors(scale, [_CHOICE], [False])[0],
            validation_errors=lambda scale: errors(scale, [VALIDATION, CALIBRATION], limits),
            largest_ratio=0.85,  # a smaller gain may be chance
        )

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: the samples of all sites' inputs, and one forward pass."""
        read = {op.node.args[0]: sizes.matrices.get(op.node.name) for op in sizes.coded if self.condition.holds(op)}
        matrices, most = [m for m in read.values() if m], sum(POSITIONS)
        sample_bytes = int(sum(FLOAT32 * min(sizes.batches * m.rows, most) * m.groups * m.inputs for m in matrices))
        # A trial holds the weight scaled, rounded, limited, and unscaled, its outputs, and the reference outputs.
        tried = max((4 * m.target + 2 * FLOAT32 * most * m.groups * m.outputs for m in matrices), default=0)
        working = sample_bytes + max(sizes.forward, sizes.weight_bytes + tried)
        return Need((Moment(working),), held=sizes.weight_bytes, operations=sizes.forward_operations)


@dataclass(frozen=True, eq=False)
class SampleStatistics:
    """Statistics of a site from samples, each of shape (components,).

    Attributes:
        components: Number of components of the site.
        inputs: Component of each channel and samples of the activation, for each operator that reads the site.
        without: Fold to leave out, `None` to use all.
        largest_weight: Largest magnitude of the operators' weights, shape (components,).
    """

    components: int
    inputs: Sequence[tuple[Tensor, Samples]]
    without: int | None
    largest_weight: Tensor

    @cached_property
    def largest(self) -> Tensor:
        """Largest magnitude of the activation."""
        ends = ((labels, samples.range(self.without)) for labels, samples in self.inputs)
        return _largest(((labels, torch.maximum(-low, high)) for labels, (low, high) in ends), self.components)

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of the activation's samples."""
        moments = [Means.of_none(self.components) for _ in range(2)]
        for labels, samples in self.inputs:
            for x in samples.calibration_samples(self.without):
                rows = x.float().movedim(samples.axis, -1)
                for power, moment in enumerate(moments, 1):
                    moment.add(labels.expand(rows.shape), rows**power)
        mean, square = (moment.means for moment in moments)
        return (square - mean.square()).clamp_min(0).sqrt().to(self.largest_weight.device)


def _largest(pairs: Iterable[tuple[Tensor, Tensor]], components: int) -> Tensor:
    """Return the largest value of each component, shape (components,)."""
    return torch.stack([largest_per_component(labels, values, components) for labels, values in pairs]).amax(0)


@dataclass(frozen=True, eq=False)
class _Operator:
    """Operator that reads a site, with a module that computes it, samples of its input, and its outputs in float."""

    reader: Reader
    spec: TensorSpec
    module: GraphModule
    weight: Tensor
    statistics: Samples
    samples: Sequence[Sequence[Sample]]
    outputs: list[_Reference]

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader, statistics: Samples) -> _Operator:
        """Build the operator and compute its float outputs."""
        samples, spec = statistics.samples[CALIBRATION], reader.operator.input
        assert spec is not None  # see `_CODED_INPUT`
        positions = sum(x.numel() // x.shape[statistics.axis] for _, x in samples)
        few = -(-len(samples) // max(1, positions // _FEW))
        choice = [samples[i] for i in spread_indices(len(samples), few).tolist()]
        module = extract(gm, [reader.scaled.value], [reader.scaled.reader])
        operator = cls(reader, spec, module, reader.value(gm), statistics, (*statistics.samples, choice), [])
        for part in operator.samples:
            operator.outputs.append(_Reference(operator.run([x for _, x in part])))
        return operator

    def run(self, inputs: Sequence[Tensor], weight: Tensor | None = None) -> list[Tensor]:
        """Return the operator's outputs, with another weight if given; inputs are joined into one batch if possible."""
        if weight is not None:
            set_parameter(self.module, str(self.reader.operator.weight_node.target), weight)
        joined = self.statistics.divisible and len({x.shape[1:] for x in inputs}) == 1
        with torch.no_grad():
            return [self.module(x)[0] for x in ([torch.cat(list(inputs))] if joined else inputs)]

    def rounded_weights(self, scale: Tensor, limits: Sequence[bool]) -> list[Tensor]:
        """Return the weight times a scale, quantized and dequantized, for each of `limits`."""
        scaled = self.weight.float() * per_element(self.reader.labels, scale)
        return [rounded.to(self.weight.dtype) for rounded in _rounded(scaled, self.reader.operator, limits)]

    def in_codes(self, part: int, scales: Callable[[int | None], Tensor]) -> Iterator[Tensor]:
        """Yield the samples, quantized and dequantized with the scale applied.

        The scale and range for a sample are measured without its fold, so the error estimates the error on new data.
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
    """Return the dequantized weight for each of `limits`: with or without the target's limit on sums of code pairs."""
    spec, linear = operator.weight, operator.linear
    observed = None if spec.is_cast else observe_tensor(weight, spec, linear)
    bounds = (operator.pairs if limited else None for limited in limits)
    return [quantize_tensor(weight, spec, linear=linear, observed=observed, pairs=p).dequantize() for p in bounds]


@dataclass(frozen=True, eq=False)
class _Reference:
    """Reference values that other values are compared with."""

    values: list[Tensor]

    @cached_property
    def _power(self) -> float:
        return _squared(r.float() for r in self.values)

    def error(self, values: Sequence[Tensor]) -> float:
        """Return the squared error of `values`, relative to the sum of squares of the reference values."""
        noise = _squared(x.float() - r.float() for x, r in zip(values, self.values, strict=True))
        return noise / max(self._power, torch.finfo(torch.float32).tiny)


def _squared(values: Iterable[Tensor]) -> float:
    """Return the sum of all squares; waits for the device once."""
    sums = [x.square().sum() for x in values]
    return sum(torch.stack(sums).tolist()) if sums else 0.0


__all__ = ["SampleStatistics", "SampledScaling"]
