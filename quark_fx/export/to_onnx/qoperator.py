"""The format `qoperator`: integer operators instead of `QuantizeLinear` / `DequantizeLinear` around float operators.

`INTEGER_FORMS` has one small function per kind of operator. The supported types and granularities were measured on the
CPU provider of ONNX Runtime 1.31; the operators of the domain `com.microsoft` are described in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark_fx.errors import Declined, ExportError
from quark_fx.export.to_onnx.edit import (
    Kept,
    add_array,
    added_vector,
    array_of,
    erase_unread,
    made_by,
    narrowed,
    only_reader,
    permutation,
    put_node,
    remove_node,
    stored_array,
    without_trailing_none,
)
from quark_fx.export.to_onnx.formats import CONTRIB
from quark_fx.export.to_onnx.recurrent import MEASURED
from quark_fx.targets.onnxruntime import MOVERS

_EIGHT = (ir.DataType.INT8, ir.DataType.UINT8)


def use_integer_operators(model: ir.Model) -> tuple[Kept, ...]:
    """Rewrite every operator that has an integer form; return the operators left between quantizers, with reasons.

    Raises:
        ExportError: If no operator can be rewritten.
    """
    reasons: dict[ir.Node, str] = {}
    done = 0
    for node in list(model.graph):
        if node.op_type in _PLUMBING or _shapes_weights(node):
            continue
        if (narrow := narrowed(node.inputs[0] if node.inputs else None)) is not None:
            reasons[node] = narrow
        read = [_unshaped(value) for value in node.inputs] if node.op_type in _RECURRENT else node.inputs
        if not any(made_by(value, "DequantizeLinear", "RoundBlocks", "Transpose") for value in read):
            continue
        try:
            INTEGER_FORMS.get(node.op_type, _no_form)(model, node)
            done += 1
        except Declined as declined:
            if any(made_by(value, "DequantizeLinear", "RoundBlocks") for value in read):
                reasons[node] = declined.reason
    erase_unread(model)
    parts = [Kept(node.name or "", node.op_type, why) for node, why in reasons.items() if node.graph is not None]
    if not done and not any(node.op_type == "MatMulInteger" for node in model.graph):
        why = "".join(f"\n  {k.name} ({k.operator}): {k.reason}" for k in parts) or " no activation is quantized"
        raise ExportError(
            f"format='qoperator' is for 8-bit weights and activations; in this model, no operator fits:{why}\n"
            "Use format='qdq' or, for weights alone, format='matmul_nbits'; or the preset 'int8_static'."
        )
    return tuple(parts)


_PLUMBING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "Shape"})
_RECURRENT = ("LSTM", "GRU", "RNN")


def _shapes_weights(node: ir.Node) -> bool:
    """Tell whether a node is a `Reshape` that only splits the weight of a recurrent layer by direction."""
    return node.op_type == "Reshape" and any(use.node.op_type in _RECURRENT for use in node.outputs[0].uses())


def _unshaped(value: ir.Value | None) -> ir.Value | None:
    """Return the input of the `Reshape` that computes `value`, or `value` itself if another node computes it."""
    shaped = made_by(value, "Reshape")
    return value if shaped is None else shaped.inputs[0]


def _no_form(model: ir.Model, node: ir.Node) -> None:
    raise Declined(f"ONNX Runtime's CPU provider has no integer {node.op_type}")


# Operands and results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedValue:
    """A quantized value: the input of a `DequantizeLinear`, or the output of a `QuantizeLinear`.

    Attributes:
        values: Codes.
        scale: Scale, a scalar or a vector along `axis`.
        zero_point: Zero point, in the shape of the scale and the type of the codes.
        dtype: Type of the codes.
        axis: Dimension of the codes along which the scales vary; `None` for one scale.
    """

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    dtype: ir.DataType
    axis: int | None

    def __iter__(self) -> Any:
        yield from (self.values, self.scale, self.zero_point)

    @property
    def factor(self) -> np.ndarray[Any, Any] | None:
        """The scale in float64; `None` if it is measured at run time."""
        array = array_of(self.scale)
        return None if array is None else array.astype(np.float64)

    def same_grid(self, other: QuantizedValue) -> bool:
        """Tell whether equal codes of the two values stand for equal numbers."""
        if self.dtype != other.dtype or self.axis is not None or other.axis is not None:
            return False
        pairs = [(array_of(a), array_of(b)) for a, b in zip(tuple(self)[1:], tuple(other)[1:], strict=True)]
        return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


def _codes(model: ir.Model, node: ir.Node, values: ir.Value | None) -> QuantizedValue:
    """Return the codes that a `QuantizeLinear` writes or a `DequantizeLinear` reads, with scale and zero point."""
    scale = node.inputs[1]
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    dtype = values.dtype if values is not None else None
    if values is None or scale is None or scale.shape is None or dtype is None or dtype not in _EIGHT:
        name = dtype.name.lower() if dtype is not None else "unknown"
        raise Declined(f"its codes are {name}; integer operators need 8 bits")
    if node.attributes.get_int("block_size", 0):
        raise Declined("its weight is quantized in groups")
    if zero_point is None:
        zeros = np.zeros(scale.shape.numpy(), dtype.numpy())
        # Not shared between weights: session.x64quantprecision fails on a shared zero point.
        zero_point = add_array(model, f"{values.name}_zero_point", zeros)
    axis = node.attributes.get_int("axis", 1) if scale.shape.rank() else None
    return QuantizedValue(values, scale, zero_point, dtype, axis)


def _operand(model: ir.Model, value: ir.Value | None, *, per_tensor: bool = True) -> QuantizedValue:
    node = made_by(value, "DequantizeLinear")
    turned = made_by(value, "Transpose") if not per_tensor else None
    if node is None and turned is not None:
        node = made_by(turned.inputs[0], "DequantizeLinear")
    if node is None:
        blocks = made_by(value, "RoundBlocks") is not None
        raise Declined("its activation is in blocks" if blocks else "one of its inputs is not quantized")
    codes = _codes(model, node, node.inputs[0])
    if turned is not None:
        return _turned(codes, turned)
    if per_tensor and codes.axis is not None:
        raise Declined("its input has a scale per channel")
    return codes


def _turned(codes: QuantizedValue, transpose: ir.Node) -> QuantizedValue:
    """Transpose the codes instead of the dequantized matrix, so that a weight also read untransposed is stored once."""
    if array_of(codes.values) is None or codes.values.shape is None or codes.values.shape.rank() != 2:
        raise Declined("its weight is transposed, and is not a constant matrix")
    if permutation(transpose, 2) == (0, 1):
        return codes
    new = ir.node("Transpose", [codes.values], {"perm": [1, 0]})
    new.outputs[0].dtype, new.outputs[0].shape = codes.dtype, ir.Shape(tuple(codes.values.shape)[::-1])
    transpose.prepend(new)
    return replace(codes, values=new.outputs[0], axis=None if codes.axis is None else 1 - codes.axis % 2)


@dataclass(frozen=True)
class Result:
    """The quantized output of an operator.

    Attributes:
        codes: Codes of the output.
        quantizer: Node that computes the codes.
        clamp: `Relu` or `Clip` before the quantizer; `None` if there is no such node.
        bounds: Smallest and largest value after the clamp.
    """

    codes: QuantizedValue
    quantizer: ir.Node
    clamp: ir.Node | None
    bounds: tuple[float, float]


def _result(model: ir.Model, node: ir.Node) -> Result:
    reader, clamp, bounds = only_reader(node.outputs[0]), None, (-np.inf, np.inf)
    if reader is not None and reader.op_type in ("Relu", "Clip") and (limits := _bounds(reader)) is not None:
        reader, clamp, bounds = only_reader(reader.outputs[0]), reader, limits
    if reader is None or reader.op_type != "QuantizeLinear":
        raise Declined("its output is not quantized")
    codes = _codes(model, reader, reader.outputs[0])
    if codes.axis is not None:
        raise Declined("its output has a scale per channel")
    return Result(codes, reader, clamp, bounds)


def _bounds(clamp: ir.Node) -> tuple[float, float] | None:
    """Return the constant bounds of a `Relu` or `Clip`; `None` if a bound is not a constant."""
    if clamp.op_type == "Relu":
        return 0.0, np.inf
    bounds = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        value = clamp.inputs[index] if len(clamp.inputs) > index else None
        array = np.asarray(default) if value is None else array_of(value)
        if array is None or array.size != 1:
            return None
        bounds.append(float(array.reshape(())))
    return bounds[0], bounds[1]


def _finish(model: ir.Model, result: Result, new: ir.Node) -> None:
    """Replace the quantizer, and the clamp before it, by `new` and a `Clip` of its codes.

    The codes are equal, because quantization is monotone. The `Clip` is left out if there is no clamp, or if codes
    saturate at its bounds.
    """
    if result.clamp is not None:
        low, high = (_code_of(bound, result.codes) for bound in result.bounds)
        info = np.iinfo(result.codes.dtype.numpy())
        if (low, high) != (info.min, info.max):
            result.quantizer.prepend(new)
            new.outputs[0].dtype, new.outputs[0].shape = result.codes.dtype, result.quantizer.outputs[0].shape
            limits = [
                add_array(model, f"code_{bound}_{result.codes.dtype.name.lower()}", np.asarray(bound, info.dtype))
                for bound in (low, high)
            ]
            new = ir.node("Clip", [new.outputs[0], *limits], name=result.clamp.name)
    put_node(result.quantizer, new)


def _code_of(bound: float, codes: QuantizedValue) -> int:
    """Return the code of the number `bound`, computed like `QuantizeLinear`."""
    scale, zero_point = array_of(codes.scale), array_of(codes.zero_point)
    if scale is None or zero_point is None:
        raise Declined("the scale of its output is measured at run time")
    info = np.iinfo(codes.dtype.numpy())
    with np.errstate(over="ignore"):
        ideal = np.rint(np.float32(bound) / scale.astype(np.float32)) + int(zero_point)
    return int(np.clip(ideal, info.min, info.max))


# Forms ---------------------------------------------------------------------------------------------------------------


def _attributes(node: ir.Node, *left_out: str) -> list[ir.Attr]:
    return [value for name, value in node.attributes.items() if name not in left_out]


def _node(
    domain: str,
    operator: str,
    old: ir.Node,
    inputs: list[ir.Value | None],
    attributes: list[ir.Attr] | None = None,
    outputs: int = 1,
) -> ir.Node:
    return ir.Node(domain, operator, inputs, attributes or [], num_outputs=outputs, name=old.name)


def _conv(model: ir.Model, node: ir.Node) -> None:
    x = _operand(model, node.inputs[0])
    w = _operand(model, node.inputs[1], per_tensor=False)
    if w.axis not in (None, 0):
        raise Declined("its weight has scales along an axis other than its output channels")
    if made_by(x.values, "DynamicQuantizeLinear") is not None:
        _conv_integer(model, node, x, w)
        return
    result = _result(model, node)
    _require(x.dtype == result.codes.dtype and (x.dtype == ir.DataType.UINT8 or w.dtype == x.dtype), x, w)
    bias = _integer_bias(model, node, x, w)
    inputs = [*x, *w, *tuple(result.codes)[1:], *([] if bias is None else [bias])]
    _finish(model, result, _node("", "QLinearConv", node, inputs, _attributes(node)))


def _require(holds: bool, *operands: QuantizedValue) -> None:
    if not holds:
        names = " and ".join(operand.dtype.name.lower() for operand in operands)
        raise Declined(f"there is no integer kernel for {names} with this output")


def _integer_bias(model: ir.Model, node: ir.Node, x: QuantizedValue, w: QuantizedValue) -> ir.Value | None:
    """Return the bias in int32 at the scale of the product; a bias at another scale must be exact at that scale."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return None
    source = made_by(bias, "DequantizeLinear")
    codes, scale = (array_of(value) for value in source.inputs[:2]) if source is not None else (None, None)
    if source is None or codes is None or scale is None or x.factor is None or w.factor is None:
        raise Declined(
            "its bias is not in integers; set bias=TensorSpec(format='int32'), or, if the range of its input is "
            "measured at run time, use format='qdq'"
        )
    ratio = scale / (x.factor * w.factor)
    if source.inputs[0] is not None and codes.dtype == np.int32 and np.allclose(ratio, 1, rtol=1e-5, atol=0):
        return source.inputs[0]
    zero_point = array_of(source.inputs[2]) if len(source.inputs) > 2 else None
    ideal = (codes.astype(np.float64) - (0 if zero_point is None else zero_point.astype(np.float64))) * ratio
    if (ideal != np.rint(ideal)).any() or (np.abs(ideal) > np.iinfo(np.int32).max).any():
        raise Declined("its bias has a finer scale than the product; set bias=TensorSpec(format='int32')")
    return add_array(model, f"{node.name}_bias_int32", ideal.astype(np.int32))


