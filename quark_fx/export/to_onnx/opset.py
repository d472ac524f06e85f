"""The opset that a graph needs, conversion to another opset, and quantizers in `com.microsoft` for old opsets."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from quark_fx.config.target import Target
from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.block_functions import DOMAIN
from quark_fx.export.to_onnx.formats import CONTRIB

DEFAULT = 21
"""First opset with 4- and 16-bit codes and with blocks; every ONNX Runtime since 1.20 supports it."""

OLDEST, NEWEST = 14, 25
"""Range of opsets: the onnx package does not convert additions to opsets before 14; torch translates to at most 25."""

_FIRST_TRANSLATED = 18
"""First opset of torch's table of lowerings."""

_SINCE = {
    **dict.fromkeys((ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16, ir.DataType.UINT16), 21),
    # Opset 19 has 8-bit floats, but its QuantizeLinear lacks the attribute for the type of the codes.
    **dict.fromkeys((ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2), 21),
    **dict.fromkeys((ir.DataType.INT2, ir.DataType.UINT2), 25),
}
_CAST_SINCE = {
    **dict.fromkeys((ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2), 19),
    **dict.fromkeys((ir.DataType.INT4, ir.DataType.UINT4), 21),
    **dict.fromkeys((ir.DataType.INT2, ir.DataType.UINT2), 25),
}
_CONTRIB_TYPES = frozenset(dtype for dtype, since in _SINCE.items() if since == 21 and dtype.is_integer())


def require_known(opset: int, target: Target) -> None:
    """Raise `ExportError` if `opset` cannot be written or the target does not support it."""
    oldest, newest = (max(OLDEST, target.onnx.opsets[0]), min(NEWEST, target.onnx.opsets[1]))
    if type(opset) is not int or not oldest <= opset <= newest:
        choice = f"use {oldest}" if oldest == newest else f"choose one from {oldest} to {newest}"
        raise ExportError(
            f"opset {opset!r} cannot be written for target={str(target)!r}; {choice} (default: {target.onnx.opset})"
        )


def translated(opset: int) -> int:
    """Return the opset to translate to; `convert` then converts the result to `opset`."""
    return opset if opset >= DEFAULT else _FIRST_TRANSLATED


def require_types(model: ir.Model, opset: int) -> None:
    """Raise `ExportError` with a list of the quantizers and casts whose types or blocks `opset` lacks, if any."""
    bad, needed = [], 0
    cast = any(_needed(node)[0] > opset for node in model.graph.all_nodes() if node.op_type == "Cast")
    for node in model.graph.all_nodes():
        since, what, contributed = _needed(node)
        if since > opset:
            remedy = " or domain='com.microsoft'" if contributed and not cast else ""
            bad.append(f"  {node.name}: {what} needs opset {since}{remedy}")
            needed = max(needed, since)
    if bad:
        raise ExportError(f"opset {opset} is too old for\n" + "\n".join(bad) + f"\nUse opset={needed}.")


def _needed(node: ir.Node) -> tuple[int, str, bool]:
    """Return the opset that a node needs, the reason, and whether `com.microsoft` has the node in every opset."""
    if node.domain == DOMAIN:
        return DEFAULT, node.op_type, False
    if node.op_type == "Cast":
        target = ir.DataType(node.attributes["to"].as_int())
        return _CAST_SINCE.get(target, 0), f"a cast to {_name(target)}", False
    if node.domain or node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return 0, "", False
    codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    dtype = codes.dtype if codes is not None else None
    blocks = bool(node.attributes.get_int("block_size", 0))
    since = max(_SINCE.get(dtype, 0) if dtype is not None else 0, DEFAULT if blocks else 0)
    return since, _name(dtype) + " in blocks" * blocks, dtype in _CONTRIB_TYPES and not blocks


def _name(dtype: ir.DataType | None) -> str:
    return dtype.name.lower() if dtype is not None else "unknown"


def convert(model: ir.Model, opset: int) -> ir.Model:
    """Convert `model`, in opset `translated(opset)`, to `opset`.

    Raises:
        ExportError: If the converter of the onnx package does not support an operator in the older opset.
    """
    if opset >= DEFAULT:
        return model
    for node in model.graph.all_nodes():
        if node.op_type == "Cast":
            node.attributes.pop("saturate", None)  # exists since opset 19, and for 8-bit floats only
        if opset < _FIRST_TRANSLATED and not node.attributes.get_int("noop_with_empty_axes", 0):
            node.attributes.pop("noop_with_empty_axes", None)  # reductions have it since opset 18
    if opset == _FIRST_TRANSLATED:
        return model
    import onnx
    import onnxscript.optimizer
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    # The converter requires constant axes for a reduction; it does not support a reshaped constant.
    onnxscript.optimizer.fold_constants(model, should_fold=lambda node: node.op_type in ("Constant", "Reshape"))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    try:
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), opset))
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        cause = str(error).rpartition("failed: ")[2]
        raise ExportError(f"opset {opset} cannot express the model: {cause}; use opset={_FIRST_TRANSLATED}") from error


def raised(model: ir.Model, opset: int = DEFAULT) -> ir.Model:
    """Return `model`, converted to `opset` if its opset is older."""
    if model.opset_imports[""] >= opset:
        return model
    import onnx

    return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), opset))


def first_with(dtypes: Iterable[ir.DataType | None]) -> int:
    """Return the first opset whose quantizers support all of `dtypes`."""
    return max((_SINCE.get(dtype, OLDEST) for dtype in dtypes if dtype is not None), default=OLDEST)


def ir_version(opset: int) -> int:
    """Return the IR version for a file: at least 10, which every ONNX Runtime since 1.18 loads."""
    import onnx

    return max(10, int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])))


def use_contrib_domain(model: ir.Model) -> None:
    """Move every quantizer and dequantizer to `com.microsoft`, whose kernels support 4- and 16-bit codes in any opset.

    Raises:
        ExportError: If the model lacks quantizers, or some have scales in blocks, 8-bit floats, or 2-bit codes, which
            these kernels do not support; the message lists them.
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
        raise ExportError(
            f"domain='{CONTRIB}' has no kernel for\n" + "\n".join(bad) + "\nDrop domain=, and use opset=21."
        )
    if not moved:
        raise ExportError(f"domain='{CONTRIB}' applies to QDQ pairs, but this model has none; drop domain=")
    model.opset_imports[CONTRIB] = 1
