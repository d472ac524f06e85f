"""Files of llama.cpp's format, GGUF, as the package gguf reads them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from quark_fx.errors import CheckpointError


def open_gguf(path: Path) -> Any:
    """Return the `gguf.GGUFReader` of a file.

    Raises:
        CheckpointError: if it is no GGUF file, damaged or cut off, or the package is missing.
    """
    try:
        package = importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the package gguf: pip install 'quark_fx[hf]'") from error
    try:
        return package.GGUFReader(path)
    except Exception as error:  # whatever it raises about a damaged file
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}; copy or export it again") from error


__all__ = ["open_gguf"]
