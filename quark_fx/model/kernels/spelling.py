"""Decomposition of operators without a kernel into operators that `torch.compile` fuses with their neighbors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, erase_dead, fake_mode, get_attr, target_name, value_of
from quark_fx.model.constants import constant_of
from quark_fx.numbers import ops
from quark_fx.numbers.quantized_tensor import QuantizedTensor

aten = torch.ops.aten

Traced = dict[Any, Graph]
"""Traces of functions, keyed by function, constant arguments, and symbolic shapes."""


def spell_out(gm: GraphModule, traced: Traced | None = None) -> None:
    """Replace `quantize`, `dequantize`, and `dynamic_qparams` with torch's operators; constants become floats.

    Args:
        gm: A quantized graph.
        traced: Traces of earlier graphs with fake values of the same mode, which are reused.
    """
    traced = {} if traced is None else traced
    erase_dead(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        constant = constant_of(gm, node) if target_name(node) == DEQUANTIZE else None
        with gm.graph.inserting_before(node):
            if constant is not None:
                node.replace_all_uses_with(get_attr(gm, constant.names[0], constant.value()))
            elif (function := _FUNCTIONS.get(target_name(node))) is not None:
                _inline(gm, node, function, traced)
    erase_dead(gm)


def _inline(gm: GraphModule, node: Node, function: Any, traced: Traced) -> None:
    """Replace a call with the operators that `function` calls for the same arguments."""
    operands = [argument for argument in node.args if isinstance(argument, Node)]

    def of_tensors(*tensors: Tensor) -> Any:
        named = dict(zip(operands, tensors, strict=True))
        return function(*(named[a] if isinstance(a, Node) else a for a in node.args), **node.kwargs)

    values = [value_of(gm, argument) for argument in operands]
    constants = [None if isinstance(a, Node) else a for a in node.args]
    shapes = [(str(tuple(v.shape)), str(v.stride()), v.dtype, v.device) for v in values]
    same = [operands.index(argument) for argument in operands]  # an argument that is passed twice is one input
    key = (function, repr(constants), repr(node.kwargs), *same, *shapes)
    if key not in traced:
        # Without torch's Python rules for composite operators, dynamic sizes are fixed, also in the original graph.
        with fake_mode(gm), enable_python_dispatcher():
            traced[key] = make_fx(of_tensors, _VECTORIZED)(*values).graph
    inputs = (n for n in traced[key].nodes if n.op == "placeholder")
    result: Any = gm.graph.graph_copy(traced[key], dict(zip(inputs, operands, strict=True)))
    if isinstance(result, tuple | list):
        for reader in list(node.users):
            index: Any = reader.args[1]
            reader.replace_all_uses_with(result[index])
            gm.graph.erase_node(reader)
    else:
        node.replace_all_uses_with(result)


def _without_nan(x: Tensor, nan: float) -> Tensor:
    """Compute `nan_to_num_` for a value that is clamped next, so that infinities may stay.

    Inductor compiles `isnan` to a scalar loop, which can take as long as the product that follows.
    """
    return x.masked_fill_(x != x, nan)


_VECTORIZED: Any = {aten.nan_to_num_.default: _without_nan}


def _dequantize(*stored: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute `ops.dequantize` for the same arguments, for all values at once instead of in pieces."""
    *tensor, dtype = stored if len(stored) == 7 else (*stored, dtype)
    return QuantizedTensor.of(*tensor).decoded().to(dtype)


_FUNCTIONS = {
    QUANTIZE: ops.quantize._init_fn,
    DEQUANTIZE: _dequantize,
    "quark_fx.dynamic_qparams.default": ops.dynamic_qparams._init_fn,
}

__all__ = ["Traced", "spell_out"]
