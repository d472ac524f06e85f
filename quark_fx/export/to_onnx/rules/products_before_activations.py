"""Keep integer products apart from float biases and activation functions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_array, array_of, made_by, only_reader, put_same_behind, replace_node
from quark_fx.export.to_onnx.rules.moved_pairs import SIGNED
from quark_fx.export.to_onnx.rules.rule import onnx_rule

_FUSED = frozenset(
    {"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "HardSigmoid", "Selu", "Softplus", "Softsign", "ThresholdedRelu"}
)


@onnx_rule("Gemm", runtime="onnxruntime")
def keep_product_from_activation(model: ir.Model, node: ir.Node) -> bool:
    """Prevent ONNX Runtime from computing an integer `Gemm` in float, with its bias or the activation after it.

    Its integer `Gemm` does not support a float bias, so an `Add` follows instead. It fuses a `Gemm` with an activation
    before it looks for integers; a `Max` of one value, which changes nothing, prevents this. Both stay if a quantizer
    follows: the kernel then includes the bias, rounded to int32, and a relu.
    """
    result = node.outputs[0]
    if not all(_has_codes_of_a_byte(value) for value in node.inputs[:2]) or _is_quantized(result):
        return False
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and made_by(bias, "DequantizeLinear") is None and node.attributes.get_float("beta", 1.0) == 1:
        product = ir.node("Gemm", node.inputs[:2], dict(node.attributes))
        add = ir.node("Add", [product.outputs[0], bias])
        for new in (product, add):
            new.outputs[0].shape, new.outputs[0].type = result.shape, result.type
        node.prepend([product, add])
        replace_node(node, add.outputs[0])
        return True
    reader = only_reader(result)
    if reader is None or reader.op_type not in _FUSED:
        return False
    reader.replace_input_with(0, put_same_behind(result))
    return True


@onnx_rule("MatMul", runtime="onnxruntime")
def keep_product_from_sum(model: ir.Model, node: ir.Node) -> bool:
    """Prevent ONNX Runtime from fusing an integer product and a vector added to it into a `Gemm`.

    It does so for a matrix, and for any other rank if all sizes are fixed, before it looks for integers; the `Gemm`
    then runs in float. For another rank, it also reshapes the codes to a matrix and quantizes them again, with the
    fault that `repeat_moved_pair` describes for signed codes. If the product is a stack of matrices, a constant is
    added as a matrix of one row, which is not fused; otherwise, a `Max` of one value, which changes nothing, prevents
    the fusion.
    """
    value, add = node.inputs[0], only_reader(node.outputs[0])
    dequantize = made_by(value, "DequantizeLinear")
    if dequantize is None or value is None or value.shape is None or add is None or add.op_type != "Add":
        return False
    codes, rank = dequantize.inputs[0], value.shape.rank()
    index = list(add.inputs).index(node.outputs[0])
    other = add.inputs[1 - index]
    if other is not None and other.shape is not None and other.shape.rank() not in ((1, 2) if rank == 2 else (1,)):
        return False
    in_bytes = all(_has_codes_of_a_byte(each) for each in node.inputs)
    if rank == 2 and (not in_bytes or _is_quantized(add.outputs[0])):
        return False
    if rank != 2 and not all(isinstance(size, int) for size in value.shape):
        return False
    if not in_bytes and (codes is None or codes.dtype not in SIGNED):
        return False
    vector = array_of(other)
    if rank > 2 and vector is not None:
        add.replace_input_with(1 - index, add_array(model, f"{node.name}_bias_row", vector.reshape(1, -1)))
    else:
        add.replace_input_with(index, put_same_behind(node.outputs[0]))
    return True


def _is_quantized(value: ir.Value) -> bool:
    """Tell whether a kernel includes the quantizer of a value, possibly past a relu if the smallest code is zero."""
    readers = [use.node for use in value.uses()]
    if len(readers) == 1 and readers[0].op_type == "Relu":
        after = [use.node for use in readers[0].outputs[0].uses()]
        return [one.op_type for one in after] == ["QuantizeLinear"] and _begins_at_zero(after[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _begins_at_zero(quantize: ir.Node) -> bool:
    zero = array_of(quantize.inputs[2]) if len(quantize.inputs) > 2 else None
    if zero is None:
        return quantize.outputs[0].dtype is ir.DataType.UINT8
    return bool(zero.dtype.kind in "iu" and (zero == np.iinfo(zero.dtype).min).all())


def _has_codes_of_a_byte(value: ir.Value | None) -> bool:
    source = made_by(value, "DequantizeLinear")
    codes = source.inputs[0] if source is not None else None
    return codes is not None and codes.dtype in (ir.DataType.UINT8, ir.DataType.INT8)