def _conv_integer(model: ir.Model, node: ir.Node, x: QuantizedValue, w: QuantizedValue) -> None:
    """Replace a convolution by `ConvInteger`, which supports one weight zero point, then apply scales and bias."""
    zero_point = array_of(w.zero_point)
    if zero_point is None or (zero_point != zero_point.reshape(-1)[:1]).any():
        raise Declined("the zero points of its weight differ by channel")
    one = add_array(model, f"{node.name}_weight_zero_point", zero_point.reshape(-1)[0])
    rank = w.values.shape.rank() if w.values.shape is not None else 0
    scale = stored_array(w.scale)
    shape = (-1, *[1] * (rank - 2))
    by_channel = add_array(model, f"{node.name}_weight_scale", scale.reshape(shape) if scale.ndim else scale)
    product = _node("", "ConvInteger", node, [x.values, w.values, x.zero_point, one], _attributes(node))
    real = ir.node("Cast", product.outputs, {"to": ir.DataType.FLOAT})
    factor = ir.node("Mul", [x.scale, by_channel])
    steps = [product, real, factor, ir.node("Mul", [real.outputs[0], factor.outputs[0]])]
    bias = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is not None:
        added = add_array(model, f"{node.name}_bias", bias.reshape(shape))
        steps.append(ir.node("Add", [steps[-1].outputs[0], added]))
    elif len(node.inputs) > 2 and node.inputs[2] is not None:
        raise Declined("its bias is not a constant")
    for step, dtype in zip(steps, (ir.DataType.INT32, *[ir.DataType.FLOAT] * 4), strict=False):
        step.outputs[0].dtype = dtype
    node.prepend(steps[:-1])
    put_node(node, steps[-1])


