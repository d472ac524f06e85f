"""Helpers of all readers: select samples evenly, and split them into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return `count` items, spread evenly and in order; all items if there are fewer.

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items in batches of `size`; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
