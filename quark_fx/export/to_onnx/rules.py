"""Rewrite rules for ONNX graphs: the type `OnnxRule`, and the rules that run on every translated graph.

To add a rule for one export, see `rules` of `quark_fx.export.onnx`. Rewrites for faults of runtimes are in
`workarounds`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchingTracer, MatchStatus, RewriteRule

from quark_fx.errors import Declined, ExportError
from quark_fx.export.to_onnx.edit import (
    Kept,
    add_array,
    add_initializer,
    array_of,
    erase_unread,
    made_by,
    naming_failures,
    operand,
    permutation,
    replace_node,
    shape_of,
)

logger = logging.getLogger(__name__)

Rewrite = Callable[[ir.Model, ir.Node], bool]
"""Function that edits the graph around a node and returns whether it changed the graph. It raises `Declined` if the
node matches, but another condition forbids the rewrite."""

DeclinedError = Declined
"""Earlier name of `quark_fx.errors.Declined`, which rules of users may import."""


@dataclass(frozen=True)
class OnnxRule:
    """A rewrite of nodes of some types. Calling a rule rewrites a model in place.

    Attributes:
        name: Name of the rewrite function.
        operators: Types of the nodes to rewrite, such as `"Relu"`.
        rewrite: Function that rewrites a node; see `Rewrite`.
    """

    name: str
    operators: tuple[str, ...]
    rewrite: Rewrite

    def __call__(self, model: ir.Model) -> tuple[Kept, ...]:
        """Rewrite every matching node of the main graph; return the nodes that the rule declined, and why."""
        done, left_alone = 0, list[Kept]()
        for node in list(model.graph):
            if node.op_type not in self.operators or node.graph is None:
                continue
            try:
                with naming_failures(lambda: f"rule {self.name}", node):
                    rewrote = self.rewrite(model, node)
            except Declined as declined:
                logger.debug("%s declines %s (%s): %s", self.name, node.name, node.op_type, declined.reason)
                left_alone.append(Kept(str(node.name), node.op_type, declined.reason, self.name))
                continue
            if not isinstance(rewrote, bool):
                raise ExportError(
                    f"rule {self.name} returned {rewrote!r} for {node.op_type} {node.name}; return True if it rewrote "
                    "the graph and False if not, or raise Declined with a reason"
                )
            done += rewrote
        if done:
            erase_unread(model)
        return tuple(left_alone)


def onnx_rule(*operators: str) -> Callable[[Rewrite], OnnxRule]:
    """Return a decorator that turns a function of a model and a node into a rule: `@onnx_rule("Relu")`.

    Args:
        operators: Types of the nodes for which the rule calls the function.

    Raises:
        ExportError: If no type is given.
    """
    if not operators or not all(isinstance(name, str) for name in operators):
        raise ExportError('onnx_rule needs the types of nodes that the rule rewrites; write @onnx_rule("Relu")')

    def make(rewrite: Rewrite) -> OnnxRule:
        return OnnxRule(rewrite.__name__, operators, rewrite)

    return make


def apply_rule(rule: Any, model: ir.Model) -> tuple[Kept, ...]:
    """Run an `OnnxRule` or a rule of `onnxscript.rewriter` on a model, in place; return the nodes it declined, and why.

    A pattern of `onnxscript.rewriter` declines a match if its `check` fails.

    Raises:
        ExportError: If `rule` is of neither kind.
    """
    if isinstance(rule, OnnxRule):
        return rule(model)
    if not isinstance(rule, RewriteRule):
        raise ExportError(
            f"{rule!r} is not an ONNX rule; decorate a function that takes a model and a node with onnx_rule, or "
            "pass the `rule()` of an onnxscript pattern"
        )
    reasons = _Reasons()
    rule.apply_to_model(model, tracer=reasons)  # with a tracer, it matches without rewriting
    if rule.apply_to_model(model):
        erase_unread(model)
    return tuple(reasons.declined)


class _Reasons(MatchingTracer):  # type: ignore[misc]
    """Tracer that records the reason for every declined match; onnxscript's own tracer keeps only the best match."""

    def __init__(self) -> None:
        super().__init__()
        self.declined: list[Kept] = []

    def log(self, rule: Any, container: Any, node: ir.Node, match_result: Any, status: MatchStatus) -> None:
        if status is MatchStatus.CONDITION_FAILED:
            self.declined.append(Kept(str(node.name), node.op_type, match_result.reason, str(rule)))


