"""Replace operators that torch's exporter translates incorrectly, or not at all, by operators that it translates.

The exporter's lowerings ignore arguments (the divisor of an average pool), support attention of rank 4 only, let a
token whose mask forbids every position attend to all positions, and rearrange the weights of recurrent layers on every
run. The rewrites apply to a copy of the graph, just before translation.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.recurrent import KINDS, spell_out_layers
from quark_fx.export.to_onnx.resized_bytes import (
    INTERPOLATIONS,
    has_fixed_size,
    interpolate_bytes,
    round_interpolation,
)
from quark_fx.graph.linear import per_dimension
from quark_fx.graph.nodes import (
    call,
    cast,
    describe,
    erase_dead,
    is_parameter,
    parameter,
    static_size,
    target_name,
    value_of,
)
from quark_fx.graph.operators import argument
from quark_fx.graph.pass_manager import copy_graph

aten = torch.ops.aten


def respelled(gm: GraphModule) -> GraphModule:
    """Return an equivalent copy of `gm` with operators that torch translates, or `gm` itself if no rule applies.

    Raises:
        ExportError: If ONNX does not support an argument; the message names the operator and the user's line.
    """
    if not any(_rule(gm, node) for node in gm.graph.nodes):
        return gm
    copy = copy_graph(gm)
    for node in list(copy.graph.nodes):
        rule = _rule(copy, node)
        if rule is not None:
            with copy.graph.inserting_before(node):
                new = rule(copy, node)
            if isinstance(new, Node):
                node.replace_all_uses_with(new)
            else:
                for result in list(node.users):
                    result.replace_all_uses_with(new[result.args[1]])
    erase_dead(copy)
    return copy


Rule = Callable[[GraphModule, Node], Node | tuple[Node, ...]]
"""Function that inserts the replacement of a node and returns the new node, or one new node per result."""


def _rule(gm: GraphModule, node: Node) -> Rule | None:
    """Return the rule that rewrites a node; `None` if none applies."""
    if node.op != "call_function":
        return None
    name = target_name(node)
    if name == "aten.scaled_dot_product_attention.default":
        return _rule_of_attention(gm, node)
    if name in ("aten.avg_pool2d.default", "aten.avg_pool3d.default") and argument(node, 6) is not None:
        return _sum_over_divisor
    of_bytes = name in INTERPOLATIONS and value_of(gm, node).dtype == torch.uint8
    if of_bytes and has_fixed_size(gm, node):
        return interpolate_bytes
    if name in _ANTIALIASED and argument(node, 2):
        return _refuse("antialias=True with align_corners=True has no equivalent in ONNX; drop one of the two")
    if name in _ANTIALIASED and name.endswith("default") and (argument(node, 3) is None) != (argument(node, 4) is None):
        return _refuse(
            "an antialiased resize with a scale factor for one axis is not possible in ONNX; pass both or none"
        )
    if of_bytes:
        return round_interpolation
    if name == "aten.lstm.input" and _is_projected(gm, node):
        return _refuse("an LSTM with proj_size has no equivalent in ONNX; project its output with a linear layer")
    if name == "aten.index_put.default" and _has_mask_beside_others(gm, node):
        return _refuse("a mask next to other indices has no equivalent in ONNX; use torch.where instead")
    if name == "aten.cross_entropy_loss.default" and argument(node, 5):
        return _refuse("label_smoothing has no equivalent in ONNX; write the loss with log_softmax, or drop the option")
    if name in _DEVIATIONS and value_of(gm, argument(node, 0)).dtype in _HALVES:
        return _in_float32
    if name in _DIVISIONS and (_has_number_first(node) or value_of(gm, node).dtype in _HALVES):
        return _division
    if name.startswith(_FOR_FLOATS) and _is_whole(gm, argument(node, 0)):
        return _ON_INTEGERS.get(name, _promoted if value_of(gm, node).dtype.is_floating_point else None)
    if name in _TRUTHS and value_of(gm, node).dtype == torch.uint8:
        return _truth_as_number
    if name == "aten.mean.dim" and argument(node, 1) is None:
        return _mean_of_all
    if name == "aten.cat.default" and len(_joined(gm, node)) < len(argument(node, 0)):
        return _without_empty_vectors
    if name == "aten.diff.default" and argument(node, 1) not in (None, 1):
        return None
    if name == "aten.batch_norm.default" and argument(node, 5):
        return None
    if name == "aten.rrelu.default":
        return None if argument(node, 3) else _mean_slope
    if name in _ADAPTIVE_MAXIMA and _has_unequal_windows(gm, node):
        return _maxima_of_windows
    if name.startswith("aten.conv_transpose") and value_of(gm, node).dim() != value_of(gm, argument(node, 1)).dim():
        return None  # `aten.convolution` does not support a sample without a batch dimension
    return spell_out_layers if name in KINDS else _WITHOUT_LOWERING.get(name)


_TRUTHS = frozenset(f"aten.{kind}.{overload}" for kind in ("all", "any") for overload in ("default", "dim", "dims"))
"""Operators whose result is uint8 for uint8 operands, and bool for operands of any other type."""


def _is_whole(gm: GraphModule, value: Any) -> bool:
    """Tell whether a value is a tensor of integers or booleans."""
    dtype = value_of(gm, value).dtype if isinstance(value, Node) else torch.float32
    return not (dtype.is_floating_point or dtype.is_complex)


def _promoted(gm: GraphModule, node: Node) -> Node:
    value = cast(gm, argument(node, 0), value_of(gm, node).dtype, node)
    return call(gm, node.target, value, *node.args[1:], like=node, **node.kwargs)


def _everywhere(truth: bool) -> Rule:
    return lambda gm, node: call(gm, aten.full_like.default, argument(node, 0), truth, like=node, dtype=torch.bool)


_ON_INTEGERS: dict[str, Rule] = {
    **{
        f"aten.{name}.default": lambda gm, node: argument(node, 0)
        for name in ("ceil", "fix", "floor", "round", "trunc")
    },
    "aten.relu.default": lambda gm, node: call(gm, aten.clamp_min.default, argument(node, 0), 0, like=node),
    "aten.isnan.default": _everywhere(False),
    "aten.isfinite.default": _everywhere(True),
}
"""Replacements on integers of operators that ONNX or ONNX Runtime has for floats only."""

_FOR_FLOATS = (*_ON_INTEGERS, "aten.special_")
"""Prefixes of operators whose lowerings need floats; for all other operators, torch promotes integers."""

_ANTIALIASED = frozenset(name for name in INTERPOLATIONS if "_aa." in name)


_DEVIATIONS = frozenset(
    f"aten.{kind}.{overload}"
    for kind in ("std", "var", "std_mean", "var_mean")
    for overload in ("default", "dim", "correction")
)
"""Operators whose 16-bit operands torch's exporter casts in a way that fails with several results or without axes."""

