"""Sizes of inputs for which the comparisons in a model's code have the same results as for the example.

`torch.export` turns a comparison of a dimension into a limit, or fixes the dimension. It records a comparison of a size
that is computed from dimensions, as in `int(conv(x).shape[-1])`, as a guard, which the graph does not check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

_SIZES = 64
"""Number of sizes after the example's that are tried: a condition on multiples holds again for one of them."""


def multiple_of(size: Any) -> int:
    """Return the number that must divide a size of an input for the captured path to be valid; 1 if there is none."""
    if not _is_symbol(size):
        return 1
    guards = [guard for guard in _guards(size) if guard.free_symbols == {size.node.expr}]
    return math.lcm(*(number for guard in guards for number in _multiple(guard, size.node.expr)))


def fixed_dimensions(program: ExportedProgram) -> dict[tuple[tuple[int, ...], int], str]:
    """Return the dimensions that the model's code fixes by converting a size computed from them to a number.

    Returns:
        The name of an input, keyed by its shape in the example and the dimension.
    """
    inputs = [(node, node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    shapes = {str(node.target): list[Any](value.shape) for node, value in inputs if isinstance(value, Tensor)}
    example = {size.node.expr: _in_example(size) for sizes in shapes.values() for size in sizes if _is_symbol(size)}
    limits = program.range_constraints
    symbols = {
        size.node.expr
        for sizes in shapes.values()
        for size in sizes
        if _is_symbol(size) and any(_fixes(g, size.node.expr, example, limits) for g in dict.fromkeys(_guards(size)))
    }
    return {
        (tuple(map(_in_example, sizes)), dim): name
        for name, sizes in shapes.items()
        for dim, size in enumerate(sizes)
        if _is_symbol(size) and size.node.expr in symbols
    }


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(getattr(size.node.expr, "is_Symbol", False))


def _in_example(size: Any) -> int:
    hint: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint)


def _guards(size: Any) -> Iterator[Any]:
    """Yield the conditions on a dynamic size."""
    for guard in getattr(size.node.shape_env, "guards", ()):
        if size.node.expr in guard.expr.free_symbols:
            yield guard.expr


def _holds(guard: Any, sizes: Mapping[Any, int]) -> bool:
    import sympy  # takes half a second; already loaded if there are symbols

    try:
        return bool(guard.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}) == sympy.true)
    except (ZeroDivisionError, AssertionError):  # the guard has no value at this size, such as a negative dividend
        return False


def _multiple(guard: Any, symbol: Any) -> Iterator[int]:
    """Yield the number whose multiples satisfy `guard`, while no size between them does, if there is one."""
    import sympy

    for number in sorted({int(n) for n in guard.atoms(sympy.Integer) if n > 1}):
        sizes = range(2 * number, 5 * number)
        if all(_holds(guard, {symbol: n}) == (n % number == 0) for n in sizes):
            yield number
            return


def _fixes(guard: Any, symbol: Any, example: Mapping[Any, int], limits: Mapping[Any, Any]) -> bool:
    """Tell whether a guard is an equality that fails for a size past the example's, and for all later ones."""
    import sympy

    if not isinstance(guard, sympy.Eq):
        return False
    others = guard.free_symbols - {symbol}
    if others and (not others <= example.keys() or _relates(guard, example)):
        return False
    guard = guard.xreplace({other: sympy.Integer(example[other]) for other in others})
    first = example[symbol]
    last = limits[symbol].upper if symbol in limits else sympy.oo
    steps = range(first + 1, 2 * first + _SIZES, max(1, first // _SIZES))
    sizes = sorted({size for size in (*steps, *range(first + 1, first + _SIZES)) if size <= last})
    held = [_holds(guard, {symbol: size}) for size in sizes]
    return False in held and not any(held[held.index(False) :])


def _relates(guard: Any, example: Mapping[Any, int]) -> bool:
    """Tell whether an equality is a relation of dimensions: it holds again where all of them grow together."""
    if not any(side.is_number and side > 0 for side in guard.args):
        return True
    sizes = {symbol: example[symbol] for symbol in guard.free_symbols}
    grown = [{symbol: n * size for symbol, size in sizes.items()} for n in (2, 3)]
    grown += [{symbol: size + n for symbol, size in sizes.items()} for n in (1, 2)]
    return any(_holds(guard, sizes) for sizes in grown)


__all__ = ["fixed_dimensions", "multiple_of"]
