"""Store weights and biases as codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import least_bias_scale
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import call, cast, describe, get_attr, is_finite, is_parameter, parameter, value_of
from quark_fx.graph.operators import BRANCH, argument
from quark_fx.graph.provenance import inherit
from quark_fx.numbers.formats import INT32
from quark_fx.numbers.qparams import QParams
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.observers.base import ObserverError
from quark_fx.plan.pair_sums import PairBound
from quark_fx.plan.placement import Attending, Coded, Plan, PlannedOperator, Quantized
from quark_fx.plan.report import Measured, Row, with_measured
from quark_fx.plan.siblings import value_read
from quark_fx.plan.weights import RoundedWeight, observe_tensor, quantize_tensor, rescale_zeros
from quark_fx.system import accelerator
from quark_fx.system.memory import give_back

ops = torch.ops.quark_fx


def quantize_constants(
    gm: GraphModule,
    plan: Plan,
    input_scales: Mapping[Node, Tensor],
    settled: Mapping[tuple[Node, Node], QParams],
    context: Context,
) -> list[Row]:
    """Replace the weights and biases of the plan's operators with codes and a `dequantize`.

    A weight with several readers is stored once. An embedding looks up codes and dequantizes the selected rows. A bias
    is stored as int32 with the scale `input scale * weight scale` if its spec is INT32 and an integer kernel accepts
    it; in any other format, the scale covers the range of the bias.

    Args:
        gm: Graph that was planned.
        plan: Result of `plan_quantization`.
        input_scales: Static scales of activations, shape `()`, keyed by operator.
        settled: Quantization parameters of weights and biases that are already fixed, keyed by operator and constant.
        context: Context of the run, with the spec of biases, and with rounded weights of earlier runs.

    Returns:
        One report row per operator of the plan.

    Raises:
        CalibrationError: If a weight is not finite, or overflows its format; the message names it.
    """
    stored: dict[_Key, _Stored] = {}
    rows, measured, joint, beside = list[Row](), dict[int, Measured](), _joint_magnitudes(gm, plan), _branch_bytes(gm)
    # An embedding with a tied weight reads the codes of the operator that multiplies by it.
    coded = (op for op in reversed(plan.operators) if isinstance(op, Coded))
    pairs = {str(op.weight_node): op.pairs for op in coded if op.pairs is not None}
    with accelerator.checked_together():
        for op in plan.operators:
            if not isinstance(op, Coded):
                rows.append(_float_row(gm, op))
                continue
            give_back()
            op = replace(op, pairs=op.pairs or pairs.get(str(op.weight_node)))
            scale, amax = input_scales.get(op.node), joint.get(op.node)
            row, measured[len(rows)] = _quantize_operator(gm, op, scale, stored, amax, settled, context)
            rows.append(replace(row, bytes_after=row.bytes_after + beside[op.node.name]))
    return with_measured(rows, measured)


def _branch_bytes(gm: GraphModule) -> Counter[str]:
    """Return the bytes of float branches that passes added, keyed by the names of the operators next to them."""
    sizes = Counter[str]()
    for node in gm.graph.nodes:
        if BRANCH in node.meta:
            sizes[node.meta[BRANCH]] += sum(parameter(gm, n).nbytes for n in node.all_input_nodes if is_parameter(n))
    return sizes


def _joint_magnitudes(gm: GraphModule, plan: Plan) -> dict[Node, Tensor]:
    """Return the largest magnitude across the weights of linear operators with the same input, keyed by operator.

    Servers fuse such operators (query, key, and value), and use one global scale for the result.
    """
    groups: dict[object, list[Coded]] = {}
    for op in plan.operators:
        if isinstance(op, Coded) and op.linear and op.kind == "linear" and op.weight.scale.has_unit:
            groups.setdefault((value_read(op), op.weight), []).append(op)
    magnitudes: dict[Node, Tensor] = {}
    for group in groups.values():
        weights = [parameter(gm, op.weight_node).detach() for op in group]
        # A shared weight is stored once, for its first reader.
        magnitudes |= dict.fromkeys(
            (op.node for op in group), torch.stack([w.abs().amax().float() for w in weights]).amax()
        )
    return magnitudes


_BIAS_STEPS = 1 << 23
"""Number of steps in the bias of an all-zero channel: float32 represents as many, and in int32 it may grow 255-fold."""


_Key = tuple[str, TensorSpec, float | None, PairBound | None]
"""Key of a stored weight: its name, its spec, its scale if that is already fixed, and the bound on pairs of codes."""


@dataclass(frozen=True)
class _Stored:
    """A quantized constant with its spec, the nodes of its codes, scale, and zero point, and the norms of a weight."""

    tensor: QuantizedTensor
    spec: TensorSpec
    nodes: list[Node]
    norms: Sequence[Tensor] = ()


def _quantize_operator(
    gm: GraphModule,
    op: Coded,
    input_scale: Tensor | None,
    stored: dict[_Key, _Stored],
    amax: Tensor | None,
    settled: Mapping[tuple[Node, Node], QParams],
    context: Context,
) -> tuple[Row, Measured]:
    weight, bias_spec = parameter(gm, op.weight_node), context.config.bias
    bias_node = op.linear.bias if op.linear is not None and bias_spec is not None else None
    follows = bias_node is not None and bias_spec is not None and _takes_int32_bias(gm, op, bias_spec)
    int32_scale = input_scale if follows else None
    smallest = free = None
    if is_parameter(bias_node) and int32_scale is not None:
        magnitude = parameter(gm, bias_node).detach().abs().float() / int32_scale
        # Below this scale, the int32 bias would overflow (a channel of nearly zero weights with a large bias).
        smallest = least_bias_scale(magnitude)
        free = magnitude / _BIAS_STEPS

    qparams = settled.get((op.node, op.weight_node))
    key = (str(op.weight_node.target), op.weight, None if qparams is None else float(qparams.scale), op.pairs)
    entry = stored.get(key)
    if entry is None or not _suits(entry, smallest, free if qparams is None else None):
        cache = None if context.known is None else context.known.weights
        encode = partial(_quantize_weight, op, weight.detach(), smallest, amax, qparams, cache)
        quantized, norms = context.with_room(encode)
        if free is not None and qparams is None:
            quantized = rescale_zeros(quantized, free, op.weight.scale)  # does not change any value
        entry = stored[key] = replace(_store(gm, op.weight_node, quantized, op.weight), norms=norms)
    _use_weight(gm, op, entry)
    if is_parameter(bias_node) and bias_spec is not None and op.input is not None:
        bias_qparams = settled.get((op.node, bias_node))
        _replace_bias(gm, op.node, bias_node, bias_spec, entry.tensor, int32_scale, bias_qparams)
    row = Row.of_quantized(
        name=op.name,
        parameter=str(op.weight_node.target),
        kind=op.kind,
        weight=str(op.weight),
        activation=str(op.input) if op.input else "",
        original=weight,
        quantized=entry.tensor,
        spec=op.weight,
        linear=op.linear,
        computed_from=_sources(op.weight_node),
    )
    return row, Measured.of(entry.norms, None if op.weight.is_cast else entry.tensor.scale)


def _suits(stored: _Stored, smallest: Tensor | None, free: Tensor | None) -> bool:
    """Tell whether the scale of a stored weight allows the bias of another reader to be stored."""
    scale = stored.tensor.scale
    if smallest is not None and bool((scale.abs() < smallest).any()):
        return False
    return free is None or torch.equal(rescale_zeros(stored.tensor, free, stored.spec.scale).scale, scale)


def _takes_int32_bias(gm: GraphModule, op: Coded, bias: TensorSpec) -> bool:
    # A product with more than two dimensions becomes a MatMul followed by an Add, which does not support integers.
    kernel = op.kind == "conv" or value_of(gm, op.node).dim() == 2
    weight = op.weight.format.is_integer and op.weight.granularity is not Granularity.GROUP
    return bias.format == INT32 and kernel and weight


def _quantize_weight(
    op: Coded,
    weight: Tensor,
    smallest: Tensor | None,
    amax: Tensor | None,
    qparams: QParams | None,
    cache: MutableMapping[tuple[str, str], RoundedWeight] | None,
) -> tuple[QuantizedTensor, list[Tensor]]:
    """Return the quantized weight, and the norms of the weight and of its errors."""
    key, spec, largest = (op.node.name, op.weight_node.name), op.weight, None if amax is None else float(amax)
    last = cache.get(key) if cache is not None and qparams is None else None
    if last is not None and last.is_of(spec, largest, op.pairs, smallest):
        return last.copied(), last.norms
    try:
        with accelerator.checked_later() as checks:
            observed = None if qparams is not None or spec.is_cast else observe_tensor(weight, spec, op.linear, amax)
            codes = quantize_tensor(
                weight,
                spec,
                linear=op.linear,
                smallest_scale=smallest,
                amax=amax,
                qparams=qparams,
                pairs=op.pairs,
                observed=observed,
            )
    except ValueError as error:
        reason = error
        raise _unusable(op, weight, lambda: reason) from error
    for condition, error_of in checks:
        accelerator.require(condition, partial(_unusable, op, weight, error_of))
    norms = codes.norms(weight)
    if cache is not None and observed is not None:
        rounded = RoundedWeight(spec, largest, op.pairs, observed, codes, norms)
        if rounded.is_of(spec, largest, op.pairs, smallest):
            cache[key] = replace(rounded, tensor=rounded.copied())
    return codes, norms


def _unusable(op: Coded, weight: Tensor, error: Callable[[], Exception]) -> CalibrationError:
    reason = error()
    remedy = reason.remedy if isinstance(reason, ObserverError) else "exclude the operator"
    if not is_finite(weight):
        remedy = "fix the model's weights"
    return CalibrationError(
        f"weight {op.weight_node.target!r} of {describe(op.node)} cannot be quantized: {reason}; {remedy}"
    )


def _use_weight(gm: GraphModule, op: Coded, stored: _Stored) -> None:
    """Replace the operator's weight with the stored codes."""
    if not op.row.activations:
        with gm.graph.inserting_before(op.node):
            lookup = _embed(gm, op.node, stored)
            lookup.meta["carries"] = op.node.name
            op.node.replace_all_uses_with(lookup)
        return
    reader = op.node if op.linear is None else op.linear.stored.reader
    with gm.graph.inserting_before(reader):
        real = _dequantize(gm, op.node, stored, value_of(gm, op.weight_node).dtype)
    reader.replace_input_with(op.weight_node, real)


