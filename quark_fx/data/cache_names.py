"""What `transformers` calls a KV cache, and what it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""The argument and the result of a model's forward: from transformers 5.24 on, and before."""

_HELD = re.compile(rf"(?:(?:input|output)\.)?(?:{'|'.join(CACHE_NAMES)})\.(.+)")


def returned_cache(output: Any) -> Any:
    """Return the cache among the results of a model's forward; `None` if there is none."""
    return next((getattr(output, name) for name in CACHE_NAMES if hasattr(output, name)), None)


def held_in_cache(name: str | None) -> str | None:
    """Return what a graph's input or output is called within the cache, such as `layers.0.keys`.

    Args:
        name: as the exporters of `transformers` write it, such as `input.cache.layers.0.keys`.

    Returns:
        `None` if it belongs to no cache.
    """
    found = _HELD.fullmatch(name or "")
    return found[1] if found is not None else None


def cache_of(values: Iterable[Any]) -> dict[str, Any]:
    """Return which of a graph's inputs or outputs a cache holds, by name within it.

    Args:
        values: Of `onnx_ir`. Scalars are left out: the window of a sliding layer, which nothing reads.
    """
    held = {held_in_cache(value.name): value for value in values if value.shape is None or value.shape.rank()}
    return {name: value for name, value in held.items() if name is not None}


__all__ = ["CACHE_NAMES", "cache_of", "held_in_cache", "returned_cache"]
