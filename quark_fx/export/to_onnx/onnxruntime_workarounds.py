"""Conditions and rewrites of the rows in `workarounds` that are for ONNX Runtime's CPU provider.

Several rewrites insert a `Max` with a single operand, which changes no value, but stops fusions of ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import (
    add_array,
    array_of,
    made_by,
    only_reader,
    operand,
    producer_of,
    put_node,
    put_same_behind,
    replace_node,
    stored_array,
)
from quark_fx.targets.onnxruntime import MOVES

_SIGNED = frozenset({ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16})
_BYTES = frozenset({ir.DataType.INT8, ir.DataType.UINT8})


def keep_apart(model: ir.Model, reader: ir.Node, index: int = 0) -> None:
    """Insert a `Max` with a single operand between a node and its input number `index`."""
    reader.replace_input_with(index, put_same_behind(operand(reader, index)))


def _input(node: ir.Node, index: int) -> ir.Value | None:
    """Return input number `index` of a node; `None` if it is omitted."""
    return node.inputs[index] if len(node.inputs) > index else None


# Pairs of quantizers -------------------------------------------------------------------------------------------------


def is_rounded_again(node: ir.Node) -> bool:
    """Tell whether a quantizer is the only reader of a dequantized value of the same type with other parameters."""
    source = made_by(node.inputs[0], "DequantizeLinear")
    if source is None or only_reader(source.outputs[0]) is None:
        return False
    if made_by(source.inputs[0], "QuantizeLinear") is None or operand(source).dtype != node.outputs[0].dtype:
        return False
    parameters = [[array_of(_input(pair, index)) for index in (1, 2)] for pair in (source, node)]
    return not all(old is new or np.array_equal(old, new) for old, new in zip(*parameters, strict=True))


# Weights -------------------------------------------------------------------------------------------------------------


def has_row_scales(node: ir.Node) -> bool:
    """Tell whether a product's weight has scales along the summed axis, for example if it is also read transposed."""
    weight = made_by(node.inputs[1], "DequantizeLinear")
    if weight is None or made_by(node.inputs[0], "DequantizeLinear") is None:
        return False
    codes, scale = weight.inputs[:2]
    if codes is None or array_of(codes) is None or scale is None or scale.shape is None or scale.shape.rank() != 1:
        return False
    summed = 1 if node.attributes.get_int("transB", 0) else 0
    return codes.shape is not None and codes.shape.rank() == 2 and weight.attributes.get_int("axis", 1) % 2 == summed


def spell_out_row_scales(model: ir.Model, node: ir.Node) -> None:
    """Dequantize the weight with `Sub` and `Mul`, which ONNX Runtime does not fuse."""
    weight = producer_of(operand(node, 1))
    shape = [-1 if dim == weight.attributes.get_int("axis", 1) % 2 else 1 for dim in range(2)]
    node.replace_input_with(1, _dequantized_by_arithmetic(model, weight, shape))


def _dequantized_by_arithmetic(model: ir.Model, source: ir.Node, shape: list[int]) -> ir.Value:
    """Insert `(Cast(codes) - zero_point) * scale` after a `DequantizeLinear`, with its parameters in `shape`."""
    steps = [ir.node("Cast", source.inputs[:1], {"to": ir.DataType.FLOAT})]
    for operator, value in (("Sub", _input(source, 2)), ("Mul", source.inputs[1])):
        array = array_of(value)
        if array is None or (operator == "Sub" and not array.any()):
            continue
        array = array.astype(np.float32)
        stored = add_array(model, f"{source.name}_{operator.lower()}", array.reshape(shape) if array.ndim else array)
        steps.append(ir.node(operator, [steps[-1].outputs[0], stored]))
    for step in steps:
        step.outputs[0].shape, step.outputs[0].type = source.outputs[0].shape, source.outputs[0].type
    source.append(steps)
    return steps[-1].outputs[0]