def _replace_bias(
    gm: GraphModule,
    operator: Node,
    node: Node,
    spec: TensorSpec,
    weight: QuantizedTensor,
    input_scale: Tensor | None,
    qparams: QParams | None,
) -> None:
    """Replace the operator's bias with codes."""
    bias = parameter(gm, node).detach()
    if spec.format != INT32:
        codes = quantize_tensor(bias, spec, qparams=qparams)
    elif input_scale is not None:
        codes = _int32_bias(bias, (input_scale * weight.scale).float())
    else:
        return
    with gm.graph.inserting_before(operator):
        stored = _store(gm, node, codes, spec)
        operator.replace_input_with(node, _dequantize(gm, operator, stored, bias.dtype))


def _int32_bias(bias: Tensor, scale: Tensor) -> QuantizedTensor:
    codes = (bias.double() / scale.double()).round().clamp(INT32.qmin, INT32.qmax).to(torch.int32)
    return QuantizedTensor.of(codes, scale, None, INT32, None if scale.dim() == 0 else 0)


def _store(gm: GraphModule, value: Node, quantized: QuantizedTensor, spec: TensorSpec) -> _Stored:
    """Add codes, scale, and zero point as attributes of the graph, named after the `value` they represent."""
    parts = {"codes": quantized.codes}
    if not spec.is_cast:
        zero = torch.zeros((), dtype=torch.int32, device=quantized.scale.device)
        is_zero = (spec.scheme.symmetric and spec.format.signed) or quantized.is_symmetric  # the latter reads a device
        parts |= {"scale": quantized.scale, "zero_point": zero if is_zero else quantized.zero_point}
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        nodes = [get_attr(gm, f"{value.target}_{part}", tensor) for part, tensor in parts.items()]
    inherit(nodes[0], value)
    return _Stored(replace(quantized, codes=parameter(gm, nodes[0])), spec, nodes)  # the graph's tensors may be on disk


