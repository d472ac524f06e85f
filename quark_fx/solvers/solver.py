"""A solver proposes what one operator's weight should hold; the engine here decides, and does everything else.

The engine walks the blocks, measures what solvers read, on several ranks if there are any, shares it among operators
that read one value, and judges every proposal on validation data: what is no better there is dropped.
Where data is scarce, what was accepted is then learned from all of it. It reports the errors, resumes, and predicts
memory.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import BlockRun, walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import note_left_alone, quantized_weights, share_changed, shared_tensors
from quark_fx.engine.sizes import FLOAT32, BlockSize, Matrices, Need, Sizes
from quark_fx.errors import CalibrationError
from quark_fx.graph.pass_manager import Change, Stage, graph_pass
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.products import Part, Product, find_products
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.system.memory import give_back

S = TypeVar("S", bound=type)

_PLENTY = 64
"""Calibration rows per input that are enough: the excess error over infinite data is about inputs / rows, so an eighth
more rows changes the error by less than 0.3 %. With fewer rows, an accepted operator is solved once more with the
validation rows included; the report keeps the errors measured before that."""

_DAMPING = 1e-3
"""Of the Hessian of the validation rows, where a target is solved for."""


@dataclass(frozen=True)
class Proposal:
    """What a solver would have an operator multiply by.

    Attributes:
        weight: with other codes, other scales, or both.
        remark: appended to the operator's row in the report.
        asymmetry: share of the way from what the float weight makes of the quantized inputs to what the float model
            makes of its own, for those who read `Hessian.shift`: the target it is judged by.
    """

    weight: QuantizedMatrix
    remark: str = ""
    asymmetry: float = 0.0


@dataclass(frozen=True)
class Skip:
    """Why a solver proposes nothing for an operator."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Solver(Selective, ABC):
    """What chooses codes and scales of one operator after another from the Hessian of what it reads.

    A subclass is a frozen dataclass of options with `solve`, decorated with `solver`. It is a pass of the quantized
    stage, by its class's name.
    """

    @property
    def reads_float(self) -> bool:
        """Whether `Hessian.shift` is measured, at the cost of a second forward pass."""
        return False

    @abstractmethod
    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        """Return what the operator should multiply by.

        Args:
            weight: the float weight, and what it is quantized to now.
            seen: the Hessian of what it reads on the calibration batches, everything before it quantized. Operators
                that read one value get the same object.

        Raises:
            CalibrationError: for data that cannot be learned from; the engine adds the operators' names.
        """

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes that `solve` takes beside the Hessian; default: six float32 copies of the weight."""
        return 6 * FLOAT32 * matrices.values

    def working_operations(self, matrices: Matrices) -> float:
        """Return the multiplications of `solve`; default: a product of the weight and the Hessian."""
        return matrices.inputs * matrices.values

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Choose weights of `gm`; return how many changed."""
        note_left_alone(gm, context, self)
        shared, number = shared_tensors(gm), itertools.count()
        for weight in quantized_weights(gm, self.selected(context.plan)):
            if weight.linear.matrices is None and weight.codes not in shared:
                context.note(Change(weight.name, "left: unsupported weight layout", changed=False))
        label = type(self).__name__
        for run in walk_blocks(gm, context, unit=Unit.OPERATOR, label=label, side_by_side=self.reads_float):
            for product in [] if run.finished else self._products(run, shared, context):
                self._solve_product(product, context, number)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: the Hessians of a product on both kinds of batches, and `working_bytes`."""
        hessians = 2 * (1 + self.reads_float)

        def turn(block: BlockSize) -> int:
            # Rows of another dtype are copied.
            copied = (FLOAT32 * m.rows * m.inputs * (m.itemsize != FLOAT32) for m in block.matrices)
            pairs = zip(block.matrices, copied, strict=True)
            measured = (hessians * m.moment + block.entrances + rows for m, rows in pairs)
            solved = (hessians * m.moment + self.working_bytes(m) for m in block.matrices)
            return max((*measured, *solved), default=0)

        def work(block: BlockSize) -> float:
            measured = (m.inputs * m.inputs * m.rows * sizes.batches for m in block.matrices)
            return sum(measured) + sum(map(self.working_operations, block.matrices))

        return sizes.walk(Unit.OPERATOR, turn, streams=1 + self.reads_float, work=work)

    def _products(self, run: BlockRun, shared: set[str], context: Context) -> list[Product]:
        weights = [w for w in quantized_weights(run.module, self.selected(context.plan)) if w.codes not in shared]
        return find_products(run, weights)

    def _solve_product(self, product: Product, context: Context, number: Iterator[int]) -> None:
        began = time.perf_counter()
        seen = product.hessian(context, shifted=self.reads_float, batches=context.tuning)
        judge = seen
        if context.holds_out:
            judge = product.hessian(context, shifted=self.reads_float, batches=context.held_out)
        parts = [part for part, n in zip(product.parts, number, strict=False) if context.ranks.owns(n)]
        try:
            answers = [(part, self._judged(part, seen, judge)) for part in parts]
            few = int(seen.rows.sum()) < _PLENTY * seen.rows.numel() * seen.h.shape[-1]
            again = context.holds_out and few
            if again:
                seen.add_rows_of(judge)
            del judge
            changes = [self._kept(part, answer, seen if again else None) for part, answer in answers]
        except CalibrationError as error:
            raise product.blamed(error) from error
        seconds = (time.perf_counter() - began) / max(1, len(parts))
        for change in changes:
            context.note(replace(change, seconds=seconds))

    def _judged(self, part: Part, seen: Hessian, judge: Hessian) -> _Judged | Change:
        """Return the proposal for an operator if it is better on validation data, else what to note."""
        give_back()
        now = part.matrix
        answer = self.solve(now, seen)
        if isinstance(answer, Skip):
            return Change(now.name, f"left: {answer.reason}", changed=False)
        target = now.real
        if answer.asymmetry:
            target = judge.target(now.real, answer.asymmetry, judge.factors(damping=_DAMPING, by_activation=False))
        before, after = (matrix.error(target, judge.h) for matrix in (now, answer.weight))
        if not after < before:
            data = "validation data" if judge is not seen else "the calibration data"
            return Change(now.name, f"left: no better on {data}", False, before, before)
        return _Judged(answer, before, after)

    def _kept(self, part: Part, judged: _Judged | Change, all_rows: Hessian | None) -> Change:
        """Store what was accepted, learned once more from `all_rows` if that is given; return what to note."""
        if isinstance(judged, Change):
            return judged
        give_back()
        now = part.matrix
        wider = None if all_rows is None else self.solve(now, all_rows)
        for answer in (wider, judged.answer):
            if not isinstance(answer, Proposal):
                continue
            try:
                part.store(answer.weight)
            except OverflowError:
                continue
            changed = _changed(now.stored, answer.weight.stored)
            what = "; ".join(filter(None, (" and ".join(changed) or "nothing", answer.remark)))
            return Change(now.name, what, bool(changed), judged.before, judged.after)
        return Change(now.name, "left: its int32 bias would overflow", False, judged.before, judged.before)


@dataclass(frozen=True)
class _Judged:
    """A proposal that is better on validation data, and the errors there."""

    answer: Proposal
    before: float
    after: float


def _changed(old: QuantizedTensor, new: QuantizedTensor) -> list[str]:
    """Say what of a weight is new."""
    share = share_changed(old.codes, new.codes)
    scales = [] if torch.equal(old.scale, new.scale) else ["scales"]
    return scales + ([f"{share:.1%} of the codes"] if share else [])


def solver(cls: S) -> S:
    """Register a `Solver` as a pass under its name."""
    register: Any = graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True, held_out=True)
    registered: S = register(cls)
    return registered


__all__ = ["Proposal", "Skip", "Solver", "solver"]
