"""Detection of hooks, patched forwards, and references to modules that a copy of a model would share."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from quark_fx.capture.model_state import globals_of

_REBUILT_BY = ("torch", "transformers")
"""Packages whose classes attach their hooks again when a checkpoint is loaded."""


def hooks_of(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the hooks of a module, such as accelerate's, keyed by a description."""
    by_description: dict[str, Callable[..., Any]] = {}
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        by_description |= {f"{kind} {_name(hook)}": hook for hook in hooks.values()}
    if "forward" in vars(module):
        by_description[f"patched forward {_name(vars(module)['forward'])}"] = vars(module)["forward"]
    forward, bases = inspect.unwrap(type(module).forward), type(module).__mro__
    packages = {base.__module__.partition(".")[0] for base in bases}
    if _owner(forward) not in packages and not any(_imports(base.__module__, forward) for base in bases):
        by_description[f"forward of {type(module).__name__} patched with {_name(forward)}"] = forward
    return by_description


def _imports(file: str, function: Any) -> bool:
    """Return whether a Python module has imported a function itself, not only the function's module."""
    variables = vars(sys.modules.get(file, ModuleType(file))).values()
    return any(value is function for value in list(variables))


def foreign_hooks(model: nn.Module) -> list[str]:
    """Describe the hooks that a model will lack when it is loaded from its checkpoint."""
    hooks = [
        f"{name or '(the model)'}: {kind}"
        for name, module in model.named_modules()
        for kind, hook in hooks_of(module).items()
        if _owner(hook) not in _REBUILT_BY
    ]
    return [*hooks, *_foreign_attention(model), *_replaced_definitions(model)]


def hooks_within(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Describe the hooks that users registered on the modules at `paths` and on their submodules."""
    inner = {f"{path}.{name}".strip("."): m for path in paths for name, m in model.get_submodule(path).named_modules()}
    return [
        f"{_name(hook)} of {path or 'the model'}"
        for path, module in inner.items()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if _owner(hook) not in _REBUILT_BY
    ]


def _foreign_attention(model: nn.Module) -> Iterator[str]:
    """Describe the attention function of a model if it was registered outside of transformers."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    functions = vars(sys.modules.get("transformers.modeling_utils", ModuleType("none"))).get("ALL_ATTENTION_FUNCTIONS")
    function = None if name is None or functions is None else functions.get(name)
    if function is not None and _owner(function) not in _REBUILT_BY:
        yield f"attention implementation {name!r} with {_name(function)}"


def _replaced_definitions(model: nn.Module) -> Iterator[str]:
    """Describe replaced functions and classes in the files of transformers that define a model's modules."""
    for file in sorted({type(module).__module__ for module in model.modules()}):
        if file.partition(".")[0] != "transformers":
            continue
        variables = vars(sys.modules[file]).items()
        foreign = {k: x for k, x in variables if isinstance(x, FunctionType | type) and not _is_of_packages(x)}
        source = inspect.getsource(sys.modules[file]) if foreign else ""
        for name, value in foreign.items():
            if re.search(rf"^(def|class) {name}\b", source, re.MULTILINE):
                yield f"{name} of {file} replaced with {value.__module__}.{_name(value)}"


def _is_of_packages(defined: Any) -> bool:
    owner = _owner(defined)
    return owner in _REBUILT_BY or owner in sys.stdlib_module_names  # transformers imports functions from the latter


def bound_elsewhere(model: nn.Module, original: nn.Module) -> list[str]:
    """Describe the attributes through which a copy of a model refers to modules or parameters of the original.

    `copy.deepcopy` copies modules, bound methods, and the contents of lists, but not functions: closure variables and
    globals that a function reads still hold the modules of the original model.
    """
    theirs = {id(part) for part in (*original.modules(), *original.parameters())}
    theirs |= {id(part) for _, part in _reached(original)}
    return list(dict.fromkeys(name for name, part in _reached(model) if id(part) in theirs))


def _reached(model: nn.Module) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield the modules and parameters that are not registered, each with the attribute that refers to it."""
    registered = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in _attributes(module).items():
            for part in _held(value, registered, set()):
                yield f"{name} of {path or 'the model'}", part


def _attributes(module: nn.Module) -> dict[str, Any]:
    hooks = {"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks}
    return hooks | {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


_OF_TORCH = frozenset(vars(nn.Module()))


def _held(
    value: Any, registered: Collection[int], visited: set[int], file: str | None = None
) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that a value refers to.

    Args:
        value: Attribute of a module, or a part of one.
        registered: Identities of registered modules, which are skipped.
        visited: Identities of values that were visited before.
        file: Python module of the function that refers to the value; functions and objects from elsewhere are skipped.
    """
    if id(value) in visited or id(value) in registered:
        return
    visited.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, nn.Module | nn.Parameter):
        yield value
        if isinstance(value, nn.Module) and file is None:
            inner = [*value.children(), *_attributes(value).values()]
    elif isinstance(value, FunctionType) and file in (None, value.__module__):
        variables = [value.__globals__.get(name) for name in globals_of(value.__code__)[0]]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inner, file = (*_cells(value), *variables, *defaults), value.__module__
    elif isinstance(value, MethodType):
        inner = value.__self__, value.__func__
    elif isinstance(value, partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif type(value).__module__ == file:
        inner = getattr(value, "__dict__", {}).values()
    for part in list(inner):
        yield from _held(part, registered, visited, file)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the outer function has not set this variable yet
            yield cell.cell_contents


def _function(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") else type(hook)


def _name(hook: Any) -> str:
    return str(_function(hook).__qualname__)


def _owner(hook: Any) -> str:
    return str(_function(hook).__module__).partition(".")[0]


__all__ = ["bound_elsewhere", "foreign_hooks", "hooks_of", "hooks_within"]
