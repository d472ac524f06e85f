"""Draw the calibration samples of gradient steps, identically on every rank; each rank runs the samples it holds."""

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
"""Relative squared error allowed for a batch with fewer rows, since sums are computed in another order."""


@dataclass(frozen=True)
class Piece:
    """Samples of a mini-batch from one calibration batch.

    Attributes:
        batch: Index of the batch on this rank.
        rows: Indices of its samples, `None` for all.
        seed: Seed of the values dropped in them, the same on any rank.
    """

    batch: int
    rows: Tensor | None
    seed: int

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the piece's samples of a batch's values."""
        return list(values) if self.rows is None else [x[self.rows] for x in values]


class MiniBatches:
    """Draws samples of the calibration batches of all ranks.

    A mini-batch takes its samples from one batch, and from more if that has too few. If samples are not rows, it is one
    whole batch.

    Args:
        run: Block with the inputs and targets.
        context: Context with the calibration batches of this rank.
        size: Samples per mini-batch.
        seed: Seed of the samples.
    """

    def __init__(self, run: BlockRun, context: Context, size: int, seed: int) -> None:
        self._context, self._run, self._size, self._seed = context, run, size, seed
        row_counts = [run.rows(batch) for batch in context.data.calibration]
        divisible = bool(row_counts) and _divisible(run, context.data.calibration[0], size)
        by_rank = context.ranks.gather((row_counts, divisible))
        self._rows = [rows for batches, _ in by_rank for rows in batches]
        self._first = sum(len(batches) for batches, _ in by_rank[: context.ranks.index])
        self._here = len(row_counts)
        self._divisible = by_rank[0][1]  # decided by the first batch of the first rank
        self._chance = torch.Generator().manual_seed(seed)

    def draw(self, steps: Sequence[int]) -> list[list[Piece]]:
        """Return this rank's pieces of each step's mini-batch, possibly none; copies to the device once."""
        drawn = [self._drawn(step) for step in steps]
        rows = [piece.rows for pieces in drawn for piece in pieces if piece.rows is not None]
        if not rows:
            return drawn
        moved = iter(torch.cat(rows).to(self._context.device).split([len(part) for part in rows]))
        return [[p if p.rows is None else replace(p, rows=next(moved)) for p in pieces] for pieces in drawn]

    def _drawn(self, step: int) -> list[Piece]:
        pieces, room = [], self._size
        for batch in self._order():
            rows = None
            if self._divisible:
                rows = torch.randperm(self._rows[batch], generator=self._chance)[:room]
                room -= len(rows)
            if 0 <= batch - self._first < self._here:
                seed = (self._seed * 1_000_003 + step) * 1_000_003 + batch
                pieces.append(Piece(batch - self._first, rows, seed % (1 << 63)))
            if rows is None or not room:
                break
        return pieces

    def inputs(self, piece: Piece, generator: torch.Generator, drop: float = 0.0) -> list[Any]:
        """Return the inputs of a piece; each value is taken from the float stream with probability `drop`."""
        inputs = piece.of(self._run.inputs(piece.batch))
        if drop:
            reals = piece.of(self._run.reference_inputs(piece.batch))
            inputs = [_mixed(x, real, drop, generator) for x, real in zip(inputs, reals, strict=True)]
        return inputs

    def targets(self, piece: Piece) -> list[Any]:
        """Return the targets of a piece."""
        return piece.of(self._run.targets(piece.batch))

    def _order(self) -> Iterator[int]:
        """Yield batches in random order, each once."""
        first = int(torch.randint(len(self._rows), (), generator=self._chance))
        yield first
        order = torch.randperm(len(self._rows), generator=self._chance).tolist()
        yield from (batch for batch in order if batch != first)


def _divisible(run: BlockRun, batch: int, size: int) -> bool:
    """Return whether dimension 0 counts samples: a few rows, reordered and run alone, give the same outputs again."""
    inputs, targets = run.reference_inputs(batch), run.targets(batch)
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in (*inputs, *targets)}
    if len(sizes) != 1 or None in sizes:
        return False
    # Start with the last rows, which depend on earlier ones if the block is causal along dimension 0; never use all.
    few = torch.arange(len(targets[0]), device=targets[0].device).flip(0)[: min(size, max(1, len(targets[0]) - 1))]
    try:
        with torch.no_grad():
            outputs = run.made(run.reference(*(x[few] for x in inputs)))
    except RuntimeError as error:
        if is_shortage(error):
            raise
        return False  # for example, a mask does not fit fewer rows
    alone = [t[few] for t in targets]
    same = all(y.shape == t.shape for y, t in zip(outputs, alone, strict=True))
    return same and float(relative_error(outputs, alone)) < _REORDERED_SUMS


def _mixed(x: Any, real: Any, share: float, generator: torch.Generator) -> Any:
    """Return `x` with each value taken from `real` with probability `share`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.where(torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32) < share, real, x)


__all__ = ["MiniBatches", "Piece"]
