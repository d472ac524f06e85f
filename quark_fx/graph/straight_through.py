"""Run a quantized graph so that gradients pass through its quantizers.

A `quantize` and the `dequantize` that reads it become one differentiable function, `numbers.ops.fake_quantize`; the
integer codes between them are not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, describe, target_name
from quark_fx.numbers import ops
from quark_fx.system.isolation import warn


def records_gradients(*values: Any) -> bool:
    """Tell whether a computation on `values` records gradients; never during export, which keeps operators on codes."""
    differentiable = any(isinstance(value, Tensor) and value.requires_grad for value in values)
    return differentiable and torch.is_grad_enabled() and not torch.compiler.is_exporting()


def quantize_of(node: Node) -> Node | None:
    """Return the `quantize` whose codes a `dequantize` reads with the same scale, `None` for any other node."""
    source = node.args[0] if target_name(node) == DEQUANTIZE else None
    if not isinstance(source, Node) or target_name(source) != QUANTIZE:
        return None
    # scale, zero point, format, and granularity, with or without defaults
    theirs, ours = ([*n.args[1:6], *(None, 0)[len(n.args[:6]) - 4 :]] for n in (source, node))
    return source if all(map(_same, theirs, ours)) and not (source.kwargs or set(node.kwargs) - {"dtype"}) else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Node) and isinstance(b, Node):
        return a is b or (a.op == b.op == "get_attr" and a.target == b.target)
    return type(a) is type(b) and bool(a == b)


def run_with_gradients(gm: GraphModule, *inputs: Any) -> Any:
    """Return the outputs of `gm` for `inputs`, bit for bit, with the straight-through gradient of its quantizers.

    The gradient ends at codes that an operator other than `dequantize` reads; a warning names that operator.
    """
    return _Differentiable(gm).run(*inputs)


class _Differentiable(Interpreter):
    def run_node(self, n: Node) -> Any:
        if target_name(n) == QUANTIZE:
            (x, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
            if _read_in_pairs(n):
                # The rounded values stand in for the codes until `dequantize` casts them.
                return ops.fake_quantize(x.float(), *rest, **kwargs)
            if x.requires_grad:
                readers = ", ".join(describe(user) for user in n.users if quantize_of(user) is not n)
                warn(
                    f"no gradient flows through {describe(n)}, because {readers or 'the caller'} reads its codes "
                    "directly"
                )
        elif (source := quantize_of(n)) is not None and _read_in_pairs(source):
            (value, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
            return value.to(kwargs.get("dtype", rest[5] if len(rest) > 5 else torch.float32))
        return super().run_node(n)


def _read_in_pairs(node: Node) -> bool:
    return all(quantize_of(user) is node for user in node.users)


__all__ = ["quantize_of", "records_gradients", "run_with_gradients"]
