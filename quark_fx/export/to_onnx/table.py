"""The table of ONNX lowerings, and how to add to it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from quark_fx.errors import ExportError
from quark_fx.system.registry import Registry

LOWERINGS: Registry[Callable[..., Any], Callable[..., Any]] = Registry("ONNX lowering", error=ExportError)
"""Lowering functions by qualified operator name. The table is the support list: tests iterate over it."""

F = TypeVar("F", bound=Callable[..., Any])


def lowers(name: str) -> Callable[[F], F]:
    """Register the ONNX lowering of an operator, `"namespace.name.overload"`.

    The function gets the operator's arguments, tensors as ONNX values and the rest as Python constants,
    and returns the ONNX value(s) it built with `onnxscript.opset21`.

    Raises:
        ExportError: for a name of another form, an overload that the operator does not have, or an operator that has
            a lowering of another module.
    """
    _overload(name)

    def register(function: F) -> F:
        if not function.__module__.startswith("quark_fx.") and find_spec("onnxscript"):
            _fill()
        LOWERINGS.add(function, name)
        return function

    return register


def translation_table() -> dict[Any, Callable[..., Any]]:
    """Return the table for `torch.onnx.export(custom_translation_table=...)`: the operators that exist here."""
    _fill()
    found = {_overload(name): function for name, function in LOWERINGS.items()}
    return {overload: function for overload, function in found.items() if overload is not None}


def _fill() -> None:
    import quark_fx.export.to_onnx.index_put
    import quark_fx.export.to_onnx.lowering
    import quark_fx.export.to_onnx.stable_functions  # noqa: F401 (all fill the table; they need the `onnx` extra)


def _overload(name: str) -> Any:
    """Return the operator called `name`; `None` if there is none here.

    Raises:
        ExportError: for a name of another form, or an overload that the operator does not have.
    """
    if name.count(".") != 2 or not all(name.split(".")):
        raise ExportError(f"{name!r} names no operator; write 'namespace.name.overload', as 'aten.relu.default'")
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is not None and not hasattr(packet, overload):
        raise ExportError(f"{namespace}.{operator} has no overload {overload}; it has {', '.join(packet.overloads())}")
    return getattr(packet, overload, None)
