"""Sizes of inputs for which the comparisons in a model's code have the same results as in the example.

`torch.export` turns a comparison of a dimension into a limit, or fixes the dimension. It records a comparison of a size
that is computed from dimensions, as in `int(conv(x).shape[-1])`, as a guard, which the graph does not check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from quark_fx.graph.size_condition import SizeCondition
from quark_fx.system.isolation import warn

_TORCH, _PACKAGE = Path(torch.__file__).parent, Path(__file__).parents[1]

_SIZES = 64
"""Number of sizes above the example's size that are tried, so that a condition on multiples holds again."""


def size_conditions(inputs: Sequence[Node]) -> tuple[SizeCondition, ...]:
    """Return the comparisons of sizes that chose the captured path.

    A comparison in torch's own computation of shapes counts if it asks for multiples of a number, like a division into
    windows, or for a number of pieces. Other such comparisons choose between equivalent paths, or an operator of the
    graph raises the error.
    """
    named: dict[Any, tuple[str, Any]] = {
        size.node._expr: (f"{node.target}.shape[{dim}]", size)
        for node in reversed(inputs)  # reversed, so that the first input with a symbol names it
        for dim, size in enumerate(sizes_of(node))
        if isinstance(size, torch.SymInt) and getattr(size.node._expr, "is_Symbol", False)
    }
    if not named:
        return ()
    import sympy  # takes half a second; already loaded if there are symbols
    from torch.utils._sympy.printers import PythonPrinter

    env: Any = next(iter(named.values()))[1].node.shape_env
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, (name, _) in named.items()}
    numbers = {symbol: size.node.expr for symbol, (_, size) in named.items() if size.node.expr.is_number}
    shapes = {str(node.target): [*map(_in_example, sizes_of(node))] for node in inputs}
    at_one = [
        (condition, place)
        for condition, place in getattr(env, "told_from_one", {}).items()
        if any(env.var_to_range[symbol].lower <= 2 for symbol in condition.free_symbols)  # otherwise the limit suffices
    ]
    guards = [(guard.expr, _place_of(guard) or _place_of_pieces(guard, env.var_to_range)) for guard in env.guards]
    conditions: dict[str, SizeCondition] = {}
    for guard, place in (*at_one, *guards):
        expr = guard.xreplace(numbers)
        if not expr.free_symbols or not expr.free_symbols <= names.keys():
            continue
        # Guards on strides count, too: torch does not record later comparisons in the model that follow from them.
        simple = _as_multiple(expr)
        if place or simple is not None:
            text = PythonPrinter().doprint((expr if simple is None else simple).xreplace(names))
            condition = SizeCondition(text, place)
            try:
                holds = condition.holds(shapes)
            except ValueError:
                holds = False
            if holds:
                conditions.setdefault(condition.text, condition)
            else:
                warn(
                    f"the model's code compares sizes at {place}: {text}; quark_fx does not check that later inputs "
                    "satisfy this condition"
                )
    return tuple(conditions.values())


def _as_multiple(guard: Any) -> Any:
    """Return `x % number == 0` if a guard on one size is equivalent to that, else `None`."""
    import sympy

    if isinstance(guard, sympy.Eq) and len(guard.free_symbols) == 1:
        (symbol,) = guard.free_symbols
        for number in sorted({int(n) for n in guard.atoms(sympy.Integer) if n > 1}):
            if all(_holds(guard, {symbol: n}) == (n % number == 0) for n in range(2 * number, 5 * number)):
                return sympy.Eq(sympy.Mod(symbol, number), 0)
    return None


def _is_of_pieces(guard: Any) -> bool:
    """Tell whether a guard is about the number of pieces of a `split` or `chunk`."""
    return getattr(guard.sloc.framework_loc, "name", "") == "split" and not _place_of(guard)


