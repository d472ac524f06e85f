"""How codes are learned by gradient steps: how long, how fast, from where, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from quark_fx.config.selection import Selective
from quark_fx.engine.blocks import Unit
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.solvers.error_feedback import working_bytes
from quark_fx.solvers.starts import ROWS, Start
from quark_fx.system.options import Interval, NonNegativeFloat, NonNegativeInt, PositiveInt

_LEARNED_COPIES = 6
"""Copies of a weight while it is learned: real, parameter, gradient, two moments of the optimizer, and rounded."""

_RANGED_COPIES = 4
"""Those that the gradient of its scales keeps besides."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Selective):
    """How long and how fast to learn. Every position of a batch counts, those of padding too.

    Args:
        unit: what is reconstructed at once: `"operator"` (with what follows it) or `"block"`.
        iterations: gradient steps per unit, at most; 0 keeps the start.
        batch_size: samples per step, from one calibration batch, or from several where that has fewer.
        learning_rate: of the codes; its unit is the method's.
        scale_rate: of activation scales, relative to their size; 0 leaves them as they are.
        bias_rate: of biases, relative to their mean magnitude; 0 leaves them as they are.
        drop: probability that an activation stays in float during a step (QDrop).
        start: what the steps start from: `"descent"`, `"feedback"`, or the `"codes"` of the passes before.
        patience: looks at the validation batches, of twenty, without improvement before it stops.
        seed: of the samples, and of what is dropped.

    Raises:
        ConfigError: for a value out of range.
    """

    unit: Unit = Unit.OPERATOR
    iterations: NonNegativeInt = 250
    batch_size: PositiveInt = 32
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 0.0
    bias_rate: NonNegativeFloat = 0.0
    drop: Annotated[float, Interval("[0, 1)")] = 0.0
    start: Start = Start.DESCENT
    patience: PositiveInt = 5
    seed: int = 0

    @property
    def rate(self) -> float:
        """The learning rate of the codes that is used."""
        return self.learning_rate

    @property
    def fits_scales(self) -> bool:
        """Whether scales of weights are learned, too, where they may change; error feedback shrinks them first."""
        return False

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: a gradient's values, and of each weight what it is learned through."""

        def turn(block: BlockSize) -> int:
            rows = (FLOAT32 * m.groups * m.inputs * min(m.rows, ROWS) for m in block.matrices)
            descent = (3 * m.moment + values for m, values in zip(block.matrices, rows, strict=True))
            # Two moments and a factor's squares beside it, what it rounds, and what it rounded of the whole block.
            rounded = (working_bytes(m.groups, m.outputs, m.inputs) + 2 * m.target for m in block.matrices)
            moments = (3 * m.moment + block.weights for m in block.matrices)
            feedback = (kept + working for kept, working in zip(moments, rounded, strict=True))
            starts: dict[Start, Iterable[int]] = {Start.DESCENT: descent, Start.FEEDBACK: feedback}
            copies = _LEARNED_COPIES + (self.start is Start.FEEDBACK) + _RANGED_COPIES * self.fits_scales
            steps = 2 * block.every_value + copies * block.weights
            return max((steps, *starts.get(self.start, ())))

        def work(block: BlockSize) -> int:
            return 3 * self.iterations * block.operations

        return sizes.walk(self.unit, turn, streams=2, work=work)

    def optimizer(
        self, groups: list[dict[str, Any]]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return what takes the steps, and how its rates decay."""
        optimizer = torch.optim.Adam(groups)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)


__all__ = ["Schedule"]
