"""What all readers share: samples spread evenly over what there is, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return `count` of the items, spread evenly over them and in their order; all where there are no more.

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items in parts of `size`, the last of which may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