def _matmul(model: ir.Model, node: ir.Node) -> None:
    a = _operand(model, node.inputs[0])
    b = _operand(model, node.inputs[1], per_tensor=False)
    rank = b.values.shape.rank() if b.values.shape is not None else 0
    if b.axis is not None and (rank != 2 or b.axis % 2 != 1):
        raise Declined("its weight has scales along an axis other than its columns")
    try:
        result = _result(model, node)
    except Declined:
        _require(a.dtype == ir.DataType.UINT8 or b.dtype == a.dtype, a, b)
        bias, last = added_vector(model, node, _columns(b))
        inputs: list[ir.Value | None] = [a.values, b.values, a.scale, b.scale, a.zero_point, b.zero_point]
        inputs += [] if bias is None else [bias]
        put_node(last, _node(CONTRIB, "MatMulIntegerToFloat", node, inputs))
        return
    _require(a.dtype == result.codes.dtype and (a.dtype == ir.DataType.UINT8 or b.dtype == a.dtype), a, b)
    inputs = [*a, *b, *tuple(result.codes)[1:]]
    _finish(model, result, _node("", "QLinearMatMul", node, inputs))


def _columns(matrix: QuantizedValue) -> int | None:
    """Return the size of the last dimension of a matrix; `None` if it is unknown."""
    size = matrix.values.shape[-1] if matrix.values.shape is not None else None
    return size if isinstance(size, int) else None


