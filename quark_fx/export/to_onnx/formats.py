"""The formats of an ONNX file, as a table with one row per format: its rewrite and the options that apply to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark_fx.config.target import OnnxFiles, Target
from quark_fx.errors import ExportError
from quark_fx.export.runtime.runners import RUNNERS
from quark_fx.system.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

    from quark_fx.export.to_onnx.edit import Kept


CONTRIB = "com.microsoft"
"""Domain of the operators of ONNX Runtime."""


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Options of all formats; `None` selects the default of the format.

    Attributes:
        domain: Domain of the quantizers and dequantizers.
        accuracy_level: Attribute `accuracy_level` of `MatMulNBits`, from 0 to 4.
    """

    domain: str | None = None
    accuracy_level: int | None = None


@dataclass(frozen=True, kw_only=True)
class OnnxFormat:
    """A rewrite of a graph of `QuantizeLinear` / `DequantizeLinear` pairs.

    Attributes:
        rewrite: Function that edits the model and returns the parts that it left unchanged.
        choices: Values of each option that applies to the format, the default first.
        standard: Function that replaces the operators of the domains in `choices` by standard operators, and returns
            the model, possibly edited in place; `None` if ONNX Runtime has kernels for the format.
        wide: Whether the quantizers of the format support 32-bit codes.
    """

    rewrite: Callable[[ir.Model, FormatOptions], tuple[Kept, ...]]
    choices: dict[str, tuple[object, ...]]
    standard: Callable[[ir.Model], ir.Model] | None = None
    wide: bool = False


def _qdq(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    from quark_fx.export.to_onnx.opset import use_contrib_domain

    if options.domain == CONTRIB:
        use_contrib_domain(model)
    return ()


def _qoperator(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    from quark_fx.export.to_onnx.qoperator import use_integer_operators

    return use_integer_operators(model)


def _matmul_nbits(model: ir.Model, options: FormatOptions) -> tuple[Kept, ...]:
    from quark_fx.export.to_onnx.matmul_nbits import use_matmul_nbits

    return use_matmul_nbits(model, options.accuracy_level or 0)


FORMATS: Registry[OnnxFormat, OnnxFormat] = Registry("ONNX format", error=ExportError)
"""Every format by its name, the default first."""
_add = FORMATS.add


def register_onnx_format(name: str, row: OnnxFormat) -> OnnxFormat:
    """Register a format for `quark_fx.export.onnx(format=name)`. A module can register a name again.

    Raises:
        ExportError: If another module has registered a format under that name.
    """
    return _add(row, name, depth=2)


register_onnx_format("qdq", OnnxFormat(rewrite=_qdq, choices={"domain": ("ai.onnx", CONTRIB)}))
register_onnx_format("qoperator", OnnxFormat(rewrite=_qoperator, choices={}))
register_onnx_format("matmul_nbits", OnnxFormat(rewrite=_matmul_nbits, choices={"accuracy_level": (0, 1, 2, 3, 4)}))


def vendor_formats(model: ir.Model) -> dict[str, OnnxFormat]:
    """Return the vendor domains of a model, for which ONNX Runtime lacks kernels, with the format that writes each."""
    rows = (row for row in FORMATS.values() if row.standard is not None)
    return {str(name): row for row in rows for name in row.choices.get("domain", ()) if name in model.opset_imports}


def find_format(name: str, options: FormatOptions, target: Target) -> tuple[OnnxFormat, FormatOptions]:
    """Return the format called `name`, and its options with defaults filled in.

    Raises:
        ExportError: If the format is unknown or the target does not support it, or if an option or its value does not
            apply to the format.
    """
    chosen = FORMATS.find(name)
    if name not in (formats := target.onnx.formats or FORMATS):
        raise ExportError(
            f"target={str(target)!r} does not support format={name!r}; choose one of {', '.join(formats)}"
        )
    filled = {}
    for option in (field.name for field in fields(FormatOptions)):
        value, choices = getattr(options, option), chosen.choices.get(option)
        if choices is None:
            if value is not None:
                users = ", ".join(repr(other) for other, row in FORMATS.items() if option in row.choices)
                raise ExportError(f"format={name!r} has no {option}; drop it (it is an option of {users})")
            continue
        if value is not None and (type(value), value) not in [(type(choice), choice) for choice in choices]:
            raise ExportError(f"format={name!r} does not support {option}={value!r}; choose one of {choices}")
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
        rules: Further rewrites, which run after the target's rules.

    Returns:
        Parts that the format left as `QuantizeLinear` / `DequantizeLinear` pairs, and parts that the target's rules and
        `rules` declined.
    """
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    from quark_fx.export.to_onnx.blocks import fuse_block_rounding, spell_out_blocks
    from quark_fx.export.to_onnx.edit import keep_names_apart
    from quark_fx.export.to_onnx.rules import TRANSLATED, apply_rule
    from quark_fx.export.to_onnx.stored_codes import halve_scales
    from quark_fx.export.to_onnx.workarounds import WORKAROUNDS

    _settle_sizes(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fuse_block_rounding(model)
    for rule in TRANSLATED:
        rule(model)
    if files.runtime in RUNNERS and (module := RUNNERS[files.runtime].workarounds):
        import_module(module)
    rows = [row for row in WORKAROUNDS.values() if row.runtime == files.runtime]
    for row in rows:
        if row.before_formats:
            row(model)
    _strip_notes(model)
    left_alone = chosen.rewrite(model, options)
    spell_out_blocks(model)
    for row in rows:
        if chosen.standard is None and not row.before_formats:
            row(model)
    declined = [part for rule in (*files.rules, *rules) for part in apply_rule(rule, model)]
    keep_names_apart(model)
    if chosen.standard is None and files.runtime == "onnxruntime":
        halve_scales(model)
    for domain in {node.domain for node in model.graph.all_nodes()} - {""}:
        model.opset_imports.setdefault(domain, 1)
    return (*left_alone, *declined)


def _settle_sizes(model: ir.Model) -> None:
    """Replace symbolic sizes whose name is a number by that number: torch writes some fixed sizes in that way."""
    import onnx_ir as ir

    values = itertools.chain(model.graph.inputs, *(node.outputs for node in model.graph.all_nodes()))
    for value in values:
        shape = value.shape or ir.Shape(())
        for axis, size in enumerate(shape):
            if isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdecimal():
                shape[axis] = int(size.value)


def _strip_notes(model: ir.Model) -> None:
    """Remove the exporter's metadata (stack traces, signatures), which is larger than the weights of a small model."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    ClearMetadataAndDocStringPass()(model)
    for node in model.graph.all_nodes():
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                value.metadata_props.clear()
