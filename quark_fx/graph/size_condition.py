"""Conditions on the sizes of inputs: comparisons in a model's code that chose the captured path."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_LONGEST = 2000
"""Largest number of characters; Python's parser and `_value` handle text of this length without deep recursion."""

_BITS = 256
"""Limit on exponents, and on the bits of factors and bases: text from a file must not compute ever longer numbers."""


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _BITS:
        raise ValueError(f"the exponent {exponent} is too large")
    return _short(base) ** exponent


def _short(number: Any) -> Any:
    if isinstance(number, int) and number.bit_length() > _BITS:
        raise ValueError(f"a number has more than {_BITS} bits")
    return number


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda a, b: _short(a) * _short(b),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.And: lambda *parts: all(parts),
    ast.Or: lambda *parts: any(parts),
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sym_float": float,
}
"""Functions by the names that torch's printer gives them, such as `math.floor`, without their modules."""


@dataclass(frozen=True)
class SizeCondition:
    """A comparison of sizes that is true for the batch used at capture.

    Attributes:
        text: Python expression of the comparison, such as `x.shape[2] > x.shape[3]`, with the names of inputs. It is
            interpreted, not executed, because it may come from a file.
        place: File and line of the model's code, such as `model.py:12`, or the call that compares.
    """

    text: str
    place: str = ""

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Tell whether the comparison holds for inputs of these shapes, keyed by input name.

        A comparison without a value, such as one with a division by zero, does not hold.

        Raises:
            ValueError: If the text does not compare sizes of these inputs.
        """
        try:
            return _value(_parsed(self.text), shapes) is True
        except (SyntaxError, RecursionError, MemoryError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{error}") from error


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} characters")
    return ast.parse(text, mode="eval").body


def _value(tree: ast.AST, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return the value of an expression, or NaN if it has no value; all parts are evaluated, so that errors surface."""
    match tree:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(int() as dim)):
            return shapes[name][dim]
        case ast.BinOp(left, kind, right) | ast.Compare(left, [kind], [right]) if type(kind) in _OPERATORS:
            return _applied(_OPERATORS[type(kind)], [left, right], shapes)
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _applied(_OPERATORS[type(kind)], [operand], shapes)
        case ast.BoolOp(kind, parts):
            return _applied(_OPERATORS[type(kind)], parts, shapes)
        case ast.Call(ast.Name(name) | ast.Attribute(ast.Name(), name), arguments, []) if name in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], arguments, shapes)
    raise ValueError(f"{ast.unparse(tree)!r} is not a size, a number, or a comparison")


def _applied(function: Callable[..., Any], arguments: Sequence[ast.AST], shapes: Mapping[str, Sequence[int]]) -> Any:
    values = [_value(argument, shapes) for argument in arguments]
    if any(value != value for value in values):
        return math.nan
    try:
        value = function(*values)
    except ArithmeticError:
        return math.nan
    return math.nan if isinstance(value, complex) else value


__all__ = ["SizeCondition"]
