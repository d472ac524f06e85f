"""The ONNX nodes of Vitis AI and AMD Quark: quantizers, dequantizers, and rounding to blocks.

Source: the custom operators of AMD Quark for ONNX (`VitisQuantizeLinear`, `BFPFixNeuron`, and `MXFixNeuron` up to
release 0.8; `ExtendedQuantizeLinear`, `BFPQuantizeDequantize`, and `MXQuantizeDequantize` since), with the attributes
that its documentation describes. A node for blocks rounds a float tensor to a float tensor; the file does not contain
codes. ONNX Runtime has kernels for these nodes only with AMD's operator library, so `with_standard_nodes` replaces them
by standard operators, and the resulting model runs in any runtime and can be compared with torch.

Measured on the operator library of AMD Quark 0.13: quantizers have three inputs; scales are along dimension 0 by
default (in the ONNX standard, 1); codes have 8, 16, or 32 bits or half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.block_functions import DOMAIN
from quark_fx.export.to_onnx.blocks import Rounding, look_up_values, spell_out_rounding, stored_weight
from quark_fx.export.to_onnx.edit import (
    add_array,
    add_initializer,
    array_of,
    drop_unused_initializers,
    dtype_of,
    operand,
    put_node,
    shape_of,
    stored_array,
)
from quark_fx.export.to_onnx.opset import first_with, raised
from quark_fx.export.to_onnx.workarounds import WORKAROUNDS
from quark_fx.numbers.formats import INT8, SM3, SM5, SM8, parse_format
from quark_fx.numbers.qparams import Scheme
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import E8M0_EVEN, E8M0_FLOOR, scale_format
from quark_fx.vendors.amd.formats import PREFIXES

HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_NARROW = {ir.DataType[f"{sign}INT{bits}"]: ir.DataType[f"{sign}INT8"] for sign in ("", "U") for bits in (2, 4)}
"""Type in which the file stores codes, by type of codes narrower than a byte."""

CODES = HALVES | _NARROW.keys() | {ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32)}
"""Supported types of codes."""


def settle_quantizers(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Write the omitted zero points and axes of `nodes`, and store codes narrower than a byte in bytes.

    Args:
        model: Model to edit.
        nodes: Quantizers and dequantizers of the model.
    """
    for node in nodes:
        quantizes = node.op_type == "QuantizeLinear"
        codes, scale = node.outputs[0] if quantizes else operand(node), operand(node, 1)
        if len(node.inputs) < 3:
            dtype = dtype_of(codes)
            kind = dtype.name.lower()
            zeros = ir.Tensor(np.zeros(shape_of(scale).numpy(), dtype.numpy()), dtype=dtype)
            node.resize_inputs(3)
            node.replace_input_with(2, add_initializer(model, f"{node.name}_zero_{kind}", zeros))
        if shape_of(scale).rank():
            node.attributes["axis"] = ir.AttrInt64("axis", node.attributes.get_int("axis", 1))
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.const_value is not None and value.dtype in _NARROW:
                _widen(value)
        if node.op_type == "QuantizeLinear" and node.outputs[0].dtype in _NARROW:
            _clip(model, node)


def _widen(value: ir.Value) -> None:
    """Store a constant with codes narrower than a byte in bytes."""
    dtype = _NARROW[dtype_of(value)]
    value.const_value = ir.Tensor(stored_array(value).astype(dtype.numpy()), dtype=dtype, name=value.name)
    value.dtype = dtype


def _clip(model: ir.Model, node: ir.Node) -> None:
    """Widen the codes of a quantizer to bytes, and clip them to the range of their narrow type."""
    codes = node.outputs[0]
    narrow = dtype_of(codes)
    codes.dtype = wide = _NARROW[narrow]
    kind = wide.numpy()
    limits = [add_array(model, f"code_{limit}_{kind}", np.asarray(limit, kind)) for limit in (narrow.min, narrow.max)]
    clip = ir.node("Clip", [codes, *limits])
    (clipped,) = clip.outputs
    clipped.name, codes.name = codes.name, f"{codes.name}_wide"
    clipped.dtype, clipped.shape = wide, codes.shape
    for use in list(codes.uses()):
        if use.node is not clip:
            use.node.replace_input_with(use.idx, clipped)
    node.append(clip)


