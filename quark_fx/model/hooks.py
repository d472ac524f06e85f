"""What calls of a module do besides its own `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_REBUILT_BY = ("torch", "transformers")
"""Packages whose classes attach their hooks again where a checkpoint is loaded."""


def hooks_of(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the hooks of a module, as those of accelerate, by what they are."""
    found: dict[str, Callable[..., Any]] = {}
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        found |= {f"{kind} {_name(hook)}": hook for hook in hooks.values()}
    if "forward" in vars(module):
        found[f"patched forward {_name(vars(module)['forward'])}"] = vars(module)["forward"]
    forward = inspect.unwrap(type(module).forward)
    if _owner(forward) not in {base.__module__.partition(".")[0] for base in type(module).__mro__}:
        found[f"forward of {type(module).__name__} patched with {_name(forward)}"] = forward
    return found


def foreign_hooks(model: nn.Module) -> list[str]:
    """Describe the hooks of a model that it does not have where a checkpoint of it is loaded."""
    return [
        f"{name or '(the model)'}: {kind}"
        for name, module in model.named_modules()
        for kind, hook in hooks_of(module).items()
        if _owner(hook) not in _REBUILT_BY
    ]


def _function(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") else type(hook)


def _name(hook: Any) -> str:
    return str(_function(hook).__qualname__)


def _owner(hook: Any) -> str:
    return str(_function(hook).__module__).partition(".")[0]


__all__ = ["foreign_hooks", "hooks_of"]
