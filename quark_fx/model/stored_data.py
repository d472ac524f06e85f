"""Plain data from an untrusted file: lists, mappings, and names, or an error."""

from __future__ import annotations

from typing import Any

from quark_fx.errors import QuarkError
from quark_fx.system.untrusted import brief

LONGEST = 1 << 16
"""Maximum length of the name of a tensor or module."""


def listed(value: Any) -> list[Any]:
    """Return `value` if it is a list.

    Raises:
        QuarkError: If the value has another type; the functions below raise it, too.
    """
    if not isinstance(value, list):
        raise QuarkError(f"the stored model holds {brief(value)} in place of a list")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping."""
    if not isinstance(value, dict):
        raise QuarkError(f"the stored model holds {brief(value)} in place of a mapping")
    return value


def text(value: Any) -> str:
    """Return `value` if it is a string that is not too long for a name."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise QuarkError(f"the stored model holds {brief(value)} in place of a name")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of names as a tuple."""
    return tuple(text(name) for name in listed(value))


__all__ = ["LONGEST", "listed", "mapping", "text", "texts"]
