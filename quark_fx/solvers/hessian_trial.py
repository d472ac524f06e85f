"""Evaluate scales by the Hessian of the operators' input: weights are quantized, activations stay in float."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import FloatRun, walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, BlockSize, Matrices, Need, Sizes, has_scales_apart
from quark_fx.errors import CalibrationError
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.sampling import spread_indices
from quark_fx.plan.placement import Coded
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.components import Means, per_element, sums_along
from quark_fx.rescale.planned_sites import PlannedSite, Reader
from quark_fx.solvers.error_feedback import DAMPING, factor, stack_chunks
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.scaling import Point, ScaleOf, Trial, foresee
from quark_fx.system import accelerator

_COPIES = 7
"""Copies of a weight in float32 while a scale is tried: original, scaled, rounded, error, products with the Hessian."""

_WHOLE = 3
"""The same for a weight that is tried as a whole, in addition to its codes: error and products with the Hessian."""

_AT_ONCE = 1 << 20
"""Approximate number of weights that a scale is tried on together."""

_ROWS = 512
"""Smallest number of output channels used to evaluate scales; all channels are scaled alike, so more add little."""

_SCALES = 1 << 26
"""Largest number of scale values computed before the search begins."""

_TRIES = 27
"""Approximate number of scales tried per site, on a grid of 21 by 21 points."""


_Index = tuple[slice | Tensor, ...]
"""Index of a part of a weight."""

_Found = dict[Reader[LinearMap], tuple[Hessian, Hessian]]
"""Hessians of each operator's input, of calibration and of validation data."""


