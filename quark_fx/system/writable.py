"""Places that results are written to."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from quark_fx.errors import ExportError


def require_possible(path: str | os.PathLike[str]) -> None:
    """Raise `ExportError` for a path that no file can have, such as one with a name that is too long."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # what is missing, or in the way, has words of its own
    except (OSError, ValueError, TypeError) as error:
        raise ExportError(f"{str(path)!r} cannot be written: {error}; choose another path") from error


def require_writable(path: Path) -> None:
    """Raise `ExportError` for a file or directory that could not be written once the work is done."""
    require_possible(path)
    # A file is written beside and moved, so that its directory has to be writable, too.
    place = path if path.is_dir() else next(p for p in path.absolute().parents if p.exists())
    if not place.is_dir():
        raise ExportError(f"{path} cannot be written: {place} is a file; choose another path")
    for there in (place, path):
        if there.exists() and not os.access(there, os.W_OK):
            raise ExportError(f"{path} cannot be written: {there} is not writable; choose another path")


def require_file_place(path: Path) -> None:
    """Raise `ExportError` if a file cannot be written to `path`: it is a directory, or its directory does not exist."""
    require_possible(path)
    if path.is_dir():
        raise ExportError(f"{path} is a directory, and the output a file; choose another name")
    require_writable(path)
    if not path.parent.is_dir():
        raise ExportError(f"the directory {path.parent} does not exist; create it first")


def replace_synced(new: Path, path: Path) -> None:
    """Rename `new` to `path` once its bytes are on disk: a power failure leaves the old file or the whole new one."""
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory last, where the system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


__all__ = ["replace_synced", "require_file_place", "require_possible", "require_writable", "sync_directory"]
