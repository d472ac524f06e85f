"""Scale up the weights that multiply large activations, so that rounding them causes smaller errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import FloatRun, walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, BlockSize, Matrices, Need, Sizes, has_scales_apart
from quark_fx.errors import CalibrationError, Declined
from quark_fx.graph.nodes import named_nodes
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.sampling import spread_indices
from quark_fx.plan.placement import Coded
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import PlannedSite, Reader
from quark_fx.solvers.error_feedback import DAMPING, factor, stack_chunks
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.scaling import ScaleOf, ScalingSolver, Trial, scaling_solver, search
from quark_fx.system import accelerator

_SMALLEST = 1e-4
"""Smallest value of a channel relative to the largest; smaller ones are scaled alike."""


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

_ROUNDS = 2
"""Rounds of the search per step size on a device; the first often finds a better point, the next seldom does."""

_TRIES = 27
"""Approximate number of scales tried per site, on a grid of 21 by 21 points."""

_Index = tuple[slice | Tensor, ...]
"""Index of a part of a weight."""

_Measured = dict[Reader, tuple[Hessian, Hessian]]
"""Hessians of each operator's input, of calibration and of validation data; operators with one input share them."""


class _HessianTrial(Trial):
    """A site and the output error of its quantized weights, computed by quadratic forms of the weights."""

    unread = "not every operator that reads it has codes"
    moments: ClassVar = 2
    """Matrices of the size of a Hessian that exist at once."""

    def __init__(self, gm: GraphModule, site: PlannedSite, measurements: _Measured) -> None:
        self.forms = [_Form.of(gm, reader, measurements[reader]) for reader in site.readers]
        self.seen = _MeasuredSite.of(site.site.channels, self.forms)
        if not bool(self.seen.root_mean_square.isfinite().all()):
            raise Declined("its input is too large to be squared")
        self._on_device, counts = self.seen.to(self.forms[0].hessians[0].h.device), cache(self.counts)
        try:
            self._counts = [counts(*form.hessians) for form in self.forms]
        except CalibrationError as error:
            raise Declined(str(error)) from error

    @classmethod
    def counts(cls, learned: Hessian, judge: Hessian) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight of each input's squared error, on calibration and on validation data.

        `None` stands for the quadratic form, in which errors of dependent inputs add up or cancel.

        Raises:
            CalibrationError: If the Hessian cannot be factored.
        """
        return None, None

    @classmethod
    def reads(cls, operator: Coded) -> bool:
        """Tell whether an operator multiplies matrices of codes."""
        return not operator.weight.is_cast and operator.linear is not None and operator.linear.matrices is not None

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, label: str
    ) -> Iterator[tuple[int, _Measured]]:
        """Walk the operators in order; yield a site when all of its readers have been measured."""
        pending, hessians = dict(sites), _Measured()
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

        return sizes.walk(Unit.OPERATOR, turn, held=sizes.weight_bytes, work=work)

    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the errors on calibration data, summed over the readers; waits for the device once."""
        return self._errors(scales, 0)

    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return the errors on validation data, averaged over the readers; waits for the device once."""
        return [[error / len(self.forms)] for error in self._errors(scales, 1)]

    def _errors(self, scales: Sequence[ScaleOf], part: int) -> list[float]:
        with accelerator.checked_later() as checks:
            tried = [error for scale_of in scales for error in self._tried(scale_of(self._on_device), part)]
        terms, count = accelerator.read(tried, checks), len(self.forms)
        return [sum(terms[first : first + count]) for first in range(0, len(terms), count)]

    def _tried(self, scale: Tensor, part: int) -> list[Tensor]:
        """Return the error of each operator on calibration data (0) or validation data (1)."""
        return [form.error(scale, part, counts[part]) for form, counts in zip(self.forms, self._counts, strict=True)]

    def foreseen(self, scales_of: ScaleOf, sizes: Sequence[int]) -> Tensor | None:
        """Return the errors at points of a search on a device, which waits for it once; `None` on a CPU."""
        if self._on_device.mean_weight.is_cpu or math.prod(sizes) * len(self.seen.mean_weight) > _SCALES:
            return None
        scales = scales_of(self._on_device)
        table = scales.new_full((len(scales), len(self.forms)), math.nan)

        def errors(points: Tensor) -> Tensor:
            tried = (scales.index_select(0, point.view(1))[0] for point in points)
            return torch.stack([torch.stack(self._tried(scale, 0)) for scale in tried])

        with accelerator.checked_later() as checks:
            search(errors, sizes, table, rounds=_ROUNDS)
        flags = [condition.to(table.dtype).view(1) for condition, _ in checks]
        on_host = torch.cat([table.flatten(), *flags]).cpu()  # one transfer: each one makes the host wait
        if not bool(on_host[table.numel() :].all()):  # the search may never reach the point that fails
            return None
        return on_host[: table.numel()].view(table.shape).double().sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _MeasuredSite:
    """Measurements of a site from Hessians, per component, averaged over its readers.

    Attributes:
        root_mean_square: Root mean square of the activation, shape (components,).
        mean_weight: Mean magnitude of the weights, each divided by its scale, shape (components,).
    """

    root_mean_square: Tensor
    mean_weight: Tensor

    @classmethod
    def of(cls, components: int, forms: Sequence[_Form]) -> _MeasuredSite:
        """Return the measurements of a site's readers, on the host; waits for the device once."""
        squares, weights, ones = (
            Means.of_none(components),
            Means.of_none(components),
            torch.ones(components, dtype=torch.float32),
        )
        sums: list[tuple[Means, Tensor, Tensor, int]] = []
        with accelerator.checked_later() as checks:
            for form in forms:
                for means, pairs in ((squares, [form.squared]), (weights, form.ratios(ones))):
                    sums += [(means, labels, means.sums(labels, x), x.numel()) for labels, x in pairs]
        tensors = [*(x for _, _, x, _ in sums), *(condition for condition, _ in checks)]
        on_host = iter(accelerator.moved(tensors, torch.device("cpu"), copy=False))
        for means, labels, _, size in sums:
            means.add_sums(labels, next(on_host), size)
        accelerator.read((), [(condition, error) for condition, (_, error) in zip(on_host, checks, strict=True)])
        return cls(squares.means.sqrt(), weights.means)

    def to(self, device: torch.device) -> _MeasuredSite:
        """Return the measurements on a device."""
        if self.mean_weight.device == device:
            return self
        return _MeasuredSite(self.root_mean_square.to(device), self.mean_weight.to(device))


