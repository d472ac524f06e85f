"""Scale up the weights that multiply large activations, so that rounding them causes smaller errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import Condition, PlannedSite, Reader
from quark_fx.solvers.error_feedback import DAMPING, factor, stack_chunks
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.scaling import Magnitudes, Measured, MeasuredSite, ScaleOf, ScalingSolver, scaling_solver
from quark_fx.system import accelerator

_SMALLEST = 1e-4
"""Smallest magnitude of a channel that is distinguished, relative to the largest; smaller magnitudes count as this."""

_COPIES = 7
"""Float32 copies of a weight while a scale is tried, such as scaled, rounded, error, and products with the Hessian."""

_WHOLE = 3
"""Float32 copies of a weight that is tried as a whole, in addition to its codes: error, products with the Hessian."""

_AT_ONCE = 1 << 20
"""Approximate number of weights on which a scale is tried at once."""

_ROWS = 512
"""Smallest number of output channels used to evaluate scales; all have the same scale, so more channels add little."""

_TRIES = 27
"""Approximate number of scales tried per site, on a grid of 21 by 21 points."""

_CODED_MATRICES = Condition(
    lambda op: not op.weight.is_cast and op.linear is not None and op.linear.matrices is not None,
    "not every operator that reads it is quantized to codes",
)
"""Operators that multiply matrices of codes."""

_Index = tuple[slice | Tensor, ...]
"""Index of a part of a weight."""

_Hessians = dict[Reader, tuple[Hessian, Hessian]]
"""Hessians of each operator's input, on calibration and on validation data; operators with one input share them."""


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class AWQ(ScalingSolver):
    """Multiply weights by `s = a ** r / w ** q` per input channel, and divide their input by `s` where possible.

    `a` is the root mean square of a channel on the calibration data. `w` is the mean magnitude of the weights that
    multiply the channel, each divided by the scale of its group. Weights of large activations are rounded more finely,
    and so are weights far below the largest of their group. Exponents are searched on a grid from 0 to 1; each site
    gets the exponents that minimize the output error of its readers with rounded weights. That error is a quadratic
    form of the weights, so the data runs only once. For wide operators, it is measured on a subset of the outputs. A
    scale that is not better on validation data is rejected. Set `feedback=True` if `GPTQ` follows: error feedback
    removes much of the error of rounding to nearest, and with scales chosen for that error, `GPTQ` may do worse than
    without scales.

    Args:
        feedback: Whether to choose the scales with the smallest error after error feedback.
        explicit: Whether to insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, where `a` is the mean magnitude, `q` is 0, and the objective is the error of
        a block; the error of an operator depends on the squares of its inputs. llm-compressor's "duo" scales have
        `q = 1 - r`. `feedback` is ours (`quark_fx.solvers.error_feedback.Factor.residual_curvature`).
    """

    steps: ClassVar[int] = 20
    """Number of intervals of the grid; about every fifth point of each exponent is tried, then points near the best."""

    feedback: bool = False

    @property
    def grid(self) -> dict[str, list[float]]:
        """Exponents to try."""
        exponents = [step / self.steps for step in range(self.steps + 1)]
        return {"r": exponents, "q": exponents}

    def scale(self, statistics: Magnitudes, values: tuple[float, ...]) -> Tensor:
        """Return the scale for a pair of exponents, with 1 as the geometric mean of its extremes."""
        r, q = values
        a, w = ((x / x.max().clamp_min(1e-30)).clamp_min(_SMALLEST) for x in statistics)
        s: Tensor = a**r / w**q
        return s / (s.max() * s.min()).sqrt()

    @property
    def condition(self) -> Condition:
        """Condition that operators multiply matrices of codes."""
        return _CODED_MATRICES

    def measure(
        self, gm: GraphModule, sites: Mapping[int, PlannedSite], context: Context, before: GraphModule
    ) -> Measured:
        """Walk the operators in order; yield a site when all of its readers have been measured."""
        pending, hessians = dict(sites), _Hessians()
        for run in walk_float_blocks(before, context, unit=Unit.OPERATOR, label=type(self).__name__):
            hessians |= _hessians(run, [reader for site in pending.values() for reader in site.readers], context)
            for number in [n for n, site in pending.items() if all(reader in hessians for reader in site.readers)]:
                site = pending.pop(number)
                yield number, partial(self._site, gm, site, {reader: hessians.pop(reader) for reader in site.readers})
            if not pending:
                return

    def _site(self, gm: GraphModule, site: PlannedSite, hessians: _Hessians) -> MeasuredSite:
        """Return the output error `|(Q(W s) / s - W) x|**2 / |W x|**2` of each reader, from the Hessians of `x`."""
        operators = [_Operator.of(gm, reader, hessians[reader]) for reader in site.readers]
        statistics, device = _magnitudes(site.site.channels, operators), operators[0].device
        if not bool(statistics.activation.isfinite().all()):
            raise Declined("its input is infinite or too large to be squared; check the calibration data")
        if self.feedback:
            operators = _with_feedback(operators)
        on_device = Magnitudes(*(x.to(device) for x in statistics))

        def error(scale: ScaleOf, part: int) -> Tensor:
            s = scale(on_device).to(device)
            return torch.stack([operator.error(s, part) for operator in operators])

        return MeasuredSite(statistics, lambda scale: error(scale, 0), lambda scale: [error(scale, 1)], device=device)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: both Hessians of the input, and copies of the weight while scales are tried."""
        hessians = 5 if self.feedback else 2

        def asked(m: Matrices) -> int:
            return m.values // m.outputs * _rows(m.outputs) if m.apart else m.values

        def tried(m: Matrices) -> int:
            return FLOAT32 * _COPIES * min(m.values, _AT_ONCE) if m.apart else _WHOLE * m.target + m.values

        def turn(block: BlockSize) -> int:
            both = hessians * max((m.moment for m in block.matrices), default=0)
            copy_bytes = sum(asked(m) * m.itemsize for m in block.matrices)  # or a scaled weight before it is stored
            most = max((max(copy_bytes, m.target) + tried(m) for m in block.matrices), default=0)
            return both + max(most, block.entrances)

        def work(block: BlockSize) -> float:
            moments = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            return sum(moments) + sum(2 * _TRIES * asked(m) * m.inputs for m in block.matrices)

        return sizes.walk(Unit.OPERATOR, turn, held=sizes.weight_bytes, work=work)


def _hessians(run: FloatRun, readers: Sequence[Reader], context: Context) -> _Hessians:
    """Return the Hessians of the inputs of the readers in a block, on calibration and on validation data."""
    hessians, by_entrance, nodes = _Hessians(), dict[object, tuple[Hessian, Hessian]](), named_nodes(run.module)
    for reader in readers:
        if reader.scaled.reader.name in run.block.operators:
            linear, mapping = reader.scaled.linear.at(nodes[reader.scaled.reader.name]), reader.mapping
            if (key := linear.rows_key) not in by_entrance:
                by_entrance[key] = Hessian.of_parts(context, Entrance(run.module, linear, mapping, run.inputs))
            hessians[reader] = by_entrance[key]
    return hessians


def _magnitudes(components: int, operators: Sequence[_Operator]) -> Magnitudes:
    """Return root mean squares of a site's activation, and means of its weights' magnitudes divided by their scales.

    Both are averaged over the readers on the host, which waits for the device only once.
    """
    squares, weights = Means.of_none(components), Means.of_none(components)
    ones, device = torch.ones(components, dtype=torch.float32), operators[0].device
    sums: list[tuple[Means, Tensor, Tensor, int]] = []
    with accelerator.checked_later() as checks:
        for operator in operators:
            for means, pairs in ((squares, [operator.squared]), (weights, operator.ratios(ones.to(device)))):
                sums += [(means, labels, means.sums(labels, x), x.numel()) for labels, x in pairs]
    tensors = [*(x for _, _, x, _ in sums), *(condition for condition, _ in checks)]
    on_host = iter(accelerator.moved(tensors, torch.device("cpu"), copy=False))
    for means, labels, _, size in sums:
        means.add_sums(labels, next(on_host), size)
    accelerator.read((), [(condition, error) for condition, (_, error) in zip(on_host, checks, strict=True)])
    return Magnitudes(squares.means.sqrt(), weights.means)


def _with_feedback(operators: Sequence[_Operator]) -> list[_Operator]:
    """Return operators that measure only the error that remains after error feedback.

    Rounding errors are assumed to be independent, and as large as with rounding to nearest. Order and damping come from
    the Hessian of the unscaled input, although a scale changes them a little.

    Raises:
        Declined: If a Hessian cannot be factored.
    """
    residuals: dict[tuple[Hessian, Hessian], tuple[Tensor, ...]] = {}
    for calibration, validation in dict.fromkeys(operator.hessians for operator in operators):
        try:
            parts = [
                factor(calibration.h[chunk], damping=DAMPING, by_activation=True).residual_curvature(
                    calibration.h[chunk], validation.h[chunk]
                )
                for chunk in stack_chunks(calibration.h)
            ]
        except CalibrationError as error:
            raise Declined(str(error)) from error
        residuals[calibration, validation] = tuple(torch.cat(curvatures) for curvatures in zip(*parts, strict=True))
    return [replace(operator, residuals=residuals[operator.hessians]) for operator in operators]


@dataclass(frozen=True, eq=False)
class _Operator:
    """A reader of a site, with its squared output as a quadratic form of its weight, on the device of its Hessians.

    Attributes:
        reader: The operator.
        shape: Shape of the operator's weight.
        hessians: Hessians of the operator's input, on calibration and on validation data.
        parts: Parts of the weight for which scales are tried, each as (index, labels, values); the scales of different
            parts are independent.
        largest: Labels, and the largest magnitude of the weights with each label, if all scales depend on the largest
            magnitude of the whole weight; otherwise `None`.
        residuals: Factor of each input's squared error, on calibration and on validation data, shape (groups, inputs)
            each; `None` for the quadratic form, in which errors of dependent inputs add up or cancel.
    """

    reader: Reader
    shape: torch.Size
    hessians: tuple[Hessian, Hessian]
    parts: tuple[tuple[_Index, Tensor, Tensor], ...]
    largest: tuple[Tensor, Tensor] | None
    residuals: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader, hessians: tuple[Hessian, Hessian]) -> _Operator:
        """Read the weight of an operator of `gm`."""
        weight, labels, device, largest = reader.value(gm), reader.labels, hessians[0].h.device, None
        if reader.operator.weight.scale.has_unit:
            alike = [dim for dim, size in enumerate(labels.shape) if size == 1]
            ends = (weight.amin(alike, keepdim=True), weight.amax(alike, keepdim=True)) if alike else (weight, weight)
            largest = labels.to(device), torch.maximum(-ends[0], ends[1]).float().to(device)
        indices = _parts(reader, weight)
        parts = tuple((i, _labels_at(labels, i).to(device), weight[i].to(device)) for i in indices)
        return cls(reader, weight.shape, hessians, parts, largest)

    @property
    def device(self) -> torch.device:
        """Device of the Hessians."""
        return self.hessians[0].h.device

    def rounded(self, scale: Tensor) -> Iterator[tuple[_Index, Tensor, Tensor, QuantizedTensor]]:
        """Yield, for each part, its index, its values, the factors of the values, and the quantized products."""
        op, amax = self.reader.operator, None
        if self.largest is not None:
            amax = (self.largest[1] * per_element(self.largest[0], scale)).amax()
        for index, labels, part in self.parts:
            real, s = part.float(), per_element(labels, scale)
            yield index, real, s, quantize_tensor(real * s, op.weight, linear=op.linear, amax=amax, pairs=op.pairs)

    @property
    def squared(self) -> tuple[Tensor, Tensor]:
        """Component and mean square of each input channel, each of shape `(channels of the value,)`."""
        hessian, labels, kernel = self.hessians[0], self.reader.scaled.labels, self.reader.mapping.kernel
        squares, rows = hessian.h.diagonal(dim1=-2, dim2=-1), hessian.rows
        # An input of a convolution is a channel at one position of the kernel. Groups of channels are stored one after
        # another, and each group reads all rows.
        squares, count = (squares, rows[0]) if kernel else (squares.sum(0), rows.sum())
        return labels, squares.reshape(len(labels), -1).mean(1) / count.clamp_min(1)

    def ratios(self, ones: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for parts of the weight, the component of each value and its magnitude divided by its scale."""
        for index, real, _, rounded in self.rounded(ones):
            yield self.reader.labels.expand(self.shape)[index], (real / rounded.layout.spread(rounded.scale)).abs()

    def error(self, scale: Tensor, part: int) -> Tensor:
        """Return the relative squared error of the output with the site scaled by `scale`, shape ().

        Args:
            scale: The scale.
            part: 0 for calibration data, 1 for validation data.
        """
        noise = torch.zeros((), device=self.device, dtype=torch.float32)
        residual = None if self.residuals is None else self.residuals[part]
        for index, real, s, rounded in self.rounded(scale):
            noise += self._square(index, rounded.dequantize().div_(s).sub_(real), part, residual)
        return noise / self._signals[part]

    @cached_property
    def _signals(self) -> list[Tensor]:
        """Squared output of the unscaled float weight on each part of the data."""
        signals = torch.zeros(2, device=self.device, dtype=torch.float32)
        for part in range(2):
            for index, _, values in self.parts:
                signals[part] += self._square(index, values.float(), part)
        return [*signals.clamp_min(torch.finfo(torch.float32).tiny)]

    def _square(self, index: _Index, values: Tensor, part: int, residual: Tensor | None = None) -> Tensor:
        """Return the squared output for values of a part of the weight, or, with `residual`, their weighted squares."""
        mapping = self.reader.mapping
        matrix, group = mapping.matrix(values), index[0] if mapping.stacked else slice(None)
        if residual is None:
            return ((matrix @ self.hessians[part].h[group]) * matrix).sum()
        return (matrix.square().sum(-2) * residual[group]).sum()


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
    """Return the labels of a part of a weight; dimensions along which labels do not change stay at size 1."""
    return labels[tuple(slice(None) if size == 1 else i for i, size in zip(index, labels.shape, strict=True))]


def _rows(outputs: int) -> int:
    """Return the number of output channels used to evaluate scales."""
    return outputs // max(1, outputs // _ROWS)


__all__ = ["AWQ"]
