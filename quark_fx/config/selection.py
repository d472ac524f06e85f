"""Patterns that select operators, in configurations and in passes."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

NOT_SELECTED = "skipped: not selected"
"""What a pass notes of an operator that its patterns leave out."""


class Named(Protocol):
    """An operator that patterns can select."""

    @property
    def name(self) -> str:
        """The module it comes from."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """What `"op:"` patterns may call it by."""
        ...


N = TypeVar("N", bound=Named)


def matches(pattern: str, name: str, *kinds: str) -> bool:
    """Tell whether `pattern` selects the operator of module `name`, which is of these kinds.

    Args:
        pattern: a glob on the module name, or `"op:"` and a glob on a kind (see `config.quant_config.Override`).
        name: the module it comes from.
        kinds: of the operator.

    >>> matches("layers.*.up", "layers.0.up"), matches("op:conv*", "layers.0.up", "linear")
    (True, False)
    """
    if pattern.startswith("op:"):
        return any(fnmatchcase(kind, pattern.removeprefix("op:")) for kind in kinds)
    return fnmatchcase(name, pattern)


def without_numbers(name: str) -> str:
    """Return the pattern of all names that differ from `name` in their numbers alone.

    >>> without_numbers("layers.0.mlp.up2")
    'layers.*.mlp.up*'
    """
    return re.sub(r"\d+", "*", glob.escape(name))


@dataclass(frozen=True, kw_only=True)
class Selective:
    """A pass that can be limited to some operators; passes with the option derive from it.

    Args:
        only: patterns, as `QuantConfig.exclude` has them, of the operators it changes; empty for all. What scales
            channels between operators, or rounds what they read, counts as a change of those that read it.
    """

    only: tuple[str, ...] = ()

    def selects(self, operator: Named) -> bool:
        """Tell whether the pass may change an operator."""
        return not self.only or any(matches(pattern, operator.name, *operator.kinds) for pattern in self.only)

    def selected(self, plan: Mapping[str, N]) -> Mapping[str, N]:
        """Return the operators of a plan that the pass may change."""
        return {name: operator for name, operator in plan.items() if self.selects(operator)} if self.only else plan


__all__ = ["NOT_SELECTED", "Selective", "matches", "without_numbers"]