# Constants and attributes --------------------------------------------------------------------------------------------


@onnx_rule("Cast")
def fold_initializer_cast(model: ir.Model, node: ir.Node) -> bool:
    """Store a constant in the integer type to which it is cast, such as a zero point in the type of its codes."""
    source, dtype = node.inputs[0], ir.DataType(node.attributes["to"].as_int())
    if source is None or source.const_value is None or not source.is_initializer():
        return False
    if not dtype.is_integer():
        raise Declined("a float16 weight would become a float32 one")
    name, cast_name = str(source.name), f"{source.name}_{dtype.name.lower()}"
    values = source.const_value.numpy().astype(dtype.numpy())
    if len(source.uses()) > 1 or cast_name in model.graph.initializers:
        stored = add_array(model, cast_name, values)  # shared by several casts of one constant
    else:
        stored = add_initializer(model, name, ir.Tensor(values, dtype=dtype, name=name))
    replace_node(node, stored)
    return True


@onnx_rule("CastLike")
def fold_cast_like(model: ir.Model, node: ir.Node) -> bool:
    """Store a constant, such as a bound of a clamp, in the type to which a `CastLike` casts it."""
    source, like = node.inputs
    constant = array_of(source)
    if constant is None or like is None or like.dtype is None:
        return False
    replace_node(node, add_array(model, f"{node.name}_constant", constant.astype(like.dtype.numpy())))
    return True


@onnx_rule("Conv")
def drop_zero_bias(model: ir.Model, node: ir.Node) -> bool:
    """Drop the zero bias that torch writes for a convolution without a bias.

    The bias is an `Expand` to the number of rows of the dequantized weight, so it is computed at run time, is not
    recognized as a constant, and gives the weight a second reader.
    """
    zeros = made_by(node.inputs[2], "Expand") if len(node.inputs) > 2 else None
    constant = array_of(zeros.inputs[0]) if zeros is not None else None
    if constant is None or constant.any():
        return False
    node.resize_inputs(2)
    return True


@onnx_rule("Cast", "QuantizeLinear")
def type_codes(model: ir.Model, node: ir.Node) -> bool:
    """Set the type of a quantizer's output to the type of its zero point: torch declares bytes for 4-bit codes.

    A `Cast`, which ends a quantization with one scale per row, gets the type in its attribute.
    """
    output, zero_point = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
    elif zero_point is None or zero_point.dtype is None:
        return False
    else:
        dtype = zero_point.dtype
    changes = bool(output.dtype != dtype)
    output.dtype = dtype
    return changes


_DEFAULTS = (("axis", 1), ("block_size", 0), ("output_dtype", 0), ("saturate", 1))


@onnx_rule("QuantizeLinear", "DequantizeLinear")
def drop_default_attributes(model: ir.Model, node: ir.Node) -> bool:
    """Remove attributes of a quantizer that have their default value, and the axis if there is a single scale."""
    scale = node.inputs[1]
    scalar = scale is not None and scale.shape is not None and not scale.shape.rank()
    dropped = [
        name
        for name, default in _DEFAULTS
        if name in node.attributes and ((scalar and name == "axis") or node.attributes.get_int(name) == default)
    ]
    for name in dropped:
        del node.attributes[name]
    return bool(dropped)


# Quantized weights --------------------------------------------------------------------------------------------------


