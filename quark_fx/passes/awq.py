"""Scale up the weights that large activations multiply, so that rounding them matters less."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.block_walk import FloatRun, walk_float_blocks
from quark_fx.blocks import Unit
from quark_fx.config import Granularity
from quark_fx.context import Context
from quark_fx.errors import ConfigError
from quark_fx.graph import named_nodes, parameter
from quark_fx.linear_map import LinearMap, linear_map
from quark_fx.operators import argument
from quark_fx.pass_manager import Change, copy_graph, graph_pass
from quark_fx.placement import PlannedOperator
from quark_fx.planned_sites import planned_sites
from quark_fx.qparams import ScaleType
from quark_fx.scale_sites import Absorber, ScaledInput, ScaleSite, SiteAnalysis, apply_scale
from quark_fx.second_moment import Entrance, SecondMoment
from quark_fx.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.weights import quantize_tensor

_COPIES = 7
"""Of a weight in float32 while an exponent is tried: it, scaled, rounded, what is lost, products with the moment."""

_AT_ONCE = 1 << 20
"""Weights that an exponent is tried on together, about."""

_ROWS = 512
"""Output channels, at least, that exponents are judged on: every channel is scaled alike, so more add nothing."""

_SMALLEST = 1e-4
"""Of an average magnitude: an input that is never there is scaled like one that hardly is."""


@graph_pass(distributed=True)
@dataclass(frozen=True, kw_only=True)
class AWQ:
    """Multiply weights by `s = a ** r` per input channel and divide what they read by it, where something absorbs that.

    `a` is the mean magnitude of a channel on the calibration data. Of a grid of exponents `r` from 0 (leave it alone)
    to 1 each site takes the one whose rounded weights change the outputs of the operators that read it least: the
    error is a quadratic form of the weights, so the data is read once, whatever the grid. Of wide operators every few
    outputs are asked.

    Args:
        steps: intervals of the grid; the best of every other one is refined.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Raises:
        ConfigError: for fewer than two steps.

    Source:
        Lin et al. 2024 (AWQ), section 3.2, with the error of the operators' outputs as objective.
    """

    steps: int = 20
    explicit: bool = False

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"the grid has two steps or more, not {self.steps}")

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Scale the sites of `gm` that quantized weights read; return how many changed."""
        planned, analysis = planned_sites(gm, context, explicit=self.explicit)
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
        """Return what a run takes: second moments of two sites, and copies of the weight an exponent is tried on."""

        def turn(block: BlockSize) -> int:
            moments = sorted((m.moment for m in block.matrices), reverse=True)
            tried = max((FLOAT32 * _COPIES * min(m.values, _AT_ONCE) + m.target for m in block.matrices), default=0)
            return sum(moments[:2]) + max(tried, block.entrances)

        def work(block: BlockSize) -> float:
            tries = self.steps // 2 + 3
            moments = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            asked = (m.values // _stride(m.outputs) for m in block.matrices)
            return sum(moments) + sum(2 * tries * n * m.inputs for n, m in zip(asked, block.matrices, strict=True))

        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        return sizes.walk(Unit.OPERATOR, turn, held=scaled, work=work)

    def _search_scale(
        self, gm: GraphModule, searches: Sequence[_Search], site: ScaleSite, context: Context
    ) -> Tensor | None:
        """Return the scale that changes the outputs least, `None` if none is better."""
        start = time.perf_counter()
        magnitude = _magnitudes(site, searches)
        errors: dict[float, float] = {}

        def error(exponent: float) -> float:
            if exponent not in errors:
                scale = _scales(magnitude, exponent)
                errors[exponent] = sum(search.error(gm, scale) for search in searches)
            return errors[exponent]

        coarse = min((step / self.steps for step in range(0, self.steps + 1, 2)), key=error)
        near = [exponent for exponent in (coarse - 1 / self.steps, coarse + 1 / self.steps) if 0 <= exponent <= 1]
        best = min([coarse, *near], key=error)
        best = context.ranks.gather(best)[0]  # another processor may see a tie otherwise
        changed = best > 0
        name = ", ".join(search.operator.name for search in searches)
        what = f"exponent {best:.2f}" if changed else "left: no exponent is better"
        before, after = errors[0.0] / len(searches), errors[best] / len(searches)
        context.note(Change(name, what, changed, before, after, time.perf_counter() - start))
        return _scales(magnitude, best) if changed else None


@dataclass
class _Search:
    """One operator that reads a site.

    Attributes:
        scaled: what it reads.
        operator: how it is quantized.
        mapping: how it multiplies.
        absorber: its weight.
        shape: groups and inputs of it as matrices.
        moment: of what it reads, once the data has been there.
        signal: the squared output of the weight as it is, once it was needed.
    """

    scaled: ScaledInput
    operator: PlannedOperator
    mapping: LinearMap
    absorber: Absorber
    shape: tuple[int, int]
    moment: SecondMoment | None = None
    signal: Tensor | None = None

    @property
    def h(self) -> Tensor:
        """The sum of `x x'` of what it reads."""
        assert self.moment is not None
        return self.moment.h

    def error(self, gm: GraphModule, scale: Tensor) -> float:
        """Return the relative squared error of the operator's output if its site is scaled by `scale`."""
        op = self.operator
        assert op.row is not None
        assert op.weight is not None
        weight = parameter(gm, self.absorber.parameter).detach().to(self.h.device)
        labels = self.absorber.labels.to(weight.device)
        factor = torch.where(labels >= 0, scale[labels.clamp(min=0)], 1.0).expand_as(weight)
        axes = op.row.output_axis, op.row.input_axis
        stacked = op.row.kind in ("experts", "linear") and weight.dim() > 2
        noise, signal = torch.zeros(2, device=weight.device)
        amax = (weight * factor).abs().amax().float() if op.weight.scale_type is ScaleType.FP8_E4M3 else None
        if self._rows_apart:
            some = (slice(None),) * (axes[0] % weight.dim()) + (slice(None, None, _stride(weight.shape[axes[0]])),)
            weight, factor = weight[some], factor[some]
        for piece, h in self._pieces(weight):
            real, s = weight[piece].float(), factor[piece]
            rounded = quantize_tensor(
                real * s, op.weight, output_axis=axes[0], input_axis=axes[1], stacked=stacked, amax=amax
            )
            lost = self.mapping.matrix(rounded.dequantize().div_(s).sub_(real))
            noise += ((lost @ h) * lost).sum()
            if self.signal is None:
                real = self.mapping.matrix(real)
                signal += ((real @ h) * real).sum()
        if self.signal is None:
            self.signal = signal.clamp_min(torch.finfo(torch.float32).tiny)
        return float(noise / self.signal)

    @property
    def _rows_apart(self) -> bool:
        """Whether the scales of an output do not depend on those of another."""
        spec = self.operator.weight
        assert spec is not None
        return spec.granularity is not Granularity.TENSOR and (self.mapping.stacked or self.mapping.groups == 1)

    def _pieces(self, weight: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield parts of a weight whose scales do not depend on each other, and the moments of what they multiply."""
        row = self.operator.row
        assert row is not None
        axis = 0 if self.mapping.stacked else row.output_axis % weight.dim()
        size = weight.shape[axis]
        step = max(1, _AT_ONCE * size // weight.numel()) if self._rows_apart else size
        for first in range(0, size, step):
            part = slice(first, first + step)
            yield (slice(None),) * axis + (part,), self.h[part] if self.mapping.stacked else self.h


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
    if op is None or op.row is None or op.weight is None or op.weight.is_cast or op.weight_node is None:
        return None
    weight = parameter(gm, op.weight_node)
    mapping = linear_map(op.node, op.row, weight)
    absorber = next((a for a in site.consumers if a.parameter is op.weight_node), None)
    if mapping is None or absorber is None:
        return None
    groups, _, inputs = mapping.matrix(weight).shape
    return _Search(scaled, op, mapping, absorber, (groups, inputs))


def _collect(run: FloatRun, searches: Sequence[_Search], context: Context) -> None:
    """Give those of the searches whose operators are in the block the moment of what these read."""
    known: dict[object, SecondMoment] = {}
    nodes = named_nodes(run.module)
    for search in searches:
        name, row, mapping = search.operator.node.name, search.operator.row, search.mapping
        if name not in run.block.operators:
            continue
        assert row is not None
        key = argument(nodes[name], row.activations[0]), replace(mapping, transposed=False)
        if key not in known:
            entrance = Entrance(run.module, nodes[name], row, mapping, run.inputs)
            known[key] = SecondMoment.measure(context, search.shape, entrance, magnitudes=True)
        search.moment = known[key]


def _magnitudes(site: ScaleSite, searches: Sequence[_Search]) -> Tensor:
    """Return the mean magnitude of what the site's components scale, shape (components,)."""
    total, count = (torch.zeros(site.channels, device=searches[0].h.device) for _ in range(2))
    for search in searches:
        assert search.moment is not None
        assert search.moment.magnitude is not None
        mean = search.moment.magnitude.sum(0) / max(1, int(search.moment.rows.sum()))
        labels = search.scaled.labels.to(mean.device)
        # Of a convolution an input is a channel at a place of the kernel; the groups of channels lie one after another.
        mean = search.moment.magnitude.reshape(-1) if search.mapping.kernel else mean
        mean = mean.reshape(len(labels), -1).mean(1)
        known = labels >= 0
        total.index_add_(0, labels[known], mean[known])
        count.index_add_(0, labels[known], torch.ones_like(mean[known]))
    return total / count.clamp_min(1)


def _stride(outputs: int) -> int:
    """Return how far those output channels lie apart that are asked."""
    return max(1, outputs // _ROWS)


def _scales(magnitude: Tensor, exponent: float) -> Tensor:
    """Return the scales of an exponent, around 1, shape (components,)."""
    scale = magnitude.clamp_min(_SMALLEST) ** exponent
    return scale / (scale.max() * scale.min()).sqrt()


__all__ = ["AWQ"]
