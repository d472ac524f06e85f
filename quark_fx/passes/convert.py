"""Replace the planned constants with codes, and insert `quantize` and `dequantize`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.context import Context
from quark_fx.errors import PassError
from quark_fx.graph.nodes import call, cast, erase_dead, get_attr, value_of
from quark_fx.graph.operators import clamp_bounds
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.graph.provenance import CONVERT
from quark_fx.numbers.qparams import QParams
from quark_fx.passes.calibrate import watches_in
from quark_fx.passes.quantize_constants import quantize_constants
from quark_fx.plan.placement import Coded, Plan, Point, Rounding
from quark_fx.system import accelerator


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
            f"{', and '.join(what)}; the pass of the observed stage must store the result of `read_observers` in "
            "context.calibrated.values and call `remove_watches` (quark_fx.engine.calibration)"
        )
    coded = (op for op in plan.operators if isinstance(op, Coded))
    scales = {op.node: scale for op in coded if (scale := _input_scale(op, plan, calibration.values)) is not None}
    before = set(gm.graph.nodes)
    with torch.no_grad():
        _quantize_values(gm, plan, calibration.values)
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


ops = torch.ops.quark_fx


def _quantize_values(gm: GraphModule, plan: Plan, qparams: Mapping[tuple[Node, TensorSpec], QParams]) -> None:
    """Insert a `quantize` and `dequantize` pair at every point of the plan; drop clamps that saturation performs.

    Args:
        gm: Graph that was planned.
        plan: Result of `plan_quantization`.
        qparams: Quantization parameters, keyed by source and spec.
    """
    stored: dict[tuple[Node, TensorSpec], list[Node]] = {}
    shared = [key for key in plan.observed if key[1].dynamic]
    largest = dict(zip(shared, accelerator.read([qparams[key].scale.reshape(()) for key in shared]), strict=True))
    # Points for specific readers come first: if the value is also quantized for all readers, they read that result.
    for point in sorted(plan.points.values(), key=lambda p: p.readers is None):
        key = point.source, point.spec
        _convert_point(gm, point, largest.get(key, qparams.get(key)), stored)


def _convert_point(
    gm: GraphModule, point: Point, qparams: QParams | float | None, stored: dict[tuple[Node, TensorSpec], list[Node]]
) -> None:
    value, spec = point.value, point.spec
    users = list(value.users) if point.readers is None else [user for user in value.users if user in point.readers]
    dtype = value_of(gm, value).dtype
    after = value.next
    while after.op == "placeholder":
        after = after.next
    with gm.graph.inserting_before(after):
        if spec.is_cast:
            result = cast(gm, cast(gm, value, spec.format.dtype, value), dtype, value)
        elif spec.dynamic:
            assert not isinstance(qparams, QParams)
            result = _dynamic(gm, point, qparams, dtype)
        else:
            assert isinstance(qparams, QParams)
            key = point.source, spec
            stored[key] = parameters = _parameters(gm, point, qparams, stored.get(key))
            result = _static(gm, point, qparams, parameters, dtype)
    if point.readers is None:
        result.meta["carries"] = value.name
    for user in users:
        user.replace_input_with(value, result)


def _parameters(gm: GraphModule, point: Point, qparams: QParams, stored: list[Node] | None) -> list[Node]:
    """Return nodes for the point's scale and zero point, which are stored once for all points of a source."""
    if stored is None:
        name = f"{point.source.name}_quantizer"
        # Cloned, because the fake value of a view includes its base.
        shape = _scale_shape(gm, point)
        tensors = {part: getattr(qparams, part).reshape(shape).clone() for part in ("scale", "zero_point")}
        return [get_attr(gm, f"{name}_{part}", tensor) for part, tensor in tensors.items()]
    again = [gm.graph.get_attr(str(node.target)) for node in stored]
    for node, first in zip(again, stored, strict=True):
        node.meta["val"] = first.meta["val"]
    return again


def _scale_shape(gm: GraphModule, point: Point) -> list[int]:
    """Return the shape of a point's scale: empty for a single scale, else with size 1 where values share scales."""
    sizes = value_of(gm, point.value).shape if point.separate else ()
    return [int(size) if dim in point.separate else 1 for dim, size in enumerate(sizes)]


def _static(gm: GraphModule, point: Point, qparams: QParams, parameters: list[Node], dtype: torch.dtype) -> Node:
    fmt = str(point.spec.format)
    source, rounding = point.value, Rounding(point.source.name, point.spec)
    absorbed: list[tuple[str, Any]] = []
    while point.absorbed and (bounds := clamp_bounds(point.absorbed[-1])) is not None:
        low, high = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
        if not qparams.saturates(low, high, point.spec.scheme):
            break
        clamp = point.absorbed.pop()
        absorbed.insert(0, (clamp.name, clamp.meta.get("nn_module_stack") or {}))
        source = clamp.args[0]  # type: ignore[assignment]
        rounding = replace(rounding, low=max(low, rounding.low), high=min(high, rounding.high))
    shared = [dim for dim in range(value_of(gm, point.value).dim()) if dim not in point.separate]
    layout = (shared[:2][-1], -1) if point.separate else (None, 0)  # any dimension that shares scales, but samples
    codes = call(gm, ops.quantize.default, source, *parameters, fmt, *layout, like=point.value)
    codes.meta |= {"rounding": rounding, "absorbed": tuple(absorbed)}
    return call(gm, ops.dequantize.default, codes, *parameters, fmt, *layout, dtype, like=point.value)


def _dynamic(gm: GraphModule, point: Point, largest: float | None, dtype: torch.dtype) -> Node:
    """Insert the measurement of a value's scales; `largest` is their maximum in calibration if they share a unit."""
    value, rank, spec = point.value, value_of(gm, point.value).dim(), point.spec
    if largest is not None:
        spec = spec.replace(scale=spec.scale.under(largest))
    measurement = spec.measurement(rank - 1 if point.reduced is None else point.reduced)
    measured = call(gm, ops.dynamic_qparams.default, value, *measurement, like=value)
    scale, zero_point = (_getitem(gm, measured, i) for i in (0, 1))
    fmt, _, axis, block, *_ = measurement
    codes = call(gm, ops.quantize.default, value, scale, zero_point, fmt, axis, block, like=value)
    return call(gm, ops.dequantize.default, codes, scale, zero_point, fmt, axis, block, dtype, like=value)


def _getitem(gm: GraphModule, node: Node, index: int) -> Node:
    item = gm.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


__all__ = ["convert"]