@onnx_rule("Transpose")
def drop_idle_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Remove a `Transpose` that keeps the order of axes; any other `Transpose` of a matrix swaps rows and columns."""
    value = operand(node)
    order = permutation(node, 2 if value.shape is None else value.shape.rank())
    if list(order) != sorted(order):
        return False
    if node.outputs[0].is_graph_output() and (value.is_graph_output() or value.producer() is None):
        return False  # an output needs a separate value
    replace_node(node, value)
    return True


@onnx_rule("Transpose")
def fold_initializer_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Transpose stored codes if a `Transpose` is their only reader, and remove that node."""
    codes = operand(node)
    if codes.const_value is None or not codes.const_value.dtype.is_integer() or node.outputs[0].is_graph_output():
        return False
    if not _may_transpose(codes):
        raise Declined("another node also reads the codes")
    _store_transposed(codes, permutation(node, shape_of(codes).rank()))
    replace_node(node, codes)
    return True


@onnx_rule("Transpose", "Gemm")
def transpose_weight(model: ir.Model, node: ir.Node) -> bool:
    """Store the codes of a transposed weight transposed: kernels do not match `Transpose(DequantizeLinear(codes))`.

    `Gemm(transB=1)` is rewritten, too, if its weight is in blocks.
    """
    gemm = node.op_type == "Gemm"
    dequantize = made_by(node.inputs[1] if gemm else node.inputs[0], "DequantizeLinear")
    if dequantize is None or any(value is not None and value.const_value is None for value in dequantize.inputs):
        return False
    if gemm and not (node.attributes.get_int("transB", 0) and dequantize.attributes.get_int("block_size", 0)):
        return False
    rank = shape_of(operand(dequantize)).rank()
    transpose_dequantized(dequantize, (1, 0) if gemm else permutation(node, rank))
    if gemm:
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
    else:
        replace_node(node, dequantize.outputs[0])
    return True


def transpose_dequantized(node: ir.Node, order: Sequence[int]) -> None:
    """Transpose the constants of a weight's `DequantizeLinear` in place.

    Args:
        node: `DequantizeLinear` of the weight.
        order: Permutation of the axes, in the convention of `Transpose`.

    Raises:
        Declined: If another node also reads the weight or one of the constants, such as for a tied embedding.
    """
    constants = [value for value in node.inputs if value is not None]
    if len(node.outputs[0].uses()) != 1 or not all(_may_transpose(value) for value in constants):
        raise Declined("another node also reads the weight")
    rank = shape_of(constants[0]).rank()
    for value in constants:
        if rank > 1 and shape_of(value).rank() == rank:
            _store_transposed(value, order)
    if "axis" in node.attributes:
        axis = node.attributes["axis"].as_int() % rank
        node.attributes["axis"] = ir.AttrInt64("axis", order.index(axis))
    if (shape := node.outputs[0].shape) is not None:
        node.outputs[0].shape = ir.Shape([shape[axis] for axis in order])


def _store_transposed(value: ir.Value, order: Sequence[int]) -> None:
    tensor = value.const_value
    assert tensor is not None
    transposed = np.ascontiguousarray(tensor.numpy().transpose(order))
    value.const_value = ir.Tensor(transposed, dtype=tensor.dtype, name=tensor.name)
    value.shape = ir.Shape(transposed.shape)


def _may_transpose(value: ir.Value) -> bool:
    """Tell whether a constant has only one reader, or is a scalar or vector, which a transpose does not change."""
    return len(value.uses()) == 1 or (value.shape is not None and value.shape.rank() < 2)


TRANSLATED: tuple[OnnxRule, ...] = (
    fold_initializer_cast,
    fold_cast_like,
    drop_zero_bias,
    type_codes,
    drop_idle_transpose,
    fold_initializer_transpose,
    transpose_weight,
    drop_default_attributes,
)
"""Rules that run, in this order, on every translated graph before it is converted to a format."""

__all__ = ["TRANSLATED", "DeclinedError", "OnnxRule", "Rewrite", "apply_rule", "onnx_rule"]
