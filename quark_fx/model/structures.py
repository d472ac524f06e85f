"""Conversion of the structure of inputs and outputs to plain data and back, without importing types that it names.

Tuples, lists, mappings, and named tuples of torch are rebuilt from their description. A `ModelOutput` of transformers
is looked up in the modules where transformers defines such classes, and becomes a `dict` if the class does not exist.
Any other type must already be registered with torch in this process.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from quark_fx.errors import QuarkError
from quark_fx.system.untrusted import MAX_DEPTH, brief

logger = logging.getLogger(__name__)

_MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str)}
_MODEL_OUTPUT = re.compile(r"transformers\.(modeling_outputs|models\.(\w+)\.(modeling|modular)_\w+)", re.ASCII)
"""Modules of transformers that define the results of models."""
_LEAF = None


def structure_to_data(spec: pytree.TreeSpec) -> Any:
    """Return a structure as lists, mappings, strings, and numbers; a leaf is `None`.

    Raises:
        QuarkError: If a type cannot be stored; the message names it.
    """
    if spec.is_leaf():
        return _LEAF
    children = [structure_to_data(child) for child in children_of(spec)]
    kind: Any = spec.type
    context = spec.context
    for name, mapping in _MAPPINGS.items():
        if kind is mapping:
            return {"kind": name, "keys": _keys(context), "items": children}
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {"kind": name, "items": children}
    if kind is defaultdict:
        factory, keys = context
        if factory is not None and not any(builder is factory for builder in _FACTORIES.values()):
            raise QuarkError(
                f"a defaultdict in the model's inputs or outputs has the factory {brief(factory)}, which cannot be "
                f"stored; use {', '.join(_FACTORIES)}, or a dict"
            )
        factory_name = (
            None if factory is None else next(name for name, builder in _FACTORIES.items() if builder is factory)
        )
        return {"kind": "defaultdict", "factory": factory_name, "keys": _keys(keys), "items": children}
    if kind is deque:
        return {"kind": "deque", "length": context, "items": children}
    if getattr(torch.return_types, getattr(kind, "__name__", ""), None) is kind:
        return {"kind": "torch", "name": str(getattr(kind, "__name__", "")), "items": children}
    return _registered_to_data(spec, children)


def _registered_to_data(spec: pytree.TreeSpec, children: list[Any]) -> dict[str, Any]:
    kind = spec.type
    if _is_model_output(kind):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return {"kind": "model_output", "name": name, "keys": _keys(spec.context), "items": children}
    if kind is namedtuple:
        kind = spec.context
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if entry is None or entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        name = f"{kind.__module__}.{kind.__qualname__}"
        named_tuple = spec.type is namedtuple
        register = "torch.utils._pytree._register_namedtuple" if named_tuple else "torch.export.register_dataclass"
        raise QuarkError(
            f"{name} has no serialized_type_name; register the type with {register}({kind.__qualname__}, "
            f"serialized_type_name={name!r})"
        )
    if spec.type is namedtuple:
        return {"kind": "namedtuple", "name": entry.serialized_type_name, "items": children}
    context = entry.to_dumpable_context(spec.context) if entry.to_dumpable_context else spec.context
    return {"kind": "registered", "name": entry.serialized_type_name, "context": _plain(context), "items": children}


def _keys(keys: Any) -> list[Any]:
    for key in keys:
        if not isinstance(key, str | int | float | None):
            raise QuarkError(f"{brief(key)} cannot be a key in the model's inputs or outputs; use strings as keys")
    # An enum member that is also a string becomes a plain string, so that loading imports nothing.
    return [str.__str__(key) if isinstance(key, str) else key for key in keys]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise QuarkError(
        f"{brief(value)}, in the description of a registered type, is not plain data (None, a Boolean, a number, or "
        "text)"
    )


def structure_from_data(data: Any, depth: int = MAX_DEPTH) -> pytree.TreeSpec:
    """Rebuild a structure from the result of `structure_to_data`.

    Raises:
        QuarkError: If the data does not describe a structure, or names a type that is not registered in this process.
    """
    if data is _LEAF:
        return pytree.tree_structure(0)
    if not isinstance(data, dict) or not isinstance(data.get("items"), list) or not depth:
        raise QuarkError(f"{brief(data)} does not describe a structure of inputs or outputs")
    kind, items = data.get("kind"), [structure_from_data(item, depth - 1) for item in data["items"]]
    if kind in _SEQUENCES:
        return pytree.TreeSpec(_SEQUENCES[kind], None, items)
    if kind == "deque" and (data["length"] is None or (type(data["length"]) is int and data["length"] >= len(items))):
        return pytree.TreeSpec(deque, data["length"], items)
    if kind == "torch" and isinstance(data.get("name"), str):
        return _return_type(data["name"], items)
    if kind in ("registered", "namedtuple") and isinstance(data.get("name"), str):
        return _registered(data["name"], data.get("context"), items, named_tuple=kind == "namedtuple")
    keys = data.get("keys")
    if not isinstance(keys, list) or len(keys) != len(items) or any(isinstance(key, dict | list) for key in keys):
        raise QuarkError(f"{brief(data)} does not describe a structure of inputs or outputs")
    if len(set(keys)) != len(keys):
        raise QuarkError(f"the structure of inputs or outputs has a duplicate key: {brief(keys)}")
    if kind in _MAPPINGS:
        return pytree.TreeSpec(_MAPPINGS[kind], keys, items)
    if kind == "defaultdict" and (data["factory"] is None or data["factory"] in _FACTORIES):
        return pytree.TreeSpec(defaultdict, [data["factory"] and _FACTORIES[data["factory"]], keys], items)
    if kind == "model_output" and isinstance(data.get("name"), str) and all(isinstance(key, str) for key in keys):
        return pytree.TreeSpec(_model_output(data["name"], keys), keys, items)
    raise QuarkError(f"{brief(data)} does not describe a structure of inputs or outputs")


def _return_type(name: str, items: list[pytree.TreeSpec]) -> pytree.TreeSpec:
    kind = vars(torch.return_types).get(name)
    if not isinstance(kind, type) or kind not in pytree.SUPPORTED_NODES or kind.n_fields != len(items):
        raise QuarkError(f"torch has no return type {brief(name)} with {len(items)} fields")
    return pytree.TreeSpec(kind, None, items)


def _model_output(name: str, keys: list[str]) -> type:
    """Return the class `name` of transformers, or `dict` if the installed version lacks it or one of its fields."""
    module, _, leaf = name.rpartition(".")
    if not _MODEL_OUTPUT.fullmatch(module):
        raise QuarkError(f"{brief(name)} is not an output class of transformers")
    kind: Any = None
    with suppress(ImportError):
        kind = vars(importlib.import_module(module)).get(leaf)
    names = {f.name for f in fields(kind)} if isinstance(kind, type) and is_dataclass(kind) else set()
    if not _is_model_output(kind) or not names >= set(keys):
        logger.warning(
            "the model returned a %s, a class that is not installed here; the loaded model returns a dict instead",
            brief(name),
        )
        return dict
    return kind  # type: ignore[no-any-return]


def _is_model_output(kind: Any) -> bool:
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return any(base.__module__ == "transformers.utils.generic" and base.__name__ == "ModelOutput" for base in bases)


def _registered(name: str, context: Any, items: list[pytree.TreeSpec], *, named_tuple: bool) -> pytree.TreeSpec:
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    # Registered types of torch and Python rebuild enums and factories by importing names from the data.
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] in ("builtins", "collections", "torch"):
        raise QuarkError(
            f"the stored inputs or outputs are of an unregistered type: {brief(name)}; import the module that "
            "registers it, then load again"
        )
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    if named_tuple != (names is not None) or (names is not None and len(names) != len(items)):
        raise QuarkError(f"the stored inputs or outputs do not fit the type {brief(name)}")
    if named_tuple:
        return pytree.TreeSpec(namedtuple, kind, items)
    rebuild = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    return pytree.TreeSpec(kind, rebuild(context) if rebuild else context, items)


def children_of(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Return the child structures, which versions of torch store under different names."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


__all__ = ["children_of", "structure_from_data", "structure_to_data"]
