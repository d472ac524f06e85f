"""The table of ONNX lowerings, and the decorator that adds to it."""

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

    The function gets the operator's arguments, with tensors as ONNX values and all others as Python constants, and
    returns the ONNX value or values that it builds with `onnxscript.opset21`.

    Raises:
        ExportError: If the name has another form, the operator does not have the overload, or another module has
            registered a lowering.
    """
    _overload(name)

    def register(function: F) -> F:
        if not function.__module__.startswith("quark_fx.") and find_spec("onnxscript"):
            _fill()
        LOWERINGS.add(function, name)
        return function

    return register


def translation_table() -> dict[Any, Callable[..., Any]]:
    """Return the table for `torch.onnx.export(custom_translation_table=...)`, limited to operators that exist here."""
    _fill()
    found = {_overload(name): function for name, function in LOWERINGS.items()}
    return {overload: function for overload, function in found.items() if overload is not None}


def _fill() -> None:
    import quark_fx.export.to_onnx.index_put
    import quark_fx.export.to_onnx.lowering
    import quark_fx.export.to_onnx.stable_functions  # noqa: F401 (all fill the table; they need the `onnx` extra)


def _overload(name: str) -> Any:
    """Return the operator called `name`; `None` if it does not exist here.

    Raises:
        ExportError: If the name has another form, or the operator does not have the overload.
    """
    if name.count(".") != 2 or not all(name.split(".")):
        raise ExportError(f"{name!r} names no operator; write 'namespace.name.overload', as 'aten.relu.default'")
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is not None and not hasattr(packet, overload):
        raise ExportError(f"{namespace}.{operator} has no overload {overload}; it has {', '.join(packet.overloads())}")
    return getattr(packet, overload, None)
