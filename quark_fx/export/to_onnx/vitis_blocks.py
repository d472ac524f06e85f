"""The nodes of Vitis AI and Quark for values in blocks. Each rounds a float tensor; codes are not packed.

Source: the custom operators of AMD Quark for ONNX (`BFPFixNeuron` and `MXFixNeuron` up to release 0.8,
`BFPQuantizeDequantize` and `MXQuantizeDequantize` since), with the attributes that its documentation describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir
import torch
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.block_nodes import DOMAIN, Rounding
from quark_fx.export.to_onnx.blocks import look_up_values, spell_out_rounding, stored_weight
from quark_fx.export.to_onnx.edit import add_array, drop_unused_initializers, operand, put_node
from quark_fx.numbers.formats import INT8, SM3, SM5, SM8, parse_format
from quark_fx.numbers.qparams import Scheme
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import E8M0_EVEN, E8M0_FLOOR, scale_format

BLOCK_NODES = {
    "com.vai.quantize": {"BFP": "BFPFixNeuron", "MX": "MXFixNeuron"},
    "com.amd.quark": {"BFP": "BFPQuantizeDequantize", "MX": "MXQuantizeDequantize"},
}
"""The names of the operators in each domain."""

HALF_EVEN = 2
"""Value of `rounding_mode`; 0 is half away from zero, 1 half up."""

_MX_BLOCK = 32
"""Values per scale in the formats of the microscaling specification."""

_GROUPS = (16, 32, 8, 4)
"""Numbers of values that may share an exponent, the usual one first."""

Attributes = dict[str, int | str]


def use_block_nodes(model: ir.Model, domain: str) -> int:
    """Insert the vendor's nodes where values are rounded to blocks, and after weights, which are stored as floats.

    Raises:
        ExportError: If the vendor's nodes cannot express a rounding; all values are listed.
    """
    look_up_values(model, lambda node, table: True)
    known = [Rounding.of(node) for node in model.graph if _is_rounding(node)]
    done, bad = 0, []
    for node in list(model.graph):
        if _is_rounding(node):
            x, reason = operand(node), _described(Rounding.of(node))
            rounding: Rounding | None = Rounding.of(node)
        elif found := stored_weight(node):
            weight, stored = found
            x, reason = add_array(model, weight.name, _to_round(stored).numpy()), _why(stored)
            rounding = _weight_rounding(stored, known)
            known += [rounding] if rounding is not None else []
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
    """Return the vendor's node that rounds `x` this way; `None` if there is none."""
    found = vendor_attributes(rounding) if rounding is not None else None
    if found is None:
        return None
    kind, attributes = found
    return ir.node(BLOCK_NODES[domain][kind], [x], attributes, domain=domain, version=1)


def vendor_attributes(rounding: Rounding) -> tuple[str, Attributes] | None:
    """Return the vendor's operator for a rounding, `"BFP"` or `"MX"`, and its attributes; `None` if there is none."""
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
    # The vendor's other kernel saturates where rounding exceeds the largest code; this one raises the exponent.
    return "BFP", attributes | ({"use_compiler_version_cpu_kernel": 1} if raised else {})


# Weights -------------------------------------------------------------------------------------------------------------


def _weight_rounding(weight: QuantizedTensor, known: list[Rounding]) -> Rounding | None:
    """Return a rounding that the vendor has a node for and that reproduces the weight; `None` if there is none."""
    given, values = _to_round(weight), weight.dequantize()
    for rounding in _candidates(weight, known):
        if vendor_attributes(rounding) is not None and torch.equal(rounding.of_tensor(given), values):
            return rounding
    return None


def _to_round(weight: QuantizedTensor) -> Tensor:
    """Return floats that a node rounds to the weight's values.

    They are these values, except for codes of -128: as a power of two, such a value belongs to the next binade, and its
    block would get the exponent above.
    """
    if weight.format != INT8:
        return weight.dequantize()
    nearer = torch.where(weight.codes == INT8.qmin, INT8.qmin + 0.25, weight.codes.float())
    return replace(weight, codes=nearer).dequantize()


def _candidates(weight: QuantizedTensor, known: list[Rounding]) -> Iterator[Rounding]:
    """Yield roundings that may have made the codes: roundings of other values, then the usual ones of the format."""
    if weight.axis is None or not weight.block_size:
        return
    length = weight.codes.shape[weight.axis]
    for rounding in dict.fromkeys(known):
        # All blocks that cover the whole length are equivalent.
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
    return f"{weight.format} in blocks of {weight.block_size}, with values or scales that a node does not give back"


def _described(rounding: Rounding) -> str:
    size = f"{rounding.group_size}/{rounding.block_size}" if rounding.group_size else f"{rounding.block_size}"
    return f"{rounding.scheme.format} in blocks of {size}, {rounding.scheme.scale} scales"


# Reference -----------------------------------------------------------------------------------------------------------


def has_block_nodes(model: ir.Model) -> bool:
    """Tell whether the model has a vendor's nodes for blocks."""
    return any(map(_is_block_node, model.graph))


def _is_block_node(node: ir.Node) -> bool:
    return node.op_type in BLOCK_NODES.get(node.domain, {}).values()


def spell_out_block_nodes(model: ir.Model) -> None:
    """Replace the vendor's nodes by functions of standard operators, so that any runtime computes them.

    Raises:
        ExportError: If this package does not write such a node.
    """
    for node in filter(_is_block_node, list(model.graph)):
        output, x = node.outputs[0], operand(node)
        output.shape = output.shape if output.shape is not None else x.shape
        rounded = _rounding_of(node).node(x)
        put_node(node, rounded)
        spell_out_rounding(model, rounded)


def _rounding_of(node: ir.Node) -> Rounding:
    """Return the rounding for which `vendor_attributes` returns the attributes of a node."""
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
    found = vendor_attributes(rounding)
    if found is None or found[1] != {name: attribute.value for name, attribute in node.attributes.items()}:
        raise ExportError(
            f"{node.name}: this {node.op_type} has other attributes than those that export.onnx writes; "
            "run the file with the vendor's library"
        )
    return rounding