def spell_out_codes(model: ir.Model) -> None:
    """Replace quantizers to int32, and quantizers and dequantizers of half precision, by standard operators."""
    for node in list(model.graph):
        zero_point = node.inputs[2] if len(node.inputs) > 2 else None
        dtype = zero_point.dtype if zero_point is not None else None
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain or dtype is None:
            continue
        quantizes = node.op_type == "QuantizeLinear"
        if dtype in HALVES:
            target = dtype if quantizes else ir.DataType.FLOAT
            put_node(node, ir.node("Cast", node.inputs[:1], {"to": target}))
        elif dtype == ir.DataType.INT32 and quantizes:
            _quantize_to_int32(model, node)


def _quantize_to_int32(model: ir.Model, node: ir.Node) -> None:
    """Replace a quantizer to int32 with one scale by arithmetic that clips in float64.

    An int64 `Clip` to less than 2**31 lets 2**31 pass in ONNX Runtime 1.31.
    """
    x, scale, zero_point = node.inputs
    info = np.iinfo(np.int32)
    limits = [add_array(model, f"int32_{limit}", np.asarray(limit, np.float64)) for limit in (info.min, info.max)]
    steps = [ir.node("Div", [x, scale])]
    steps.append(ir.node("Round", steps[-1].outputs))
    steps.append(ir.node("Cast", steps[-1].outputs, {"to": ir.DataType.DOUBLE}))
    point = ir.node("Cast", [zero_point], {"to": ir.DataType.DOUBLE})
    steps += [point, ir.node("Add", [steps[-1].outputs[0], point.outputs[0]])]
    steps.append(ir.node("Clip", [steps[-1].outputs[0], *limits]))
    node.prepend(steps)
    put_node(node, ir.node("Cast", steps[-1].outputs, {"to": ir.DataType.INT32}))


BLOCK_NODES = {
    "com.vai.quantize": {"BFP": "BFPFixNeuron", "MX": "MXFixNeuron"},
    "com.amd.quark": {"BFP": "BFPQuantizeDequantize", "MX": "MXQuantizeDequantize"},
}
"""Names of the operators that round to blocks, by domain and by kind of format."""

HALF_EVEN = 2
"""Value of `rounding_mode` for ties to even; 0 rounds ties away from zero, and 1 rounds ties up."""

_MX_BLOCK = 32
"""Number of values per scale in the formats of the OCP microscaling (MX) specification."""

_GROUPS = (16, 32, 8, 4)
"""Numbers of values that may share an exponent; 16, the usual number, comes first."""

Attributes = dict[str, int | str]


def use_block_nodes(model: ir.Model, domain: str) -> int:
    """Replace rounding to blocks by the vendor's nodes, for activations and for weights, which are stored as floats.

    Returns:
        Number of nodes inserted.

    Raises:
        ExportError: If the vendor's nodes cannot express a rounding; the message lists all such values.
    """
    look_up_values(model, lambda node, table: True)
    roundings = [Rounding.of(node) for node in model.graph if _is_rounding(node)]
    done, bad = 0, []
    for node in list(model.graph):
        if _is_rounding(node):
            x, reason = operand(node), _described(Rounding.of(node))
            rounding: Rounding | None = Rounding.of(node)
        elif weight_and_tensor := stored_weight(node):
            weight, stored = weight_and_tensor
            x, reason = add_array(model, weight.name, _to_round(stored).numpy()), _why(stored)
            rounding = _weight_rounding(stored, roundings)
            roundings += [rounding] if rounding is not None else []
        else:
            continue
        written = _vendor_node(rounding, x, domain)
        if written is None:
            bad.append(f"  {x.name}: {reason}")
            continue
        put_node(node, written)
        done += 1
    if bad:
        raise ExportError(
            "format='vitis' has no node for these blocks:\n"
            + "\n".join(bad)
            + "\nUse the preset 'bfp16', 'mxint8', 'mx9', 'mx6' or 'mx4', an MX format with scale='e8m0_floor' "
            "and observer=MinMax() (the node computes exponents from the largest magnitudes; Mse() chooses others), "
            "or format='qdq'."
        )
    if done:
        drop_unused_initializers(model)
        model.opset_imports[domain] = 1
        model.opset_imports.pop(DOMAIN, None)
    return done


