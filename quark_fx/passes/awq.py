"""Scale up the weights that large activations multiply, so that rounding them matters less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity
from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import FloatRun, walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, parameter
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.numbers.qparams import ScaleType
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.placement import PlannedOperator
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.planned_sites import planned_sites
from quark_fx.rescale.scale_sites import Absorber, ScaledInput, ScaleSite, SiteAnalysis, apply_scale
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.system.options import Interval

_COPIES = 7
"""Of a weight in float32 while an exponent is tried: it, scaled, rounded, what is lost, products with the moment."""

_AT_ONCE = 1 << 20
"""Weights that an exponent is tried on together, about."""

_ROWS = 512
"""Output channels, at least, that exponents are judged on: every channel is scaled alike, so more add nothing."""

_TRIES = 27
"""Pairs of exponents that are tried for a site, about, on a grid of 20 steps."""

_SMALLEST = 1e-4
"""Of a channel, relative to the largest: one that is never there is scaled like one that hardly is."""


@graph_pass(distributed=True, held_out=True)
@dataclass(frozen=True, kw_only=True)
class AWQ(Selective):
    """Multiply weights by `s = a ** r / w ** q` per input channel and divide what they read by it, where something can.

    `a` is the root mean square of a channel on the calibration data, `w` the mean magnitude of the weights that read
    it, each relative to the scale of its group: what the data multiplies most is rounded finer, and so is what lies far
    below the largest weight of its group. Of the exponents it tries, on a grid from 0 to 1, each site takes those whose
    rounded weights change the outputs of the operators that read it least. That error is a quadratic form of the
    weights, so the data is read once, whatever is tried. Of wide operators every few outputs are asked. What is
    no better on validation data is dropped. The judge is rounding to nearest: error feedback (`GPTQ`) makes up for much
    of what scaling would, and at 4 bits in small groups and at 2 bits the two together may lose more than `GPTQ` alone.

    Args:
        steps: intervals of the grid; about every fifth of it is tried for each exponent, then what lies around.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Raises:
        ConfigError: for fewer than two steps.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, where `a` is the mean magnitude, `q` is 0, and the objective the error of a
        block; squares are what the error of an operator weighs by. llm-compressor's "duo" scales have `q = 1 - r`.
    """

    steps: Annotated[int, Interval("[2, inf)")] = 20
    explicit: bool = False

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Scale the sites of `gm` that quantized weights read; return how many changed."""
        planned, analysis = planned_sites(gm, context, self, explicit=self.explicit)
        waiting = _searches(gm, analysis, planned, context)
        walk, learned, noted = context.next_walk(), dict[str, Tensor](), len(context.changes)
        last = context.checkpoint.last(walk) if context.checkpoint is not None else -1
        # Scales change the values between blocks, so the data goes through the graph as it was.
        for index, run in enumerate(walk_float_blocks(copy_graph(gm), context, unit=Unit.OPERATOR, label="AWQ")):
            if index <= last:
                self._continue(gm, waiting, walk, index, context)
                continue
            _collect(run, [search for _, searches in waiting.values() for search in searches], context)
            for number in [n for n, (_, searches) in waiting.items() if all(s.moment is not None for s in searches)]:
                site, searches = waiting.pop(number)
                if (scale := self._search_scale(gm, searches, site, context)) is not None:
                    apply_scale(gm, site, scale)
                    learned[str(number)] = scale
            # A moment that waits for another block's would be lost.
            settled = all(search.moment is None for _, searches in waiting.values() for search in searches)
            if context.checkpoint is not None and context.ranks.index == 0 and settled:
                context.checkpoint.save(walk, index, learned, context.changes[noted:])
                learned, noted = {}, len(context.changes)
        return sum(change.changed for change in context.changes)

    @staticmethod
    def _continue(
        gm: GraphModule,
        waiting: _Waiting,
        walk: int,
        index: int,
        context: Context,
    ) -> None:
        """Apply what an interrupted run found in a block."""
        assert context.checkpoint is not None
        scales, changes = context.checkpoint.load(walk, index) or ({}, [])
        for number, scale in scales.items():
            apply_scale(gm, waiting[int(number)][0], scale.to(context.device))
        for change in changes:
            context.note(change)

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: Hessians of two sites, and copies of the weight an exponent is tried on."""

        def turn(block: BlockSize) -> int:
            moments = sorted((m.moment for m in block.matrices), reverse=True)
            tried = max((FLOAT32 * _COPIES * min(m.values, _AT_ONCE) + m.target for m in block.matrices), default=0)
            return 2 * sum(moments[:2]) + max(tried, block.entrances)

        def work(block: BlockSize) -> float:
            moments = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            asked = (m.values // _stride(m.outputs) for m in block.matrices)
            return sum(moments) + sum(2 * _TRIES * n * m.inputs for n, m in zip(asked, block.matrices, strict=True))

        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        return sizes.walk(Unit.OPERATOR, turn, held=scaled, work=work)

    def _search_scale(
        self, gm: GraphModule, searches: Sequence[_Search], site: ScaleSite, context: Context
    ) -> Tensor | None:
        """Return the scale that changes the outputs least, `None` if none is better."""
        start = time.perf_counter()
        name = ", ".join(search.operator.name for search in searches)
        channels = _Channels.of(gm, site, searches)
        if not bool(channels.activation.isfinite().all()):
            context.note(Change(name, "left: what it reads is too large to be squared", changed=False))
            return None
        errors: dict[_Exponents, float] = {}

        def error(exponents: _Exponents) -> float:
            if exponents not in errors:
                scale = channels.scale(exponents, self.steps)
                errors[exponents] = sum(search.error(gm, scale) for search in searches)
            return errors[exponents]

        # All ranks have to take the same; another processor may see a tie otherwise.
        best = context.ranks.gather(self._best(error))[0]
        changed = best != (0, 0)
        what = "exponents {:.2f}, {:.2f}".format(*(e / self.steps for e in best))
        scale = context.ranks.gather(channels.scale(best, self.steps))[0].to(context.device)
        judges = [replace(search, moment=search.judge, signal=None) for search in searches]
        before, after = (
            sum(judge.error(gm, s) for judge in judges) / len(judges) for s in (torch.ones_like(scale), scale)
        )
        if not changed:
            what = "left: no exponents are better"
        elif not context.ranks.gather(after < before)[0]:
            what, changed, after = "left: no better on validation data", False, before
        context.note(Change(name, what, changed, before, after, time.perf_counter() - start))
        return scale if changed else None

    def _best(self, error: Callable[[_Exponents], float]) -> _Exponents:
        """Return the exponents of the least error that is found: one after the other, nearer and nearer by."""
        steps, reach = self.steps, max(1, self.steps // 5)
        coarse = (*range(0, steps, reach), steps)
        best = min(((r, 0) for r in coarse), key=error)
        best = min(((best[0], q) for q in coarse), key=error)
        while reach := reach // 2:
            left: _Exponents | None = None
            while left != best:
                left = best
                for r, q in ((reach, 0), (0, reach), (reach, -reach)):  # what one scales up, the other may make up for
                    near = ((best[0] + sign * r, best[1] + sign * q) for sign in (-1, 1))
                    best = min([best, *(e for e in near if min(e) >= 0 and max(e) <= steps)], key=error)
        return best


_Exponents = tuple[int, int]
"""Those of the activation and of the weights, in steps of the grid."""


@dataclass(frozen=True)
class _Channels:
    """What the scales of a site are made of, per component, on the CPU.

    Attributes:
        activation: root mean squares of what is scaled, relative to the largest, shape (components,).
        weight: mean magnitudes of the weights that read it over those of their scales, likewise.
    """

    activation: Tensor
    weight: Tensor

    @classmethod
    def of(cls, gm: GraphModule, site: ScaleSite, searches: Sequence[_Search]) -> _Channels:
        """Return the averages over the operators that read the site."""
        activation, weight = (_Means.of_none(site.channels) for _ in range(2))
        for search in searches:
            activation.add(search.scaled.labels, search.squares)
            for labels, ratios in search.ratios(gm):
                weight.add(labels, ratios)
        found = activation.means.sqrt(), weight.means
        return cls(*((one / one.max().clamp_min(1e-30)).clamp_min(_SMALLEST) for one in found))

    def scale(self, exponents: _Exponents, steps: int) -> Tensor:
        """Return the scales of exponents on a grid of `steps`, around 1, shape (components,)."""
        r, q = (exponent / steps for exponent in exponents)
        scale = self.activation**r / self.weight**q
        return scale / (scale.max() * scale.min()).sqrt()


@dataclass(frozen=True)
class _Means:
    """Means of the values that belong to each component, on the CPU: sums on a GPU have no order.

    Attributes:
        total: their sums, shape (components,).
        count: how many, shape (components,).
    """

    total: Tensor
    count: Tensor

    @classmethod
    def of_none(cls, components: int) -> _Means:
        """Return those of no values."""
        return cls(torch.zeros(components, dtype=torch.float32), torch.zeros(components, dtype=torch.float32))

    def add(self, labels: Tensor, values: Tensor) -> None:
        """Add values, each to the component in `labels`, which are of their shape; -1 is none."""
        # Labels do not vary along dimensions that they were expanded in.
        alike = {dim for dim in range(values.dim()) if labels.stride(dim) == 0}
        sums = (values.sum(tuple(alike)) if alike else values).cpu()
        labels = labels[tuple(0 if dim in alike else slice(None) for dim in range(values.dim()))]
        known = labels >= 0
        self.total.index_add_(0, labels[known], sums[known])
        self.count.index_add_(0, labels[known], torch.full_like(sums[known], values.numel() / sums.numel()))

    @property
    def means(self) -> Tensor:
        """The means, 0 of no values."""
        return self.total / self.count.clamp_min(1)


@dataclass
class _Search:
    """One operator that reads a site.

    Attributes:
        scaled: what it reads.
        operator: how it is quantized.
        mapping: how it multiplies.
        absorber: its weight.
        shape: groups and inputs of it as matrices.
        moment: of what it reads on the calibration batches, once the data has been there.
        judge: of what it reads on the validation batches.
        signal: the squared output of the weight as it is, once it was needed.
    """

    scaled: ScaledInput
    operator: PlannedOperator
    mapping: LinearMap
    absorber: Absorber
    shape: tuple[int, int]
    moment: Hessian | None = None
    judge: Hessian | None = None
    signal: Tensor | None = None

    @property
    def linear(self) -> Linear:
        """The operator."""
        return self.scaled.linear

    @property
    def h(self) -> Tensor:
        """The sum of `x x'` of what it reads."""
        assert self.moment is not None
        return self.moment.h

    @property
    def squares(self) -> Tensor:
        """The mean square of each channel of what it reads, shape `(channels of the value,)`."""
        assert self.moment is not None
        found, rows = self.h.diagonal(dim1=-2, dim2=-1), self.moment.rows
        # Of a convolution an input is a channel at a place of the kernel; the groups of channels lie one after another,
        # and all of them see every row.
        found, count = (found, rows[0]) if self.mapping.kernel else (found.sum(0), rows.sum())
        return found.reshape(len(self.scaled.labels), -1).mean(1) / count.clamp_min(1)

    def ratios(self, gm: GraphModule) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for parts of the weight, the component of each value and its magnitude over that of its scale."""
        weight = self._weight(gm)
        labels, amax = self.absorber.labels.expand_as(weight), self._amax(weight)
        for piece, _ in self._pieces(weight):
            real = weight[piece].float()
            rounded = self._quantize(real, amax)
            yield labels[piece], (real / rounded.layout.spread(rounded.scale)).abs()

    def error(self, gm: GraphModule, scale: Tensor) -> float:
        """Return the relative squared error of the operator's output if its site is scaled by `scale`."""
        weight, labels = self._weight(gm), self.absorber.labels
        factor = torch.where(labels >= 0, scale[labels.clamp(min=0)], 1.0).to(weight.device).expand_as(weight)
        noise, signal = torch.zeros(2, device=weight.device, dtype=torch.float32)
        amax = self._amax(weight, factor)
        for piece, h in self._pieces(weight):
            real, s = weight[piece].float(), factor[piece]
            rounded = self._quantize(real * s, amax)
            lost = self.mapping.matrix(rounded.dequantize().div_(s).sub_(real))
            noise += ((lost @ h) * lost).sum()
            if self.signal is None:
                real = self.mapping.matrix(real)
                signal += ((real @ h) * real).sum()
        if self.signal is None:
            self.signal = signal.clamp_min(torch.finfo(torch.float32).tiny)
        return float(noise / self.signal)

    def _weight(self, gm: GraphModule) -> Tensor:
        return parameter(gm, self.absorber.parameter).detach().to(self.h.device)

    def _amax(self, weight: Tensor, factor: Tensor | float = 1.0) -> Tensor | None:
        """Return the magnitude that the scales of all parts of `weight * factor` share, if they share one."""
        assert self.operator.weight is not None
        shared = self.operator.weight.scale_type is ScaleType.FP8_E4M3
        return (weight * factor).abs().amax().float() if shared else None

    def _quantize(self, weight: Tensor, amax: Tensor | None) -> QuantizedTensor:
        op = self.operator
        assert op.weight is not None
        return quantize_tensor(weight, op.weight, linear=self.linear, amax=amax, pairs=op.pairs)

    def _pieces(self, weight: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield parts of a weight whose scales do not depend on each other, and the moments of what they multiply."""
        outputs, spec = self.linear.output_axis, self.operator.weight
        assert spec is not None
        apart = spec.granularity is not Granularity.TENSOR and (self.mapping.stacked or self.mapping.groups == 1)
        stride = _stride(weight.shape[outputs]) if apart else 1
        stacked = self.mapping.stacked
        axis, every = (0, 1) if stacked else (outputs, stride)
        size = weight.shape[axis]
        step = max(1, _AT_ONCE * size * stride // (weight.numel() * every)) * every if apart else size
        for first in range(0, size, step):
            index = [slice(None)] * weight.dim()
            index[outputs] = slice(None, None, stride)
            index[axis] = slice(first, first + step, every)
            yield tuple(index), self.h[index[0]] if stacked else self.h


_Waiting = dict[int, tuple[ScaleSite, list[_Search]]]
"""Sites whose readers have not all been seen."""


def _searches(
    gm: GraphModule, analysis: SiteAnalysis, planned: dict[Node, PlannedOperator], context: Context
) -> _Waiting:
    """Return what reads each site that can be scaled, by the number of the site; note which cannot."""
    waiting: _Waiting = {}
    for number, site in enumerate(analysis.sites):
        found = [_search(gm, site, scaled, planned) for scaled in site.inputs]
        searches = [search for search in found if search is not None]
        if searches and len(searches) == len(found):
            waiting[number] = site, searches
        else:
            names = ", ".join(planned[scaled.reader].name for scaled in site.inputs)
            context.note(Change(names, "left: not every operator that reads it has codes", changed=False))
    return waiting


def _search(
    gm: GraphModule, site: ScaleSite, scaled: ScaledInput, planned: dict[Node, PlannedOperator]
) -> _Search | None:
    op = planned.get(scaled.reader)
    if op is None or op.weight is None or op.weight.is_cast:
        return None
    mapping = scaled.linear.matrices
    absorber = next((a for a in site.consumers if a.parameter is op.weight_node), None)
    if mapping is None or absorber is None:
        return None
    groups, _, inputs = mapping.matrix(parameter(gm, absorber.parameter)).shape
    return _Search(scaled, op, mapping, absorber, (groups, inputs))


def _collect(run: FloatRun, searches: Sequence[_Search], context: Context) -> None:
    """Give those of the searches whose operators are in the block the moment of what these read."""
    known: dict[object, tuple[Hessian, Hessian]] = {}
    nodes = named_nodes(run.module)
    for search in searches:
        name, mapping = search.linear.node.name, search.mapping
        if name not in run.block.operators:
            continue
        linear = search.linear.at(nodes[name])
        key = linear.activation, replace(mapping, transposed=False)
        if key not in known:
            entrance = Entrance(run.module, linear, mapping, run.inputs)
            measure = partial(Hessian.measure, context, search.shape, entrance)
            seen = measure(batches=context.tuning)
            known[key] = seen, measure(batches=context.held_out) if context.holds_out else seen
        search.moment, search.judge = known[key]


def _stride(outputs: int) -> int:
    """Return how far those output channels lie apart that are asked."""
    return max(1, outputs // _ROWS)


__all__ = ["AWQ"]
