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
    """Run the calibration data, read scales off the observers, take these out, and return how many there were.

    No data is read where nothing is observed, or a `Session` has observed it before.

    Raises:
        CalibrationError: if there is no batch, a value is not finite, or an index beyond its table; the message
            names the batch, or the operator and the user's source line.
    """
    watches = watches_in(gm)
    if watches:
        found = context.planned
        observe_batches(gm, context)
        found.values = read_observers(gm, found.plan, context.known)
        context.histograms = histograms_of(gm, found.values)
        remove_watches(gm, watches)
    return len(watches)


__all__ = ["calibrate"]