class HessianTrial(Trial[LinearMap]):
    """A site and the output error of its quantized weights, computed by quadratic forms of the weights."""

    unread = "not every operator that reads it has codes"
    moments: ClassVar = 2
    """Matrices of the size of a Hessian that exist at once."""

    def __init__(self, gm: GraphModule, site: PlannedSite[LinearMap], measurements: _Found) -> None:
        weights = {reader: _Weight.of(gm, reader, measurements[reader][0].h.device) for reader in site.readers}
        counts = dict[int, tuple[Tensor | None, Tensor | None]]()
        for learned, judge in measurements.values():  # readers of one value share these objects
            try:
                counts[id(learned)] = counts.get(id(learned)) or self.counts(learned, judge)
            except CalibrationError as error:
                self.refusal = str(error)
                counts[id(learned)] = None, None
        pairs = [
            (weight, measurements[reader], counts[id(measurements[reader][0])]) for reader, weight in weights.items()
        ]
        self.calibration = tuple(_Form(weight, hessians[0], count[0]) for weight, hessians, count in pairs)
        self.validation = tuple(_Form(weight, hessians[1], count[1]) for weight, hessians, count in pairs)
        self._on_host = MeasuredSite.of(site.site.channels, self.calibration)
        self.seen = self._on_host.to(self.calibration[0].seen.h.device)
        if not self.seen.is_finite:
            self.refusal = "its input is too large to be squared"

    @property
    def seen_on_host(self) -> MeasuredSite:
        """Measurements of the site, on the host."""
        return self._on_host

    @classmethod
    def counts(cls, learned: Hessian, judge: Hessian) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight of each input's squared error, on calibration and on validation data.

        `None` stands for the quadratic form, in which errors of dependent inputs add up or cancel.

        Raises:
            CalibrationError: If the Hessian cannot be factored.
        """
        return None, None

    @classmethod
    def reads(cls, operator: Coded) -> LinearMap | None:
        """Return how an operator multiplies matrices of codes, or `None` if it does not."""
        return None if operator.linear is None or operator.weight.is_cast else operator.linear.matrices

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite[LinearMap]], context: Context, label: str
    ) -> Iterator[tuple[int, _Found]]:
        """Walk the operators in order; yield a site when all of its readers have been measured."""
        pending, hessians = dict(sites), _Found()
        for run in walk_float_blocks(gm, context, unit=Unit.OPERATOR, label=label):
            hessians |= _measured(run, [reader for site in pending.values() for reader in site.readers], context)
            for number in [n for n, site in pending.items() if all(reader in hessians for reader in site.readers)]:
                yield number, {reader: hessians.pop(reader) for reader in pending.pop(number).readers}
            if not pending:
                return

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return the needs of a run: both Hessians of the input, and copies of the weight that a scale is tried on."""

        def asked(m: Matrices) -> int:
            return m.values // m.outputs * _rows(m.outputs) if m.apart else m.values

        def tried(m: Matrices) -> int:
            return FLOAT32 * _COPIES * min(m.values, _AT_ONCE) if m.apart else _WHOLE * m.target + m.values

        def turn(block: BlockSize) -> int:
            both = cls.moments * max((m.moment for m in block.matrices), default=0)
            copy_bytes = sum(asked(m) * m.itemsize for m in block.matrices)  # or a scaled weight before it is stored
            most = max((max(copy_bytes, m.target) + tried(m) for m in block.matrices), default=0)
            return both + max(most, block.entrances)

        def work(block: BlockSize) -> float:
            moments = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            return sum(moments) + sum(2 * _TRIES * asked(m) * m.inputs for m in block.matrices)

        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        return sizes.walk(Unit.OPERATOR, turn, held=scaled, work=work)

    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the errors on calibration data, summed over the readers; waits for the device once."""
        return self._errors(self.calibration, scales)

    def foreseen(self, scales_of: ScaleOf, sizes: Sequence[int]) -> dict[Point, float]:
        """Return the errors at the points of the search on a device, computed in advance; waits for it once."""
        points, forms = [*itertools.product(*map(range, sizes))], self.calibration
        if forms[0].seen.h.is_cpu or len(points) * len(self.seen.mean_weight) > _SCALES:
            return {}
        scales = scales_of(self.seen)
        with accelerator.checked_later() as checks:

            def errors(number: Tensor) -> Tensor:
                scale = scales.index_select(0, number.view(1))[0]
                return torch.stack([form.error(scale) for form in forms])

            table = foresee(errors, len(forms), sizes, scales.device)
        fine = torch.stack([condition for condition, _ in checks] or [table.new_ones((), dtype=torch.bool)]).all()
        *terms, is_fine = torch.cat([table.flatten(), fine.to(table.dtype).view(1)]).tolist()
        if not is_fine:  # the search may never reach the point that fails
            return {}
        rows = (terms[first : first + len(forms)] for first in range(0, len(terms), len(forms)))
        return {point: sum(row) for point, row in zip(points, rows, strict=True) if not math.isnan(row[0])}

    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return the errors on validation data, averaged over the readers; waits for the device once."""
        return [[error / len(self.validation)] for error in self._errors(self.validation, scales)]

    def _errors(self, forms: Sequence[_Form], scales: Sequence[ScaleOf]) -> list[float]:
        with accelerator.checked_later() as checks:
            tried = [form.error(scale) for scale in (scale_of(self.seen) for scale_of in scales) for form in forms]
        terms, count = accelerator.read(tried, checks), len(forms)
        return [sum(terms[first : first + count]) for first in range(0, len(terms), count)]


@dataclass(frozen=True, eq=False)
class MeasuredSite:
    """Measurements of a site from Hessians, per component, averaged over its readers.

    Attributes:
        root_mean_square: Root mean square of the activation, shape (components,).
        mean_weight: Mean magnitude of the weights, each divided by its scale, shape (components,).
        is_finite: True if the squares of the activation are finite.
    """

    root_mean_square: Tensor
    mean_weight: Tensor
    is_finite: bool

    @classmethod
    def of(cls, components: int, forms: Sequence[_Form]) -> MeasuredSite:
        """Return the measurements of a site's readers; waits for the device once."""
        squares, weights = Means.of_none(components), Means.of_none(components)
        sums: list[tuple[Means, Tensor, Tensor, int]] = []
        with accelerator.checked_later() as checks:
            for form in forms:
                for means, pairs in ((squares, [form.squared]), (weights, form.ratios())):
                    for labels, values in pairs:
                        sums.append((means, labels, sums_along(labels, values), values.numel()))
        parts = [part.flatten() for _, _, part, _ in sums]
        flags = [condition.to(torch.float32).view(1) for condition, _ in checks]
        # One transfer: each one makes the host wait.
        read = torch.cat([*parts, *flags]).cpu().split([*(len(part) for part in parts), len(flags)])
        for (means, labels, part, size), on_host in zip(sums, read[:-1], strict=True):
            means.add_sums(labels, on_host.view(part.shape), size)
        accelerator.read([], [(flag, error) for flag, (_, error) in zip(read[-1], checks, strict=True)])
        mean = squares.means.sqrt()
        return cls(mean, weights.means, bool(mean.isfinite().all()))

    def to(self, device: torch.device) -> MeasuredSite:
        """Return the measurements on a device."""
        if self.root_mean_square.device == device:
            return self
        return replace(self, **{name: getattr(self, name).to(device) for name in ("root_mean_square", "mean_weight")})


