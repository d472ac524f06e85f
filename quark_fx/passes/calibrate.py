"""Measure the ranges of activations."""

from __future__ import annotations

from torch.fx import GraphModule

from quark_fx.engine.calibration import (
    histograms_of,
    observe_batches,
    read_observers,
    remove_watches,
    watches_in,
)
from quark_fx.engine.context import Context
from quark_fx.graph.pass_manager import Stage, graph_pass


@graph_pass(stage=Stage.OBSERVED, distributed=True)
def calibrate(gm: GraphModule, context: Context) -> int:
    """Run the calibration data, compute scales from the observers, remove these, and return their number.

    Without observers, or if a `Session` has run the data before, it does not run.

    Raises:
        CalibrationError: If batches are missing, a value is not finite, or an index exceeds its table; the message
            names the batch, or the operator and the user's source line.
    """
    watches = watches_in(gm)
    if watches:
        calibration = context.planned
        observe_batches(gm, context)
        calibration.values = read_observers(gm, calibration.plan, context.known)
        context.histograms = histograms_of(gm, calibration.values)
        remove_watches(gm, watches)
    return len(watches)


__all__ = ["calibrate"]