_DIVISIONS = frozenset(
    (
        *("aten.div.Tensor_mode", "aten.div.Scalar_mode"),
        *("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor"),
        *("aten.fmod.Tensor", "aten.fmod.Scalar"),
    )
)
"""Operators whose first operand may be a Python number, and that torch computes in float32 for 16-bit operands."""

_HALVES = (torch.float16, torch.bfloat16)

_ADAPTIVE_MAXIMA = frozenset(f"aten.adaptive_max_pool{rank}d.default" for rank in (1, 2, 3))


def _rule_of_attention(gm: GraphModule, node: Node) -> Callable[[GraphModule, Node], Node] | None:
    if value_of(gm, argument(node, 0)).dtype in _HALVES:
        return _attention_in_float32
    if value_of(gm, argument(node, 0)).dim() != 4:
        return _attention_of_rank_four
    return _attention_to_nothing if _may_forbid_rows(gm, argument(node, 3)) else None


def _refuse(reason: str) -> Rule:
    def refuse(gm: GraphModule, node: Node) -> Node:
        raise ExportError(f"{describe(node)}: {reason}")

    return refuse


def _has_mask_beside_others(gm: GraphModule, node: Node) -> bool:
    indices = [value_of(gm, index) for index in argument(node, 1) if index is not None]
    return len(indices) > 1 and any(index.dtype == torch.bool for index in indices)


def _is_projected(gm: GraphModule, node: Node) -> bool:
    hidden, cell = (value_of(gm, state) for state in argument(node, 1))
    return bool(hidden.shape[-1] != cell.shape[-1])


def _may_forbid_rows(gm: GraphModule, mask: Node | None) -> bool:
    """Tell whether a mask may forbid every key for some query, for which torch returns zeros and ONNX a mean or NaN."""
    if mask is None:
        return False
    if not is_parameter(mask):
        return True
    values = parameter(gm, mask)
    allowed = values if values.dtype == torch.bool else values != -math.inf
    return not bool(allowed.any(-1).all())


def _attention_to_nothing(gm: GraphModule, node: Node) -> Node:
    attended = call(gm, node.target, *node.args, like=node, **node.kwargs)
    return _zero_where_forbidden(gm, attended, argument(node, 3), node)


