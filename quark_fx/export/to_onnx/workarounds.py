"""Workarounds for faults of runtimes, as a table: each row has the pattern that fails and its replacement.

`register_workaround` adds a row; users can call it, too.

A test runs each pattern without its row and expects the fault, so that a row can be removed when its runtime is fixed.
The rows for ONNX Runtime are in this module; their conditions and rewrites are in `onnxruntime_workarounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx import onnxruntime_workarounds as ort
from quark_fx.export.to_onnx.edit import erase_unread, naming_failures
from quark_fx.system.options import checked
from quark_fx.system.registry import Registry


@checked
@dataclass(frozen=True, kw_only=True)
class Workaround:
    """A pattern that a runtime does not run as it should, and its replacement. Calling a row rewrites a model in place.

    Attributes:
        runtime: `OnnxFiles.runtime` of the targets whose files need the workaround.
        versions: Versions of the runtime in which the fault was measured, for readers of the table. The rewrite does
            not depend on the version, because a file may be run by any version.
        fault: Effect of the pattern in the runtime.
        source: Pull request or issue of the runtime that explains the fault; empty if none is known.
        operators: Types of the nodes at which the pattern ends.
        condition: Function that tells whether a node of these types ends the pattern.
        rewrite: Function that replaces the pattern by an equivalent one.
        before_formats: Whether the workaround must run before the rewrites of formats.
    """

    runtime: str
    versions: tuple[str, ...]
    fault: str
    operators: tuple[str, ...]
    condition: Callable[[ir.Node], object]
    rewrite: Callable[[ir.Model, ir.Node], None]
    source: str = ""
    before_formats: bool = False

    def __call__(self, model: ir.Model) -> None:
        """Replace the pattern everywhere in the main graph."""
        done = False
        for node in list(model.graph):
            if node.op_type not in self.operators or node.graph is None:
                continue
            with naming_failures(self._name, node):
                if self.condition(node):
                    self.rewrite(model, node)
                    done = True
        if done:
            erase_unread(model)

    def _name(self) -> str:
        name = next((repr(name) for name, row in WORKAROUNDS.items() if row is self), f"for {self.runtime}")
        return f"workaround {name}"


WORKAROUNDS: Registry[Workaround, Workaround] = Registry("workaround", error=ExportError)
"""All workarounds under their names, in the order in which they run."""
_add = WORKAROUNDS.add


def register_workaround(name: str, row: Workaround) -> Workaround:
    """Register a workaround for the files of all targets with its `runtime`.

    Workarounds run in the order of registration. A module can register a name again, for example from a notebook cell.

    Raises:
        ExportError: If another module has registered a workaround under that name.
    """
    return _add(row, name, depth=2)


MEASURED = ("1.31", "1.32")
"""Versions of ONNX Runtime in which all patterns were run."""

_PULLS = "https://github.com/microsoft/onnxruntime/pull/"

_ROWS = {
    "row scales": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="treats the scales of rows as scales of columns: wrong results, or an error if the sizes differ",
        operators=("MatMul", "Gemm"),
        condition=ort.has_row_scales,
        rewrite=ort.spell_out_row_scales,
        before_formats=True,
    ),
    "average pool beyond the rim": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="its integer kernel divides by an incorrect count at the rim",
        source=_PULLS + "29629",
        operators=("AveragePool",),
        condition=ort.counts_beyond_rim,
        rewrite=ort.settle_average_pool,
        before_formats=True,
    ),
    "moved signed codes": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="quantizes the moved values again with the zero point of uint8, and refuses the graph",
        operators=("DequantizeLinear",),
        condition=ort.moves_signed_codes,
        rewrite=ort.repeat_pair,
        before_formats=True,
    ),
    "arithmetic of bfloat16": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="has no kernels",
        operators=ort.ARITHMETIC,
        condition=ort.reads_bfloat16,
        rewrite=ort.compute_in_float,
    ),
    "sum before a layer normalization": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="fuses the two into SkipLayerNormalization, which takes six times as long on a processor",
        operators=("LayerNormalization",),
        condition=ort.sums_before_norm,
        rewrite=ort.spell_as_sum,
    ),
    "product before float": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="runs a Gemm of codes in float if it has a float bias, or an activation function follows",
        operators=("Gemm",),
        condition=ort.is_float_after_codes,
        rewrite=ort.split_product,
    ),
    "padding before a pool": Workaround(
        runtime="onnxruntime",
        versions=("1.31",),
        fault="turns zeros into padding of the pool, which is -inf for a maximum and changes the count of an average; "
        "refuses padding as wide as the window",
        source=_PULLS + "18136",
        operators=("MaxPool", "AveragePool"),
        condition=ort.is_padded_otherwise,
        rewrite=ort.keep_apart,
    ),
    "cubic resize to a smaller size": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="moves a Transpose across it; the kernel then fails, because it shrinks only the last two axes",
        source=_PULLS + "24385",
        operators=("Resize",),
        condition=ort.shrinks_by_cubes,
        rewrite=ort.copy_first,
    ),
    "product before a sum": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="fuses the two into a Gemm, which runs in float; for ranks other than 2, it also reshapes the codes, and "
        "refuses signed ones as in 'moved signed codes'",
        operators=("MatMul",),
        condition=ort.becomes_gemm,
        rewrite=ort.keep_product_from_sum,
    ),
    "weights of recurrent layers": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="dequantizes the weights in every run instead of at load time, when its kernels rearrange constants",
        operators=("LSTM", "GRU", "RNN"),
        condition=ort.recurrent_weights,
        rewrite=ort.dequantize_once,
    ),
    "values rounded twice": Workaround(
        runtime="onnxruntime",
        versions=("1.32",),
        fault="rounds once, with a scale of its own, where a value is rounded with two scales one after the other",
        operators=("QuantizeLinear",),
        condition=ort.is_rounded_again,
        rewrite=ort.keep_apart,
    ),
    "float weights": Workaround(
        runtime="onnxruntime",
        versions=MEASURED,
        fault="rounds float weights of quantized operators to int8 with one scale per tensor, and float biases to "
        "int32 without checking that they fit",
        source=_PULLS + "22969",
        operators=("Conv", "ConvTranspose", "Gemm", "MatMul"),
        condition=ort.is_rounded,
        rewrite=ort.keep_floats,
    ),
}
for _name, _row in _ROWS.items():
    register_workaround(_name, _row)

__all__ = ["MEASURED", "WORKAROUNDS", "Workaround", "register_workaround"]
