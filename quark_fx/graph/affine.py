"""Affine maps by constants, with one factor and one offset per channel, in every spelling.

`x * g + b`, `(x - mean) / std`, `torch.addcmul(b, x, g)`, a batch norm in eval mode, and chains of them compute the
same function. `affine_step` reads one operator as such a map; its constants can be computed from parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.errors import CalibrationError
from quark_fx.graph.computed import constant_value, is_constant
from quark_fx.graph.nodes import describe, is_finite, is_known, is_parameter, target_name, value_of
from quark_fx.graph.operators import KEEPS_ORDER, Motion, argument, motion, permutation


@dataclass(frozen=True)
class Step:
    """An operator that multiplies each channel by a constant and adds one.

    Attributes:
        node: Call.
        value: Operand that is multiplied.
        result: Node that holds the result: the call, or the node that selects it from several results.
        factor: Factor, float64 on the host, shape `(channels,)` or `(1,)`.
        offset: Offset, of the same type and one of these shapes.
        per_channel: Whether a constant has an element for each channel.
        statistics: Mean and deviation of each channel of the result, if the operator is a batch norm.
    """

    node: Node
    value: Node
    result: Node
    factor: Tensor
    offset: Tensor
    per_channel: bool
    statistics: tuple[Tensor, Tensor] | None = None


_OPERATORS = {
    **{f"aten.{name}.Tensor": (0, 1) for name in ("mul", "add", "sub", "rsub")},
    **{f"aten.{name}.Scalar": (0,) for name in ("mul", "add", "sub", "rsub")},
    **{f"aten.{name}": (0,) for name in ("div.Tensor", "div.Scalar", "div.Tensor_mode", "neg.default")},
    "aten.addcmul.default": (0, 1, 2),
    "aten.addcdiv.default": (0, 1),
    "aten.lerp.Scalar": (0, 1),
    "aten.lerp.Tensor": (0, 1, 2),
}
"""Operands in which an operator is affine if the other operands are constants."""

_NORMS = {"aten.batch_norm.default": 7, "aten.instance_norm.default": 7}
"""Norms with stored statistics, and the position of epsilon; their channels are dimension 1."""

_NATIVE_NORM = "aten._native_batch_norm_legit_no_training.default"


def affine_step(gm: GraphModule, node: Node, channels: int, constants: Collection[Node]) -> Step | None:
    """Return a call as an affine map by constants that vary along one dimension only, or `None`.

    Args:
        gm: Graph.
        node: Any node.
        channels: Dimension that the constants may vary along.
        constants: Computed constants of the graph.

    Raises:
        CalibrationError: If a constant holds NaN, or a batch norm has impossible statistics.
    """
    name = target_name(node)
    if name in _NORMS or name == _NATIVE_NORM:
        return _norm(gm, node, constants) if channels == 1 else None
    given = [entry for entry in node.args if isinstance(entry, Node)] if name in _OPERATORS else []
    values = [entry for entry in given if not is_constant(_before_expansions(entry), constants)]
    if len(values) != 1 or node.kwargs.get("rounding_mode") is not None:
        return None
    value = values[0]
    if node.args.index(value) not in _OPERATORS[name] or not _keeps_shape(gm, node, value):
        return None
    operands = {entry: _channel_constant(gm, node, entry, channels) for entry in given if entry is not value}
    if any(operand is None for operand in operands.values()):
        return None
    rank = value_of(gm, node).dim()

    def result(x: float) -> Tensor:
        known = {**operands, value: torch.full([1] * rank, x, dtype=torch.float64)}
        args = map_arg(node.args, known.__getitem__)
        found: Tensor = node.target(*args, **node.kwargs)  # type: ignore[operator]
        return found.flatten()

    offset = result(0)
    factor = result(1) - offset
    if not (is_finite(factor) and is_finite(offset)):
        return None
    size = value_of(gm, node).shape[channels]
    varies = any(
        c is not None and c.dim() and c.dim() + channels >= rank and c.numel() == size for c in operands.values()
    )
    return Step(node, value, node, factor, offset, varies)


def _norm(gm: GraphModule, node: Node, constants: Collection[Node]) -> Step | None:
    """Return a norm with constant statistics as an affine map."""
    result, training = node, False
    if target_name(node) == _NATIVE_NORM:
        if [user.target for user in node.users] != [operator.getitem]:
            return None
        result, epsilon = next(iter(node.users)), argument(node, 6)
    else:
        epsilon, training = argument(node, 7), argument(node, 5)
    given = [argument(node, position) for position in (1, 2, 3, 4)]
    if training or given[2] is None or not all(entry is None or is_constant(entry, constants) for entry in given):
        return None
    weight, bias = (None if entry is None else constant_value(gm, entry, wide=True) for entry in given[:2])
    mean, variance = (constant_value(gm, entry, wide=True) for entry in given[2:])
    _require_usable(node, dict(zip(given, (weight, bias, mean, variance), strict=True)), given[3], epsilon)
    # In half precision, the sum of a small variance and epsilon, or its root, is off by percents.
    factor = torch.rsqrt(_wide(variance) + epsilon)
    gamma = torch.ones_like(factor) if weight is None else _wide(weight)
    beta = torch.zeros_like(factor) if bias is None else _wide(bias)
    factor = factor * gamma
    return Step(node, argument(node, 0), result, factor, beta - _wide(mean) * factor, True, (beta, gamma.abs()))


def _require_usable(node: Node, constants: dict[Any, Tensor | None], variance: Node, epsilon: float) -> None:
    """Raise `CalibrationError` if a constant is not finite, or the sum of a variance and epsilon is not positive."""
    for source, constant in constants.items():
        if constant is not None and not is_finite(constant):
            raise CalibrationError(
                f"{_called(source)} of {describe(node)} holds NaN or infinity; fix the model's weights"
            )
    found = constants[variance]
    smallest = float(found.min()) if found is not None and found.numel() else 0.0
    if found is not None and smallest + epsilon <= 0:
        raise CalibrationError(
            f"{_called(variance)} of {describe(node)} is {smallest:.3g} in channel {int(found.argmin())}, and a "
            "variance is not negative; fix the model's weights"
        )


def _called(constant: Node) -> str:
    return str(constant.target) if is_parameter(constant) else f"%{constant.name}"


def _wide(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def _channel_constant(gm: GraphModule, node: Node, source: Node, channels: int) -> Tensor | None:
    """Return a constant operand, with size 1 along all other dimensions; `None` if it varies there."""
    constant = constant_value(gm, _before_expansions(source), wide=True)
    rank = value_of(gm, node).dim()
    if constant.dim() > rank or constant.is_complex() or constant.dtype == torch.bool or not constant.numel():
        return None
    for dim in range(constant.dim()):
        if dim + rank - constant.dim() != channels and constant.shape[dim] > 1:
            first = constant.narrow(dim, 0, 1)
            if not torch.equal(first.expand_as(constant), constant):
                return None
            constant = first
    if bool(constant.isnan().any()):
        raise CalibrationError(f"{_called(source)} of {describe(node)} holds NaN; fix the model's weights")
    return _wide(constant)


def _keeps_shape(gm: GraphModule, node: Node, value: Node) -> bool:
    """Tell whether a call gives each element of `value` a new value of the same type."""
    before, after = value_of(gm, value), value_of(gm, node)
    if not isinstance(before, Tensor) or not before.is_floating_point() or before.dtype != after.dtype:
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
    """Return the operand before it is expanded; it broadcasts to the same values."""
    while motion(node) is Motion.EXPAND:
        node = node.all_input_nodes[0]
    return node


__all__ = ["Step", "affine_step", "carried_dim"]
