"""The ONNX format `"vitis"`. The module `vitis` writes its operators, and replaces them by standard operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark_fx.export.to_onnx.formats import FormatOptions, OnnxFormat, register_onnx_format

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIXES = {"com.amd.quark": "Extended", "com.vai.quantize": "Vitis"}
"""Prefix of the names `QuantizeLinear` and `DequantizeLinear`, by domain."""


def _rewrite(model: ir.Model, options: FormatOptions) -> tuple[()]:
    from quark_fx.vendors.amd.vitis import use_vendor_nodes

    assert options.domain is not None
    use_vendor_nodes(model, options.domain)
    return ()


def _standard(model: ir.Model) -> ir.Model:
    from quark_fx.vendors.amd.vitis import with_standard_nodes

    return with_standard_nodes(model)


register_onnx_format(
    "vitis",
    OnnxFormat(rewrite=_rewrite, choices={"domain": tuple(PREFIXES)}, standard=_standard, wide=True),
)
