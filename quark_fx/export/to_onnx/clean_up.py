"""What an ONNX graph needs after translation: small passes over `onnx_ir`, in the order they run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.block_nodes import fuse_block_rounding
from quark_fx.export.to_onnx.edit import (
    add_array,
    add_initializer,
    array_of,
    constant_of,
    drop_unused_initializers,
    erase_unread,
    made_by,
    replace_node,
)
from quark_fx.export.to_onnx.float_weights import MOVES


def fold_initializer_casts(model: ir.Model) -> int:
    """Store initializers in the type they are cast to: zero points in that of their codes, int4 codes packed."""
    folded = 0
    made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}  # a weight that several casts read is stored once
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is None or source.const_value is None or not source.is_initializer():
            continue
        dtype = ir.DataType(node.attributes["to"].as_int())
        if not dtype.is_integer():
            continue  # widening a float16 weight would undo its quantization
        value = made.get((source, dtype))
        if value is None:
            name = source.name if len(source.uses()) == 1 else f"{source.name}_{dtype.name.lower()}"
            assert name is not None
            values = source.const_value.numpy()
            value = add_initializer(model, name, ir.Tensor(values.astype(dtype.numpy()), dtype=dtype, name=name))
            made[source, dtype] = value
        replace_node(node, value)
        folded += 1
    drop_unused_initializers(model)
    return folded


def fold_cast_likes(model: ir.Model) -> int:
    """Store a constant in the type of the value it is cast like: the bounds of a clamp, which then alone reads it."""
    folded = 0
    for node in list(model.graph):
        source, like = node.inputs if node.op_type == "CastLike" else (None, None)
        constant = ir.convenience.get_const_tensor(source) if source is not None else None
        if constant is None or like is None or like.dtype is None:
            continue
        array = constant.numpy().astype(like.dtype.numpy())
        replace_node(node, add_array(model, f"{node.name}_constant", array))
        folded += 1
    erase_unread(model)
    return folded


def drop_zero_biases(model: ir.Model) -> int:
    """Drop the bias that torch writes for a convolution without one: zeros as many as the dequantized weight has rows.

    It would be computed at run time, and no constant to who looks for one; the weight would have a second reader.
    """
    dropped = 0
    for node in model.graph:
        zeros = made_by(node.inputs[2], "Expand") if node.op_type == "Conv" and len(node.inputs) > 2 else None
        constant = ir.convenience.get_const_tensor(zeros.inputs[0]) if zeros is not None and zeros.inputs[0] else None
        if constant is not None and not constant.numpy().any():
            node.resize_inputs(2)
            dropped += 1
    erase_unread(model)
    return dropped


def settle_zero_points(model: ir.Model) -> int:
    """Drop zero points that are the default (zero) where the scale is an array.

    Two cases need an explicit zero point, in the shape of the scale: ONNX Runtime's fusion of `Gemm`, and int8 weights,
    which `session.x64quantprecision` makes uint8 with a zero point in that shape or not at all.
    """
    settled = 0
    for node in model.graph:
        if node.op_type != "DequantizeLinear" or len(node.inputs) < 3:
            continue
        scale, zero_point = node.inputs[1], node.inputs[2]
        if scale is None or scale.shape is None or zero_point is None or zero_point.const_value is None:
            continue
        if not scale.shape.rank() or zero_point.const_value.numpy().any():
            continue
        dtype = zero_point.const_value.dtype
        blocks = node.attributes.get_int("block_size", 0)
        gemm = any(use.node.op_type == "Gemm" for use in node.outputs[0].uses())
        if not blocks and (dtype == ir.DataType.INT8 or (gemm and dtype != ir.DataType.INT32)):
            zeros = np.zeros(scale.shape.numpy(), dtype=dtype.numpy())
            name = f"{node.name}_zero_point"
            node.replace_input_with(2, add_initializer(model, name, ir.Tensor(zeros, dtype=dtype, name=name)))
        else:
            node.resize_inputs(2)
        settled += 1
    drop_unused_initializers(model)
    return settled


def drop_default_attributes(model: ir.Model) -> int:
    """Leave out attributes of `QuantizeLinear` and `DequantizeLinear` that say what is the default anyway."""
    dropped = 0
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale = node.inputs[1]
        scalar = scale is not None and scale.shape is not None and not scale.shape.rank()
        for name, default in (("axis", 1), ("block_size", 0), ("output_dtype", 0), ("saturate", 1)):
            if name in node.attributes and ((scalar and name == "axis") or node.attributes.get_int(name) == default):
                del node.attributes[name]
                dropped += 1
    return dropped


def transpose_weights(model: ir.Model) -> int:
    """Store a transposed weight transposed: `Transpose(DequantizeLinear(codes))` hides the codes from kernels.

    Also turns `Gemm(transB=1)` around for weights in blocks. A weight that something else reads too (a
    tied embedding) stays.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type == "Transpose":
            dequantize = node.inputs[0].producer() if node.inputs[0] is not None else None
        elif node.op_type == "Gemm" and node.attributes.get_int("transB", 0):
            dequantize = node.inputs[1].producer() if node.inputs[1] is not None else None
            if dequantize is None or not dequantize.attributes.get_int("block_size", 0):
                continue
        else:
            continue
        if dequantize is None or not _transpose_dequantize(dequantize):
            continue
        if node.op_type == "Transpose":
            replace_node(node, dequantize.outputs[0])
        else:
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
        done += 1
    return done


