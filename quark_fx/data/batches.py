"""Even selection of samples, and their division into batches, for all readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return `count` items, spread evenly and in order; all items if there are at most `count`.

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split the items into batches of `size`; the last batch may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
