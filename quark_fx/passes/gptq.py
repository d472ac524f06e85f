"""Choose codes column by column, so that each column makes up for the errors of those before it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from torch.fx import GraphModule

from quark_fx.block_walk import BlockRun, walk_blocks
from quark_fx.blocks import Unit
from quark_fx.context import Context
from quark_fx.error_feedback import working_bytes
from quark_fx.memory import give_back
from quark_fx.options import Interval
from quark_fx.pass_manager import Change, Stage, graph_pass
from quark_fx.products import Factors, Part, Product, find_products
from quark_fx.quantized_weights import quantized_weights, share_changed, shared_tensors
from quark_fx.reconstruction import note_left_alone
from quark_fx.second_moment import SecondMoment
from quark_fx.selection import Selective
from quark_fx.sizes import FLOAT32, BlockSize, Need, Sizes


@graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True)
@dataclass(frozen=True, kw_only=True)
class GPTQ(Selective):
    """Round the weights of matrix products and convolutions so that their outputs, not the weights, are nearest.

    Scales do not change on the way (static groups). Every operator sees inputs that everything before it, quantized,
    makes of the data (true sequential), in one forward pass over it. Operators that read one value share its second
    moment and its factors; of a stack of experts each has the tokens routed to it, and borrows from the average
    of all where they are few. Positions that the data's `attention_mask` leaves out do not count, but for experts.
    A weight keeps its codes where the error on the data that it was rounded for would be higher; no data is held out.

    Args:
        damping: share of the mean diagonal of the second moment that is added to it.
        by_activation: round the inputs that matter most first (activation order; no trace of it in the result).
        asymmetry: how far the target moves from what the float weight makes of the quantized inputs (0, the paper's)
            to what the float model makes of its own inputs (1), at the cost of a second forward pass.
        fit_scales: first shrink each scale to the one that this rounding is expected to lose least with.

    Raises:
        ConfigError: for a value out of range.

    Source:
        Frantar et al. 2023 (GPTQ); for `asymmetry` the objective of Li et al. 2025 (GPTAQ) and Zhang et al. 2025
        (Qronos), minimised column by column.
    """

    damping: Annotated[float, Interval("(0, 1]")] = 0.01
    by_activation: bool = True
    asymmetry: Annotated[float, Interval("[0, 1]")] = 0.0
    fit_scales: bool = False

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Choose the codes of `gm`; return how many weights changed."""
        note_left_alone(gm, context, self)
        shared = shared_tensors(gm)
        walk = walk_blocks(gm, context, unit=Unit.OPERATOR, label="GPTQ", side_by_side=self.asymmetry > 0)
        number = itertools.count()
        for run in walk:
            if not run.finished:
                self._round_block(run, shared, context, number)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: the second moment of a product, its factor, and a piece of a weight at work."""
        moments = 2 if self.asymmetry else 1

        def turn(block: BlockSize) -> int:
            # Rows of another dtype are copied.
            copied = (FLOAT32 * m.rows * m.inputs * (m.itemsize != FLOAT32) for m in block.matrices)
            pairs = zip(block.matrices, copied, strict=True)
            measured = (moments * m.moment + block.entrances + rows for m, rows in pairs)
            shapes = ((m, working_bytes(m.groups, m.outputs, m.inputs)) for m in block.matrices)
            # A target is solved for, and scales are fitted, with another matrix of the size of a factor.
            kept = moments + bool(self.asymmetry or self.fit_scales)
            rounded = (kept * m.moment + working + bool(self.asymmetry) * m.target for m, working in shapes)
            return max((*measured, *rounded), default=0)

        def work(block: BlockSize) -> float:
            return sum(m.inputs * (m.inputs * m.rows * sizes.batches + 2 * m.values) for m in block.matrices)

        streams = 2 if self.asymmetry else 1
        return sizes.walk(Unit.OPERATOR, turn, streams=streams, work=work)

    def _round_block(self, run: BlockRun, shared: set[str], context: Context, number: Iterator[int]) -> None:
        weights = [w for w in quantized_weights(run.module, self.selected(context.plan)) if w.codes not in shared]
        for product in find_products(run, weights, context):
            self._round(product, context, number)

    def _round(self, product: Product, context: Context, number: Iterator[int]) -> None:
        began = time.perf_counter()
        moment = product.second_moment(context, shifted=self.asymmetry > 0)
        parts = [part for part, n in zip(product.parts, number, strict=False) if context.ranks.owns(n)]
        if not parts:
            return
        factors = product.factors(moment, damping=self.damping, by_activation=self.by_activation)
        shared = (time.perf_counter() - began) / len(parts)
        for part in parts:
            self._round_part(part, moment, factors, context, time.perf_counter() - shared)

    def _round_part(
        self,
        part: Part,
        moment: SecondMoment,
        factors: Factors,
        context: Context,
        began: float,
    ) -> None:
        give_back()
        target, nearest = part.target(moment, factors, self.asymmetry), part.codes()

        def round_() -> tuple[bool, float]:
            stays = self.fit_scales and not part.fit_scales_to_feedback(target, factors)
            return stays, part.round(target, factors)

        (stays, damping), was, now, kept = part.keep_if_lower(target, moment.h, round_)
        share = share_changed(nearest, part.codes())
        left = "; scales left: not free to change" * stays
        damped = f"; damped by {damping:g}" * (damping > self.damping)
        what = f"{share:.1%} of the codes{left}{damped}{_few(moment)}" if kept else "left: no better than it was"
        context.note(Change(part.weight.name, what, share > 0, was, now, time.perf_counter() - began))


def _few(moment: SecondMoment) -> str:
    """Say which of a stack of experts saw fewer rows than it has inputs."""
    rows, inputs = moment.rows, moment.h.shape[-1]
    few = [f"{expert} ({count})" for expert, count in enumerate(rows.tolist()) if count < inputs]
    return f"; few rows: expert {', '.join(few)}" if len(rows) > 1 and few else ""


__all__ = ["GPTQ"]
