"""The nodes of Vitis AI and Quark in place of `QuantizeLinear` and `DequantizeLinear`, for power-of-two scales.

Those of blocks are in `vitis_blocks`.

Source: the custom operators of AMD Quark for ONNX (`VitisQuantizeLinear` up to release 0.8, `ExtendedQuantizeLinear`
since). ONNX Runtime has no kernels for them without that library, so `with_standard_nodes` puts standard operators in
their place: with those a file runs anywhere, and is compared with torch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.float_weights import keep_floats
from quark_fx.export.onnx_edit import array_of
from quark_fx.export.onnx_opset import first_with, raised
from quark_fx.export.vitis_blocks import has_block_nodes, spell_out_block_nodes, use_block_nodes

PREFIXES = {"com.vai.quantize": "Vitis", "com.amd.quark": "Extended"}
"""What the operators of each domain are called: this and `QuantizeLinear` or `DequantizeLinear`."""

_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def use_vendor_nodes(model: ir.Model, domain: str) -> None:
    """Rename every quantizer and dequantizer to the vendor's, and put its nodes where values are rounded to blocks.

    Raises:
        ExportError: if a scale is no power of two, or is measured at run time, or the vendor has no node for a kind of
            blocks; all are listed.
    """
    blocks = use_block_nodes(model, domain)
    nodes = [node for node in model.graph.all_nodes() if node.op_type in _PAIRS]
    require_powers_of_two(model, nodes, allow_none=bool(blocks))
    for node in nodes:
        node.domain, node.op_type, node.version = domain, f"{PREFIXES[domain]}{node.op_type}", 1
    model.opset_imports[domain] = 1


def require_powers_of_two(model: ir.Model, nodes: list[ir.Node], *, allow_none: bool) -> None:
    """Raise, naming every scale of `nodes` that is no power of two."""
    measured = {node.op_type for node in model.graph if node.op_type in ("DynamicQuantizeLinear", "MatMulInteger")}
    bad = [f"  {name} measures its scale at run time" for name in sorted(measured)]
    for value in dict.fromkeys(node.inputs[1] for node in nodes):
        scale = array_of(value)
        name = value.name if value is not None else None
        if scale is None:
            bad.append(f"  {name} is measured at run time")
        elif (np.abs(np.frexp(scale.astype(np.float64))[0]) != 0.5).any() or (scale <= 0).any():
            bad.append(f"  {name}: {float(scale.flat[0]):.6g}")
    bad += [f"  {node.name} has scales in blocks" for node in nodes if node.attributes.get_int("block_size", 0)]
    if not (nodes or measured or allow_none):
        raise ExportError(
            "format='vitis' is for static power-of-two scales, and nothing in this model has a scale; "
            "use the preset 'xint8' or scale_type='power_of_two', or format='qdq'"
        )
    if bad:
        raise ExportError(
            "format='vitis' is for static power-of-two scales; these are none:\n"
            + "\n".join(bad)
            + "\nUse the preset 'xint8' or scale_type='power_of_two', or format='qdq'."
        )


def with_standard_nodes(model: ir.Model) -> ir.Model:
    """Return `model`, perhaps edited, with standard operators in place of the vendor's, so that any runtime runs it.

    Nodes and not functions: ONNX Runtime 1.31 gives codes a wrong type where it inlines both quantizers and, from opset
    21 on, a `GroupNormalization`. Those of blocks need opset 21, those of wide and narrow codes that of the standard
    quantizers; a model in an older one is converted.
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
    if pairs:
        keep_floats(model)
    return model