def _transpose_dequantize(node: ir.Node) -> bool:
    """Transpose the constants of a matrix's `DequantizeLinear` in place, if nothing else reads them."""
    constants = [value for value in node.inputs if value is not None]
    if node.op_type != "DequantizeLinear" or len(node.outputs[0].uses()) != 1:
        return False
    if any(value.const_value is None or not _may_transpose(value) for value in constants):
        return False
    if constants[0].shape is None or constants[0].shape.rank() != 2:
        return False
    for value in constants:
        tensor = value.const_value
        assert tensor is not None
        if tensor.shape.rank() == 2:
            transposed = np.ascontiguousarray(tensor.numpy().T)
            value.const_value = ir.Tensor(transposed, dtype=tensor.dtype, name=tensor.name)
            value.shape = ir.Shape(transposed.shape)
    if "axis" in node.attributes:
        axis = node.attributes["axis"].as_int() % 2
        node.attributes["axis"] = ir.AttrInt64("axis", 1 - axis)
    if (shape := node.outputs[0].shape) is not None:
        node.outputs[0].shape = ir.Shape([shape[1], shape[0]])
    return True


def _may_transpose(value: ir.Value) -> bool:
    """Tell whether nothing else reads a matrix; a scalar or vector that others read as well stays as it is."""
    return len(value.uses()) == 1 or (value.shape is not None and value.shape.rank() < 2)


def fuse_dynamic_quantization(model: ir.Model) -> int:
    """Take the codes `DynamicQuantizeLinear` already computes instead of quantizing a second time."""
    fused = 0
    for node in list(model.graph):
        if node.op_type != "QuantizeLinear":
            continue
        scale = node.inputs[1]
        producer = scale.producer() if scale is not None else None
        if producer is None or producer.op_type != "DynamicQuantizeLinear" or producer.inputs[0] is not node.inputs[0]:
            continue
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == "DequantizeLinear":
                use.node.replace_input_with(2, producer.outputs[2])
        replace_node(node, producer.outputs[0])
        fused += 1
    return fused