@dataclass(frozen=True, eq=False)
class _Weight:
    """Output channels of a weight used to evaluate scales, on the device of the operator's Hessian.

    Attributes:
        reader: Operator of the weight.
        shape: Shape of the whole weight.
        labels: Labels of the reader, on the device.
        parts: Parts of the weight with their indices; the scales of different parts are independent.
        places: The same indices, with index tensors on the device.
        largest: Largest magnitude of each label if all scales follow the weight's largest magnitude, else `None`.
    """

    reader: Reader[LinearMap]
    shape: torch.Size
    labels: Tensor
    parts: tuple[tuple[_Index, Tensor], ...]
    places: tuple[_Index, ...]
    largest: Tensor | None

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader[LinearMap], device: torch.device) -> _Weight:
        """Read the weight of an operator of `gm`."""
        weight, largest = reader.value(gm), None
        if reader.operator.weight.scale.has_unit:
            alike = [dim for dim, size in enumerate(reader.labels.shape) if size == 1]
            ends = (weight.amin(alike, keepdim=True), weight.amax(alike, keepdim=True)) if alike else (weight, weight)
            largest = torch.maximum(-ends[0], ends[1]).float().to(device)
        parts = tuple((index, weight[index].to(device)) for index in _parts(reader, weight))
        places = tuple(tuple(i.to(device) if isinstance(i, Tensor) else i for i in index) for index, _ in parts)
        return cls(reader, weight.shape, reader.labels.to(device), parts, places, largest)

    def rounded(self, factor: Tensor) -> Iterator[tuple[_Index, Tensor, Tensor, QuantizedTensor]]:
        """Yield for each part its index, its values, its factors, and the quantized product of values and factors.

        Args:
            factor: Factors of the shape of the labels.
        """
        op, amax = self.reader.operator, None if self.largest is None else (self.largest * factor).amax()
        factor = factor.expand(self.shape)
        for (index, part), place in zip(self.parts, self.places, strict=True):
            real, s = part.float(), factor[place]
            yield index, real, s, quantize_tensor(real * s, op.weight, linear=op.linear, amax=amax, pairs=op.pairs)