def _zero_where_forbidden(gm: GraphModule, attended: Node, mask: Node, node: Node) -> Node:
    """Set the result to zero for queries for which a mask, boolean or additive, forbids every key."""
    if value_of(gm, mask).dtype != torch.bool:
        mask = call(gm, aten.ne.Scalar, mask, -math.inf, like=node)
    allowed = call(gm, aten.any.dim, mask, -1, True, like=node)
    return call(gm, aten.where.ScalarOther, allowed, attended, 0.0, like=node)


def _attention_in_float32(gm: GraphModule, node: Node) -> Node:
    """Compute attention in float32 like torch's kernels: products of queries and keys may overflow float16."""
    *values, mask = (argument(node, position) for position in range(4))
    values = [cast(gm, value, torch.float32, node) for value in values]
    if mask is not None and value_of(gm, mask).is_floating_point():
        mask = cast(gm, mask, torch.float32, node)
    attended = _attend(gm, node, values, mask)
    rule = _rule_of_attention(gm, attended)
    attention = attended if rule is None else rule(gm, attended)
    return cast(gm, attention, value_of(gm, node).dtype, node)


def _attend(gm: GraphModule, node: Node, values: list[Node], mask: Node | None) -> Node:
    """Insert an attention with the options of `node` on the queries, keys, and values in `values`."""
    options = {key: value for key, value in node.kwargs.items() if key not in ("query", "key", "value", "attn_mask")}
    return call(gm, node.target, *values, mask, *node.args[4:], like=node, **options)


def _attention_of_rank_four(gm: GraphModule, node: Node) -> Node:
    """Compute attention in rank 4: add dimensions of size 1 to a lower rank; flatten the first dimensions otherwise."""
    rank = value_of(gm, node).dim()
    values = [argument(node, position) for position in range(3)]
    mask = argument(node, 3)
    if rank < 4:
        for _ in range(4 - rank):
            values = [call(gm, aten.unsqueeze.default, value, 0, like=node) for value in values]
            if mask is not None and value_of(gm, mask).dim() > 2:
                mask = call(gm, aten.unsqueeze.default, mask, 0, like=node)
    else:
        if mask is not None and value_of(gm, mask).dim() > 2:
            missing = rank - value_of(gm, mask).dim()
            for _ in range(missing):
                mask = call(gm, aten.unsqueeze.default, mask, 0, like=node)
            if any(static_size(size) != 1 for size in value_of(gm, mask).shape[: rank - 3]):
                mask = _with_leading(gm, mask, values[0], rank, node)
            mask = call(gm, aten.flatten.using_ints, mask, 0, rank - 4, like=node)
        leading = [call(gm, aten.sym_size.int, values[0], dim, like=node) for dim in range(rank - 3)]
        values = [call(gm, aten.flatten.using_ints, value, 0, rank - 4, like=node) for value in values]
    attended = _attend(gm, node, values, mask)
    if mask is not None and _may_forbid_rows(gm, argument(node, 3)):
        attended = _zero_where_forbidden(gm, attended, mask, node)
    if rank >= 4:
        sizes = [size if static_size(value_of(gm, size)) is None else value_of(gm, size) for size in leading]
        return call(gm, aten.unflatten.int, attended, 0, sizes, like=node)
    for _ in range(4 - rank):
        attended = call(gm, aten.squeeze.dim, attended, 0, like=node)
    return attended


def _with_leading(gm: GraphModule, mask: Node, like: Node, rank: int, node: Node) -> Node:
    """Expand a mask along the leading dimensions of the queries `like`, before these dimensions are flattened."""
    sizes = [call(gm, aten.sym_size.int, like, dim, like=node) for dim in range(rank - 3)]
    return call(gm, aten.expand.default, mask, [*sizes, -1, -1, -1], like=node)


