"""Judge a scale by the Hessian of what operators read: their weights in codes, activations in float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.quant_config import Granularity
from quark_fx.engine.block_walk import FloatRun, walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes
from quark_fx.numbers.qparams import ScaleType
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.placement import Coded
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import PlannedSite, Reader
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.scaling import ScaleOf, Trial

_COPIES = 7
"""Of a weight in float32 while a scale is tried: it, scaled, rounded, what is lost, products with the Hessian."""

_AT_ONCE = 1 << 20
"""Weights that a scale is tried on together, about."""

_ROWS = 512
"""Output channels, at least, that scales are judged on: every channel is scaled alike, so more add nothing."""

_TRIES = 27
"""Scales that are tried for a site, about, on a grid of 21 by 21 points."""


_Found = dict[Reader[LinearMap], tuple[Hessian, Hessian]]
"""The Hessians of what operators read, of calibration and of validation data."""


class HessianTrial(Trial[LinearMap]):
    """A site and the outputs that rounded weights lose there, quadratic forms of the weights."""

    unread = "not every operator that reads it has codes"

    def __init__(self, gm: GraphModule, site: PlannedSite[LinearMap], found: _Found) -> None:
        self.calibration = tuple(_Form(gm, reader, found[reader][0]) for reader in site.readers)
        self.validation = tuple(_Form(gm, reader, found[reader][1]) for reader in site.readers)
        self.seen = MeasuredSite(site.site.channels, self.calibration)
        if not bool(self.seen.root_mean_square.isfinite().all()):
            self.refusal = "what it reads is too large to be squared"

    @classmethod
    def reads(cls, operator: Coded) -> LinearMap | None:
        """Return how an operator multiplies matrices of codes, `None` if it does not."""
        return None if operator.linear is None or operator.weight.is_cast else operator.linear.matrices

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite[LinearMap]], context: Context, label: str
    ) -> Iterator[tuple[int, _Found]]:
        """Walk the operators in order; a site comes when the last of its readers was measured."""
        left, found = dict(sites), _Found()
        for run in walk_float_blocks(gm, context, unit=Unit.OPERATOR, label=label):
            found |= _measured(run, [reader for site in left.values() for reader in site.readers], context)
            for number in [n for n, site in left.items() if all(reader in found for reader in site.readers)]:
                yield number, {reader: found.pop(reader) for reader in left.pop(number).readers}
            if not left:
                return

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return what a run takes: both Hessians of what is read, and copies of the weight a scale is tried on."""

        def turn(block: BlockSize) -> int:
            both = 2 * max((m.moment for m in block.matrices), default=0)
            tried = max((FLOAT32 * _COPIES * min(m.values, _AT_ONCE) + m.target for m in block.matrices), default=0)
            return both + max(tried, block.entrances)

        def work(block: BlockSize) -> float:
            moments = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            asked = (m.values // _stride(m.outputs) for m in block.matrices)
            return sum(moments) + sum(2 * _TRIES * n * m.inputs for n, m in zip(asked, block.matrices, strict=True))

        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        return sizes.walk(Unit.OPERATOR, turn, held=scaled, work=work)

    def error(self, scale_of: ScaleOf) -> float:
        """Return the error on calibration data, summed over the readers."""
        scale = scale_of(self.seen)
        return sum(form.error(scale) for form in self.calibration)

    def verdicts(self, scale_of: ScaleOf) -> list[float]:
        """Return the error on validation data, averaged over the readers."""
        scale = scale_of(self.seen)
        return [sum(form.error(scale) for form in self.validation) / len(self.validation)]


@dataclass(frozen=True, eq=False)
class MeasuredSite:
    """What is seen of a site by Hessians: per component, averaged over what reads it, on the CPU."""

    components: int
    forms: tuple[_Form, ...]

    @cached_property
    def root_mean_square(self) -> Tensor:
        """The root mean square of the activation, shape (components,)."""
        squares = Means.of_none(self.components)
        for form in self.forms:
            squares.add(form.reader.scaled.labels, form.squares)
        return squares.means.sqrt()

    @cached_property
    def mean_weight(self) -> Tensor:
        """The mean magnitude of the weights, each over its scale, shape (components,)."""
        weights = Means.of_none(self.components)
        for form in self.forms:
            for labels, ratios in form.ratios():
                weights.add(labels, ratios)
        return weights.means


@dataclass(frozen=True, eq=False)
class _Form:
    """The squared output of one operator as a quadratic form of its weight.

    Attributes:
        gm: the graph that has the weight.
        reader: the operator.
        seen: of what it reads.
    """

    gm: GraphModule
    reader: Reader[LinearMap]
    seen: Hessian

    @property
    def squares(self) -> Tensor:
        """The mean square of each channel of what it reads, shape `(channels of the value,)`."""
        found, rows = self.seen.h.diagonal(dim1=-2, dim2=-1), self.seen.rows
        # Of a convolution an input is a channel at a place of the kernel; the groups of channels lie one after another,
        # and all of them see every row.
        found, count = (found, rows[0]) if self.reader.how.kernel else (found.sum(0), rows.sum())
        return found.reshape(len(self.reader.scaled.labels), -1).mean(1) / count.clamp_min(1)

    def ratios(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for parts of the weight, the component of each value and its magnitude over that of its scale."""
        weight = self._weight
        labels, amax = self.reader.labels.expand_as(weight), self._amax(weight)
        for piece, _ in self._pieces(weight):
            real = weight[piece].float()
            rounded = self._quantize(real, amax)
            yield labels[piece], (real / rounded.layout.spread(rounded.scale)).abs()

    def error(self, scale: Tensor) -> float:
        """Return the relative squared error of the operator's output if its site is scaled by `scale`."""
        weight = self._weight
        factor = per_element(self.reader.labels, scale).to(weight.device).expand_as(weight)
        noise = torch.zeros((), device=weight.device, dtype=torch.float32)
        amax = self._amax(weight, factor)
        for piece, h in self._pieces(weight):
            real, s = weight[piece].float(), factor[piece]
            rounded = self._quantize(real * s, amax)
            lost = self.reader.how.matrix(rounded.dequantize().div_(s).sub_(real))
            noise += ((lost @ h) * lost).sum()
        return float(noise / self._signal)

    @cached_property
    def _signal(self) -> Tensor:
        """The squared output of the weight as it is."""
        signal, weight = torch.zeros((), device=self.seen.h.device, dtype=torch.float32), self._weight
        for piece, h in self._pieces(weight):
            real = self.reader.how.matrix(weight[piece].float())
            signal += ((real @ h) * real).sum()
        return signal.clamp_min(torch.finfo(torch.float32).tiny)

    @property
    def _weight(self) -> Tensor:
        return self.reader.value(self.gm).to(self.seen.h.device)

    def _amax(self, weight: Tensor, factor: Tensor | float = 1.0) -> Tensor | None:
        """Return the magnitude that the scales of all parts of `weight * factor` share, if they share one."""
        shared = self.reader.operator.weight.scale_type is ScaleType.FP8_E4M3
        return (weight * factor).abs().amax().float() if shared else None

    def _quantize(self, weight: Tensor, amax: Tensor | None) -> QuantizedTensor:
        op = self.reader.operator
        return quantize_tensor(weight, op.weight, linear=op.linear, amax=amax, pairs=op.pairs)

    def _pieces(self, weight: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield parts of a weight whose scales do not depend on each other, and the Hessians of what they multiply."""
        outputs, spec, mapping = self.reader.scaled.linear.output_axis, self.reader.operator.weight, self.reader.how
        apart = spec.granularity is not Granularity.TENSOR and (mapping.stacked or mapping.groups == 1)
        stride = _stride(weight.shape[outputs]) if apart else 1
        axis, every = (0, 1) if mapping.stacked else (outputs, stride)
        size = weight.shape[axis]
        step = max(1, _AT_ONCE * size * stride // (weight.numel() * every)) * every if apart else size
        for first in range(0, size, step):
            index = [slice(None)] * weight.dim()
            index[outputs] = slice(None, None, stride)
            index[axis] = slice(first, first + step, every)
            yield tuple(index), self.seen.h[index[0]] if mapping.stacked else self.seen.h


def _measured(run: FloatRun, readers: Sequence[Reader[LinearMap]], context: Context) -> _Found:
    """Return the Hessians of the readers in a block."""
    found, known = _Found(), dict[object, tuple[Hessian, Hessian]]()
    nodes = named_nodes(run.module)
    for reader in readers:
        if reader.scaled.reader.name not in run.block.operators:
            continue
        linear, mapping = reader.scaled.linear.at(nodes[reader.scaled.reader.name]), reader.how
        if (key := Entrance.key(linear, mapping)) not in known:
            measure = partial(Hessian.measure, context, Entrance(run.module, linear, mapping, run.inputs))
            seen = measure(batches=context.calibration)
            known[key] = seen, measure(batches=context.validation) if context.has_validation else seen
        found[reader] = known[key]
    return found


def _stride(outputs: int) -> int:
    """Return how far those output channels lie apart that are asked."""
    return max(1, outputs // _ROWS)


__all__ = ["HessianTrial", "MeasuredSite"]
