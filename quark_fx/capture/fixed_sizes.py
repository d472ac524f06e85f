"""Dimensions that the model's code fixes through a size computed from them, as `int(conv(x).shape[-1])` does.

`torch.export` fixes a dimension that is compared with a number itself. It records a comparison of a computed size as a
guard, and leaves the dimension dynamic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

_AFTER = 64
"""Sizes past the first one that breaks a guard that are tried: a size that is a multiple of a number returns."""


def fixed_dimensions(program: ExportedProgram) -> set[tuple[tuple[int, ...], int]]:
    """Return the shape in the example and the dimension of each input that has a dimension fixed in this way."""
    fixed: set[tuple[tuple[int, ...], int]] = set()
    fixing: dict[Any, bool] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        sizes: list[Any] = list(value.shape) if isinstance(value, Tensor) else []
        for dim, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                symbol: Any = size.node.expr
                if symbol not in fixing:
                    fixing[symbol] = _is_fixed(size.node, program.range_constraints.get(symbol))
                if fixing[symbol]:
                    fixed.add((tuple(_in_example(size) for size in sizes), dim))
    return fixed


def _in_example(size: Any) -> int:
    hint: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint)


def _is_fixed(size: Any, limits: Any) -> bool:
    if not size.expr.is_Symbol:
        return False
    guards = {guard.expr for guard in size.shape_env.guards if guard.expr.free_symbols == {size.expr}}
    example, last = int(size.hint), int(limits.upper) if limits is not None and limits.upper.is_Integer else None
    steps = range(example + 1, 2 * example + _AFTER, max(1, example // _AFTER))
    sizes = sorted({n for n in (*steps, *range(example + 1, example + _AFTER)) if last is None or n <= last})
    return any(_fixes(guard, size.expr, sizes) for guard in guards)


def _fixes(guard: Any, symbol: Any, sizes: list[int]) -> bool:
    """Tell whether a guard is an equality that holds at the first of the sizes, at most, and never again."""
    import sympy  # takes half a second; already loaded if there are symbols

    def holds(size: int) -> bool:
        try:
            return bool(guard.xreplace({symbol: sympy.Integer(size)}) == sympy.true)
        except (ZeroDivisionError, AssertionError):  # the guard has no value at this size
            return False

    if not isinstance(guard, sympy.Eq):
        return False
    results = [holds(size) for size in sizes]
    first = results.index(False) if False in results else len(results)
    return not any(results[first:]) and first < len(results)


__all__ = ["fixed_dimensions"]