def _gemm(model: ir.Model, node: ir.Node) -> None:
    a = _operand(model, node.inputs[0])
    b = _operand(model, node.inputs[1], per_tensor=False)
    turned = node.attributes.get_int("transB", 0)
    if b.axis is not None and b.axis % 2 != (0 if turned else 1):
        raise Declined("its weight has scales along an axis other than its output channels")
    if any(node.attributes.get_float(factor, 1.0) != 1 for factor in ("alpha", "beta")):
        raise Declined("its Gemm scales the product or the bias")
    _require(a.dtype == ir.DataType.UINT8 or b.dtype == a.dtype, a, b)
    bias = _integer_bias(model, node, a, b)
    inputs = [*a, *b, bias]
    attributes = _attributes(node, "beta")
    try:
        result = _result(model, node)
    except Declined:
        put_node(node, _node(CONTRIB, "QGemm", node, inputs if bias is not None else inputs[:-1], attributes))
        return
    _require(a.dtype == result.codes.dtype, a, b)
    inputs += tuple(result.codes)[1:]
    _finish(model, result, _node(CONTRIB, "QGemm", node, inputs, attributes))


def _lstm(model: ir.Model, node: ir.Node) -> None:
    """Replace an `LSTM` by `DynamicQuantizeLSTM`, which quantizes its input at run time and its state in every step."""
    if not node.meta.get(MEASURED):
        raise Declined("its input is not uint8 with scales measured at run time, as the integer LSTM needs")
    x, stored, scales = _unrounded(node), list[ir.Value | None](), list[ir.Value | None]()
    directions = 2 if node.attributes.get_string("direction") == "bidirectional" else 1
    for value in node.inputs[1:3]:
        codes = _operand(model, _unshaped(value), per_tensor=False)
        matrix, scale, zero_point = (array_of(part) for part in codes)
        if matrix is None or scale is None or zero_point is None:
            raise Declined("its weights are not constant")
        if zero_point.any():
            raise Declined("its weights have zero points, which the integer LSTM does not support")
        rows = len(matrix) // directions
        turned = matrix.reshape(directions, rows, -1).transpose(0, 2, 1)
        stored.append(add_array(model, f"{codes.values.name}_turned", turned))
        for name, part in (("scale", scale), ("zero_point", zero_point)):
            each = np.broadcast_to(part, directions * rows).reshape(directions, rows)
            scales.append(add_array(model, f"{codes.values.name}_{name}", each))
    inputs = [x, *stored, *without_trailing_none(node.inputs)[3:]]
    inputs += [None] * (8 - len(inputs)) + scales
    new = _node(CONTRIB, "DynamicQuantizeLSTM", node, inputs, _attributes(node, "layout"), len(node.outputs))
    node.prepend(new)
    for old, value in zip(node.outputs, new.outputs, strict=True):
        value.name, value.shape, value.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    remove_node(node)


