"""Plain data from an untrusted file: lists, mappings, and names, or an error."""

from __future__ import annotations

from typing import Any

from quark_fx.errors import QuarkError
from quark_fx.system.untrusted import brief

LONGEST = 1 << 16
"""Length of the longest name of a tensor or module."""


def listed(value: Any) -> list[Any]:
    """Return a list.

    Raises:
        QuarkError: If it has another type; also for the functions below.
    """
    if not isinstance(value, list):
        raise QuarkError(f"the stored model holds {brief(value)} in place of a list")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping."""
    if not isinstance(value, dict):
        raise QuarkError(f"the stored model holds {brief(value)} in place of a mapping")
    return value


def text(value: Any) -> str:
    """Return a name of bounded length."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise QuarkError(f"the stored model holds {brief(value)} in place of a name")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of names."""
    return tuple(text(name) for name in listed(value))


__all__ = ["LONGEST", "listed", "mapping", "text", "texts"]
