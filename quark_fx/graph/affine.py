"""Affine maps with a constant factor and a constant offset for each channel, in every spelling.

`x * g + b`, `(x - mean) / std`, `torch.addcmul(b, x, g)`, a batch norm in eval mode, and chains of them compute the
same kind of function. `affine_step` recognizes such maps; their constants can be computed from parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.errors import CalibrationError
from quark_fx.graph.computed import constant_value, is_constant
from quark_fx.graph.nodes import describe, is_finite, is_known, is_parameter, static_size, target_name, value_of
from quark_fx.graph.operators import KEEPS_ORDER, Motion, argument, motion, named_argument, permutation


@dataclass(frozen=True)
class Step:
    """Operators that together multiply each channel of a value by a constant and add a constant.

    Attributes:
        nodes: Calls, in graph order. The last call computes the result; only calls in `nodes` read the other results.
        value: Value that is multiplied.
        factor: Factor of each channel, float64 on the host, shape `(channels,)`.
        offset: Offset of each channel, float64 on the host, shape `(channels,)`.
        per_channel: Whether a constant has an element for each channel, or factors or offsets differ between channels.
        statistics: Mean and standard deviation of each channel of the result if a batch norm computes it, each of
            shape `(channels,)`; otherwise `None`.
    """

    nodes: tuple[Node, ...]
    value: Node
    factor: Tensor
    offset: Tensor
    per_channel: bool
    statistics: tuple[Tensor, Tensor] | None = None

    @property
    def result(self) -> Node:
        return self.nodes[-1]


_OPERATORS: dict[str, tuple[tuple[int, ...], ...]] = {
    **{f"aten.{name}.Tensor": ((0, 1),) for name in ("add", "sub", "rsub")},
    **{f"aten.{name}.Scalar": ((0,),) for name in ("mul", "add", "sub", "rsub")},
    **{f"aten.{name}": ((0,),) for name in ("div.Tensor", "div.Scalar", "div.Tensor_mode", "neg.default")},
    **{f"aten.{name}_like.default": ((0,),) for name in ("zeros", "ones", "full")},
    "aten.mul.Tensor": ((0,), (1,)),
    "aten.addcmul.default": ((0, 1), (0, 2)),
    "aten.addcdiv.default": ((0, 1),),
    "aten.lerp.Scalar": ((0, 1),),
    "aten.lerp.Tensor": ((0, 1), (2,)),
    "aten.where.self": ((1, 2),),
    "aten.where.ScalarOther": ((1,),),
    "aten.where.ScalarSelf": ((2,),),
    "aten.masked_fill.Scalar": ((0,),),
    "aten.masked_fill.Tensor": ((0, 2),),
}
"""Groups of operand positions, by operator: it is affine in the operands of a group if all others are constants."""

_ALONG_A_DIMENSION = {
    *("aten.slice.Tensor", "aten.select.int", "aten.unbind.int", "aten.chunk.default", "aten.split.Tensor"),
    *("aten.split_with_sizes.default", "aten.cat.default", "aten.stack.default"),
}
"""Operators that move data along one dimension, their argument `dim`."""

_NORMS = {"aten.batch_norm.default", "aten.instance_norm.default"}
"""Norms with stored statistics; their channels are dimension 1."""

_NATIVE_NORM = "aten._native_batch_norm_legit_no_training.default"

_MAY_BE_AFFINE = {_NATIVE_NORM, "python.getitem", *_NORMS, *_OPERATORS, *_ALONG_A_DIMENSION}

_LARGEST_STEP = 64
"""Number of calls after which the search for the end of a step stops."""


def affine_step(
    gm: GraphModule, value: Node, channels: int, constants: Collection[Node], within: Collection[Node] | None = None
) -> Step | None:
    """Return the shortest sequence of calls from `value` that computes an affine function of it, or `None`.

    The constants vary along one dimension only. Each call is evaluated as a function of the channels, until a single
    value remains that holds every channel at its original position.

    Args:
        gm: Graph.
        value: Any node.
        channels: Dimension along which the constants may vary.
        constants: Computed constants of the graph.
        within: Consumers of `value` to consider; default: all.

    Raises:
        CalibrationError: If a constant holds NaN, or a batch norm has impossible statistics.
    """
    real = value_of(gm, value)
    if not isinstance(real, Tensor) or (size := static_size(real.shape[channels])) is None:
        return None
    order = torch.arange(size, dtype=torch.float64).view([size if d == channels else 1 for d in range(real.dim())])
    parts: dict[Node, Any] = {
        value: torch.stack([order * 0 + 1, order * 0, order, order * 0, order * nan, order * nan])
    }
    pending = {user for user in readers(value) if within is None or user in within}
    while pending and len(parts) <= _LARGEST_STEP:
        node = min(pending)  # the first in graph order: its inputs are evaluated
        part = parts[node] = _part(gm, node, parts, constants)
        if part is None:
            return None
        pending.remove(node)
        keeps_shape = _keeps_shape(gm, node, value)
        if keeps_shape and not pending and torch.equal(part[2], order):
            factor, offset, _, varies, *statistics = part.flatten(1)
            if not bool(factor.any()):
                return None  # the result does not depend on the value
            varies = varies.any() or (factor != factor[:1]).any() or (offset != offset[:1]).any()
            of_norm = None if bool(statistics[0].isnan().any()) else (statistics[0], statistics[1])
            return Step(tuple(parts)[1:], value, factor, offset, bool(varies), of_norm)
        # If the shape is the same, consumers of its sizes can read the sizes of `value` instead.
        pending.update(readers(node) if keeps_shape else node.users)
    return None


def affine_step_to(gm: GraphModule, result: Node, channels: int, constants: Collection[Node]) -> Step | None:
    """Return the shortest sequence of calls that computes `result` as an affine function of an earlier value.

    `None` if no such value exists. The earlier value may have other consumers, too. See `affine_step`.
    """
    calls, pending = set[Node](), {result}
    while pending and len(calls) < _LARGEST_STEP:
        node = max(pending)
        if target_name(node) not in _MAY_BE_AFFINE and motion(node) not in KEEPS_ORDER:
            return None
        calls.add(node)
        pending.remove(node)
        values = [n for n in node.all_input_nodes if isinstance(value_of(gm, n), Tensor | list | tuple)]
        varying = [n for n in values if not is_constant(_before_expansions(n), constants)]
        pending.update(n for n in varying if node in readers(n))
        if len(pending) == 1:
            (value,) = pending
            step = affine_step(gm, value, channels, constants, calls) if _keeps_shape(gm, result, value) else None
            if step is not None and step.result is result:
                return step
    return None


def readers(value: Node) -> list[Node]:
    """Return the consumers of a value, except consumers that read only its sizes."""
    return [user for user in value.users if not _reads_sizes_alone(user, value)]


def _reads_sizes_alone(user: Node, value: Node) -> bool:
    name = target_name(user)
    return name == "aten.sym_size.int" or (name == "aten.expand_as.default" and user.args[0] is not value)


def _part(gm: GraphModule, node: Node, parts: Mapping[Node, Any], constants: Collection[Node]) -> Any:
    """Return the result of a call as a function of the step's input channels; `None` if a step cannot contain the call.

    The function is a tensor, float64, shape `(6, ...)`. Its first dimension holds the factor, the offset, the index of
    the channel at each position, whether a constant has an element for each channel, and the mean and the standard
    deviation after a batch norm, otherwise NaN. The other dimensions are the node's, with size 1 where they hold no
    channels. For a call with several results, return a tuple of such tensors.
    """
    name = target_name(node)
    inputs = {entry: parts[entry] for entry in node.all_input_nodes if entry in parts}
    entry, first = next(iter(inputs.items()))
    if name == "python.getitem":
        return first[node.args[1]]
    if name in _OPERATORS:
        return _computed(gm, node, inputs, constants)
    if name in _NORMS or name == _NATIVE_NORM:
        return _normalized(gm, node, first, constants)
    if motion(node) in KEEPS_ORDER and node.args[0] in inputs:
        return _reshaped(first, value_of(gm, entry).shape, value_of(gm, node).shape)
    if name not in _ALONG_A_DIMENSION or len(inputs) < len(node.all_input_nodes):
        return None
    if name == "aten.slice.Tensor" and _keeps_shape(gm, node, entry):
        return first
    dim = named_argument(node, "dim") or 0
    if name != "aten.stack.default" and not _equal(first[0].shape[dim], value_of(gm, entry).shape[dim]):
        return None

    def move(*values: Tensor) -> Any:
        operands = dict(zip(inputs, values, strict=True))
        return node.target(*map_arg(node.args, operands.__getitem__), **node.kwargs)  # type: ignore[operator]

    return torch.vmap(move)(*inputs.values())


def _computed(gm: GraphModule, node: Node, inputs: Mapping[Node, Tensor], constants: Collection[Node]) -> Tensor | None:
    """Return `_part` of an operator that computes each element from the elements at the same position."""
    origin = next(iter(inputs.values()))[2]
    positions = {position for position, entry in enumerate(node.args) if entry in inputs}
    groups = _OPERATORS[target_name(node)] if node.kwargs.get("rounding_mode") is None else ()
    same_places = all(torch.equal(part[2], origin) and _keeps_shape(gm, node, n) for n, part in inputs.items())
    if not same_places or not any(positions.issubset(group) for group in groups):
        return None
    other_inputs = [entry for entry in node.all_input_nodes if entry not in inputs]
    operands = {entry: _channel_constant(gm, node, entry, origin.shape, constants) for entry in other_inputs}
    if any(operand is None for operand in operands.values()):
        return None

    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("device", "layout", "pin_memory")}

    def result(component: Callable[[Tensor], Tensor]) -> Tensor:
        args = map_arg(node.args, {**operands, **{n: component(part) for n, part in inputs.items()}}.__getitem__)
        output: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return output.double().expand_as(origin)

    factor, offset = result(lambda part: part[0]) - result(lambda part: 0 * part[0]), result(lambda part: part[1])
    if not (is_finite(factor) and is_finite(offset)):
        return None
    varies = any(c is not None and c.dim() and c.numel() == origin.numel() for c in operands.values())
    marks = torch.stack([part[3] for part in inputs.values()]).sum(0) + varies
    return torch.stack([factor, offset, origin, marks, origin * nan, origin * nan])


def _reshaped(part: Tensor, before: Sequence[int | torch.SymInt], after: Sequence[int | torch.SymInt]) -> Tensor | None:
    """Reshape a tensor from `_part`; `None` if no adjacent dimensions of the new shape hold exactly the channels."""
    sizes, channels = part.shape[1:], part[0].numel()
    dims = [d for d, size in enumerate(sizes) if size > 1] or [0]
    start, stop = dims[0], dims[-1] + 1
    if any(not _equal(a, b) for a, b in zip(before[start:stop], sizes[start:stop], strict=True)):
        return None
    for a, b in itertools.combinations(range(len(after) + 1), 2):
        if _equal(math.prod(after[:a]), math.prod(before[:start])) and _equal(math.prod(after[a:b]), channels):
            return part.reshape(6, *[1] * a, *map(int, after[a:b]), *[1] * (len(after) - b))
    return None


def _normalized(gm: GraphModule, node: Node, part: Tensor, constants: Collection[Node]) -> Any:
    """Return `_part` of a norm with constant statistics; `None` for any other norm."""
    native = target_name(node) == _NATIVE_NORM
    epsilon, training = argument(node, 6 if native else 7), not native and argument(node, 5)
    operands = [argument(node, position) for position in (1, 2, 3, 4)]
    if training or operands[2] is None or not all(entry is None or is_constant(entry, constants) for entry in operands):
        return None
    weight, bias = (None if entry is None else constant_value(gm, entry, wide=True) for entry in operands[:2])
    mean, variance = (constant_value(gm, entry, wide=True) for entry in operands[2:])
    if not part.shape[2] == part[0].numel() == len(mean):
        return None
    _require_usable(node, dict(zip(operands, (weight, bias, mean, variance), strict=True)), operands[3], epsilon)
    # In half precision, the sum of a small variance and epsilon, or its square root, is off by several percent.
    factor = torch.rsqrt(_wide(variance) + epsilon)
    gamma = torch.ones_like(factor) if weight is None else _wide(weight)
    beta = torch.zeros_like(factor) if bias is None else _wide(bias)
    factor = factor * gamma
    shift, factor, beta, gamma = (x.view_as(part[0]) for x in (beta - _wide(mean) * factor, factor, beta, gamma.abs()))
    result = torch.stack([part[0] * factor, part[1] * factor + shift, part[2], torch.ones_like(shift), beta, gamma])
    return (result, None, None) if native else result


def _require_usable(node: Node, constants: dict[Any, Tensor | None], variance: Node, epsilon: float) -> None:
    """Raise `CalibrationError` if a constant is not finite, or the sum of a variance and epsilon is not positive."""
    for source, constant in constants.items():
        if constant is not None and not is_finite(constant):
            raise CalibrationError(
                f"{_called(source)} of {describe(node)} holds NaN or infinity; fix the model's weights"
            )
    variances = constants[variance]
    smallest = float(variances.min()) if variances is not None and variances.numel() else 0.0
    if variances is not None and smallest + epsilon <= 0:
        raise CalibrationError(
            f"{_called(variance)} of {describe(node)} is {smallest:.3g} in channel {int(variances.argmin())}, but a "
            "variance cannot be negative; fix the model's weights"
        )


def _called(constant: Node) -> str:
    return str(constant.target) if is_parameter(constant) else f"%{constant.name}"


def _wide(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def _channel_constant(
    gm: GraphModule, node: Node, source: Node, sizes: Sequence[int], constants: Collection[Node]
) -> Tensor | None:
    """Return a constant operand, cut to size 1 in the dimensions where `sizes` are 1.

    `None` if the operand is not constant, or varies along one of these dimensions.
    """
    if not is_constant(_before_expansions(source), constants):
        return None
    constant = constant_value(gm, _before_expansions(source), wide=True)
    rank = value_of(gm, node).dim()
    if constant.dim() > rank or constant.is_complex() or not constant.numel():
        return None
    for dim in range(constant.dim()):
        if sizes[dim + rank - constant.dim()] == 1 and constant.shape[dim] > 1:
            first = constant.narrow(dim, 0, 1)
            if not torch.equal(first.expand_as(constant), constant):
                return None
            constant = first
    if bool(constant.isnan().any()):
        raise CalibrationError(f"{_called(source)} of {describe(node)} holds NaN; fix the model's weights")
    return constant.cpu() if constant.dtype == torch.bool else _wide(constant)


def _keeps_shape(gm: GraphModule, node: Node, value: Node) -> bool:
    """Tell whether the result of a call has the shape and dtype of `value`, a floating-point tensor."""
    before, after = value_of(gm, value), value_of(gm, node)
    if not (isinstance(before, Tensor) and isinstance(after, Tensor) and before.is_floating_point()):
        return False
    if before.dtype != after.dtype:
        return False
    return before.dim() == after.dim() and all(map(_equal, before.shape, after.shape))


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    return a is b or is_known(a == b)


def carried_dim(gm: GraphModule, node: Node, dim: int) -> int | None:
    """Return the dimension of a data movement's result that holds dimension `dim` of its input, or `None`.

    Args:
        gm: Graph.
        node: Any node.
        dim: Dimension of the node's first input, counted from 0.
    """
    order = permutation(node) if node.op == "call_function" else None
    if order is not None:
        return order.index(dim)
    if motion(node) not in KEEPS_ORDER:
        return None
    before, after = value_of(gm, node.all_input_nodes[0]).shape, value_of(gm, node).shape
    count = math.prod(before[:dim])
    fitting = (d for d in range(len(after)) if _equal(after[d], before[dim]) and _equal(math.prod(after[:d]), count))
    return next(fitting, None)


def _before_expansions(node: Node) -> Node:
    """Return the value before any expansions of it; it broadcasts to the same values."""
    while motion(node) is Motion.EXPAND:
        node = node.all_input_nodes[0]
    return node


__all__ = ["Step", "affine_step", "affine_step_to", "carried_dim", "readers"]
