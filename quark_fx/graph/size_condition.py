"""Conditions on the sizes of inputs: comparisons in a model's code that chose the captured path."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST = 2000
"""Number of characters; Python's parser and `_value` follow a text of this length without deep recursion."""

_LARGEST_EXPONENT = 8
"""A text from a file must not compute numbers of any length."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: base**exponent if abs(exponent) <= _LARGEST_EXPONENT else math.nan,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
}
"""Functions by the names that torch's printer gives them."""


@dataclass(frozen=True)
class SizeCondition:
    """A comparison of sizes that held for the example.

    Attributes:
        text: Python expression of a comparison, such as `x.shape[2] > x.shape[3]`, with the names of inputs. It is
            interpreted, not run: it may come from a file.
        place: File and line of the model's code, such as `model.py:12`.
    """

    text: str
    place: str = ""

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Tell whether the comparison holds for inputs of these shapes, keyed by input name.

        Raises:
            ValueError: If the text does not compare sizes of these inputs.
        """
        try:
            if len(self.text) > _LONGEST:
                raise ValueError(f"it is longer than {_LONGEST} characters")
            return bool(_value(ast.parse(self.text, mode="eval").body, shapes))
        except (ZeroDivisionError, OverflowError):  # undefined at these sizes
            return False
        except (SyntaxError, RecursionError, MemoryError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{error}") from error


def _value(tree: ast.AST, shapes: Mapping[str, Sequence[int]]) -> Any:
    match tree:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(int() as dim)):
            return shapes[name][dim]
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left, shapes), _value(right, shapes))
        case ast.Compare(left, [kind], [right]) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left, shapes), _value(right, shapes))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, shapes)
        case ast.BoolOp(ast.And(), values):
            return all(_value(value, shapes) for value in values)
        case ast.BoolOp(ast.Or(), values):
            return any(_value(value, shapes) for value in values)
        case ast.Call(function, arguments, []) if (name := ast.unparse(function)) in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, shapes) for argument in arguments))
    raise ValueError(f"{ast.unparse(tree)!r} is not a size, a number, or a comparison")


__all__ = ["SizeCondition"]