def recurrent_weights(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that dequantize the constant 8-bit weights of a recurrent layer."""
    dequantizers = []
    for value in node.inputs[1:3]:
        shaped = made_by(value, "Reshape")
        source = made_by(shaped.inputs[0], "DequantizeLinear") if shaped is not None else None
        if source is None or source.domain or source.attributes.get_int("block_size", 0):
            continue
        codes = array_of(source.inputs[0])
        if codes is not None and array_of(source.inputs[1]) is not None and codes.dtype.name in ("int8", "uint8"):
            dequantizers.append(source)
    return dequantizers


def dequantize_once(model: ir.Model, node: ir.Node) -> None:
    """Dequantize the weights with `Sub` and `Mul`, which ONNX Runtime folds at load time."""
    for source in recurrent_weights(node):
        replace_node(source, _dequantized_by_arithmetic(model, source, [-1, 1]))


# Data movement -------------------------------------------------------------------------------------------------------


def moves_signed_codes(node: ir.Node) -> bool:
    """Tell whether an operator of `MOVES` reads dequantized signed codes, and is not followed by quantizers only."""
    codes, scale = node.inputs[:2]
    if codes is None or codes.const_value is not None or codes.dtype not in _SIGNED:
        return False
    if scale is None or scale.shape is None or scale.shape.rank():
        return False
    return any(_is_quantized_later(use.node) for use in node.outputs[0].uses())


def _is_quantized_later(node: ir.Node) -> bool:
    """Tell whether a node is an operator of `MOVES` that is not followed by quantizers only."""
    moved = node.outputs[0]
    codes_alone = all(use.node.op_type == "QuantizeLinear" for use in moved.uses())
    return node.op_type in MOVES and (moved.is_graph_output() or not codes_alone)


def repeat_pair(model: ir.Model, node: ir.Node) -> None:
    """Quantize the result of each data movement again, and of the movements after it.

    This changes no value, because moved values are still representable.
    """
    codes, parameters = operand(node), node.inputs[1:]
    for mover in [use.node for use in node.outputs[0].uses() if _is_quantized_later(use.node)]:
        moved = mover.outputs[0]
        again = ir.node("QuantizeLinear", [moved, *parameters])
        pair = ir.node("DequantizeLinear", [again.outputs[0], *parameters])
        again.outputs[0].shape, again.outputs[0].type = moved.shape, codes.type
        dequantized = pair.outputs[0]
        dequantized.shape, dequantized.type = moved.shape, moved.type
        for use in list(moved.uses()):
            if use.node is not again:
                use.node.replace_input_with(use.idx, dequantized)
        if moved.is_graph_output():
            dequantized.name, moved.name = moved.name, f"{moved.name}_moved"
            model.graph.outputs[list(model.graph.outputs).index(moved)] = dequantized
        mover.append([again, pair])
        repeat_pair(model, pair)


def shrinks_by_cubes(node: ir.Node) -> bool:
    """Tell whether a node is a cubic `Resize` without antialiasing that may shrink an axis."""
    if node.attributes.get_string("mode", "nearest") != "cubic" or node.attributes.get_int("antialias", 0):
        return False
    return made_by(node.inputs[0], "Einsum") is None and not _enlarges(node)


def _enlarges(node: ir.Node) -> bool:
    """Tell whether a `Resize` is known to shrink no axis."""
    scales = array_of(_input(node, 2))
    if scales is not None and scales.size:
        return bool((scales >= 1).all())
    before, after = operand(node).shape, node.outputs[0].shape
    if before is None or after is None:
        return False
    return all(
        old == new or (isinstance(old, int) and isinstance(new, int) and new >= old)
        for old, new in zip(before, after, strict=True)
    )


def copy_first(model: ir.Model, node: ir.Node) -> None:
    """Insert an `Einsum` that copies the input: ONNX Runtime does not move a `Transpose` across an `Einsum`."""
    value = operand(node)
    same = ir.node("Einsum", [value], attributes={"equation": "...->..."})
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    node.prepend(same)
    node.replace_input_with(0, same.outputs[0])


# Pools ---------------------------------------------------------------------------------------------------------------


def counts_beyond_rim(node: ir.Node) -> bool:
    """Tell whether windows of an average pool may reach beyond the input while padding counts in the average."""
    if not node.attributes.get_int("ceil_mode", 0) or not node.attributes.get_int("count_include_pad", 0):
        return False
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    return not _has_pads(node) or (readers != ["Max"] and not node.outputs[0].is_graph_output())


def _has_pads(pool: ir.Node) -> bool:
    return any(pool.attributes.get_ints("pads", [0]))


def settle_average_pool(model: ir.Model, node: ir.Node) -> None:
    """Clear `count_include_pad` of a pool without padding, which changes nothing; otherwise prevent the fusion.

    A `Max` with a single operand prevents the fusion with a quantizer.
    """
    if not _has_pads(node):
        node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 0)
        return
    uses = list(node.outputs[0].uses())
    same = put_same_behind(node.outputs[0])
    for use in uses:
        use.node.replace_input_with(use.idx, same)


def is_padded_otherwise(node: ir.Node) -> bool:
    """Tell whether a pool reads padded values and would change if ONNX Runtime made that padding its own."""
    pad = made_by(node.inputs[0], "Pad")
    if pad is None or pad.attributes.get_string("mode", "constant") != "constant":
        return False
    if node.op_type == "MaxPool":
        value = array_of(_input(pad, 2))
        return value is None or not bool(np.isneginf(value.astype(np.float32)).all())
    return bool(node.attributes.get_int("ceil_mode", 0)) or not _fits_window(pad, node)


def _fits_window(pad: ir.Node, pool: ir.Node) -> bool:
    """Tell whether the padding on each side is known to be smaller than the window of a pool."""
    kernel, pads = pool.attributes.get_ints("kernel_shape", ()), array_of(pad.inputs[1])
    if pads is None or not kernel:
        return False
    sides = pads.reshape(2, -1)
    return sides.shape[1] >= len(kernel) and bool((sides[:, -len(kernel) :] < np.asarray(kernel)).all())


# Products ------------------------------------------------------------------------------------------------------------

_FUSED = frozenset(
    {"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "HardSigmoid", "Selu", "Softplus", "Softsign", "ThresholdedRelu"}
)


def is_float_after_codes(node: ir.Node) -> bool:
    """Tell whether a `Gemm` of 8-bit operands has a float bias or an activation function, and no quantizer after it."""
    if not all(_has_codes_of_a_byte(value) for value in node.inputs[:2]) or _is_quantized(node.outputs[0]):
        return False
    reader = only_reader(node.outputs[0])
    return _has_float_bias(node) or (reader is not None and reader.op_type in _FUSED)


def _has_float_bias(gemm: ir.Node) -> bool:
    bias = _input(gemm, 2)
    return (
        bias is not None and made_by(bias, "DequantizeLinear") is None and gemm.attributes.get_float("beta", 1.0) == 1
    )


def split_product(model: ir.Model, node: ir.Node) -> None:
    """Add a float bias after the product, or else separate the activation function from it by a `Max`."""
    result = node.outputs[0]
    if not _has_float_bias(node):
        ((reader, _),) = result.uses()
        keep_apart(model, reader)
        return
    product = ir.node("Gemm", node.inputs[:2], dict(node.attributes))
    add = ir.node("Add", [product.outputs[0], node.inputs[2]])
    for new in (product, add):
        new.outputs[0].shape, new.outputs[0].type = result.shape, result.type
    node.prepend([product, add])
    replace_node(node, add.outputs[0])


def becomes_gemm(node: ir.Node) -> bool:
    """Tell whether ONNX Runtime fuses a product of codes and the vector that is added to it into a float `Gemm`.

    It does so for matrices, and for operands of any other rank if all sizes are fixed.
    """
    value, add = node.inputs[0], only_reader(node.outputs[0])
    dequantize = made_by(value, "DequantizeLinear")
    if dequantize is None or value is None or value.shape is None or add is None or add.op_type != "Add":
        return False
    codes, rank = dequantize.inputs[0], value.shape.rank()
    other = add.inputs[1 - list(add.inputs).index(node.outputs[0])]
    if other is not None and other.shape is not None and other.shape.rank() not in ((1, 2) if rank == 2 else (1,)):
        return False
    in_bytes = all(_has_codes_of_a_byte(each) for each in node.inputs)
    if rank == 2:
        return in_bytes and not _is_quantized(add.outputs[0])
    fixed = all(isinstance(size, int) for size in value.shape)
    return fixed and (in_bytes or (codes is not None and codes.dtype in _SIGNED))


def keep_product_from_sum(model: ir.Model, node: ir.Node) -> None:
    """Prevent the fusion of a product and a sum.

    A constant vector that is added to a batch of matrices becomes a matrix of one row; in all other cases, a `Max`
    separates the product and the sum.
    """
    ((add, index),) = node.outputs[0].uses()
    vector = array_of(add.inputs[1 - index])
    if _rank(node.inputs[0]) > 2 and vector is not None:
        add.replace_input_with(1 - index, add_array(model, f"{node.name}_bias_row", vector.reshape(1, -1)))
    else:
        keep_apart(model, add, index)


def _rank(value: ir.Value | None) -> int:
    """Return the rank of a value; 0 if it is unknown."""
    return value.shape.rank() if value is not None and value.shape is not None else 0


def _is_quantized(value: ir.Value) -> bool:
    """Tell whether a kernel can include the quantizer of a value.

    All readers are quantizers, or the only reader is a relu before a quantizer whose smallest code stands for zero.
    """
    readers = [use.node for use in value.uses()]
    if len(readers) == 1 and readers[0].op_type == "Relu":
        after = [use.node for use in readers[0].outputs[0].uses()]
        return [one.op_type for one in after] == ["QuantizeLinear"] and _begins_at_zero(after[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _begins_at_zero(quantize: ir.Node) -> bool:
    zero = array_of(_input(quantize, 2))
    if zero is None:
        return quantize.outputs[0].dtype is ir.DataType.UINT8
    return bool(zero.dtype.kind in "iu" and (zero == np.iinfo(zero.dtype).min).all())


def _has_codes_of_a_byte(value: ir.Value | None) -> bool:
    source = made_by(value, "DequantizeLinear")
    codes = source.inputs[0] if source is not None else None
    return codes is not None and codes.dtype in _BYTES


def sums_before_norm(node: ir.Node) -> bool:
    """Tell whether a layer normalization is the only reader of a sum."""
    add = made_by(node.inputs[0], "Add")
    return add is not None and only_reader(add.outputs[0]) is node


def spell_as_sum(model: ir.Model, node: ir.Node) -> None:
    """Replace `Add` by `Sum`, which ONNX Runtime does not fuse."""
    producer_of(operand(node)).op_type = "Sum"


# Arithmetic in bfloat16 ----------------------------------------------------------------------------------------------


ARITHMETIC = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Abs", "Sqrt", "Exp", "Log", "Max", "Min", "Sum"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"),
)


def reads_bfloat16(node: ir.Node) -> bool:
    """Tell whether an operand of a node is bfloat16."""
    return any(value is not None and value.dtype == ir.DataType.BFLOAT16 for value in node.inputs)


def compute_in_float(model: ir.Model, node: ir.Node) -> None:
    """Compute a node in float32 and round its result to bfloat16, like torch."""
    operands = []
    for value in node.inputs:
        if value is not None and value.dtype == ir.DataType.BFLOAT16:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
            cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, ir.DataType.FLOAT
            node.prepend(cast)
            value = cast.outputs[0]
        operands.append(value)
    new = ir.node(node.op_type, operands, node.attributes, name=node.name)
    if node.outputs[0].dtype == ir.DataType.BFLOAT16:
        new.outputs[0].shape, new.outputs[0].dtype = node.outputs[0].shape, ir.DataType.FLOAT
        node.prepend(new)
        new = ir.node("Cast", new.outputs, {"to": ir.DataType.BFLOAT16})
    put_node(node, new)


# Float weights and biases --------------------------------------------------------------------------------------------

# ONNX Runtime rounds float weights and biases after its own fusions of `MatMul` and `Add` and of `Pad` and `Conv`, and
# after moving a `DequantizeLinear` past a `Transpose`. Two equivalent forms of a graph prevent this at no cost: an
# activation dequantized with equal scales per channel, and the bias of a `Gemm` as a matrix of one row.

_INT32_MAX = np.iinfo(np.int32).max


def is_rounded(node: ir.Node) -> bool:
    """Tell whether ONNX Runtime would round the float weight of `node`, or round its bias to a scale that does not fit.

    Rounding a float bias next to an integer weight is fine if the bias fits int32 and the codes have 8 bits: at the
    scale of the product, it is as precise as the sum.
    """
    source, weight = _dequantizer(node.inputs[0]), made_by(node.inputs[1], "DequantizeLinear")
    if source is None or weight is None or node.op_type == "MatMul":
        return source is not None and weight is None
    bias = array_of(_input(node, 2))
    if bias is None:
        return False
    scales = array_of(source.inputs[1]), array_of(weight.inputs[1])
    if node.op_type == "ConvTranspose" or any(scale is None for scale in scales):
        return True  # ONNX Runtime lacks an integer kernel here, so the rewrite prevents none
    if _is_narrow(source) or _is_narrow(weight):
        return True  # the scale of the product is too coarse for the bias
    step = np.asarray(scales[0], np.float64) * np.asarray(scales[1], np.float64)
    return step.size not in (1, bias.size) or bool((np.abs(bias / step.reshape(-1)) > _INT32_MAX).any())


def _is_narrow(dequantizer: ir.Node) -> bool:
    """Tell whether a dequantizer reads codes of fewer than 8 bits, possibly stored in bytes."""
    codes = dequantizer.inputs[0]
    stored = None if codes is None else codes.const_value
    if stored is None:
        return made_by(codes, "Clip") is not None
    if stored.dtype.bitwidth < 8:
        return True
    values = stored.numpy()
    return values.dtype.kind in "iu" and int(values.max(initial=0)) - int(values.min(initial=0)) < 128


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """Return the `DequantizeLinear` that computes `value`, directly or before operators that it can be moved past."""
    node = value.producer() if value is not None else None
    while node is not None and (node.op_type in MOVES or _pads_with_codes(node)):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _pads_with_codes(node: ir.Node) -> bool:
    """Tell whether a node pads with zeros or values of its input only, which quantize to codes exactly."""
    if node.op_type != "Pad":
        return False
    if node.attributes.get_string("mode", "constant") != "constant":
        return True
    value, array = _input(node, 2), array_of(_input(node, 2))
    return value is None or (array is not None and not bool(array.any()))


def keep_floats(model: ir.Model, node: ir.Node) -> None:
    """Rewrite the operator in an equivalent form whose float weight and bias ONNX Runtime does not round."""
    spelling = {"Gemm": _write_bias_as_row, "MatMul": _add_vector_as_row}.get(node.op_type, _spread_scale)
    spelling(model, node)


def _spread_scale(model: ir.Model, node: ir.Node) -> None:
    """Dequantize the activation of a convolution with equal scales per channel instead of one scale."""
    reader = node
    while (pad := made_by(reader.inputs[0], "Pad")) is not None:
        reader = pad  # ONNX Runtime fuses the padding into the convolution
    value, source = operand(reader), _dequantizer(reader.inputs[0])
    assert source is not None
    weight, scale = node.inputs[1], array_of(source.inputs[1])
    sizes = weight.shape.numpy() if weight is not None and weight.shape is not None else ()
    if scale is None or scale.size != 1 or not sizes:
        return
    channels = int(sizes[0]) if node.op_type == "ConvTranspose" else int(sizes[1]) * node.attributes.get_int("group", 1)
    constants = []
    for parameter in source.inputs[1:]:
        array = stored_array(parameter)
        constants.append(add_array(model, f"{node.name}_channel_scale", np.broadcast_to(array.reshape(1), channels)))
    codes, new = operand(source), []
    if value.producer() is not source:
        again = ir.node("QuantizeLinear", [value, *source.inputs[1:]], domain=source.domain)
        again.outputs[0].shape, again.outputs[0].type = value.shape, codes.type
        codes = again.outputs[0]
        new.append(again)
    apart = ir.node("DequantizeLinear", [codes, *constants], {"axis": 1}, domain=source.domain)
    apart.outputs[0].shape, apart.outputs[0].type = value.shape, value.type
    reader.prepend([*new, apart])
    reader.replace_input_with(0, apart.outputs[0])


def _write_bias_as_row(model: ir.Model, node: ir.Node) -> None:
    bias = array_of(_input(node, 2))
    if _input(node, 2) is not None and (bias is None or bias.ndim != 1):
        return
    row = np.zeros((1, 1), np.float32) if bias is None else bias.reshape(1, -1)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, add_array(model, f"{node.name}_bias_row", row))


def _add_vector_as_row(model: ir.Model, node: ir.Node) -> None:
    """Turn the vector added to a product into a matrix of one row: ONNX Runtime fuses a product and a vector only."""
    add = only_reader(node.outputs[0])
    if add is None or add.op_type != "Add":
        return
    for index, value in enumerate(add.inputs):
        array = array_of(value)
        if array is None or array.ndim != 1:
            continue
        if _rank(add.outputs[0]) < 2:  # a row would turn a vector into a matrix
            keep_apart(model, add, 1 - index)
        else:
            add.replace_input_with(index, add_array(model, f"{node.name}_bias_row", array.reshape(1, -1)))
        return