def _unrounded(node: ir.Node) -> ir.Value | None:
    """Return the input of an LSTM in float, from before its quantizer and an optional `Transpose`."""
    value, moved = node.inputs[0], made_by(node.inputs[0], "Transpose")
    source = made_by(moved.inputs[0] if moved is not None else value, "DequantizeLinear")
    measured = made_by(source.inputs[0], "DynamicQuantizeLinear") if source is not None else None
    if measured is None:
        return value  # the input of a later layer
    real = measured.inputs[0]
    if moved is None:
        return real
    again = ir.node("Transpose", [real], moved.attributes)
    again.outputs[0].shape, again.outputs[0].type = moved.outputs[0].shape, moved.outputs[0].type
    node.prepend(again)
    return again.outputs[0]


def _binary(model: ir.Model, node: ir.Node) -> None:
    a, b = (_operand(model, value) for value in node.inputs)
    result = _result(model, node)
    _require(a.dtype == b.dtype == result.codes.dtype, a, b)
    inputs = [*a, *b, *tuple(result.codes)[1:]]
    _finish(model, result, _node(CONTRIB, f"QLinear{node.op_type}", node, inputs))


def _unary(model: ir.Model, node: ir.Node) -> None:
    x = _operand(model, node.inputs[0])
    result = _result(model, node)
    _require(x.dtype == result.codes.dtype, x)
    attributes = _attributes(node, "dilations")
    if node.op_type == "Softmax":
        attributes.append(ir.AttrInt64("opset", 13))
    inputs = [*x, *tuple(result.codes)[1:]]
    _finish(model, result, _node(CONTRIB, f"QLinear{node.op_type}", node, inputs, attributes))


