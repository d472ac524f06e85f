"""Options for learning codes by gradient steps (duration, rates, and start), and the memory and time that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from quark_fx.config.selection import Selective
from quark_fx.engine.blocks import Unit
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.solvers.error_feedback import working_bytes
from quark_fx.solvers.starts import ROWS, Start
from quark_fx.system.options import Interval, NonNegativeFloat, NonNegativeInt, PositiveInt

_LEARNED_COPIES = 6
"""Number of copies of a learned weight: float, parameter, gradient, two moments of the optimizer, and rounded."""

_RANGED_COPIES = 4
"""Number of additional copies of a weight for the gradient of its scales."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Selective):
    """Duration and rates of learning. Every position of a batch counts, padding included.

    Args:
        unit: Unit to reconstruct: `"operator"` (with the operations that follow it) or `"block"`.
        iterations: Largest number of gradient steps per unit; 0 keeps the initial codes.
        batch_size: Number of samples per step, from one calibration batch, or from several if one has fewer.
        learning_rate: Learning rate of the codes; its unit depends on the method.
        scale_rate: Learning rate of activation scales, relative to their size; 0 keeps the scales.
        bias_rate: Learning rate of biases, relative to their mean magnitude; 0 keeps the biases.
        drop: Probability that a value of an activation stays in float during a step (QDrop).
        start: Initial codes: `"descent"`, `"feedback"`, or the current `"codes"` from earlier passes.
        seed: Seed of the samples, and of dropped values.

    Raises:
        ConfigError: For a value out of range.
    """

    patience: ClassVar[int] = 5
    """Number of consecutive evaluations on validation batches without improvement after which learning can stop."""

    unit: Unit = Unit.OPERATOR
    iterations: NonNegativeInt = 250
    batch_size: PositiveInt = 32
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 0.0
    bias_rate: NonNegativeFloat = 0.0
    drop: Annotated[float, Interval("[0, 1)")] = 0.0
    start: Start = Start.DESCENT
    seed: int = 0

    @property
    def rate(self) -> float:
        """Learning rate that is used for the codes."""
        return self.learning_rate

    @property
    def fits_scales(self) -> bool:
        """True if adjustable scales of weights are learned as well; error feedback then shrinks the scales first."""
        return False

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: the values that a gradient needs, and the copies of each learned weight."""

        def turn(block: BlockSize) -> int:
            rows = (FLOAT32 * m.groups * m.inputs * min(m.rows, ROWS) for m in block.matrices)
            descent = (3 * m.moment + values for m, values in zip(block.matrices, rows, strict=True))
            # Two moments and the squares of a factor, the weight to round, and the rounded weights of the block.
            rounded = (working_bytes(m.groups, m.outputs, m.inputs) + 2 * m.target for m in block.matrices)
            moments = (3 * m.moment + block.weights for m in block.matrices)
            feedback = (moment + working for moment, working in zip(moments, rounded, strict=True))
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
        """Return the optimizer, and the schedule of its learning rates."""
        optimizer = torch.optim.Adam(groups)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)


__all__ = ["Schedule"]
