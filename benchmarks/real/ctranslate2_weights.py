"""Weights as CTranslate2 stores them, in one little-endian file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_VERSION = 6
_DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a `model.bin` by name; one that has two names is under both.

    The file holds its version, the name of a specification and its revision, then the number of tensors, and each
    with its name, rank, sizes, type, bytes and data; then pairs of names of which the first stands for the second.

    Raises:
        ValueError: if the file has another version, or a type that is not known here.

    Source:
        CTranslate2, `python/ctranslate2/specs/model_spec.py`, `_serialize`.
    """
    weights: dict[str, Tensor] = {}
    with path.open("rb") as file:
        (version,) = _read(file, "I")
        if version != _VERSION:
            raise ValueError(f"{path} is a file of version {version}, not {_VERSION}")
        _text(file)
        _, count = _read(file, "II")
        for _ in range(count):
            name, (rank,) = _text(file), _read(file, "B")
            sizes = _read(file, f"{rank}I")
            dtype, length = _read(file, "BI")
            if dtype not in _DTYPES:
                raise ValueError(f"{name} in {path} is of type {dtype}, not one of {list(_DTYPES)}")
            weights[name] = torch.frombuffer(bytearray(file.read(length)), dtype=_DTYPES[dtype]).reshape(sizes)
        for _ in range(_read(file, "I")[0]):
            alias, name = _text(file), _text(file)
            weights[alias] = weights[name]
    return weights


def _read(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _text(file: BinaryIO) -> str:
    """Return a string, which ends with a zero byte that its length counts."""
    return file.read(_read(file, "H")[0])[:-1].decode()
