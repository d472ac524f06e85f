"""Take gradient steps on the codes, biases, and activation scales of a block, identical on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun, energies, relative_error
from quark_fx.engine.context import Context
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.trainable import LearnedWeight, Trainable
from quark_fx.system import accelerator
from quark_fx.system.memory import is_shortage

_REORDERED_SUMS = 1e-6
"""Relative squared error allowed if fewer rows run together, because sums are then computed in another order."""


@dataclass(frozen=True)
class _Piece:
    """Samples of a mini-batch from one calibration batch.

    Attributes:
        batch: Index of the batch on this rank.
        rows: Indices of the samples in the batch, `None` for all.
        seed: Seed of the dropped values, which does not depend on the rank.
    """

    batch: int
    rows: Tensor | None
    seed: int

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the samples of this piece from the values of its batch."""
        return list(values) if self.rows is None else [x[self.rows] for x in values]


class _MiniBatches:
    """Sampler of mini-batches from the calibration batches of all ranks.

    A mini-batch takes its samples from one batch, or from several if one has too few. If dimension 0 does not count
    samples, a mini-batch is one whole batch.

    Args:
        run: Block that provides the inputs and targets.
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

    def draw(self, steps: Sequence[int]) -> list[list[_Piece]]:
        """Return this rank's pieces of each step's mini-batch, possibly none; copies to the device once."""
        drawn = [self._drawn(step) for step in steps]
        rows = [piece.rows for pieces in drawn for piece in pieces if piece.rows is not None]
        if not rows:
            return drawn
        moved = iter(torch.cat(rows).to(self._context.device).split([len(part) for part in rows]))
        return [[p if p.rows is None else replace(p, rows=next(moved)) for p in pieces] for pieces in drawn]

    def _drawn(self, step: int) -> list[_Piece]:
        pieces, room = [], self._size
        for batch in self._order():
            rows = None
            if self._divisible:
                rows = torch.randperm(self._rows[batch], generator=self._chance)[:room]
                room -= len(rows)
            if 0 <= batch - self._first < self._here:
                seed = (self._seed * 1_000_003 + step) * 1_000_003 + batch
                pieces.append(_Piece(batch - self._first, rows, seed % (1 << 63)))
            if rows is None or not room:
                break
        return pieces

    def inputs(self, piece: _Piece, generator: torch.Generator, drop: float = 0.0) -> list[Any]:
        """Return the inputs of a piece; each value is taken from the float stream with probability `drop`."""
        inputs = piece.of(self._run.inputs(piece.batch))
        if drop:
            reals = piece.of(self._run.reference_inputs(piece.batch))
            inputs = [_mixed(x, real, drop, generator) for x, real in zip(inputs, reals, strict=True)]
        return inputs

    def targets(self, piece: _Piece) -> list[Any]:
        """Return the targets of a piece."""
        return piece.of(self._run.targets(piece.batch))

    def _order(self) -> Iterator[int]:
        """Yield batches in random order, each once."""
        first = int(torch.randint(len(self._rows), (), generator=self._chance))
        yield first
        order = torch.randperm(len(self._rows), generator=self._chance).tolist()
        yield from (batch for batch in order if batch != first)


def _divisible(run: BlockRun, batch: int, size: int) -> bool:
    """Return whether dimension 0 counts samples: whether a few rows, reordered and run alone, give the same outputs."""
    inputs, targets = run.reference_inputs(batch), run.targets(batch)
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in (*inputs, *targets)}
    if len(sizes) != 1 or None in sizes:
        return False
    # Use the last rows, which depend on earlier rows if the block is causal along dimension 0, and never all rows.
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


@dataclass(frozen=True)
class Learned:
    """Tensors that gradient steps change.

    Attributes:
        codes: Learnable codes of each weight.
        biases: Bias of each weight, `None` if it is not learned.
        scales: Scales of activations, by their names.
    """

    codes: Sequence[LearnedWeight]
    biases: Sequence[Tensor | None]
    scales: dict[str, Tensor]

    @property
    def others(self) -> tuple[list[Tensor], list[Tensor]]:
        """Biases and activation scales, in the form that `Trainable` takes."""
        return [bias for bias in self.biases if bias is not None], list(self.scales.values())

    def groups(self, schedule: Schedule) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, with learning rates."""
        biases, scales = self.others
        groups: list[dict[str, Any]] = [{"params": [p for c in self.codes for p in c.parameters], "lr": schedule.rate}]
        for bias in biases:
            size = max(float(bias.detach().abs().mean()), 1e-6)
            groups.append({"params": [bias], "lr": schedule.bias_rate * size})
        return groups + [{"params": [s], "lr": schedule.scale_rate * float(s.detach())} for s in scales]