def _pool(model: ir.Model, node: ir.Node) -> None:
    if any(value != 1 for value in node.attributes.get_ints("dilations", [1])):
        raise Declined("ONNX Runtime's integer AveragePool does not support dilations")
    _unary(model, node)


def _concat(model: ir.Model, node: ir.Node) -> None:
    parts = [_operand(model, value) for value in node.inputs]
    result = _result(model, node)
    _require(all(part.dtype == result.codes.dtype for part in parts), *parts)
    inputs = [*tuple(result.codes)[1:], *(value for part in parts for value in part)]
    _finish(model, result, _node(CONTRIB, "QLinearConcat", node, inputs, _attributes(node)))


def _move(model: ir.Model, node: ir.Node) -> None:
    """Run a data movement on codes instead of floats, if its input and output have equal scales and zero points."""
    x = _operand(model, node.inputs[0])
    quantizers = [use.node for use in node.outputs[0].uses()]
    if len(node.outputs) > 1 or node.outputs[0].is_graph_output() or not quantizers:
        raise Declined("its output is not quantized")
    for quantizer in quantizers:
        if quantizer.op_type != "QuantizeLinear" or not _codes(model, quantizer, quantizer.outputs[0]).same_grid(x):
            raise Declined("its output is not quantized with the scale and zero point of its input")
    moved = _node(node.domain, node.op_type, node, [x.values, *node.inputs[1:]], _attributes(node))
    moved.outputs[0].dtype, moved.outputs[0].shape = x.dtype, node.outputs[0].shape
    node.prepend(moved)
    for quantizer in quantizers:
        _replace_output(quantizer, moved.outputs[0])


def _replace_output(quantizer: ir.Node, value: ir.Value) -> None:
    output = quantizer.outputs[0]
    if output.is_graph_output():
        raise Declined("its codes are an output of the graph")
    value.name = output.name
    ir.convenience.replace_all_uses_with(output, value)
    remove_node(quantizer)


INTEGER_FORMS: dict[str, Callable[[ir.Model, ir.Node], None]] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "LSTM": _lstm,
    "Add": _binary,
    "Mul": _binary,
    "Sigmoid": _unary,
    "LeakyRelu": _unary,
    "Softmax": _unary,
    "GlobalAveragePool": _unary,
    "AveragePool": _pool,
    "Concat": _concat,
    **{name: _move for name, row in MOVERS.items() if row.on_codes},
}
"""Functions that rewrite an operator in integers or raise `Declined`, by ONNX operator."""
