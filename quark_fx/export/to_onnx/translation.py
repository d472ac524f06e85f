"""Hand a program to torch's ONNX exporter, without paying for its table of lowerings every time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from quark_fx.export.to_onnx.table import translation_table


def translate(program: ExportedProgram, input_names: Sequence[str], output_names: Sequence[str], *, opset: int) -> Any:
    """Return the `onnx_ir.Model` of `program`, not optimized.

    `torch.onnx.export` builds its table of some 500 lowerings anew in every call, which takes longer than
    translating a ResNet. Where torch lets a table be handed over, it is built once per process.

    Raises:
        torch.onnx.OnnxExporterError: if an operator has no lowering.
    """
    options: dict[str, Any] = {
        "input_names": list(input_names),
        "output_names": list(output_names),
        "opset_version": opset,
        "optimize": False,
        "verbose": False,
    }
    table = translation_table()
    if (export := _export_with_registry()) is not None:
        return export(program, (), registry=_registry(opset, tuple(table.items())), **options).model
    exported = torch.onnx.export(program, (), dynamo=True, custom_translation_table=table, **options)
    assert exported is not None
    return exported.model


@functools.cache
def _export_with_registry() -> Callable[..., Any] | None:
    """Return the function behind `torch.onnx.export` that takes a table, if this torch has it."""
    try:
        from torch.onnx._internal.exporter import _core, _registration  # noqa: F401
    except ImportError:
        return None
    export = getattr(_core, "export", None)
    needed = {"registry", "input_names", "output_names", "opset_version", "optimize", "verbose"}
    return export if export is not None and needed <= set(inspect.signature(export).parameters) else None


@functools.cache
def _registry(opset: int, table: tuple[tuple[Any, Callable[..., Any]], ...]) -> Any:
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    for target, function in table:
        registry.register_op(target, function, is_complex=False)
    return registry
