"""A solver of one file: clip ranges of activations, from a histogram of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from quark_fx.observers import Percentile
from quark_fx.observers.squared_error import best_range
from quark_fx.solvers.solver import Activation, Input, Proposal, Skip, Solver, solver


@solver
@dataclass(frozen=True, kw_only=True)
class ClipActivations(Solver):
    """Shrink both ends of each activation's range to where rounding and clipping together lose least.

    Args:
        least: share of the range that is kept on either side.
        steps: shares that are tried, each on one side with each on the other.
    """

    chooses: ClassVar = Activation
    least: float = 0.1
    steps: int = 32

    @property
    def reads(self) -> Input:
        """Everything that was seen, in a histogram."""
        return Input(Percentile(percentile=100))

    def solve(self, now: Activation, seen: Percentile) -> Proposal | Skip:
        """Try all pairs of shares."""
        low, high = seen.range(now.scheme)
        if not low < high:
            return Skip("it is one value")
        shares = torch.linspace(self.least, 1, self.steps, dtype=torch.float64, device=low.device)
        lows, highs = torch.meshgrid(low.clamp(max=0) * shares, high.clamp(min=0) * shares, indexing="ij")
        best = best_range(seen.collected(), lows.reshape(1, -1), highs.reshape(1, -1), now.scheme)
        return Proposal(now.with_range(*best), f"clipped to {float(best[0]):.3g} to {float(best[1]):.3g}")
