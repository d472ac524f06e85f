"""Conversion of graphs to an int8 KV cache."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.data.cache_names import cache_of
from quark_fx.errors import ExportError
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.to_onnx.edit import add_array, operand, producer_of


def use_int8_cache(model: ir.Model, cache: CacheScales) -> int:
    """Make a graph read and return int8 codes instead of keys and values; return the number of tensors in the cache.

    A graph that reads a cache rounds the keys and values of its new tokens before it attends to them. A graph without a
    cache as input attends to them in float, and rounds only the keys and values that it returns.

    Args:
        model: Graph, changed in place.
        cache: Scales of the keys and values of each layer.

    Raises:
        ExportError: If the tensors of the graph's cache differ from the tensors in `cache`, or the graph does more than
            append to its cache.
    """
    taken, returned = cache_of(model.graph.inputs), cache_of(model.graph.outputs)
    if unknown := sorted((taken.keys() | returned.keys()) ^ cache.scales.keys()):
        raise ExportError(
            f"the graph and the measured cache differ in {', '.join(unknown)}; measure the cache of this model"
        )
    for name, output in returned.items():
        scale = add_array(model, f"{name}_scale", cache.scales[name].numpy(force=True).astype(np.float32))
        if output.dtype != ir.DataType.FLOAT:
            raise ExportError(f"{name} is {output.dtype}; an int8 cache is for float32 models: quantize model.float()")
        past = taken.get(name)
        node = output.producer()
        if past is None:
            _return_codes(model, output, scale)
        elif node is None or {use.node for use in past.uses() if use.node.op_type != "Shape"} != {node}:
            raise ExportError(
                f"the graph does more with {name} than append to it, so {name} cannot be int8; export without cache="
            )
        elif node.op_type == "GroupQueryAttention":
            _attend_to_codes(node, past, output, scale)
        elif node.op_type == "Concat" and len(node.inputs) == 2 and node.inputs[0] is past and _appends(node):
            _append_codes(node, past, output, scale)
        else:
            raise ExportError(
                f"the graph computes {name} with {node.op_type}, which does not append tokens to the cache, so {name} "
                "cannot be int8; export without cache="
            )
    return len(returned)


def _appends(node: ir.Node) -> bool:
    """Tell whether a concatenation of tensors of shape `(batch, heads, tokens, channels)` is along the tokens."""
    return node.attributes.get_int("axis") in (2, -2)


def _attend_to_codes(node: ir.Node, past: ir.Value, output: ir.Value, scale: ir.Value) -> None:
    """Set the inputs and attributes with which `GroupQueryAttention` reads, appends, and returns codes."""
    which = list(node.outputs).index(output)  # 1: keys, 2: values
    if len(node.inputs) < 14:
        node.resize_inputs(14)
    node.replace_input_with(11 + which, scale)
    kind = "k_quant_type" if which == 1 else "v_quant_type"
    node.attributes[kind] = ir.AttrString(kind, "PER_CHANNEL")
    node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
    past.dtype = output.dtype = ir.DataType.INT8


def _append_codes(node: ir.Node, past: ir.Value, output: ir.Value, scale: ir.Value) -> None:
    """Quantize the new keys or values, append them to the cached codes, and dequantize the result for other nodes."""
    codes = _codes(operand(node, 1), scale)
    real = [ir.node("Cast", [output], {"to": ir.DataType.FLOAT})]
    real.append(ir.node("Mul", [real[0].outputs[0], scale]))
    for step in real:
        step.outputs[0].shape, step.outputs[0].dtype = output.shape, ir.DataType.FLOAT
    for use in list(output.uses()):
        if use.node is not real[0]:
            use.node.replace_input_with(use.idx, real[1].outputs[0])
    node.prepend(codes)
    node.append(real)
    node.replace_input_with(1, codes[-1].outputs[0])
    past.dtype = output.dtype = ir.DataType.INT8


def _return_codes(model: ir.Model, output: ir.Value, scale: ir.Value) -> None:
    """Make the graph return the codes of keys or values; nodes inside the graph still read floats."""
    index, codes = list(model.graph.outputs).index(output), _codes(output, scale)
    producer_of(output).append(codes)
    result = codes[-1].outputs[0]
    model.graph.outputs[index] = result
    result.name, output.name = output.name, f"{output.name}_real"


def _codes(x: ir.Value, scale: ir.Value) -> list[ir.Node]:
    """Return the nodes that quantize `x`; `QuantizeLinear` does not support scales along two axes."""
    ratio = ir.node("Div", [x, scale])
    whole = ir.node("Round", ratio.outputs)
    low, high = (ir.node("Constant", [], {"value_float": bound}) for bound in (-128.0, 127.0))
    clipped = ir.node("Clip", [whole.outputs[0], low.outputs[0], high.outputs[0]])
    codes = ir.node("Cast", clipped.outputs, {"to": ir.DataType.INT8})
    for step in (ratio, whole, clipped, codes):
        step.outputs[0].shape, step.outputs[0].dtype = x.shape, ir.DataType.FLOAT
    codes.outputs[0].dtype = ir.DataType.INT8
    return [ratio, whole, low, high, clipped, codes]


__all__ = ["use_int8_cache"]
