"""Replace what the plan quantizes by codes, `quantize` and `dequantize`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config import Granularity, TensorSpec
from quark_fx.errors import CalibrationError
from quark_fx.formats import INT32, IntFormat
from quark_fx.graph import call, describe, erase_dead, get_attr, is_parameter, parameter, value_of
from quark_fx.operators import argument, clamp_bounds, set_argument, stored_weight
from quark_fx.placement import Plan, PlannedOperator, Point
from quark_fx.qparams import QParams, Scheme
from quark_fx.report import Row
from quark_fx.weights import QuantizedTensor, quantize_tensor, sqnr

ops = torch.ops.quark_fx
ValueQParams = Mapping[tuple[Node, TensorSpec], QParams]


@dataclass
class _Conversion:
    gm: GraphModule
    plan: Plan
    qparams: ValueQParams
    bias: TensorSpec | None
    stored: dict[tuple[str, TensorSpec], tuple[QuantizedTensor, list[Node]]] = field(default_factory=dict)


def convert(gm: GraphModule, plan: Plan, qparams: ValueQParams, bias: TensorSpec | None) -> list[Row]:
    """Rewrite `gm` so that it computes in the plan's formats; return one report row per weighted operator.

    Weights become integer (or 8-bit float) attributes behind a `dequantize`; biases become int32 at
    `input scale * weight scale` where `bias` asks for INT32; activations go through `quantize` and
    `dequantize`; clamps that saturation already performs are dropped.

    Args:
        gm: the graph the plan was made of.
        plan: from `plan_quantization`.
        qparams: from `calibrate`.
        bias: spec of the biases, `None` keeps them in float.

    Raises:
        CalibrationError: if a weight is not finite; the message names it.
    """
    state = _Conversion(gm, plan, qparams, bias)
    input_scales = {op.node: _input_scale(state, op) for op in plan.operators if not op.reason}
    # Points that serve some readers go first: where a value is also produced in integers, they then read those.
    for point in sorted(plan.points.values(), key=lambda p: p.readers is None):
        _convert_point(state, point)
    rows = [_convert_constants(state, op, input_scales.get(op.node)) for op in plan.operators]
    erase_dead(gm)
    gm.graph.lint()
    gm.recompile()
    return rows


def _input_scale(state: _Conversion, op: PlannedOperator) -> Tensor | None:
    """Return the static scale of the operator's activation, if it has one."""
    if op.row is None or op.input is None or not op.row.activations:
        return None
    point = state.plan.points.get((argument(op.node, op.row.activations[0]), op.input))
    found = state.qparams.get((point.source, point.spec)) if point is not None else None
    return found.scale.reshape(()) if found is not None else None


