"""`QuantizeLinear` and `DequantizeLinear` in the `com.microsoft` domain, for types that old opsets lack."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.errors import ExportError

CONTRIB = "com.microsoft"


def use_contrib_domain(model: ir.Model) -> None:
    """Move every quantizer and dequantizer to `com.microsoft`, whose kernels support 4- and 16-bit codes in any opset.

    Raises:
        ExportError: If the model lacks quantizers, or they have scales in blocks, 8-bit floats, or 2-bit codes, which
            these kernels do not support; all are listed.
    """
    bad, moved = [], 0
    for node in model.graph.all_nodes():
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        dtype = codes.dtype if codes is not None else None
        if node.attributes.get_int("block_size", 0):
            bad.append(f"  {node.name}: scales in blocks")
        elif dtype is not None and (not dtype.is_integer() or dtype.itemsize < 0.5):
            bad.append(f"  {node.name}: {dtype.name.lower()}")
        node.domain, node.version = CONTRIB, 1
        moved += 1
    if bad:
        raise ExportError(f"domain='{CONTRIB}' has no kernel for\n" + "\n".join(bad) + "\nDrop it, with opset=21.")
    if not moved:
        raise ExportError(f"domain='{CONTRIB}' is of quantizers, and this model has none in pairs; drop it")
    model.opset_imports[CONTRIB] = 1
