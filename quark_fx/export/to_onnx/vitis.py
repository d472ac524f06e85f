"""The nodes of Vitis AI and Quark in place of `QuantizeLinear` and `DequantizeLinear`, and of casts to half precision.

`vitis_blocks` has the nodes for blocks, `vitis_codes` the requirements of the kernels on quantizers.

Source: the custom operators of AMD Quark for ONNX (`VitisQuantizeLinear` up to release 0.8, `ExtendedQuantizeLinear`
since). ONNX Runtime has kernels for them only with that library, so `with_standard_nodes` replaces them by standard
operators; the result runs anywhere and is compared with torch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.edit import add_array, add_initializer, array_of, dtype_of
from quark_fx.export.to_onnx.opset import first_with, raised
from quark_fx.export.to_onnx.vitis_blocks import has_block_nodes, spell_out_block_nodes, use_block_nodes
from quark_fx.export.to_onnx.vitis_codes import CODES, HALVES, settle_quantizers, spell_out_codes
from quark_fx.export.to_onnx.workarounds import WORKAROUNDS

PREFIXES = {"com.vai.quantize": "Vitis", "com.amd.quark": "Extended"}
"""The prefix of `QuantizeLinear` and `DequantizeLinear` in each domain."""

_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def use_vendor_nodes(model: ir.Model, domain: str) -> None:
    """Replace every quantizer and dequantizer by the vendor's, and insert its nodes where values are rounded to blocks.

    Raises:
        ExportError: If a scale is measured at run time or the vendor's nodes do not support a kind of codes or blocks;
            all are listed.
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
    """Rewrite a cast of float32 to half precision and back as a quantizer and dequantizer, scale 1 and zero point 0."""
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
    """Raise an error that lists all scales of `nodes`, and kinds of codes, that the vendor's kernels do not support."""
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
        raise ExportError("format='vitis' is for static scales, and nothing in this model is quantized so; use another")
    if bad:
        presets = "'xint8'" if all(_PER_TENSOR in line for line in bad) else "'xint8', 'int8_static' or 'bf16'"
        raise ExportError(
            "format='vitis' is for static scales, per tensor or channel, of integers or half precision; these are "
            "none:\n" + "\n".join(bad) + f"\nUse the preset {presets}, or format='qdq'."
        )


_PER_TENSOR = (
    ", those of the channels of every group of a ConvTranspose: give it one scale, "
    "Override(pattern='op:conv_transpose*', weight=config.weight.replace(granularity='tensor'))"
)


def _of_grouped_transpose(node: ir.Node) -> bool:
    """Tell whether a dequantizer makes the weight of a grouped transposed convolution."""
    readers = [reader for output in node.outputs for reader, _ in output.uses()]
    return any(reader.op_type == "ConvTranspose" and reader.attributes.get_int("group", 1) > 1 for reader in readers)


def with_standard_nodes(model: ir.Model) -> ir.Model:
    """Return `model`, possibly edited in place, with standard operators that any runtime runs instead of the vendor's.

    They are nodes, not functions: ONNX Runtime 1.31 infers a wrong type for codes if it inlines both quantizers and,
    from opset 21 on, a `GroupNormalization`. Blocks need opset 21; wide and narrow codes need the opset of the standard
    quantizers. A model in an older opset is converted.
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
