"""GGUF files, the format of llama.cpp: opened with the package gguf after a check of the header."""

from __future__ import annotations

import importlib
import mmap
import struct
from pathlib import Path
from typing import Any

from quark_fx.errors import CheckpointError
from quark_fx.system.untrusted import require_regular

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Sizes of metadata values in bytes, by type number; the size of strings and arrays varies."""
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 1 << 23
"""Largest number of metadata values in a header. The reader creates several objects per value; a vocabulary of 256,000
tokens takes fewer than 2 million values."""
_MOST_DIMENSIONS = 8


def is_gguf(path: str | Path) -> bool:
    """Tell whether a path has the suffix of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def open_gguf(path: Path) -> Any:
    """Return the `gguf.GGUFReader` of a file.

    Raises:
        CheckpointError: If the file is not in GGUF, damaged, or truncated, or the package is missing.
    """
    try:
        package = importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the package gguf: pip install 'quark_fx[hf]'") from error
    try:
        require_bounded(path)
        return package.GGUFReader(path)
    except Exception as error:  # the package may raise any error for a damaged file
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}; copy or export it again") from error


def require_bounded(path: Path) -> None:
    """Check that the counts and lengths in the header of a GGUF file fit the file, because readers trust them.

    Raises:
        OSError: If `path` is not a regular file.
        ValueError: If the file is not in GGUF, or its header describes more than the file holds.
    """
    require_regular(path)
    if path.stat().st_size < 24:
        raise ValueError("it is shorter than a header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        _Header(content).check()


class _Header:
    """A reader that checks a header: its content, the current position, and the number of metadata values so far."""

    def __init__(self, content: mmap.mmap) -> None:
        little = struct.unpack_from("<I", content, 4)[0] & 0xFFFF != 0
        self.content, self.order, self.position, self.values = content, "<" if little else ">", 8, 0

    def check(self) -> None:
        tensors, entries = self._number("Q"), self._number("Q")
        for _ in range(self._fitting(entries, 13)):
            self._string()
            self._value(self._number("I"))
        for _ in range(self._fitting(tensors, 24)):
            self._string()
            if (dimensions := self._number("I")) > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            self._skip(8 * dimensions + 12)

    def _number(self, kind: str) -> int:
        start = self.position
        self._skip(struct.calcsize(kind))
        return int(struct.unpack_from(self.order + kind, self.content, start)[0])

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self.content):
            raise ValueError("its header describes more than the file holds")

    def _fitting(self, count: int, least: int) -> int:
        """Return `count`; raise `ValueError` if that many items of `least` bytes do not fit the rest of the file."""
        if count * least > len(self.content) - self.position:
            raise ValueError(f"its header describes {count} items, more than the file holds")
        return count

    def _string(self) -> None:
        self._skip(self._number("Q"))

    def _value(self, kind: int) -> None:
        if kind != _ARRAY:
            self._items(kind, 1)
            return
        kind = self._number("I")
        self._items(kind, self._number("Q"))

    def _items(self, kind: int, count: int) -> None:
        if kind != _STRING and kind not in _SIZES:
            raise ValueError(f"its header has a value of type {kind}, which cannot be read there")
        self._fitting(count, _SIZES.get(kind, 8))
        self.values += count
        if self.values > _MOST_VALUES:
            raise ValueError(f"its header has more values than the limit of {_MOST_VALUES}")
        if kind == _STRING:
            for _ in range(count):
                self._string()
        else:
            self._skip(count * _SIZES[kind])


__all__ = ["open_gguf", "require_bounded"]