def _is_rounding(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, "RoundBlocks")


def _vendor_node(rounding: Rounding | None, x: ir.Value, domain: str) -> ir.Node | None:
    """Return the vendor's node that applies `rounding` to `x`; `None` if there is none."""
    node_attributes = vendor_attributes(rounding) if rounding is not None else None
    if node_attributes is None:
        return None
    kind, attributes = node_attributes
    return ir.node(BLOCK_NODES[domain][kind], [x], attributes, domain=domain, version=1)


def vendor_attributes(rounding: Rounding) -> tuple[str, Attributes] | None:
    """Return the kind of the vendor's node for a rounding, `"BFP"` or `"MX"`, and its attributes; `None` if none."""
    fmt, rule = rounding.scheme.format, rounding.scheme.scale.rule
    block: Attributes = {"axis": rounding.axis, "block_size": rounding.alone, "rounding_mode": HALF_EVEN}
    if rule == "floor" and not rounding.group_size and (fmt == INT8 or fmt.is_float):
        return "MX", {"element_dtype": str(fmt), **block}
    raised = rule == "even" and fmt == INT8 and not rounding.group_size
    if not raised and not (rule == "floor" and fmt in (SM3, SM5, SM8)):
        return None
    attributes: Attributes = {
        "bfp_method": "to_bfp_prime" if rounding.group_size else "to_bfp",
        "bit_width": 8 + fmt.bits,
        **block,
        "sub_block_size": rounding.block_size if rounding.group_size else 2,
        "sub_block_shift_bits": 1,
        "convert_to_bfloat_before_bfp": 0,
    }
    # Without this attribute, the vendor's kernel saturates where rounding exceeds the largest code; with the attribute,
    # the kernel raises the exponent.
    return "BFP", attributes | ({"use_compiler_version_cpu_kernel": 1} if raised else {})


# Weights -------------------------------------------------------------------------------------------------------------


def _weight_rounding(weight: QuantizedTensor, roundings: list[Rounding]) -> Rounding | None:
    """Return a rounding that reproduces the weight and for which the vendor has a node; `None` if there is none."""
    floats, values = _to_round(weight), weight.dequantize()
    for rounding in _candidates(weight, roundings):
        if vendor_attributes(rounding) is not None and torch.equal(rounding.of_tensor(floats), values):
            return rounding
    return None


def _to_round(weight: QuantizedTensor) -> Tensor:
    """Return floats that a node rounds to the weight's values.

    The floats are the weight's values, except for codes of -128. The value of such a code is a power of two in the next
    binade, so its block would get a larger exponent; a float slightly nearer to zero prevents that.
    """
    if weight.format != INT8:
        return weight.dequantize()
    nearer = torch.where(weight.codes == INT8.qmin, INT8.qmin + 0.25, weight.codes.float())
    return replace(weight, codes=nearer).dequantize()


