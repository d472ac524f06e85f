"""Learn all weights of a block and their scales together, starting from error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from quark_fx.engine.blocks import Unit
from quark_fx.passes.adaquant import AdaQuant
from quark_fx.solvers.solver import solver
from quark_fx.solvers.starts import Start
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt, PositiveInt


@solver
@dataclass(frozen=True, kw_only=True)
class BlockAP(AdaQuant):
    """`AdaQuant` for language models: learns all weights of a block and their scales, starting from error feedback.

    A weight may move to any code, while `AutoRound` moves it by at most one code; at 2 bits, the best code is often
    farther away. Add `TuneScales` after this pass for the second half of EfficientQAT.

    Source:
        Chen et al. 2024 (EfficientQAT), section 3.2 (Block-AP). Zero points, which are integers here, do not change;
        fewer and larger steps suit small calibration sets.
    """

    unit: Unit = Unit.BLOCK
    start: Start = Start.FEEDBACK
    iterations: NonNegativeInt = 60
    batch_size: PositiveInt = 2
    learning_rate: NonNegativeFloat = 5e-2
    scale_rate: NonNegativeFloat = 0.0
    bias_rate: NonNegativeFloat = 0.0
    range_rate: NonNegativeFloat = 0.1


__all__ = ["BlockAP"]