def _place_of_pieces(guard: Any, limits: Mapping[Any, Any]) -> str:
    """Return text that names `split` and `chunk`, if a guard is about their number of pieces and may fail."""
    if not _is_of_pieces(guard):
        return ""
    if len(guard.expr.free_symbols) == 1:
        (symbol,) = guard.expr.free_symbols
        lower, last = limits[symbol].lower, limits[symbol].upper
        first = int(lower) if lower > 2 else 1  # torch assumes at least 2, but the graph also takes 1
        # `chunk(4)` returns another number of pieces only for the shortest inputs, `split(4)` for all longer inputs.
        steps = (*range(_SIZES), *(1 << power for power in range(32)))
        if all(_holds(guard.expr, {symbol: first + step}) for step in steps if first + step <= last):
            return ""
    return "a call of split() or chunk()"


def place_in_model(file: str, line: int | None) -> str:
    """Return `file:line`; empty for lines of quark_fx, and of torch except for `torch.nn` and `torch.functional`."""
    name = _name_in_model(file)
    return f"{name}:{line}" if name else ""


@cache
def _name_in_model(file: str) -> str:
    """Return the name of a file; empty where `place_in_model` returns nothing. A capture asks thousands of times."""
    path = Path(file)
    if _PACKAGE in path.parents:
        return ""
    if _TORCH in path.parents and path.relative_to(_TORCH).parts[0] not in ("nn", "functional.py"):
        return ""
    return path.name


def _place_of(guard: Any) -> str:
    frame: Any = guard.sloc.framework_loc
    return place_in_model(frame.filename, frame.lineno) if hasattr(frame, "filename") else ""


def fixed_dimensions(program: ExportedProgram) -> dict[tuple[tuple[int, ...], int], str]:
    """Return the dimensions that the model's code fixes by converting a size computed from them to a number.

    Returns:
        Names of inputs, keyed by the input's shape in the example and the dimension.
    """
    shapes = {str(node.target): sizes_of(node) for node in program.graph.nodes if node.op == "placeholder"}
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


def sizes_of(node: Node) -> list[Any]:
    """Return the sizes of an input, with symbols for dynamic ones; an empty list if it is not a tensor."""
    value = node.meta.get("val")
    return list(value.shape) if isinstance(value, Tensor) else []


def _in_example(size: Any) -> int:
    hint: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint)


def _guards(size: Any) -> Iterator[Any]:
    """Yield the conditions on a dynamic size, except for numbers of pieces, which are equal for many sizes."""
    for guard in getattr(size.node.shape_env, "guards", ()):
        if size.node.expr in guard.expr.free_symbols and not _is_of_pieces(guard):
            yield guard.expr


def value_at(expression: Any, sizes: Mapping[Any, int]) -> Any:
    """Return the value of a symbolic expression at given sizes; `None` if it is undefined (a division by zero)."""
    import sympy  # takes half a second; already loaded if there are symbols

    try:
        return expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # torch asserts that dividends are not negative
        return None


def _holds(guard: Any, sizes: Mapping[Any, int]) -> bool:
    return bool(value_at(guard, sizes) == True)  # noqa: E712 (sympy's own true)


def _fixes(guard: Any, symbol: Any, example: Mapping[Any, int], limits: Mapping[Any, Any]) -> bool:
    """Tell whether a guard is an equality that fails for a size above the example's and for all larger sizes tried."""
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
    """Tell whether an equality relates dimensions, so that it holds again if all of them grow together."""
    if not any(side.is_number and side > 0 for side in guard.args):
        return True
    sizes = {symbol: example[symbol] for symbol in guard.free_symbols}
    grown = [{symbol: n * size for symbol, size in sizes.items()} for n in (2, 3)]
    grown += [{symbol: size + n for symbol, size in sizes.items()} for n in (1, 2)]
    return any(_holds(guard, sizes) for sizes in grown)


__all__ = ["fixed_dimensions", "place_in_model", "size_conditions", "sizes_of", "value_at"]