@dataclass(frozen=True, eq=False)
class _Form:
    """The squared output of one operator as a quadratic form of its weight.

    Attributes:
        weight: Weight of the operator.
        seen: Hessian of its input.
        count: Weight of each input's squared error (`HessianTrial.counts`), shape (groups, inputs).
    """

    weight: _Weight
    seen: Hessian
    count: Tensor | None

    @property
    def squared(self) -> tuple[Tensor, Tensor]:
        """The component of each input channel, and its mean square, shape `(channels of the value,)`."""
        squares, rows, reader = self.seen.h.diagonal(dim1=-2, dim2=-1), self.seen.rows, self.weight.reader
        # An input of a convolution is a channel at one position of the kernel; groups of channels are stored one after
        # another, and each group sees all rows.
        squares, count = (squares, rows[0]) if reader.how.kernel else (squares.sum(0), rows.sum())
        return reader.scaled.labels, squares.reshape(len(reader.scaled.labels), -1).mean(1) / count.clamp_min(1)

    def ratios(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for parts of the weight, the component of each value and its magnitude divided by its scale."""
        reader = self.weight.reader
        labels, ones = reader.labels.expand(self.weight.shape), torch.ones(reader.labels.shape, dtype=torch.float32)
        for index, real, _, rounded in self.weight.rounded(ones.to(self.seen.h.device)):
            yield labels[index], (real / rounded.layout.spread(rounded.scale)).abs()

    def error(self, scale: Tensor) -> Tensor:
        """Return the relative squared error of the operator's output with its site scaled by `scale`, shape ()."""
        factors = per_element(self.weight.labels, scale.to(self.weight.labels.device))
        noise = torch.zeros((), device=factors.device, dtype=torch.float32)
        for index, real, s, rounded in self.weight.rounded(factors):
            noise += self._noise(index, rounded.dequantize().div_(s).sub_(real))
        return noise / self._signal

    def _noise(self, index: _Index, lost: Tensor) -> Tensor:
        """Return the squared error of the output if rounding to nearest adds `lost` to a part of the weight."""
        if self.count is None:
            return self._square(index, lost)
        mapping = self.weight.reader.how
        count = self.count[index[0]] if mapping.stacked else self.count
        return (mapping.matrix(lost).square().sum(-2) * count).sum()

    @cached_property
    def _signal(self) -> Tensor:
        """Squared output of the unscaled float weight."""
        signal = torch.zeros((), device=self.seen.h.device, dtype=torch.float32)
        for index, part in self.weight.parts:
            signal += self._square(index, part.float())
        return signal.clamp_min(torch.finfo(torch.float32).tiny)

    def _square(self, index: _Index, part: Tensor) -> Tensor:
        """Return the squared output of a part of a weight."""
        mapping, h = self.weight.reader.how, self.seen.h
        matrix = mapping.matrix(part)
        return ((matrix @ (h[index[0]] if mapping.stacked else h)) * matrix).sum()


class FeedbackTrial(HessianTrial):
    """A site and the output error after error feedback.

    Rounding errors are assumed independent and as large as with rounding to nearest. Order and damping come from the
    Hessian of the unscaled input; a scale changes them a little.
    """

    moments = 5

    @property
    def seen_on_host(self) -> MeasuredSite:
        """Measurements of the site, on the host."""
        return self._on_host

    @classmethod
    def counts(cls, learned: Hessian, judge: Hessian) -> tuple[Tensor, Tensor]:
        """Return the part of each error that remains after error feedback, learned from the calibration data."""
        parts = [
            factor(learned.h[chunk], damping=DAMPING, by_activation=True).residual_curvature(
                learned.h[chunk], judge.h[chunk]
            )
            for chunk in stack_chunks(learned.h)
        ]
        one, other = (torch.cat(curvatures) for curvatures in zip(*parts, strict=True))
        return one, other


def _parts(reader: Reader[LinearMap], weight: Tensor) -> Iterator[_Index]:
    """Yield indices of parts of a weight whose scales are independent."""
    whole: list[slice | Tensor] = [slice(None)] * weight.dim()
    if not has_scales_apart(reader.operator.weight, reader.how):
        yield tuple(whole)
        return
    outputs, stacked = reader.scaled.linear.output_axis, reader.how.stacked
    rows = spread_indices(weight.shape[outputs], _rows(weight.shape[outputs]))
    whole[outputs], axis = rows, 0 if stacked else outputs
    places = torch.arange(weight.shape[0]) if stacked else rows
    values = weight.numel() // weight.shape[outputs] * len(rows)
    for chunk in places.split(max(1, _AT_ONCE * len(places) // values)):
        index = [*whole]
        index[axis] = slice(int(chunk[0]), int(chunk[-1]) + 1) if stacked else chunk
        yield tuple(index)


def _measured(run: FloatRun, readers: Sequence[Reader[LinearMap]], context: Context) -> _Found:
    """Return the Hessians of the readers in a block, of calibration and validation data."""
    hessians, by_entrance = _Found(), dict[object, tuple[Hessian, Hessian]]()
    nodes = named_nodes(run.module)
    for reader in readers:
        if reader.scaled.reader.name not in run.block.operators:
            continue
        linear, mapping = reader.scaled.linear.at(nodes[reader.scaled.reader.name]), reader.how
        if (key := Entrance.key(linear, mapping)) not in by_entrance:
            entrance = Entrance(run.module, linear, mapping, run.inputs)
            by_entrance[key] = Hessian.of_parts(context, entrance)
        hessians[reader] = by_entrance[key]
    return hessians


def _rows(outputs: int) -> int:
    """Return the number of output channels used to evaluate scales."""
    return outputs // max(1, outputs // _ROWS)


__all__ = ["FeedbackTrial", "HessianTrial", "MeasuredSite"]