def _sum_over_divisor(gm: GraphModule, node: Node) -> Node:
    """Rewrite an average pool with a divisor: pad, average windows of equal size, and rescale the averages."""
    value, kernel, stride, padding, ceil_mode, _, divisor = (argument(node, position) for position in range(7))
    rank = len(kernel) if len(kernel) > 1 else int(target_name(node)[len("aten.avg_pool")])
    kernel, stride, padding = (
        list(per_dimension(sizes, rank, 0)) for sizes in (kernel, stride or kernel, padding or None)
    )
    sizes = value_of(gm, value).shape[-rank:]
    pads: list[int] = []
    for size, wide, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        beyond = 0
        if ceil_mode:
            length = static_size(size)
            if length is None:
                raise ExportError(f"{describe(node)}: ceil_mode with divisor_override needs a fixed input size")
            windows = -(-(length + 2 * pad - wide) // step) + 1
            windows -= (windows - 1) * step >= length + pad  # windows must not begin in the padding at the end
            beyond = max((windows - 1) * step + wide - length - 2 * pad, 0)
        pads = [pad, pad + beyond, *pads]
    if any(pads):
        value = call(gm, aten.constant_pad_nd.default, value, pads, 0.0, like=node)
    averages = call(gm, node.target, value, kernel, stride, like=node)
    return call(gm, aten.mul.Scalar, averages, math.prod(kernel) / divisor, like=node)


def _difference(gm: GraphModule, node: Node) -> Node:
    value, dim = argument(node, 0), -1 if argument(node, 2) is None else argument(node, 2)
    around = [part for part in (argument(node, 3), value, argument(node, 4)) if part is not None]
    if len(around) > 1:
        value = call(gm, aten.cat.default, around, dim, like=node)
    later = call(gm, aten.slice.Tensor, value, dim, 1, sys.maxsize, like=node)
    earlier = call(gm, aten.slice.Tensor, value, dim, 0, -1, like=node)
    differs = aten.logical_xor.default if value_of(gm, value).dtype == torch.bool else aten.sub.Tensor
    return call(gm, differs, later, earlier, like=node)


def _normalized(gm: GraphModule, node: Node) -> Node:
    value, *statistics = (argument(node, position) for position in range(5))
    momentum, epsilon = argument(node, 6), argument(node, 7)
    normalize = aten._native_batch_norm_legit_no_training.default
    results = call(gm, normalize, value, *statistics, momentum, epsilon, like=node)
    return call(gm, operator.getitem, results, 0, like=node)


def _transposed_convolution(gm: GraphModule, node: Node) -> Node:
    rank = value_of(gm, argument(node, 1)).dim() - 2
    stride, padding, beyond, dilation = (
        list(per_dimension(argument(node, position), rank, fill)) for position, fill in ((3, 1), (4, 0), (5, 0), (7, 1))
    )
    groups = 1 if argument(node, 6) is None else argument(node, 6)
    operands = (argument(node, position) for position in range(3))
    convolve = aten.convolution.default
    return call(gm, convolve, *operands, stride, padding, dilation, True, beyond, groups, like=node)


def _in_float32(gm: GraphModule, node: Node) -> Node | tuple[Node, ...]:
    dtype = value_of(gm, argument(node, 0)).dtype
    wide = cast(gm, argument(node, 0), torch.float32, node)
    wide_result = call(gm, node.target, wide, *node.args[1:], like=node, **node.kwargs)
    if "mean" not in target_name(node):
        return cast(gm, wide_result, dtype, node)
    parts = (call(gm, operator.getitem, wide_result, place, like=node) for place in (0, 1))
    return tuple(cast(gm, part, dtype, node) for part in parts)


def _has_number_first(node: Node) -> bool:
    return not isinstance(argument(node, 0), Node)


def _division(gm: GraphModule, node: Node) -> Node:
    """Convert Python numbers to tensors, and compute in float32 if the result has 16 bits, like torch.

    torch rounds each operand to 16 bits first, except a Python number that is the divisor of `div`.
    """
    dtype, name = value_of(gm, node).dtype, target_name(node)
    divides = "div" in name
    operands = [argument(node, 0), argument(node, 1)]
    for place, operand in enumerate(operands):
        if isinstance(operand, Node):
            rounded = cast(gm, operand, dtype, node) if dtype in _HALVES else operand
        elif place == 1 and divides:
            continue
        else:
            rounded = call(gm, aten.scalar_tensor.default, operand, like=node, dtype=dtype)
        operands[place] = cast(gm, rounded, torch.float32, node) if dtype in _HALVES else rounded
    if divides:
        mode = node.kwargs.get("rounding_mode", "floor")  # floor_divide lacks the argument
        quotient = call(gm, aten.div.Tensor_mode, *operands, like=node, rounding_mode=mode)
    else:
        quotient = call(gm, aten.fmod.Tensor if "fmod" in name else aten.remainder.Tensor, *operands, like=node)
    return cast(gm, quotient, dtype, node)


def _truth_as_number(gm: GraphModule, node: Node) -> Node:
    truth = call(gm, aten.ne.Scalar, argument(node, 0), 0, like=node)
    number = call(gm, node.target, truth, *node.args[1:], like=node, **node.kwargs)
    return cast(gm, number, torch.uint8, node)


def _mean_of_all(gm: GraphModule, node: Node) -> Node:
    dims = list(range(value_of(gm, argument(node, 0)).dim()))
    return call(gm, node.target, argument(node, 0), dims, *node.args[2:], like=node, **node.kwargs)


def _joined(gm: GraphModule, node: Node) -> list[Node]:
    """Return the operands of a concatenation except 1-D operands, which torch accepts among higher ranks if empty."""
    parts = argument(node, 0)
    if value_of(gm, node).dim() == 1:
        return list(parts)
    return [part for part in parts if value_of(gm, part).dim() > 1]


def _without_empty_vectors(gm: GraphModule, node: Node) -> Node:
    """Concatenate without empty vectors, in the dtype of the result, which depends on their dtypes, too."""
    dtype = value_of(gm, node).dtype
    parts = [cast(gm, part, dtype, node) for part in _joined(gm, node)]
    return call(gm, aten.cat.default, parts, argument(node, 1) or 0, like=node)


def _mean_slope(gm: GraphModule, node: Node) -> Node:
    """Replace `rrelu` in eval mode by a leaky relu whose slope is the middle of the range."""
    value, lower, upper = (argument(node, position) for position in range(3))
    low, high = 1 / 8 if lower is None else lower, 1 / 3 if upper is None else upper
    return call(gm, aten.leaky_relu.default, value, (low + high) / 2, like=node)


def _products_by_doubling(gm: GraphModule, node: Node) -> Node:
    """Compute `cumprod` in log2(size) steps: multiply each value by the value 1, then 2, then 4 … positions earlier."""
    value: Node = argument(node, 0)
    dim = argument(node, 1)
    product = value_of(gm, node)
    if value_of(gm, value).dtype != product.dtype:
        value = cast(gm, value, product.dtype, node)
    if not product.dim():
        return call(gm, aten.mul.Tensor, value, 1, like=node)
    dim, size = dim % product.dim(), static_size(product.shape[dim % product.dim()])
    if size is None:
        raise ExportError(
            f"{describe(node)}: cumprod needs a fixed size along its dimension; "
            "pass quantize() `dynamic_shapes` in which this size is fixed"
        )
    shift = 1
    while shift < size:
        before = call(gm, aten.slice.Tensor, value, dim, 0, size - shift, like=node)
        ones = call(gm, aten.slice.Tensor, value, dim, 0, shift, like=node)
        ones = call(gm, aten.ones_like.default, ones, like=node)
        value = call(gm, aten.mul.Tensor, value, call(gm, aten.cat.default, [ones, before], dim, like=node), like=node)
        shift *= 2
    return value


def _maxima_of_windows(gm: GraphModule, node: Node) -> tuple[Node, ...]:
    """Rewrite an adaptive max pool as maxima over slices, one dimension at a time."""
    value, sizes = argument(node, 0), argument(node, 1)
    for dim, windows in zip(range(-len(sizes), 0), sizes, strict=True):
        if windows == 1:
            value = call(gm, aten.amax.default, value, [dim], True, like=node)
            continue
        size = static_size(value_of(gm, value).shape[dim])
        if size is None:
            raise ExportError(
                f"{describe(node)}: windows of unequal size need a fixed input size; "
                "pass quantize() `dynamic_shapes` in which this size is fixed"
            )
        if windows == size:
            continue
        maxima = []
        for window in range(windows):
            first, last = window * size // windows, -(-(window + 1) * size // windows)
            part = call(gm, aten.slice.Tensor, value, dim, first, last, like=node)
            maxima.append(call(gm, aten.amax.default, part, [dim], True, like=node))
        value = call(gm, aten.cat.default, maxima, dim, like=node)
    return (value,)


def _has_unequal_windows(gm: GraphModule, node: Node) -> bool:
    """Tell whether the windows of an adaptive max pool may differ in size, and only maxima, no indices, are read."""
    if any(result.args[1] != 0 for result in node.users):
        return False
    windows = argument(node, 1)
    sizes = [static_size(size) for size in value_of(gm, argument(node, 0)).shape[-len(windows) :]]
    return any(size is None or size % count for size, count in zip(sizes, windows, strict=True))


def _reversed(gm: GraphModule, node: Node) -> Node:
    value = argument(node, 0)
    return call(gm, aten.permute.default, value, list(range(value_of(gm, value).dim()))[::-1], like=node)


_WITHOUT_LOWERING: dict[str, Rule] = {
    "aten.diff.default": _difference,
    **{f"aten.floor_divide.{kind}": _division for kind in ("default", "Scalar")},
    "aten.batch_norm.default": _normalized,
    **{f"aten.conv_transpose{kind}": _transposed_convolution for kind in ("1d.default", "2d.input", "3d.input")},
    "aten.numpy_T.default": _reversed,
    "aten.cumprod.default": _products_by_doubling,
}
"""Rules for operators without an ONNX lowering. If such an operator remains, torch decomposes the whole graph."""