def _convert_constants(state: _Conversion, op: PlannedOperator, input_scale: Tensor | None) -> Row:
    if op.weight_node is None or op.weight is None or op.row is None or op.row.weight is None:
        return _float_row(state.gm, op)
    gm, weight_node, row = state.gm, op.weight_node, op.row
    weight = parameter(gm, weight_node)
    bias_node = argument(op.node, row.bias) if row.bias is not None else None
    int32_bias = (
        state.bias is not None
        and state.bias.format == INT32
        and input_scale is not None
        and is_parameter(bias_node)
        # A product of more than two dimensions is a MatMul followed by an Add, which takes no integers.
        and (op.row.integer_output or value_of(gm, op.node).dim() == 2)
        and op.weight.granularity in (Granularity.TENSOR, Granularity.CHANNEL)
        and isinstance(op.weight.format, IntFormat)
    )
    smallest = None
    if int32_bias:
        # Below this scale the int32 bias would overflow (a channel of nearly zero weights with a large bias).
        smallest = parameter(gm, bias_node).abs().float() / (input_scale * 0.999 * INT32.qmax)
    key = (str(weight_node.target), op.weight)
    if key in state.stored:
        quantized, nodes = state.stored[key]
    else:
        try:
            quantized = quantize_tensor(
                weight.detach(),
                op.weight,
                output_axis=row.output_axis,
                input_axis=row.input_axis,
                stacked=row.kind in ("experts", "linear") and weight.dim() > 2,
                smallest_scale=smallest,
            )
        except ValueError as error:
            raise CalibrationError(
                f"weight {weight_node.target} of {describe(op.node)} cannot be quantized: {error}; mend the "
                "checkpoint or exclude the operator"
            ) from error
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            nodes = _store(gm, str(weight_node.target), quantized)
        state.stored[key] = quantized, nodes
    with gm.graph.inserting_before(op.node):
        if op.kind == "embedding":
            op.node.replace_all_uses_with(_embed(gm, op.node, quantized, nodes))
        else:
            stored = stored_weight(op.node, row)
            assert stored is not None
            with gm.graph.inserting_before(stored.reader):
                real = _dequantize(gm, op.node, quantized, nodes, weight.dtype)
            stored.reader.replace_input_with(weight_node, real)
        if is_parameter(bias_node):
            assert row.bias is not None
            bias = _quantize_bias(state, parameter(gm, bias_node), quantized, input_scale if int32_bias else None)
            if bias is not None:
                with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                    stored = _store(gm, str(bias_node.target), bias)
                set_argument(op.node, row.bias, _dequantize(gm, op.node, bias, stored, weight.dtype))
    return Row.of_quantized(
        name=op.name,
        kind=op.kind,
        weight=str(op.weight),
        activation=str(op.input) if op.input else "",
        original=weight,
        quantized=quantized,
        sqnr=sqnr(weight, quantized.dequantize()),
    )


def _float_row(gm: GraphModule, op: PlannedOperator) -> Row:
    size = parameter(gm, op.weight_node).nbytes if op.weight_node is not None else 0
    return Row(
        name=op.name,
        kind=op.kind,
        activation=str(op.input) if op.input else "",
        bytes_before=size,
        bytes_after=size,
        reason=op.reason,
    )


def _store(gm: GraphModule, name: str, quantized: QuantizedTensor) -> list[Node]:
    """Add codes, scale and zero point as attributes; return the nodes that read them."""
    if quantized.spec.is_cast:
        return [get_attr(gm, f"{name}_codes", quantized.codes)]
    p = quantized.qparams
    zero_point = p.zero_point if bool(p.zero_point.any()) else torch.zeros_like(p.zero_point.flatten()[:1]).reshape(())
    parts = {"codes": quantized.codes, "scale": p.scale, "zero_point": zero_point}
    return [get_attr(gm, f"{name}_{part}", value) for part, value in parts.items()]


def _dequantize(
    gm: GraphModule, like: Node, quantized: QuantizedTensor, nodes: list[Node], dtype: torch.dtype
) -> Node:
    if quantized.spec.is_cast:
        return _cast(gm, nodes[0], dtype, like)
    fmt, axis, block = str(quantized.spec.format), quantized.axis, quantized.block_size
    return call(gm, ops.dequantize.default, *nodes, fmt, axis, block, dtype, like=like)


def _embed(gm: GraphModule, node: Node, quantized: QuantizedTensor, nodes: list[Node]) -> Node:
    """Look codes up first and dequantize the few rows found, not the table."""
    dtype, indices = value_of(gm, node).dtype, argument(node, 1)

    def look_up(table: Node) -> Node:
        return call(gm, torch.ops.aten.embedding.default, table, indices, like=node)

    fmt = quantized.spec.format
    if not quantized.spec.is_cast and not (isinstance(fmt, IntFormat) and fmt.bits >= 8):
        # No runtime looks up 8-bit floats or packed codes.
        return look_up(_dequantize(gm, node, quantized, nodes, dtype))
    codes = look_up(nodes[0])
    if quantized.spec.is_cast:
        return _cast(gm, codes, dtype, node)
    if quantized.axis is None:
        return call(gm, ops.dequantize.default, codes, *nodes[1:], str(fmt), None, 0, dtype, like=node)
    block = quantized.block_size or quantized.codes.shape[1]
    rows = []
    for table in nodes[1:]:
        value = value_of(gm, table)
        if value.dim() == 0:
            rows.append(table)
            continue
        matrix = table if value.dim() == 2 else call(gm, torch.ops.aten.unsqueeze.default, table, 1, like=node)
        rows.append(look_up(matrix))
    last = value_of(gm, codes).dim() - 1
    return call(gm, ops.dequantize.default, codes, *rows, str(fmt), last, block, dtype, like=node)


