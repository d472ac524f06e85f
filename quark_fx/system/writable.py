"""Places that results are written to."""

from __future__ import annotations

import os
from pathlib import Path

from quark_fx.errors import ExportError


def require_writable(path: Path) -> None:
    """Raise `ExportError` for a file or directory that could not be written once the work is done."""
    # A file is written beside and moved, so that its directory has to be writable, too.
    place = path if path.is_dir() else next(p for p in path.absolute().parents if p.exists())
    if not place.is_dir():
        raise ExportError(f"{path} cannot be written: {place} is a file; choose another path")
    for there in (place, path):
        if there.exists() and not os.access(there, os.W_OK):
            raise ExportError(f"{path} cannot be written: {there} is not writable; choose another path")


def require_file_place(path: Path) -> None:
    """Raise `ExportError` if a file cannot be written to `path`: it is a directory, or its directory does not exist."""
    try:
        if path.is_dir():
            raise ExportError(f"{path} is a directory, and the output a file; choose another name")
    except OSError as error:  # of names that are too long
        raise ExportError(f"{path} cannot be written: {error}; choose another path") from error
    require_writable(path)
    if not path.parent.is_dir():
        raise ExportError(f"the directory {path.parent} does not exist; create it first")


__all__ = ["require_file_place", "require_writable"]
