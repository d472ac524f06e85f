"""Replace what the plan quantizes by codes, `quantize` and `dequantize`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.graph.nodes import erase_dead
from quark_fx.graph.provenance import CONVERT
from quark_fx.numbers.qparams import QParams
from quark_fx.passes.quantize_constants import quantize_constants
from quark_fx.passes.quantize_values import quantize_values
from quark_fx.plan.placement import Plan, PlannedOperator
from quark_fx.plan.report import Row


def convert(
    gm: GraphModule,
    plan: Plan,
    qparams: Mapping[tuple[Node, TensorSpec], QParams],
    bias: TensorSpec | None,
    settled: Mapping[tuple[Node, int], QParams] = MappingProxyType({}),
) -> list[Row]:
    """Rewrite `gm` so that it computes in the plan's formats; return one report row per weighted operator.

    Args:
        gm: the graph the plan was made of.
        plan: from `plan_quantization`.
        qparams: from `calibrate`.
        bias: spec of the biases, `None` keeps them in float.
        settled: parameters of weights and biases that are known already, by operator and position of the argument.

    Raises:
        CalibrationError: if a weight is not finite; the message names it.
    """
    scales = {op.node: scale for op in plan.operators if (scale := _input_scale(op, plan, qparams)) is not None}
    before = set(gm.graph.nodes)
    quantize_values(gm, plan, qparams)
    rows = quantize_constants(gm, plan, scales, bias, settled)
    erase_dead(gm)
    for node in gm.graph.nodes:
        if node not in before:
            node.meta["made_by"] = CONVERT
    gm.graph.lint()
    gm.recompile()
    return rows


def _input_scale(op: PlannedOperator, plan: Plan, qparams: Mapping[tuple[Node, TensorSpec], QParams]) -> Tensor | None:
    """Return the static scale of the operator's activation, shape `()`, if it has one."""
    if op.linear is None or op.input is None:
        return None
    point = plan.points.get((op.linear.activation, op.input, None))
    found = qparams.get((point.source, point.spec)) if point is not None else None
    return found.scale.reshape(()) if found is not None else None
