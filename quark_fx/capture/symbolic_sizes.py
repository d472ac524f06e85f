"""Changes to torch's symbolic arithmetic of sizes: it simplifies whole chunks, and records more comparisons.

A model that pads a sequence to whole chunks computes `n + (c - n % c) % c`, or `n + -n % c`. Torch does not recognize
that this is a multiple of `c`, so each later comparison of strides is a proof about nested remainders, and the proofs
take most of the time of an export. In the form `c * ((n + c - 1) // c)`, the remainders cancel where `c` divides the
size.

Torch assumes that dynamic sizes are at least 2 and records no comparison that follows from it, such as one with 1.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch

from quark_fx.capture.guards import place_in_model, value_at

_MOST_SIZES = 3
"""Largest number of sizes in a comparison for which all combinations with 1 are tried."""


def round_up(dividend: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return `dividend % divisor` without remainders, if it is the distance to the next multiple of the divisor.

    Args:
        dividend: Integer expression.
        divisor: Divisor; if it is not a positive integer, the result is `None`.

    Returns:
        `divisor * ((x + divisor - 1) // divisor) - x` if the dividend is `-x`, or `-(x % divisor)`, plus a multiple of
        the divisor, for an `x` that is known to be nonnegative; otherwise `None`.
    """
    functions = importlib.import_module("torch.utils._sympy.functions")
    if not isinstance(divisor, sympy.Integer) or divisor <= 0:
        return None
    terms = sympy.Add.make_args(dividend)
    rest = sympy.Add(*(t for t in terms if not (t.is_Integer and t % divisor == 0)))
    factor, size = rest.as_coeff_Mul()
    if isinstance(size, functions.Mod | functions.PythonMod) and size.args[1] == divisor:
        size = size.args[0]
    if factor != -1 or not (size.is_integer and size.is_nonnegative):
        return None
    return divisor * functions.FloorDiv(size + divisor - 1, divisor) - size


def _remainder(original: Any) -> classmethod[Any, Any, Any]:
    def evaluate(cls: Any, dividend: Any, divisor: Any) -> Any:
        quotient = original.__func__(cls, dividend, divisor)
        return round_up(dividend, divisor) if quotient is None else quotient

    return classmethod(evaluate)


def _quotient_bounds(expression: Any, floor_div: Any) -> tuple[Any, ...]:
    """Return bounds on `x` that follow from `x // divisor == number`, since torch keeps no bounds of quotients."""
    if not isinstance(expression, sympy.Eq):
        return ()
    first, second = expression.args
    for quotient, number in ((first, second), (second, first)):
        if isinstance(quotient, floor_div) and isinstance(number, sympy.Integer):
            dividend, divisor = quotient.args
            if isinstance(divisor, sympy.Integer) and divisor > 0:
                return (
                    sympy.Ge(dividend, number * divisor),
                    sympy.Lt(dividend, (number + 1) * divisor),
                )
    return ()


def _told_from_one(expression: Any, result: Any, example: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield conditions that exclude sizes of 0 and 1 at which a comparison has another result or no known result."""
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) == 1:
        for number in (1, 0):
            if value_at(expression, {symbols[0]: number}) != result:
                yield sympy.Ne(symbols[0], number)
                return
    for ones in itertools.product((True, False), repeat=len(symbols)):
        sizes: dict[Any, Any] = {s: 1 if one else example.get(s) for s, one in zip(symbols, ones, strict=True)}
        if any(ones) and None not in sizes.values() and value_at(expression, sizes) != result:
            yield expression if result == sympy.true else sympy.Not(expression)
            return


@contextmanager
def followed_sizes() -> Iterator[None]:
    """Make torch simplify sizes that are rounded up to whole chunks, and record how a model uses sizes.

    The `ShapeEnv` records comparisons whose result would differ for a size of 0 or 1, and the first line that converts
    a size to text. Private functions of torch are replaced; if this version of torch lacks one, nothing changes.
    """
    try:
        functions = importlib.import_module("torch.utils._sympy.functions")
        symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        shapes, not_the_users = symbolic_shapes.ShapeEnv, symbolic_shapes.uninteresting_files()
        evaluations = [(kind, vars(kind)["eval"]) for kind in (functions.Mod, functions.PythonMod)]
        learn, refine, floor_div = shapes._maybe_guard_rel, shapes._refine_ranges, functions.FloorDiv
        evaluate = shapes.evaluate_expr
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def learned(self: Any, expression: Any) -> None:
        learn(self, expression)
        for bound in _quotient_bounds(expression, floor_div):
            if bound.free_symbols:
                refine(self, bound)

    def place_of_caller() -> str:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename in not_the_users:
            frame = frame.f_back
        return place_in_model(frame.f_code.co_filename, frame.f_lineno)

    def written(self: Any) -> str:
        if self.node.shape_env is not None and (place := place_of_caller()):
            vars(self.node.shape_env).setdefault("size_as_text", place)
        return repr(self)

    def evaluated(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(self, expression, *args, **kwargs)
        is_comparison = result in (sympy.true, sympy.false) and 0 < len(expression.free_symbols) <= _MOST_SIZES
        if is_comparison and (place := place_of_caller()):
            for condition in _told_from_one(expression, result, getattr(self, "backed_var_to_val", {})):
                vars(self).setdefault("told_from_one", {}).setdefault(condition, place)
        return result

    with ExitStack() as stack:
        for kind, evaluation in evaluations:
            stack.callback(setattr, kind, "eval", evaluation)
            kind.eval = _remainder(evaluation)
        # torch attributes a comparison of sizes to the innermost line outside of its own files.
        stack.callback(not_the_users.discard, __file__)
        not_the_users.add(__file__)
        stack.callback(setattr, shapes, "_maybe_guard_rel", learn)
        shapes._maybe_guard_rel = learned
        stack.callback(setattr, shapes, "evaluate_expr", evaluate)
        shapes.evaluate_expr = evaluated
        if "__str__" not in vars(torch.SymInt):
            stack.callback(delattr, torch.SymInt, "__str__")
            torch.SymInt.__str__ = written  # type: ignore[method-assign]
        yield


__all__ = ["followed_sizes", "round_up"]
