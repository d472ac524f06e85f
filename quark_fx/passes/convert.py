"""Replace the planned constants by codes, and insert `quantize` and `dequantize`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.calibration import watches_in
from quark_fx.engine.context import Context
from quark_fx.errors import PassError
from quark_fx.graph.nodes import erase_dead
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.graph.provenance import CONVERT
from quark_fx.numbers.qparams import QParams
from quark_fx.passes.quantize_constants import quantize_constants
from quark_fx.passes.quantize_values import quantize_values
from quark_fx.plan.placement import Coded, Plan


@graph_pass(exact=False, stage=Stage.SETTLED, distributed=True)
def convert(gm: GraphModule, context: Context) -> int:
    """Rewrite `gm` so that it computes in the plan's formats; return the number of quantized operators.

    The rows of the report, one per weighted operator, are stored in `context.rows`.

    Raises:
        CalibrationError: If a weight is not finite; the message names it.
        PassError: If a pass used in place of `calibrate` left observers, or did not set all scales.
    """
    calibration = context.planned
    plan = calibration.plan
    missing = [source.name for source, spec in plan.observed if (source, spec) not in calibration.values]
    leftovers = [call.all_input_nodes[0].name for call in watches_in(gm)]
    if missing or leftovers:
        what = [f"scales of {', '.join(missing)} are missing"] * bool(missing)
        what += [f"observers of {', '.join(leftovers)} are left in the graph"] * bool(leftovers)
        raise PassError(
            f"{', and '.join(what)}; the pass of the observed stage puts `read_observers` into "
            "context.calibrated.values and calls `remove_watches` (quark_fx.engine.calibration)"
        )
    coded = (op for op in plan.operators if isinstance(op, Coded))
    scales = {op.node: scale for op in coded if (scale := _input_scale(op, plan, calibration.values)) is not None}
    before = set(gm.graph.nodes)
    with torch.no_grad():
        quantize_values(gm, plan, calibration.values)
        context.rows = quantize_constants(gm, plan, scales, calibration.constants, context)
    erase_dead(gm)
    for node in gm.graph.nodes:
        if node not in before:
            node.meta["made_by"] = CONVERT
    return sum(not row.reason for row in context.rows)


def _input_scale(op: Coded, plan: Plan, qparams: Mapping[tuple[Node, TensorSpec], QParams]) -> Tensor | None:
    """Return the static scale of the operator's activation, shape `()`, if it has one."""
    if op.linear is None or op.input is None or op.input.dynamic:
        return None
    point = plan.points.get((op.linear.activation, op.input, None))
    input_qparams = qparams.get((point.source, point.spec)) if point is not None else None
    return input_qparams.scale.reshape(()) if input_qparams is not None else None


__all__ = ["convert"]
