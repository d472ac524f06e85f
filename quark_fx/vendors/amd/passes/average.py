"""Average pools and means in a DPU's arithmetic: a sum, a multiplication by an integer, and a shift."""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.errors import Declined
from quark_fx.graph.nodes import call, static_size, target_name, value_of
from quark_fx.graph.operators import AVERAGES, argument

_SQUARES = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}
"""Pairs `(a, b)` that approximate `1 / side**2` by `a / 2**b` for square kernels, by side."""

_WIDEST = 255
"""Largest side of a square kernel whose factor is known."""


@graph_rule(*AVERAGES, exact=False, after=("pool_means", "SplitLargePools"))
def use_dpu_averages(gm: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Multiply every average of `n` values by `n * a / 2**b`, because a DPU multiplies their sum by `a / 2**b`.

    The factor is close to 1 for common kernels: 63/64 for 3×3, 1029/1024 for 7×7.

    The factor depends on the kernel only. For windows that extend beyond the border, where `count_include_pad=False` or
    `ceil_mode` divide by fewer values, the factor is an approximation, as it is in Quark.

    The report lists averages that were not rewritten, with the reason.

    Source:
        AMD Quark for ONNX, `ConvertAvgPoolToDPUVersion` and `ConvertReduceMeanToDPUVersion`.
    """
    if [target_name(user) for user in node.users] == ["aten.mul.Scalar"]:
        return None
    factor = _ratio(gm, node)
    if factor == 1.0:
        raise Declined("the DPU averages it exactly")
    return call(gm, torch.ops.aten.mul.Scalar, node, factor, like=node), f"multiplied by {factor}"


def _ratio(gm: GraphModule, node: Node) -> float:
    """Return the ratio of a DPU's average to the exact average; raise `Declined` if it is unknown."""
    shape = [static_size(size) for size in value_of(gm, argument(node, 0)).shape]
    name = target_name(node)
    if name == "aten.mean.dim":
        sizes = [shape[dim] for dim in argument(node, 1) or range(len(shape))]
        fixed = [size for size in sizes if size is not None]
        if len(fixed) < len(sizes):
            raise Declined("the size varies")
        return nearest_shift(math.prod(fixed))
    if name == "aten.avg_pool2d.default":
        kernel, divisor = argument(node, 1), argument(node, 6)
        if divisor not in (None, kernel[0] * kernel[-1]):
            raise Declined(f"it divides {kernel[0]}×{kernel[-1]} values by {divisor}")
        return _of_kernel(kernel[0], kernel[-1])
    if name != "aten.adaptive_avg_pool2d.default":
        raise Declined("a pool over one dimension")
    if list(argument(node, 1)) != [1, 1]:
        raise Declined("an adaptive pool to several values")
    height, width = shape[-2:]
    if height is None or width is None:
        raise Declined("the size varies")
    return _of_kernel(height, width)


def _of_kernel(height: int, width: int) -> float:
    if height != width:
        raise Declined(f"its kernel of {height}×{width} is not square")
    return square_factor(height)


def square_factor(side: int) -> float:
    """Return the ratio of a DPU's average to the exact average for a square kernel; 1 for sides above 255.

    >>> square_factor(3), square_factor(7), square_factor(2)
    (0.984375, 1.0048828125, 1.0)
    """
    if side > _WIDEST:
        return 1.0
    if side in _SQUARES:
        multiplier, shift = _SQUARES[side]
        return float(side * side * multiplier / 2**shift)
    return nearest_shift(side * side)


def nearest_shift(count: int) -> float:
    """Return `count * a / 2**b` with `a / 2**b` nearest to `1 / count`, for `b` up to `6 + ceil(log2(count))`.

    >>> nearest_shift(16), nearest_shift(12)
    (1.0, 0.99609375)
    """
    shifts = range(7 + math.ceil(math.log2(count)))
    candidates = [round(2**shift / count) * 0.5**shift for shift in shifts]
    nearest: float = min(candidates, key=lambda c: abs(c - 1 / count))
    return count * nearest
