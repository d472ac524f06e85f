"""Learn the weights themselves, through their rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.numbers.grid import Grid
from quark_fx.solvers.reconstruction import Schedule, reconstruct
from quark_fx.system.options import NonNegativeFloat, NonNegativeInt


class StraightThrough:
    """A weight that is rounded in every step, with the gradient of one that is not; the unit is a code."""

    def __init__(self, grid: Grid, weight: Tensor, start: Tensor) -> None:
        self.grid = grid
        # As near to the weight as still rounds to the code it starts at.
        low, high = start + 0.49 * (grid.below(start) - start), start + 0.49 * (grid.above(start) - start)
        self.parameter = torch.minimum(torch.maximum(grid.position(weight), low), high)
        self.parameter.requires_grad_()
        self.parameters = (self.parameter,)

    ratio = None

    def weight(self) -> Tensor:
        """Return the rounded weight."""
        position = self.grid.within_reach(self.parameter)
        return self.grid.value(position + (self.codes() - position).detach())

    def penalty(self, progress: float) -> Tensor | float:
        """Return 0: the weight is rounded as it is."""
        return 0.0

    def codes(self) -> Tensor:
        """Return the codes it rounds to."""
        return self.grid.round(self.parameter)


@graph_pass(exact=False, stage=Stage.QUANTIZED, held_out=True)
@dataclass(frozen=True, kw_only=True)
class AdaQuant(Schedule):
    """Learn weights through their rounding, with biases and activation scales, to keep what an operator or block makes.

    Weights may move by more than one code, so it needs more data than `AdaRound`. Weight scales stay. The other options
    are those of `quark_fx.solvers.reconstruction.Schedule`; `learning_rate` is in codes per step.

    Source:
        Hubara et al. 2021, section 3; by default codes start from coordinate descent.
    """

    iterations: NonNegativeInt = 250
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 1e-2
    bias_rate: NonNegativeFloat = 1e-3

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Learn the weights of `gm`; return how many changed."""
        return reconstruct(gm, context, self, StraightThrough, "AdaQuant")


__all__ = ["AdaQuant", "StraightThrough"]
