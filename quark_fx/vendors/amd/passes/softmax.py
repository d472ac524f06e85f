"""Softmax in a DPU's arithmetic: a polynomial approximates the exponential, and every step is in bfloat16."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.graph.nodes import call, cast, value_of
from quark_fx.graph.operators import argument

_aten = torch.ops.aten
_COEFFICIENTS = (0.21875, 0.486328125, 1.0, 1.0)
"""Coefficients of the polynomial for `exp` on `[0, log 2)`, from the third power down."""


@graph_rule("aten.softmax.int", exact=False)
def use_dpu_softmax(gm: GraphModule, node: Node) -> tuple[Node, str] | None:
    """Compute every softmax as `e / sum(e)` for `e = 2**n * polynomial(x - n log 2)`, each step rounded to bfloat16.

    Here, `n = floor(x / log 2)`. The maximum is not subtracted first: inputs above 88 overflow, but rarely occur in a
    network rounded to 8 bits. Every step, and the constant `log 2`, has 8 bits of precision: an exponential has a
    relative error of up to `|x| / 2**7`. A softmax inside `scaled_dot_product_attention`, or in another type than
    float32, is left unchanged.

    Source:
        AMD Quark for ONNX, `ConvertSoftmaxToDPUVersion` (`SimulateDPUSoftmax`), off by default.
    """
    x = argument(node, 0)
    if any(value_of(gm, value).dtype != torch.float32 for value in (node, x)):
        return None
    result = _softmax(gm, node, x, argument(node, 1))
    return result, "exponential by a polynomial, in bfloat16"


def _softmax(gm: GraphModule, like: Node, x: Any, dim: int) -> Node:
    """Return the exponentials of `x` divided by their sum along `dim`."""

    def step(target: Any, *args: Any) -> Node:
        result = call(gm, target, *args, like=like)
        return cast(gm, cast(gm, result, torch.bfloat16, like), torch.float32, like)

    def constant(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.bfloat16))

    x = cast(gm, cast(gm, x, torch.bfloat16, like), torch.float32, like)
    whole = call(gm, _aten.floor.default, step(_aten.mul.Scalar, x, constant(1 / math.log(2))), like=like)
    rest = step(_aten.sub.Tensor, x, step(_aten.mul.Scalar, whole, constant(math.log(2))))
    power = call(gm, _aten.mul.Scalar, rest, _COEFFICIENTS[0], like=like)
    for coefficient in _COEFFICIENTS[1:-1]:
        power = call(gm, _aten.mul.Tensor, rest, step(_aten.add.Scalar, power, coefficient), like=like)
    fraction = step(_aten.add.Scalar, power, _COEFFICIENTS[-1])
    exponential = step(_aten.mul.Tensor, step(_aten.exp2.default, whole), fraction)
    return step(_aten.div.Tensor, exponential, step(_aten.sum.dim_IntList, exponential, [dim], True))
