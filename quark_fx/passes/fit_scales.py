"""Shrink scales to where rounding to nearest changes the outputs of operators least."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.fx import GraphModule

from quark_fx.block_walk import BlockRun, walk_blocks
from quark_fx.blocks import Unit
from quark_fx.context import Context
from quark_fx.error_feedback import working_bytes
from quark_fx.pass_manager import Change, Stage, graph_pass
from quark_fx.products import Part, Product, find_products
from quark_fx.quantized_weights import quantized_weights, shared_tensors
from quark_fx.reconstruction import note_left_alone
from quark_fx.selection import Selective
from quark_fx.sizes import BlockSize, Need, Sizes


@graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True)
@dataclass(frozen=True, kw_only=True)
class FitScales(Selective):
    """Shrink each scale of a weight to the one that rounding to nearest changes its operator's output least at.

    After `AWQ` this is the clip search of that paper; `GPTQ(fit_scales=True)` begins with it. Every operator sees
    inputs that everything before it, quantized, makes of the data, in one forward pass over it. Scales per tensor,
    powers of two, those of sub-groups, and those that a bias follows stay. What was fitted is kept unless the error on
    the data it was fitted to is higher; no data is held out.

    Source:
        Lin et al. 2024 (AWQ), the clip search of its reference code, with the sum over tokens taken beforehand.
    """

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Choose scales and codes of `gm`; return how many weights changed."""
        note_left_alone(gm, context, self)
        shared, number = shared_tensors(gm), itertools.count()
        for run in walk_blocks(gm, context, unit=Unit.OPERATOR, label="FitScales", side_by_side=False):
            if not run.finished:
                self._fit_block(run, shared, context, number)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: the second moment of a product, and a weight at work."""

        def turn(block: BlockSize) -> int:
            shapes = ((m, working_bytes(m.groups, m.outputs, m.inputs)) for m in block.matrices)
            return max((m.moment + block.entrances + working for m, working in shapes), default=0)

        def work(block: BlockSize) -> float:
            return sum(m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)

        return sizes.walk(Unit.OPERATOR, turn, streams=1, work=work)

    def _fit_block(self, run: BlockRun, shared: set[str], context: Context, number: Iterator[int]) -> None:
        weights = [w for w in quantized_weights(run.module, self.selected(context.plan)) if w.codes not in shared]
        for product in find_products(run, weights, context):
            self._fit(product, context, number)

    def _fit(self, product: Product, context: Context, number: Iterator[int]) -> None:
        h = product.second_moment(context).h
        for part in (part for part, n in zip(product.parts, number, strict=False) if context.ranks.owns(n)):
            began = time.perf_counter()
            fitted, was, now, kept = part.keep_if_lower(part.real, h, partial(_shrink_and_round, part, h))
            left = "scales left: no better" if fitted else "scales left: not free to change"
            what = "scales fitted" if fitted and kept else left
            context.note(Change(part.weight.name, what, fitted and kept, was, now, time.perf_counter() - began))


def _shrink_and_round(part: Part, h: Tensor) -> bool:
    """Fit the scales of a weight and round it to nearest; return whether they are free to change."""
    fitted = part.fit_scales(h)
    if fitted:
        grid = part.grid()
        part.store(grid.round_(grid.position(part.real.float())))
    return fitted


__all__ = ["FitScales"]