def split_dynamic_gemms(model: ir.Model) -> int:
    """Rewrite a `Gemm` of dynamically quantized activations to `MatMul` and `Add`, which `multiply_integers` takes.

    ONNX Runtime has no integer `Gemm` with a float bias. A weight that something else reads too stays.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type != "Gemm" or node.attributes.get_int("transA", 0):
            continue
        if any(node.attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
            continue
        a, b = (value.producer() if value is not None else None for value in node.inputs[:2])
        if a is None or b is None or b.op_type != "DequantizeLinear" or not _is_measured(a):
            continue
        if b.attributes.get_int("block_size", 0):
            continue
        if node.attributes.get_int("transB", 0) and not _transpose_dequantize(b):
            continue
        last = ir.node("MatMul", node.inputs[:2])
        added = [last]
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            last = ir.node("Add", [last.outputs[0], node.inputs[2]])
            added.append(last)
        for new in added:
            new.outputs[0].shape, new.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        model.graph.insert_before(node, added)
        replace_node(node, last.outputs[0])
        done += 1
    return done


def _is_measured(dequantize: ir.Node) -> bool:
    """Tell whether the node dequantizes at a scale that `DynamicQuantizeLinear` measures."""
    scale = dequantize.inputs[1] if dequantize.op_type == "DequantizeLinear" else None
    measured = scale.producer() if scale is not None else None
    return measured is not None and measured.op_type == "DynamicQuantizeLinear"


def multiply_integers(model: ir.Model) -> int:
    """Rewrite the product of dynamically quantized activations and an integer matrix to `MatMulInteger`.

    `MatMul(DQ(a), DQ(b))` with scales `s_a` and `s_b` is `MatMulInteger(a, b) * (s_a * s_b)`, which ONNX
    Runtime runs as one kernel.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type != "MatMul":
            continue
        a, b = (value.producer() if value is not None else None for value in node.inputs)
        if a is None or b is None or b.op_type != "DequantizeLinear" or not _is_measured(a) or not _per_column(b):
            continue
        product = ir.node("MatMulInteger", [a.inputs[0], b.inputs[0], a.inputs[2], *b.inputs[2:]])
        real = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT})
        scale = ir.node("Mul", [a.inputs[1], b.inputs[1]])
        result = ir.node("Mul", [real.outputs[0], scale.outputs[0]])
        product.outputs[0].dtype = ir.DataType.INT32
        result.outputs[0].dtype = ir.DataType.FLOAT
        real.outputs[0].dtype = scale.outputs[0].dtype = ir.DataType.FLOAT
        model.graph.insert_before(node, [product, real, scale, result])
        result.outputs[0].shape, result.outputs[0].dtype = node.outputs[0].shape, ir.DataType.FLOAT
        replace_node(node, result.outputs[0])
        done += 1
    erase_unread(model)
    return done


def settle_average_pools(model: ir.Model) -> int:
    """Keep ONNX Runtime from averages that its integer kernel counts wrongly: windows beyond the rim, padding counted.

    Without padding there is none to count, and the other way of counting is the same. With padding, a maximum of one
    value between the pool and its quantizer, which changes nothing, keeps the two from being fused.
    """
    settled = 0
    for node in list(model.graph):
        get = node.attributes.get_int
        if node.op_type != "AveragePool" or not get("ceil_mode", 0) or not get("count_include_pad", 0):
            continue
        if any(node.attributes.get_ints("pads", [0])):
            if node.outputs[0].is_graph_output():
                continue
            same = ir.node("Max", [node.outputs[0]])
            same.outputs[0].shape, same.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            model.graph.insert_after(node, same)
            ir.convenience.replace_all_uses_with(node.outputs[0], same.outputs[0])
            same.replace_input_with(0, node.outputs[0])
        else:
            node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 0)
        settled += 1
    return settled


def settle_sizes(model: ir.Model) -> int:
    """Write the size of a dimension that was to vary and turned out not to: torch leaves the number as its name."""
    settled = 0
    values = itertools.chain(model.graph.inputs, *(node.outputs for node in model.graph.all_nodes()))
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdecimal():
                assert value.shape is not None
                value.shape[axis] = int(size.value)
                settled += 1
    return settled


def keep_sums_from_norms(model: ir.Model) -> int:
    """Write the sum that only a layer normalisation reads as `Sum`, which ONNX Runtime does not fuse with it.

    Its fused kernel, `SkipLayerNormalization`, takes six times as long on a processor as the two apart.
    """
    kept = 0
    for norm in model.graph:
        add = made_by(norm.inputs[0], "Add") if norm.op_type == "LayerNormalization" else None
        if add is not None and len(add.outputs[0].uses()) == 1 and not add.outputs[0].is_graph_output():
            add.op_type = "Sum"
            kept += 1
    return kept


