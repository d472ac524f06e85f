"""The formats of an ONNX file: one row each, with the options that apply to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from quark_fx.config.target import OnnxFiles, Target
from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.blocks import fuse_block_rounding, spell_out_blocks
from quark_fx.export.to_onnx.edit import Kept, keep_names_apart
from quark_fx.export.to_onnx.matmul_nbits import use_matmul_nbits
from quark_fx.export.to_onnx.opset import CONTRIB, use_contrib_domain
from quark_fx.export.to_onnx.qoperator import use_integer_operators
from quark_fx.export.to_onnx.rules import TRANSLATED, apply_rule
from quark_fx.export.to_onnx.stored_codes import halve_scales
from quark_fx.export.to_onnx.vitis import PREFIXES, use_vendor_nodes
from quark_fx.export.to_onnx.workarounds import WORKAROUNDS
from quark_fx.system.names import unknown


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Options of all formats; `None` selects the default of the format.

    Attributes:
        domain: Domain of the quantizers and dequantizers.
        accuracy_level: Accuracy level of `MatMulNBits`.
    """

    domain: str | None = None
    accuracy_level: int | None = None


@dataclass(frozen=True, kw_only=True)
class OnnxFormat:
    """A rewrite of a graph of `QuantizeLinear` / `DequantizeLinear` pairs.

    Attributes:
        rewrite: Function that edits the model and returns the parts that it left unchanged.
        choices: Values of each option that applies to the format, the default first.
        runs: Whether ONNX Runtime has kernels for the format.
        wide: Whether its quantizers support 32-bit codes.
    """

    rewrite: Callable[[ir.Model, FormatOptions], tuple[Kept, ...]]
    choices: dict[str, tuple[object, ...]]
    runs: bool = True
    wide: bool = False


def _qdq(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    if options.domain == CONTRIB:
        use_contrib_domain(model)
    return ()


def _matmul_nbits(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    return use_matmul_nbits(model, options.accuracy_level or 0)


def _vitis(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    assert options.domain is not None
    use_vendor_nodes(model, options.domain)
    return ()


FORMATS: dict[str, OnnxFormat] = {
    "qdq": OnnxFormat(rewrite=_qdq, choices={"domain": ("ai.onnx", CONTRIB)}),
    "qoperator": OnnxFormat(rewrite=lambda model, _: use_integer_operators(model), choices={}),
    "matmul_nbits": OnnxFormat(rewrite=_matmul_nbits, choices={"accuracy_level": (0, 1, 2, 3, 4)}),
    "vitis": OnnxFormat(rewrite=_vitis, choices={"domain": tuple(reversed(PREFIXES))}, runs=False, wide=True),
}
"""All formats."""


def find_format(name: str, options: FormatOptions, target: Target) -> tuple[OnnxFormat, FormatOptions]:
    """Return a format that a target reads, and its options with defaults filled in.

    Raises:
        ExportError: If the format is unknown or the target does not read it, or if an option or its value does not
            apply to the format.
    """
    chosen = FORMATS.get(name)
    if chosen is None:
        raise unknown("ONNX format", name, FORMATS, error=ExportError)
    if name not in (formats := target.onnx.formats):
        raise ExportError(f"target={str(target)!r} reads no format={name!r}; choose one of {', '.join(formats)}")
    filled = {}
    for option in (field.name for field in fields(FormatOptions)):
        value, choices = getattr(options, option), chosen.choices.get(option)
        if choices is None:
            if value is not None:
                users = ", ".join(repr(other) for other, row in FORMATS.items() if option in row.choices)
                raise ExportError(f"format={name!r} has no {option}; drop it (it is an option of {users})")
            continue
        if value is not None and (type(value), value) not in [(type(choice), choice) for choice in choices]:
            raise ExportError(f"{option}={value!r} is not one of format={name!r}; choose one of {choices}")
        filled[option] = choices[0] if value is None else value
    return chosen, FormatOptions(**filled)  # type: ignore[arg-type]


def write_in_format(
    model: ir.Model, chosen: OnnxFormat, options: FormatOptions, files: OnnxFiles, rules: Iterable[Any] = ()
) -> tuple[Kept, ...]:
    """Convert a translated graph to a format, in place.

    Args:
        model: Graph from torch's exporter.
        chosen: Format.
        options: Options of the format.
        files: Properties of the target's ONNX files.
        rules: Further rewrites, which run after the target's.

    Returns:
        Parts that the format left in pairs, and parts that the target's rules and `rules` declined.
    """
    _settle_sizes(model)
    fuse_block_rounding(model)
    for rule in TRANSLATED:
        rule(model)
    rows = [row for row in WORKAROUNDS.values() if row.runtime == files.runtime]
    for row in rows:
        if row.before_formats:
            row(model)
    _strip_notes(model)
    left_alone = chosen.rewrite(model, options)
    spell_out_blocks(model)
    for row in rows:
        if chosen.runs and not row.before_formats:
            row(model)
    declined = [part for rule in (*files.rules, *rules) for part in apply_rule(rule, model)]
    keep_names_apart(model)
    if chosen.runs and files.runtime == "onnxruntime":
        halve_scales(model)
    for domain in {node.domain for node in model.graph.all_nodes()} - {""}:
        model.opset_imports.setdefault(domain, 1)
    return (*left_alone, *declined)


def _settle_sizes(model: ir.Model) -> None:
    """Store the size of a dimension that does not vary after all as a number; torch leaves the number as a name."""
    values = itertools.chain(model.graph.inputs, *(node.outputs for node in model.graph.all_nodes()))
    for value in values:
        shape = value.shape or ir.Shape(())
        for axis, size in enumerate(shape):
            if isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdecimal():
                shape[axis] = int(size.value)


def _strip_notes(model: ir.Model) -> None:
    """Remove the exporter's notes (stack traces, signatures), which outweigh the weights of a small model."""
    ClearMetadataAndDocStringPass()(model)
    for node in model.graph.all_nodes():
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                value.metadata_props.clear()
