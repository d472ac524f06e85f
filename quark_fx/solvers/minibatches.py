"""Which calibration samples a gradient step reads: the same on every rank, each of which runs those that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun, relative_error
from quark_fx.engine.context import Context
from quark_fx.system.memory import is_shortage

_REORDERED_SUMS = 1e-6
"""Relative squared error by which a batch of fewer rows may differ: sums are taken in another order."""


@dataclass(frozen=True)
class Piece:
    """The samples of a mini-batch that one calibration batch has.

    Attributes:
        batch: its index on this rank.
        rows: which of its samples, `None` for all.
        seed: of what is dropped in them, whichever rank runs them.
    """

    batch: int
    rows: Tensor | None
    seed: int

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the samples among values of the batch."""
        return list(values) if self.rows is None else [x[self.rows] for x in values]


class MiniBatches:
    """Draws samples of the calibration batches of all ranks.

    A mini-batch takes its samples from one batch, and from further ones where that has too few. Where samples are not
    rows it is one whole batch.

    Args:
        run: the block whose inputs and targets are read.
        context: with the calibration batches of this rank.
        size: samples of a mini-batch.
        seed: of the samples.
    """

    def __init__(self, run: BlockRun, context: Context, size: int, seed: int) -> None:
        self._context, self._run, self._size, self._seed = context, run, size, seed
        here = [run.rows(batch) for batch in context.data.calibration]
        divisible = bool(here) and _divisible(run, context.data.calibration[0], size)
        found = context.ranks.gather((here, divisible))
        self._rows = [rows for batches, _ in found for rows in batches]
        self._first = sum(len(batches) for batches, _ in found[: context.ranks.index])
        self._here = len(here)
        self._divisible = found[0][1]  # as the first batch of all is
        self._chance = torch.Generator().manual_seed(seed)

    def draw(self, steps: Sequence[int]) -> list[list[Piece]]:
        """Return what this rank holds of each step's mini-batch, which may be nothing; copies to the device once."""
        drawn = [self._drawn(step) for step in steps]
        rows = [piece.rows for pieces in drawn for piece in pieces if piece.rows is not None]
        if not rows:
            return drawn
        moved = iter(torch.cat(rows).to(self._context.device).split([len(some) for some in rows]))
        return [[p if p.rows is None else replace(p, rows=next(moved)) for p in pieces] for pieces in drawn]

    def _drawn(self, step: int) -> list[Piece]:
        pieces, wanted = [], self._size
        for batch in self._order():
            rows = None
            if self._divisible:
                rows = torch.randperm(self._rows[batch], generator=self._chance)[:wanted]
                wanted -= len(rows)
            if 0 <= batch - self._first < self._here:
                seed = (self._seed * 1_000_003 + step) * 1_000_003 + batch
                pieces.append(Piece(batch - self._first, rows, seed % (1 << 63)))
            if rows is None or not wanted:
                break
        return pieces

    def inputs(self, piece: Piece, generator: torch.Generator, drop: float = 0.0) -> list[Any]:
        """Return the inputs of a piece; about that share of what enters is what enters in float."""
        inputs = piece.of(self._run.inputs(piece.batch))
        if drop:
            reals = piece.of(self._run.reference_inputs(piece.batch))
            inputs = [_mixed(x, real, drop, generator) for x, real in zip(inputs, reals, strict=True)]
        return inputs

    def targets(self, piece: Piece) -> list[Any]:
        """Return the targets of a piece."""
        return piece.of(self._run.targets(piece.batch))

    def _order(self) -> Iterator[int]:
        """Yield batches until there are samples enough."""
        first = int(torch.randint(len(self._rows), (), generator=self._chance))
        yield first
        order = torch.randperm(len(self._rows), generator=self._chance).tolist()
        yield from (batch for batch in order if batch != first)


def _divisible(run: BlockRun, batch: int, size: int) -> bool:
    """Tell whether dimension 0 counts samples: some rows, reordered and run alone, give their own outputs again."""
    inputs, targets = run.reference_inputs(batch), run.targets(batch)
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in (*inputs, *targets)}
    if len(sizes) != 1 or None in sizes:
        return False
    # The last rows first, which a block that is causal along dimension 0 makes of those before; never all of them.
    few = torch.arange(len(targets[0]), device=targets[0].device).flip(0)[: min(size, max(1, len(targets[0]) - 1))]
    try:
        with torch.no_grad():
            made = run.made(run.reference(*(x[few] for x in inputs)))
    except RuntimeError as error:
        if is_shortage(error):
            raise
        return False  # a mask, for one, does not fit fewer rows
    alone = [t[few] for t in targets]
    same = all(y.shape == t.shape for y, t in zip(made, alone, strict=True))
    return same and float(relative_error(made, alone)) < _REORDERED_SUMS


def _mixed(x: Any, real: Any, share: float, generator: torch.Generator) -> Any:
    """Return `x` with about that share of its values taken from `real`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.where(torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32) < share, real, x)


__all__ = ["MiniBatches", "Piece"]