_FUSED_ACTIVATIONS = frozenset(
    {"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "HardSigmoid", "Selu", "Softplus", "Softsign", "ThresholdedRelu"}
)


def keep_products_from_activations(model: ir.Model) -> int:
    """Keep ONNX Runtime from fusing an integer `Gemm` with an activation that it computes in float.

    It does so before it looks for integers, and the product then runs in float as well. A maximum of one value, which
    changes nothing, keeps the two apart. A relu that a quantizer follows is left: both go into the kernel.
    """
    kept = 0
    for node in list(model.graph):
        if node.op_type != "Gemm" or not all(_has_codes_of_a_byte(value) for value in node.inputs[:2]):
            continue
        output = node.outputs[0]
        readers = [use.node for use in output.uses()]
        if len(readers) != 1 or output.is_graph_output() or readers[0].op_type not in _FUSED_ACTIVATIONS:
            continue
        after = [use.node.op_type for use in readers[0].outputs[0].uses()]
        if readers[0].op_type == "Relu" and after == ["QuantizeLinear"]:
            continue
        readers[0].replace_input_with(0, _same_value(output))
        kept += 1
    return kept


def keep_padding_from_pools(model: ir.Model) -> int:
    """Keep ONNX Runtime from making padding with zeros a part of a pool where that changes the result.

    A maximum pool pads with -inf, which loses the zeros. An average pool with `ceil_mode` divides by another count.
    Neither takes padding as wide as its window. A maximum of one value, which changes nothing, keeps the two apart.
    """
    kept = 0
    for node in list(model.graph):
        pad = made_by(node.inputs[0], "Pad") if node.op_type in ("MaxPool", "AveragePool") else None
        if pad is None or pad.attributes.get_string("mode", "constant") != "constant":
            continue
        if node.op_type == "MaxPool" and _is_minus_infinity(pad.inputs[2] if len(pad.inputs) > 2 else None):
            continue
        if node.op_type == "AveragePool" and not node.attributes.get_int("ceil_mode", 0) and _fits_window(pad, node):
            continue
        node.replace_input_with(0, _same_value(pad.outputs[0]))
        kept += 1
    return kept


def _is_minus_infinity(value: ir.Value | None) -> bool:
    array = constant_of(value)
    return array is not None and bool(np.isneginf(array.astype(np.float32)).all())


def _fits_window(pad: ir.Node, pool: ir.Node) -> bool:
    """Tell whether each side is padded by less than the window of a pool is wide."""
    kernel, pads = pool.attributes.get_ints("kernel_shape", ()), constant_of(pad.inputs[1])
    if pads is None or not kernel:
        return False
    sides = pads.reshape(2, -1)
    return sides.shape[1] >= len(kernel) and bool((sides[:, -len(kernel) :] < np.asarray(kernel)).all())


def _same_value(value: ir.Value) -> ir.Value:
    """Insert a maximum of `value` alone behind the node that makes it, and return its result."""
    node = value.producer()
    assert node is not None
    assert node.graph is not None
    same = ir.node("Max", [value])
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    node.graph.insert_after(node, same)
    return same.outputs[0]


def _has_codes_of_a_byte(value: ir.Value | None) -> bool:
    source = made_by(value, "DequantizeLinear")
    codes = source.inputs[0] if source is not None else None
    return codes is not None and codes.dtype in (ir.DataType.UINT8, ir.DataType.INT8)


def spell_out_row_scales(model: ir.Model) -> int:
    """Dequantize a weight by casts and products where its scales vary along the axis that is summed over.

    A weight read both ways has them there for one of its readers. ONNX Runtime fuses `DequantizeLinear` with the
    product all the same, and takes them for scales of columns.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "Gemm") or made_by(node.inputs[0], "DequantizeLinear") is None:
            continue
        weight = made_by(node.inputs[1], "DequantizeLinear")
        if weight is None:
            continue
        codes, scale = weight.inputs[:2]
        summed = 1 if node.attributes.get_int("transB", 0) else 0
        axis = weight.attributes.get_int("axis", 1)
        if codes is None or array_of(codes) is None or scale is None or scale.shape is None or len(scale.shape) != 1:
            continue
        if codes.shape is None or len(codes.shape) != 2 or axis % 2 != summed:
            continue
        node.replace_input_with(1, _spelled_out(model, weight, axis % 2))
        done += 1
    erase_unread(model)
    return done


def _spelled_out(model: ir.Model, weight: ir.Node, axis: int) -> ir.Value:
    """Insert the arithmetic of a `DequantizeLinear` with a scale per index of `axis`, and return its result."""
    shape = [-1 if dim == axis else 1 for dim in range(2)]
    parameters = []
    for value in weight.inputs[1:]:
        array = array_of(value)
        assert array is not None
        array = array.astype(np.float32)
        parameters.append(add_array(model, f"{weight.name}_parameter", array.reshape(shape) if array.ndim else array))
    steps = [ir.node("Cast", [weight.inputs[0]], {"to": ir.DataType.FLOAT})]
    if len(parameters) > 1:
        steps.append(ir.node("Sub", [steps[-1].outputs[0], parameters[1]]))
    steps.append(ir.node("Mul", [steps[-1].outputs[0], parameters[0]]))
    for step in steps:
        step.outputs[0].shape, step.outputs[0].type = weight.outputs[0].shape, weight.outputs[0].type
    assert weight.graph is not None
    weight.graph.insert_after(weight, steps)
    return steps[-1].outputs[0]


def _per_column(dequantize: ir.Node) -> bool:
    scale, codes = dequantize.inputs[1], dequantize.inputs[0]
    if dequantize.attributes.get_int("block_size", 0) or scale is None or codes is None or codes.const_value is None:
        return False
    if codes.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return False
    rank = scale.shape.rank() if scale.shape is not None else 0
    return rank == 0 or dequantize.attributes.get_int("axis", 1) % 2 == 1


def type_codes(model: ir.Model) -> int:
    """Give every `QuantizeLinear` output the type its zero point says: torch holds 4-bit codes in bytes.

    So too the codes that casts make, of a row at a time.
    """
    typed = 0
    for node in model.graph:
        if node.op_type == "Cast":
            node.outputs[0].dtype = ir.DataType(node.attributes["to"].as_int())
        if node.op_type == "QuantizeLinear" and len(node.inputs) > 2 and node.inputs[2] is not None:
            dtype = node.inputs[2].dtype
            if dtype is not None and node.outputs[0].dtype != dtype:
                node.outputs[0].dtype = dtype
                typed += 1
        if node.op_type == "DynamicQuantizeLinear" and node.outputs[0].dtype is None:
            node.outputs[0].dtype = ir.DataType.UINT8
            typed += 1
    return typed


_SIGNED = frozenset({ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16})


def repeat_moved_pairs(model: ir.Model) -> int:
    """Quantize a moved value of a signed type again, which changes nothing: its values are codes already.

    ONNX Runtime does so itself to move integers, but gives the new node the zero point of uint8 and then
    refuses the graph.
    """
    repeated = 0
    pending = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    while pending:
        dequantize = pending.pop()
        codes, *parameters = dequantize.inputs
        scale = dequantize.inputs[1]
        if codes is None or codes.const_value is not None or codes.dtype not in _SIGNED:
            continue
        if scale is None or scale.shape is None or scale.shape.rank():
            continue
        for mover in [use.node for use in dequantize.outputs[0].uses() if use.node.op_type in MOVES]:
            moved = mover.outputs[0]
            leaves = moved.is_graph_output()
            if not leaves and all(use.node.op_type == "QuantizeLinear" for use in moved.uses()):
                continue
            again = ir.node("QuantizeLinear", [moved, *parameters])
            pair = ir.node("DequantizeLinear", [again.outputs[0], *parameters])
            again.outputs[0].shape, again.outputs[0].type = moved.shape, codes.type
            pair.outputs[0].shape, pair.outputs[0].type = moved.shape, moved.type
            for use in list(moved.uses()):
                if use.node is not again:
                    use.node.replace_input_with(use.idx, pair.outputs[0])
            if leaves:
                pair.outputs[0].name, moved.name = moved.name, f"{moved.name}_moved"
                for index, output in enumerate(model.graph.outputs):
                    if output is moved:
                        model.graph.outputs[index] = pair.outputs[0]
            model.graph.insert_after(mover, [again, pair])
            pending.append(pair)
            repeated += 1
    return repeated


def strip_metadata(model: ir.Model) -> int:
    """Remove the exporter's notes (stack traces, signatures), which outweigh the weights of a small model."""
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                value.metadata_props.clear()
    return 0


OnnxPass = Callable[[ir.Model], int]

PASSES: tuple[OnnxPass, ...] = (
    settle_sizes,
    fuse_block_rounding,
    fold_initializer_casts,
    fold_cast_likes,
    drop_zero_biases,
    type_codes,
    transpose_weights,
    settle_zero_points,
    split_dynamic_gemms,
    fuse_dynamic_quantization,
    multiply_integers,
    spell_out_row_scales,
    settle_average_pools,
    repeat_moved_pairs,
    drop_default_attributes,
    strip_metadata,
)
"""What runs after translation, in order."""