@dataclass(frozen=True, eq=False)
class _Form:
    """The squared output of an operator as a quadratic form of its weight, on the device of its Hessians.

    Attributes:
        reader: The operator.
        shape: Shape of its weight.
        hessians: Hessians of its input, of calibration and of validation data.
        parts: Parts of the weight that scales are tried on, each with its index and its labels; the scales of different
            parts are independent.
        largest: Labels and the largest magnitude of the weights of each, if all scales follow the weight's largest
            magnitude, else `None`.
    """

    reader: Reader
    shape: torch.Size
    hessians: tuple[Hessian, Hessian]
    parts: tuple[tuple[_Index, Tensor, Tensor], ...]
    largest: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader, hessians: tuple[Hessian, Hessian]) -> _Form:
        """Read the weight of an operator of `gm`."""
        weight, labels, device, largest = reader.value(gm), reader.labels, hessians[0].h.device, None
        if reader.operator.weight.scale.has_unit:
            alike = [dim for dim, size in enumerate(labels.shape) if size == 1]
            ends = (weight.amin(alike, keepdim=True), weight.amax(alike, keepdim=True)) if alike else (weight, weight)
            largest = labels.to(device), torch.maximum(-ends[0], ends[1]).float().to(device)
        indices = _parts(reader, weight)
        parts = tuple((i, _labels_at(labels, i).to(device), weight[i].to(device)) for i in indices)
        return cls(reader, weight.shape, hessians, parts, largest)

    def rounded(self, scale: Tensor) -> Iterator[tuple[_Index, Tensor, Tensor, QuantizedTensor]]:
        """Yield for each part its index, its values, their factors, and the quantized product of both."""
        op, amax = self.reader.operator, None
        if self.largest is not None:
            amax = (self.largest[1] * per_element(self.largest[0], scale)).amax()
        for index, labels, part in self.parts:
            real, s = part.float(), per_element(labels, scale)
            yield index, real, s, quantize_tensor(real * s, op.weight, linear=op.linear, amax=amax, pairs=op.pairs)

    @property
    def squared(self) -> tuple[Tensor, Tensor]:
        """The component of each input channel, and its mean square, shape `(channels of the value,)`."""
        hessian, labels, kernel = self.hessians[0], self.reader.scaled.labels, self.reader.mapping.kernel
        squares, rows = hessian.h.diagonal(dim1=-2, dim2=-1), hessian.rows
        # An input of a convolution is a channel at one position of the kernel; groups of channels are stored one after
        # another, and each group sees all rows.
        squares, count = (squares, rows[0]) if kernel else (squares.sum(0), rows.sum())
        return labels, squares.reshape(len(labels), -1).mean(1) / count.clamp_min(1)

    def ratios(self, ones: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for parts of the weight, the component of each value and its magnitude divided by its scale."""
        for index, real, _, rounded in self.rounded(ones.to(self.hessians[0].h.device)):
            yield self.reader.labels.expand(self.shape)[index], (real / rounded.layout.spread(rounded.scale)).abs()

    def error(self, scale: Tensor, part: int, count: Tensor | None) -> Tensor:
        """Return the relative squared error of the output with the site scaled by `scale`, shape ().

        Args:
            scale: The scale.
            part: Index of the data in `hessians`.
            count: Result of `_HessianTrial.counts` for that data.
        """
        noise = torch.zeros((), device=self.hessians[0].h.device, dtype=torch.float32)
        for index, real, s, rounded in self.rounded(scale.to(noise.device)):
            noise += self._square(index, rounded.dequantize().div_(s).sub_(real), part, count)
        return noise / self._signals[part]

    @cached_property
    def _signals(self) -> list[Tensor]:
        """Squared output of the unscaled float weight on each part of the data."""
        signals = [torch.zeros((), device=hessian.h.device, dtype=torch.float32) for hessian in self.hessians]
        for part, signal in enumerate(signals):
            for index, _, values in self.parts:
                signal += self._square(index, values.float(), part, None)
        return [signal.clamp_min(torch.finfo(torch.float32).tiny) for signal in signals]

    def _square(self, index: _Index, values: Tensor, part: int, count: Tensor | None) -> Tensor:
        """Return the squared output of a part of a weight, or, with `count`, the sum of its weighted squares."""
        mapping = self.reader.mapping
        matrix, group = mapping.matrix(values), index[0] if mapping.stacked else slice(None)
        if count is None:
            return ((matrix @ self.hessians[part].h[group]) * matrix).sum()
        return (matrix.square().sum(-2) * count[group]).sum()


class _FeedbackTrial(_HessianTrial):
    """A site and the output error after error feedback.

    Rounding errors are assumed independent and as large as with rounding to nearest. Order and damping come from the
    Hessian of the unscaled input; a scale changes them a little.
    """

    moments = 5

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


def _parts(reader: Reader, weight: Tensor) -> Iterator[_Index]:
    """Yield indices of parts of a weight whose scales are independent."""
    whole: list[slice | Tensor] = [slice(None)] * weight.dim()
    if not has_scales_apart(reader.operator.weight, reader.mapping):
        yield tuple(whole)
        return
    outputs, stacked = reader.scaled.linear.output_axis, reader.mapping.stacked
    rows = spread_indices(weight.shape[outputs], _rows(weight.shape[outputs]))
    whole[outputs], axis = rows, 0 if stacked else outputs
    places = torch.arange(weight.shape[0]) if stacked else rows
    values = weight.numel() // weight.shape[outputs] * len(rows)
    for chunk in places.split(max(1, _AT_ONCE * len(places) // values)):
        index = [*whole]
        index[axis] = slice(int(chunk[0]), int(chunk[-1]) + 1) if stacked else chunk
        yield tuple(index)


def _labels_at(labels: Tensor, index: _Index) -> Tensor:
    """Return the labels of a part of a weight, still of size 1 where they do not change."""
    return labels[tuple(slice(None) if size == 1 else i for i, size in zip(index, labels.shape, strict=True))]


def _measured(run: FloatRun, readers: Sequence[Reader], context: Context) -> _Measured:
    """Return the Hessians of the readers in a block, of calibration and validation data."""
    hessians, by_entrance, nodes = _Measured(), dict[object, tuple[Hessian, Hessian]](), named_nodes(run.module)
    for reader in readers:
        if reader.scaled.reader.name in run.block.operators:
            linear, mapping = reader.scaled.linear.at(nodes[reader.scaled.reader.name]), reader.mapping
            if (key := linear.rows_key) not in by_entrance:
                by_entrance[key] = Hessian.of_parts(context, Entrance(run.module, linear, mapping, run.inputs))
            hessians[reader] = by_entrance[key]
    return hessians


def _rows(outputs: int) -> int:
    """Return the number of output channels used to evaluate scales."""
    return outputs // max(1, outputs // _ROWS)


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class AWQ(ScalingSolver):
    """Multiply weights by `s = a ** r / w ** q` per input channel, and divide their input by it where possible.

    `a` is the root mean square of a channel on the calibration data, and `w` the mean magnitude of the weights that
    read it, each relative to the scale of its group: weights of large activations are rounded more finely, and so are
    weights far below the largest of their group. Exponents are searched on a grid from 0 to 1; each site gets the ones
    that minimize the output error of its readers with rounded weights. That error is a quadratic form of the weights,
    so the data runs only once. For wide operators it is measured on a subset of the outputs. A scale that is not better
    on validation data is rejected. Set `feedback=True` if `GPTQ` follows: its error feedback removes much of the error
    that scales for rounding to nearest are chosen by, and with those scales it may be worse than without any.

    Args:
        feedback: Choose the scales with the smallest error after error feedback.
        explicit: Insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, where `a` is the mean magnitude, `q` is 0, and the objective is the error of
        a block; squares are the proper weights for the error of an operator. llm-compressor's "duo" scales have
        `q = 1 - r`. `feedback` is ours (`quark_fx.solvers.error_feedback.Factor.residual_curvature`).
    """

    trial: ClassVar = _HessianTrial
    steps: ClassVar[int] = 20
    """Intervals of the grid; about every fifth point is tried for each exponent, then points around the best."""

    feedback: bool = False

    @property
    def judge(self) -> type[_HessianTrial]:
        """Trial with rounding to nearest, or with error feedback."""
        return _FeedbackTrial if self.feedback else _HessianTrial

    @property
    def grid(self) -> dict[str, list[float]]:
        """Exponents to try."""
        values = [step / self.steps for step in range(self.steps + 1)]
        return {"r": values, "q": values}

    def scale(self, seen: _MeasuredSite, values: tuple[float, ...]) -> Tensor:
        """Return the scale of a pair of exponents, centered at 1."""
        r, q = values
        return _around_one(_relative(seen.root_mean_square) ** r / _relative(seen.mean_weight) ** q)

    def scales(self, seen: _MeasuredSite) -> Tensor:
        """Return the scales of all pairs of exponents."""
        magnitudes = (_relative(x) for x in (seen.root_mean_square, seen.mean_weight))
        a, w = (
            torch.stack([x**power for power in axis]) for x, axis in zip(magnitudes, self.grid.values(), strict=True)
        )
        return _around_one(a.unsqueeze(1) / w).flatten(0, 1)


def _around_one(scale: Tensor) -> Tensor:
    return scale / (scale.amax(-1, keepdim=True) * scale.amin(-1, keepdim=True)).sqrt()


def _relative(magnitude: Tensor) -> Tensor:
    return (magnitude / magnitude.max().clamp_min(1e-30)).clamp_min(_SMALLEST)


__all__ = ["AWQ"]
