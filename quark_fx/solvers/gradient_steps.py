"""Take gradient steps on the codes, biases, and activation scales of a block, identical on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun, energies, relative_error
from quark_fx.engine.context import Context
from quark_fx.solvers.minibatches import MiniBatches, Piece
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.trainable import LearnedWeight, Trainable
from quark_fx.system import accelerator


@dataclass(frozen=True)
class Learned:
    """The tensors that gradient steps change.

    Attributes:
        codes: Learnable codes of each weight.
        biases: Bias of each weight, `None` if it is not learned.
        scales: Names and scales of activations.
    """

    codes: Sequence[LearnedWeight]
    biases: Sequence[Tensor | None]
    scales: dict[str, Tensor]

    @property
    def others(self) -> tuple[list[Tensor], list[Tensor]]:
        """Biases and scales, in the form that `Trainable` takes."""
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
        block: The block as a function of the learned tensors.
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
        self.batches = MiniBatches(run, context, schedule.batch_size, seed)
        self.dropped = accelerator.new_generator(context.device)
        self.optimizer, self.decay = schedule.optimizer(learned.groups(schedule))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def taken(self, every: int) -> Iterator[tuple[int, Tensor]]:
        """Take the steps; yield the number taken and the last error after each `every` steps and at the end.

        Does not wait for the device: the caller must check that the error is finite.
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

    def _differentiate(self, pieces: Sequence[Piece], progress: float) -> Tensor:
        """Compute the gradients of a mini-batch of all ranks; return its error."""
        targets, signals = self.context.with_room(partial(self._targets, pieces))
        if signals is not None:
            self.context.ranks.add(signals)
        total = self.context.with_room(partial(self._differentiate_here, pieces, targets, signals, progress))
        self._add_over_ranks(total)
        return total

    def _differentiate_here(
        self, pieces: Sequence[Piece], targets: Sequence[Sequence[Any]], signals: Tensor | None, progress: float
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

    def _targets(self, pieces: Sequence[Piece]) -> tuple[list[list[Any]], Tensor | None]:
        """Return the targets of pieces, and their sums of squares; `None` if the mini-batch is a single piece."""
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