class Steps:
    """Gradient steps on the output error of a block.

    Args:
        run: Block to learn.
        context: Context with the calibration batches, and the ranks that share them.
        schedule: Schedule of the steps.
        block: Block as a function of the learned tensors.
        learned: Learned tensors.
        limits: Lower and upper limit of each activation scale.
        seed: Seed of the samples, and of dropped values.
    """

    def __init__(
        self,
        run: BlockRun,
        context: Context,
        schedule: Schedule,
        block: Trainable,
        learned: Learned,
        limits: dict[str, tuple[float, float]],
        seed: int,
    ) -> None:
        self.run, self.context, self.schedule = run, context, schedule
        self.block, self.learned, self.limits = block, learned, limits
        self.batches = _MiniBatches(run, context, schedule.batch_size, seed)
        self.dropped = accelerator.new_generator(context.device)
        self.optimizer, self.decay = schedule.optimizer(learned.groups(schedule))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def taken(self, every: int) -> Iterator[tuple[int, Tensor]]:
        """Take the steps; after every `every` steps and at the end, yield the number taken and the last error.

        This does not wait for the device: the caller must check that the error, shape (), is finite.
        """
        last = self.schedule.iterations
        for first in range(1, last + 1, every):
            steps = range(first, min(first + every, last + 1))
            error = torch.zeros((), dtype=torch.float32)
            for step, pieces in zip(steps, self.batches.draw(steps), strict=True):
                error = self._differentiate(pieces, step / last)
                self.optimizer.step()
                self.decay.step()
                with torch.no_grad():
                    for name, scale in self.learned.scales.items():
                        scale.clamp_(*self.limits[name])
            yield steps[-1], error

    def _differentiate(self, pieces: Sequence[_Piece], progress: float) -> Tensor:
        """Compute the gradients of a mini-batch over all ranks; return its error, shape ()."""
        targets, signals = self.context.with_room(partial(self._targets, pieces))
        if signals is not None:
            self.context.ranks.add(signals)
        total = self.context.with_room(partial(self._differentiate_here, pieces, targets, signals, progress))
        self._add_over_ranks(total)
        return total

    def _differentiate_here(
        self, pieces: Sequence[_Piece], targets: Sequence[Sequence[Any]], signals: Tensor | None, progress: float
    ) -> Tensor:
        """Compute the gradients for the pieces of this rank; the first rank adds the penalties."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.context.device, dtype=torch.float32)
        with torch.enable_grad():
            for piece, target in zip(pieces, targets, strict=True):
                inputs = self.batches.inputs(piece, self.dropped.manual_seed(piece.seed), self.schedule.drop)
                weights = [c.weight() for c in self.learned.codes]
                outputs = self.block(
                    inputs, weights, *self.learned.others, drop=self.schedule.drop, generator=self.dropped
                )
                error = relative_error(outputs, target, signals)
                error.backward()
                total += error.detach()
            for c in self.learned.codes if self.context.ranks.index == 0 else ():
                if isinstance(penalty := c.penalty(progress), Tensor):
                    penalty.backward()
                    total += penalty.detach()
        return total

    def _targets(self, pieces: Sequence[_Piece]) -> tuple[list[list[Any]], Tensor | None]:
        """Return the targets of pieces, and sums of squares for `relative_error`, `None` if there is only one piece."""
        targets = [self.batches.targets(piece) for piece in pieces]
        if self.context.ranks.alone and len(targets) == 1:
            return targets, None
        signals = torch.zeros(len(self.run.block.made), device=self.context.device, dtype=torch.float32)
        for piece in targets:
            signals += energies(piece, signals.device)
        return targets, signals

    def _add_over_ranks(self, total: Tensor) -> None:
        """Replace gradients and `total` by their sums over the ranks, in one call."""
        if self.context.ranks.alone:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([total.reshape(1), *(g.flatten() for g in gradients)])
        self.context.ranks.add(flat)
        first, *parts = flat.split([1, *(g.numel() for g in gradients)])
        total.copy_(first[0])
        for p, part in zip(self.parameters, parts, strict=True):
            p.grad = part.view_as(p)


__all__ = ["Learned", "Steps"]