def _candidates(weight: QuantizedTensor, roundings: list[Rounding]) -> Iterator[Rounding]:
    """Yield roundings that may have produced the codes: `roundings` of other values, then the format's usual ones."""
    if weight.axis is None or not weight.block_size:
        return
    length = weight.codes.shape[weight.axis]
    for rounding in dict.fromkeys(roundings):
        # All block sizes that cover the whole dimension are equivalent.
        same = min(rounding.block_size, length) == min(weight.block_size, length)
        if rounding.scheme.format == weight.format and same:
            yield replace(rounding, axis=weight.axis)
    rules = (E8M0_FLOOR, E8M0_EVEN)
    shared = weight.format.sign_magnitude and weight.block_size < min(_GROUPS)
    for rule in rules if weight.block_size == _MX_BLOCK else rules[::-1]:
        for group in (*_GROUPS, 0) if shared else (0,):
            scale = scale_format(str(rule), group // weight.block_size if group else None)
            yield Rounding(Scheme(format=weight.format, scale=scale), weight.axis, weight.block_size)


def _why(weight: QuantizedTensor) -> str:
    if not weight.block_size:
        return f"{weight.format} without blocks"
    return f"{weight.format} in blocks of {weight.block_size}, with values or scales that the node cannot reproduce"


def _described(rounding: Rounding) -> str:
    size = f"{rounding.group_size}/{rounding.block_size}" if rounding.group_size else f"{rounding.block_size}"
    return f"{rounding.scheme.format} in blocks of {size}, {rounding.scheme.scale} scales"


# Standard operators --------------------------------------------------------------------------------------------------


def has_block_nodes(model: ir.Model) -> bool:
    """Tell whether a model contains the vendor's nodes for blocks."""
    return any(map(_is_block_node, model.graph))


def _is_block_node(node: ir.Node) -> bool:
    return node.op_type in BLOCK_NODES.get(node.domain, {}).values()


def spell_out_block_nodes(model: ir.Model) -> None:
    """Replace the vendor's nodes for blocks by functions of standard operators, which any runtime can run.

    Raises:
        ExportError: If a node has attributes that this package does not write.
    """
    for node in filter(_is_block_node, list(model.graph)):
        output, x = node.outputs[0], operand(node)
        output.shape = output.shape if output.shape is not None else x.shape
        rounded = _rounding_of(node).node(x)
        put_node(node, rounded)
        spell_out_rounding(model, rounded)


def _rounding_of(node: ir.Node) -> Rounding:
    """Return the rounding of a vendor's node: the inverse of `vendor_attributes`."""
    text, number = node.attributes.get_string, node.attributes.get_int
    axis, block = (int(number(name, 0) or 0) for name in ("axis", "block_size"))
    rule, sub = E8M0_FLOOR, 0
    if node.op_type in (names["MX"] for names in BLOCK_NODES.values()):
        fmt = parse_format(str(text("element_dtype", "int8")))
    elif number("use_compiler_version_cpu_kernel", 0):
        fmt, rule = INT8, E8M0_EVEN
    else:
        fmt = parse_format(f"sm{int(number('bit_width', 16) or 0) - 8}")
        sub = int(number("sub_block_size", 2) or 0) if text("bfp_method", "to_bfp") == "to_bfp_prime" else 0
    scale = scale_format(str(rule), block // sub if sub else None)
    rounding = Rounding(Scheme(format=fmt, scale=scale), axis, sub or block)
    expected = vendor_attributes(rounding)
    if expected is None or expected[1] != {name: attribute.value for name, attribute in node.attributes.items()}:
        raise ExportError(
            f"{node.name}: the attributes of this {node.op_type} differ from those that export.onnx writes; "
            "run the file with the vendor's library"
        )
    return rounding


_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def use_vendor_nodes(model: ir.Model, domain: str) -> None:
    """Replace every quantizer, dequantizer, and rounding to blocks by a node of the vendor.

    Raises:
        ExportError: If scales are measured at run time, or the vendor's nodes do not support some codes or blocks; the
            message lists all of them.
    """
    blocks = use_block_nodes(model, domain)
    quantize_halves(model)
    nodes = [node for node in model.graph.all_nodes() if node.op_type in _PAIRS]
    require_static(model, nodes, allow_none=bool(blocks))
    settle_quantizers(model, nodes)
    for node in nodes:
        node.domain, node.op_type, node.version = domain, f"{PREFIXES[domain]}{node.op_type}", 1
    model.opset_imports[domain] = 1


def quantize_halves(model: ir.Model) -> int:
    """Replace casts of float32 to half precision and back by quantizers and dequantizers with scale 1, zero point 0.

    Returns:
        Number of casts that were replaced.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type != "Cast" or node.inputs[0] is None or not node.outputs[0].uses():
            continue
        x, target = node.inputs[0], ir.DataType(node.attributes["to"].as_int())
        back = all(_is_cast(use.node, ir.DataType.FLOAT) for use in node.outputs[0].uses())
        narrows = target in HALVES and x.dtype == ir.DataType.FLOAT and back and not node.outputs[0].is_graph_output()
        source = x.producer()
        stored = x.dtype in HALVES and (x.const_value is not None or (source is not None and source.op_type in _PAIRS))
        if not narrows and not (stored and target == ir.DataType.FLOAT):
            continue
        half = target if narrows else dtype_of(x)
        name = f"{node.name}_zero_{half.name.lower()}"
        zero = add_initializer(model, name, ir.Tensor(np.zeros((), half.numpy()), dtype=half, name=name))
        node.resize_inputs(3)
        node.replace_input_with(1, add_array(model, "one", np.ones((), np.float32)))
        node.replace_input_with(2, zero)
        node.op_type = "QuantizeLinear" if narrows else "DequantizeLinear"
        node.attributes.clear()
        done += 1
    return done


def _is_cast(node: ir.Node, target: ir.DataType) -> bool:
    return node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) is target


def require_static(model: ir.Model, nodes: list[ir.Node], *, allow_none: bool) -> None:
    """Raise `ExportError` with a list of the scales and codes that the vendor's kernels do not support, if any.

    Args:
        model: Model to check for scales that are measured at run time.
        nodes: Quantizers and dequantizers of the model.
        allow_none: Whether a model without quantizers is allowed.
    """
    measured = {node.op_type for node in model.graph if node.op_type in ("DynamicQuantizeLinear", "MatMulInteger")}
    bad = [f"  {name} measures its scale at run time" for name in sorted(measured)]
    for value in dict.fromkeys(node.inputs[1] for node in nodes):
        if array_of(value) is None:
            bad.append(f"  {value.name if value is not None else None} is measured at run time")
    bad += [
        f"  {node.name} has scales in blocks{_PER_TENSOR if _of_grouped_transpose(node) else ''}"
        for node in nodes
        if node.attributes.get_int("block_size", 0)
    ]
    for node in nodes:
        codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        if codes is not None and codes.dtype not in CODES:
            bad.append(f"  {node.name} has codes of {'?' if codes.dtype is None else codes.dtype.name.lower()}")
    if not (nodes or measured or allow_none):
        raise ExportError("format='vitis' needs static scales, and this model has none; use another format")
    if bad:
        presets = "'xint8'" if all(_PER_TENSOR in line for line in bad) else "'xint8', 'int8_static' or 'bf16'"
        raise ExportError(
            "format='vitis' needs static scales, per tensor or channel, of integers or half precision; not "
            "supported:\n" + "\n".join(bad) + f"\nUse the preset {presets}, or format='qdq'."
        )


_PER_TENSOR = (
    ", one per channel in each group of a ConvTranspose: use one scale for the weight, "
    "Override(pattern='op:conv_transpose*', weight=config.weight.replace(granularity='tensor'))"
)


def _of_grouped_transpose(node: ir.Node) -> bool:
    """Tell whether a dequantizer computes the weight of a grouped transposed convolution."""
    readers = [reader for output in node.outputs for reader, _ in output.uses()]
    return any(reader.op_type == "ConvTranspose" and reader.attributes.get_int("group", 1) > 1 for reader in readers)


def with_standard_nodes(model: ir.Model) -> ir.Model:
    """Return `model`, possibly edited in place, with standard operators instead of the vendor's.

    Quantizers become nodes, not functions: ONNX Runtime 1.31 infers a wrong type for codes if it inlines both
    quantizers and, from opset 21 on, a `GroupNormalization`. Blocks need opset 21; wide and narrow codes need the opset
    in which the standard quantizers support them. A model in an older opset is converted.
    """
    pairs = [node for node in model.graph.all_nodes() if node.op_type.endswith(_PAIRS) and node.domain in PREFIXES]
    model = raised(model, first_with(v.dtype for node in pairs for v in (*node.inputs, *node.outputs) if v is not None))
    if has_block_nodes(model):
        model = raised(model)
        spell_out_block_nodes(model)
    for node in model.graph.all_nodes():
        kind = node.op_type.removeprefix(PREFIXES.get(node.domain, ""))
        if node.domain in PREFIXES and kind in _PAIRS:
            node.domain, node.op_type, node.version = "", kind, None
    spell_out_codes(model)
    if pairs:
        for name in ("cubic resize to a smaller size", "product before a sum", "float weights"):
            WORKAROUNDS[name](model)
    return model