def _dequantize(gm: GraphModule, like: Node, stored: _Stored, dtype: torch.dtype) -> Node:
    quantized = stored.tensor
    if stored.spec.is_cast:
        return cast(gm, stored.nodes[0], dtype, like)
    layout = (str(quantized.format), quantized.axis, quantized.block_size, dtype)
    return call(gm, ops.dequantize.default, *stored.nodes, *layout, like=like)


def _embed(gm: GraphModule, node: Node, stored: _Stored) -> Node:
    """Look up codes first, and dequantize the selected rows instead of the table."""
    quantized, nodes = stored.tensor, stored.nodes
    dtype, indices = value_of(gm, node).dtype, argument(node, 1)

    def look_up(table: Node) -> Node:
        return call(gm, torch.ops.aten.embedding.default, table, indices, like=node)

    fmt, is_cast = quantized.format, stored.spec.is_cast
    if not is_cast and not (fmt.is_integer and fmt.bits >= 8):
        # No runtime looks up 8-bit floats or packed codes.
        return look_up(_dequantize(gm, node, stored, dtype))
    codes = look_up(nodes[0])
    if is_cast:
        return cast(gm, codes, dtype, node)
    if quantized.axis is None:
        return call(gm, ops.dequantize.default, codes, *nodes[1:], str(fmt), None, 0, dtype, like=node)
    block = quantized.block_size or -1
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


def _float_row(gm: GraphModule, op: PlannedOperator) -> Row:
    if isinstance(op, Quantized):
        return Row(name=op.name, kind=op.kind, activation=str(op.cache if isinstance(op, Attending) else op.input))
    weight = op.weight_node
    size = 0 if weight is None else parameter(gm, weight).nbytes
    name = "" if weight is None else str(weight.target)
    return Row(
        name=op.name,
        parameter=name,
        kind=op.kind,
        bytes_before=size,
        bytes_after=size,
        reason=op.reason,
        computed_from="" if weight is None else _sources(weight),
    )


def _sources(weight: Node) -> str:
    """Return the names of the parameters that a folded weight is computed from; empty for any other weight."""
    folded = weight.meta.get("folded")
    return "" if folded is None else ", ".join(folded.tensors)
