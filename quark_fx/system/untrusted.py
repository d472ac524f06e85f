"""Readers of files from untrusted sources, which must be regular files of limited size and nesting depth."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_DEPTH = 64
"""Largest number of levels of nested lists and mappings in a file; the deepest file that this package writes has 20."""


YAML_LIMIT = 1 << 18
"""Largest length of a YAML text, in characters."""
YAML_VALUES = 1 << 15
"""Largest number of values in a YAML document after aliases are expanded."""


_MOST_BITS = 1 << 12
"""Largest number of bits of an integer in YAML."""


def require_regular(path: Path) -> None:
    """Raise `OSError` unless `path` is a regular file or a link to a regular file: opening a pipe can block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file")


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: File; links are followed.
        limit: Largest size in bytes.

    Raises:
        OSError: If the file cannot be read, or is a directory, a pipe, or a device.
        ValueError: If the file is larger than `limit`.
    """
    require_regular(path)
    # A pipe can replace the file between the two checks: O_NONBLOCK keeps `open` from waiting for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} is larger than the limit of {limit / 2**20:g} MiB")
    return content


def read_json(path: Path, limit: int) -> Any:
    """Return the value of the JSON in a regular file; arguments and errors are the same as for `read_bytes`.

    Malformed or deeply nested JSON raises `ValueError`, like in `parse_json`.
    """
    return parse_json(read_bytes(path, limit))


def parse_json(content: bytes | str) -> Any:
    """Parse JSON: a string, or bytes in UTF-8.

    Raises:
        ValueError: If the text is malformed, nested more than `MAX_DEPTH` levels deep, or holds a number with too many
            digits.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    require_shallow(value)
    return value


def require_shallow(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise `ValueError` if lists and mappings are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth):
        level = [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]
        if not level:
            return
    raise ValueError(f"it is nested more than {depth} levels deep")


def _items(value: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text that contains only plain types.

    Raises:
        ValueError: If the text is malformed, has a key twice in one mapping, is longer than `YAML_LIMIT`, is nested
            more than `MAX_DEPTH` levels deep, or has more than `YAML_VALUES` values once aliases are expanded.
    """
    if len(text) > YAML_LIMIT:
        raise ValueError(f"it is longer than the limit of {YAML_LIMIT} characters")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            _require_small(node)
            _require_distinct_keys(node)
        value = None if node is None else loader.construct_document(node)
        _require_short_numbers(value)
        return value
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:  # from a scalar
        raise ValueError(f"{type(error).__name__}: {brief(str(error))}") from error


def _require_short_numbers(value: Any) -> None:
    """Raise `ValueError` if a value contains an integer of more than `_MOST_BITS` bits, which Python may not print.

    JSON with such an integer is rejected, but YAML can contain it in hexadecimal.
    """
    level, visited = [value], set[int]()
    while level:
        item = level.pop()
        if isinstance(item, int) and item.bit_length() > _MOST_BITS:
            raise ValueError(f"it contains {brief(item)}; the limit is {_MOST_BITS} bits")
        if isinstance(item, dict | list) and id(item) not in visited:
            visited.add(id(item))
            level += [*item, *_items(item)]


def _require_small(node: Any) -> None:
    """Raise `ValueError` if a YAML document, with aliases expanded, is too deep or too large, or contains itself."""
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if (depth >= MAX_DEPTH and isinstance(node, yaml.CollectionNode)) or id(node) in open_:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if id(node) not in sizes:
            open_.add(id(node))
            parts = [n for item in node.value for n in (item if isinstance(item, tuple) else (item,))]
            inner = parts if isinstance(node, yaml.CollectionNode) else []
            sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in inner)
            open_.remove(id(node))
        if sizes[id(node)] > YAML_VALUES:
            raise ValueError(f"it has more than {YAML_VALUES} values once its aliases are expanded")
        return sizes[id(node)]

    size(node, 0)


def _require_distinct_keys(document: Any) -> None:
    """Raise `YAMLError` if a mapping contains a key twice; YAML's loader would silently keep the last value."""
    pending, visited = [document], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in visited or not isinstance(node, yaml.CollectionNode):
            continue
        visited.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            pending += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and name in lines:
                raise yaml.YAMLError(f"key {brief(name)} occurs in lines {lines[name]} and {line}; keep one of them")
            lines[name] = line
            pending += (key, value)


class _Repr(reprlib.Repr):
    """Generator of short `repr` strings for messages, also for integers that are too long for Python to print."""

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 1 << 12 else f"a number of {x.bit_length()} bits"


_REPR = _Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 40


def brief(value: Any) -> str:
    """Return `repr(value)`, shortened for messages."""
    return _REPR.repr(value)


__all__ = [
    *("MAX_DEPTH", "YAML_LIMIT", "brief", "parse_json", "parse_yaml", "read_bytes", "read_json"),
    *("require_regular", "require_shallow"),
]
