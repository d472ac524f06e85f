"""Patterns that select operators, in configurations and in passes."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from quark_fx.errors import Declined

NOT_SELECTED = "not selected"
"""Reason in the report for skipping an operator that the patterns of a pass do not select."""


class Named(Protocol):
    """An operator that patterns can select."""

    @property
    def name(self) -> str:
        """Name of the module that contains the operator."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the operator, which `"op:"` patterns match."""
        ...


N = TypeVar("N", bound=Named)


def matches(pattern: str, name: str, *kinds: str) -> bool:
    """Return True if `pattern` selects an operator of module `name` with the given kinds.

    Args:
        pattern: Glob on the module name, or `"op:"` followed by a glob on a kind (see `config.quant_config.Override`).
        name: Name of the module that contains the operator.
        kinds: Kinds of the operator.

    >>> matches("layers.*.up", "layers.0.up"), matches("op:conv*", "layers.0.up", "linear")
    (True, False)
    """
    if pattern.startswith("op:"):
        return any(fnmatchcase(kind, pattern.removeprefix("op:")) for kind in kinds)
    return fnmatchcase(name, pattern)


def without_numbers(name: str) -> str:
    """Return a pattern that matches `name` with any other numbers in it.

    >>> without_numbers("layers.0.mlp.up2")
    'layers.*.mlp.up*'
    """
    return re.sub(r"\d+", "*", glob.escape(name))


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Base class of passes that can be limited to some operators.

    Args:
        only: Patterns of the operators to change, as in `QuantConfig.exclude`; empty for all operators. A pass that
            scales or rounds a value changes the operators that take the value as input.
    """

    only: tuple[str, ...] = ()

    def selects(self, operator: Named) -> bool:
        """Return True if the pass may change an operator."""
        return not self.only or any(matches(pattern, operator.name, *operator.kinds) for pattern in self.only)

    def why_not(self, *operators: Named) -> str:
        """Return why the pass skips a group of operators, for the report; empty if it may change all of them."""
        return "" if all(map(self.selects, operators)) else NOT_SELECTED

    def require_selected(self, operator: Named) -> None:
        """Raise `Declined` if the pass may not change an operator."""
        if reason := self.why_not(operator):
            raise Declined(reason)

    def selected(self, plan: Mapping[str, N]) -> Mapping[str, N]:
        """Return the operators of a plan that the pass may change."""
        return {name: operator for name, operator in plan.items() if self.selects(operator)} if self.only else plan


__all__ = ["NOT_SELECTED", "Selective", "matches", "without_numbers"]
