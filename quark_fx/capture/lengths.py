"""Conversion of comparisons of positions to comparisons of sizes.

Code that switches tables by length compares the largest position, `positions.max() + 1 > 4096`, which is a value of a
tensor, and `torch.export` cannot branch on values. If the positions are an `arange`, the value depends on sizes alone,
so the branch becomes a guard on a size like any other, and the captured graph rejects lengths that take the other
branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAXIMA = frozenset({torch.max, torch.amax, Tensor.max, Tensor.amax})
_UNCHANGED = frozenset(
    {
        *(Tensor.unsqueeze, Tensor.squeeze, Tensor.view, Tensor.reshape, Tensor.expand, Tensor.expand_as),
        *(Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.long, Tensor.to, Tensor.flatten, Tensor.repeat),
        *(torch.unsqueeze, torch.squeeze, torch.reshape, torch.clone, torch.flatten),
        *_MAXIMA,
    }
)
"""Functions that preserve the largest value of an integer tensor, as long as they return one tensor."""
_SHIFTS: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), operator.add),
    **dict.fromkeys((Tensor.sub, Tensor.__sub__, torch.sub), operator.sub),
}
_OPERANDS = ("input", "other")
"""Names of the operands of torch functions, in order; other arguments come after."""
_COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((Tensor.__gt__, Tensor.gt, torch.gt), operator.gt),
    **dict.fromkeys((Tensor.__ge__, Tensor.ge, torch.ge), operator.ge),
    **dict.fromkeys((Tensor.__lt__, Tensor.lt, torch.lt), operator.lt),
    **dict.fromkeys((Tensor.__le__, Tensor.le, torch.le), operator.le),
}


class KnownLengths(TorchFunctionMode):
    """A mode that compares sizes in place of the largest values of tensors computed from an `arange`."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and id(args[0]) in self._known:
            return bool(self._known[id(args[0])][1])
        result = func(*args, **kwargs)
        if _writes(func, kwargs):
            self._known.clear()  # the written tensor may be a view of a tracked tensor
        value = self._value(func, args, kwargs, result) if isinstance(result, Tensor) else None
        if value is not None:
            self._known[id(result)] = result, value
        return result

    def _value(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Any:
        """Return the largest value of a result, the outcome of a comparison, or `None` if it is unknown."""
        if func is torch.arange:
            # only a range of integers with step 1
            whole = (
                len(args) in (1, 2) and not {"start", "end", "step"} & kwargs.keys() and not result.is_floating_point()
            )
            return args[-1] - 1 if whole and not isinstance(args[-1], float) else None
        args = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
        if not args or id(args[0]) not in self._known:
            return None
        value = self._known[id(args[0])][1]
        if func in _UNCHANGED and not (func in _MAXIMA and any(isinstance(a, Tensor) for a in args[1:])):
            return value if result.dtype in (torch.int32, torch.int64) else None  # narrower dtypes may overflow
        other = args[1] if len(args) == 2 and kwargs.keys() <= {*_OPERANDS} else None
        if isinstance(other, Tensor) and id(other) in self._known and result.dim() == 0:
            other = self._known[id(other)][1]
        if not isinstance(other, int | torch.SymInt) or isinstance(other, bool):
            return None
        if func in _COMPARISONS:
            return _COMPARISONS[func](value, other) if result.dim() == 0 else None
        return _SHIFTS[func](value, other) if func in _SHIFTS else None


def _writes(func: Any, kwargs: Any) -> bool:
    """Tell whether a function writes to one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    assigns = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")  # `__iadd__` has an `__add__`
    return in_place or assigns or name == "__setitem__" or "out" in kwargs


__all__ = ["KnownLengths"]
