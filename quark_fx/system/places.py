"""Places that results are written to."""

from __future__ import annotations

import os
from pathlib import Path

from quark_fx.errors import ExportError


def require_writable(path: Path) -> None:
    """Raise `ExportError` for a file or directory that could not be written once the work is done."""
    place = path if path.is_dir() else next(p for p in path.absolute().parents if p.exists())
    if not place.is_dir():
        raise ExportError(f"{path} cannot be written: {place} is a file; choose another path")
    for there in (place, path):
        if there.exists() and not os.access(there, os.W_OK):
            raise ExportError(f"{path} cannot be written: {there} is not writable; choose another path")


__all__ = ["require_writable"]
