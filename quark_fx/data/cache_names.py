"""Names of KV caches and of their tensors in models and graphs of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in arguments and results of a model's forward: since transformers 5.24, and before that."""

_IN_CACHE = re.compile(rf"(?:(?:input|output)\.)?(?:{'|'.join(CACHE_NAMES)})\.(.+)")


def returned_cache(output: Any) -> Any:
    """Return the cache from the result of a model's forward; `None` if there is none."""
    return next((getattr(output, name) for name in CACHE_NAMES if hasattr(output, name)), None)


def held_in_cache(name: str | None) -> str | None:
    """Return the name of a graph's input or output within the cache, such as `layers.0.keys`.

    Args:
        name: Name from the exporters of `transformers`, such as `input.cache.layers.0.keys`.

    Returns:
        Name within the cache; `None` if the value does not belong to a cache.
    """
    match = _IN_CACHE.fullmatch(name or "")
    return match[1] if match is not None else None


def cache_of(values: Iterable[Any]) -> dict[str, Any]:
    """Return the inputs or outputs of a graph that belong to a cache, by their names within the cache.

    Args:
        values: Inputs or outputs, values of `onnx_ir`. Scalars are skipped, such as the window size of a sliding-window
            layer, which the graph does not use.
    """
    names = {held_in_cache(value.name): value for value in values if value.shape is None or value.shape.rank()}
    return {name: value for name, value in names.items() if name is not None}


__all__ = ["CACHE_NAMES", "cache_of", "held_in_cache", "returned_cache"]