def _cast(gm: GraphModule, value: Node, dtype: torch.dtype, like: Node) -> Node:
    return call(gm, torch.ops.aten._to_copy.default, value, dtype=dtype, like=like)


def _quantize_bias(
    state: _Conversion, bias: Tensor, weight: QuantizedTensor, input_scale: Tensor | None
) -> QuantizedTensor | None:
    if state.bias is None or (state.bias.format == INT32 and input_scale is None):
        return None
    if input_scale is None:
        return quantize_tensor(bias.detach(), state.bias)
    scale = (input_scale * weight.qparams.scale).float()
    codes = (bias.double() / scale.double()).round().clamp(INT32.qmin, INT32.qmax).to(torch.int32)
    qparams = QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
    return QuantizedTensor(codes, qparams, state.bias, None if scale.dim() == 0 else 0, 0)


def _convert_point(state: _Conversion, point: Point) -> None:
    gm, value, spec = state.gm, point.value, point.spec
    users = list(value.users) if point.readers is None else [user for user in value.users if user in point.readers]
    dtype = value_of(gm, value).dtype
    after = value.next
    while after.op == "placeholder":
        after = after.next
    with gm.graph.inserting_before(after):
        if spec.is_cast:
            result = _cast(gm, _cast(gm, value, spec.format.dtype, value), dtype, value)
        elif spec.dynamic:
            result = _dynamic(gm, value, spec, dtype)
        else:
            result = _static(gm, point, state.qparams[point.source, spec], dtype)
    for user in users:
        user.replace_input_with(value, result)


def _static(gm: GraphModule, point: Point, qparams: QParams, dtype: torch.dtype) -> Node:
    name = f"{point.value.name}_quantizer"
    parameters = [
        get_attr(gm, f"{name}_{part}", tensor.reshape(()))
        for part, tensor in (("scale", qparams.scale), ("zero_point", qparams.zero_point))
    ]
    fmt = str(point.spec.format)
    source = point.value
    while point.absorbed and _saturates(point.absorbed[-1], qparams, point.spec.scheme):
        clamp = point.absorbed.pop()
        source = clamp.args[0]  # type: ignore[assignment]
    codes = call(gm, ops.quantize.default, source, *parameters, fmt, like=point.value)
    return call(gm, ops.dequantize.default, codes, *parameters, fmt, None, 0, dtype, like=point.value)


def _saturates(clamp: Node, qparams: QParams, scheme: Scheme) -> bool:
    """Tell whether quantizing saturates everything the clamp would have cut."""
    bounds = clamp_bounds(clamp)
    if bounds is None or not isinstance(scheme.format, IntFormat):
        return False
    scale, zero_point = float(qparams.scale), int(qparams.zero_point)
    low, high = bounds
    return (low is None or round(low / scale) + zero_point <= scheme.format.qmin) and (
        high is None or round(high / scale) + zero_point >= scheme.format.qmax
    )


def _dynamic(gm: GraphModule, value: Node, spec: TensorSpec, dtype: torch.dtype) -> Node:
    per_token = spec.granularity is Granularity.TOKEN
    measured = call(gm, ops.dynamic_qparams.default, value, str(spec.format), str(spec.symmetry), per_token, like=value)
    scale, zero_point = (_getitem(gm, measured, i) for i in (0, 1))
    shape = value_of(gm, value).shape
    axis, block = (len(shape) - 1, shape[-1]) if per_token else (None, 0)
    fmt = str(spec.format)
    codes = call(gm, ops.quantize.default, value, scale, zero_point, fmt, axis, block, like=value)
    return call(gm, ops.dequantize.default, codes, scale, zero_point, fmt, axis, block, dtype, like=value)


def _getitem(gm: GraphModule, node: Node, index: int) -> Node:
    item = gm.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


