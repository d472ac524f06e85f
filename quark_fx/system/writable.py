"""Functions that check output paths and write files and directories atomically."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from quark_fx.errors import ExportError, QuarkError

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make its directory writable"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "remove the file that is in the way"),
    errno.EISDIR: "remove the directory that is in the way",
    errno.ENOENT: "create its directory",
}


@contextmanager
def writing(path: str | os.PathLike[str], error: type[QuarkError] = ExportError) -> Iterator[None]:
    """Turn file system errors in the block into an `error` that names `path` and a remedy."""
    try:
        yield
    except (OSError, SafetensorError, UnicodeError) as failure:
        # safetensors reports the system's error number as text; numpy only reports that a part was written.
        said = re.search(r"os error (\d+)|requested and \d+ written", str(failure))
        number = int(said[1] or errno.ENOSPC) if said else getattr(failure, "errno", None)
        remedy = _REMEDIES.get(number or 0, "")
        advice = f"{remedy}, or choose another path" if remedy else "choose another path"
        raise error(f"{path} cannot be written: {failure}; {advice}") from failure


def require_possible(path: str | os.PathLike[str]) -> None:
    """Raise `ExportError` if a path is invalid, for example because its name is too long."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # callers report missing directories, and files where directories are expected
    except (OSError, ValueError, TypeError) as error:
        raise ExportError(f"{str(path)!r} cannot be written: {error}; choose another path") from error


def require_writable(path: Path) -> None:
    """Raise `ExportError` if a file or directory is not writable, so that a call fails before it starts its work."""
    require_possible(path)
    # A file is written next to its path and then moved, so its directory must be writable, too.
    place = path if path.is_dir() else next(p for p in path.absolute().parents if p.exists())
    if not place.is_dir():
        raise ExportError(f"{path} cannot be written: {place} is a file; choose another path")
    for needed in (place, path):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise ExportError(f"{path} cannot be written: {needed} is not writable; choose another path")


def require_file_place(path: Path) -> None:
    """Raise `ExportError` if `path` is a directory, is not writable, or is in a directory that does not exist."""
    require_possible(path)
    if path.is_dir():
        raise ExportError(f"{path} is a directory, but the output is a file; choose another name")
    require_writable(path)
    if not path.parent.is_dir():
        raise ExportError(f"{path} cannot be written: the directory {path.parent} does not exist; create it first")


def replace_synced(new: Path, path: Path) -> None:
    """Rename `new` to `path` after its bytes are on disk: a power failure leaves the complete old or new file."""
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable, if the system supports it."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def new_file(path: Path, prefix: str) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file and its unique path in the folder of `path`; at the end, the file is removed unless renamed.

    The file is locked while its writer is alive. Files that killed writers left in the folder are removed.

    Args:
        path: File that the new file will replace.
        prefix: Start of the new file's name.
    """
    folder = path.parent
    prefix = _cut(prefix)
    place = folder / f"{prefix}{secrets.token_hex(8)}"
    with locked(folder):
        for name in abandoned(folder, prefix):
            with suppress(OSError):
                (folder / name).unlink()
        file = place.open("xb")
        lock(file.fileno(), wait=False)
    try:
        with file:
            yield file, place
    finally:
        with suppress(OSError):
            place.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text to a file, in UTF-8; an existing file is replaced in one step.

    Raises:
        ExportError: If the file cannot be written; an existing file is then unchanged.
    """
    require_possible(path)
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a terminal or a pipe
            return
        place = path.resolve()
        with new_file(place, f".{place.name}.quark_fx-") as (file, unfinished):
            file.write(text.encode())
            file.close()
            if place.exists():
                shutil.copymode(place, unfinished)
            replace_synced(unfinished, place)


@contextmanager
def new_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield an empty folder with a unique name, which is removed at the end with its contents.

    The folder is locked while its writer is alive. Folders that killed writers left in `parent` are removed.
    """
    prefix = _cut(prefix)
    with locked(parent):
        for name in abandoned(parent, prefix):
            shutil.rmtree(parent / name, ignore_errors=True)
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir()
        descriptor = _open(folder)
        if descriptor is not None:
            lock(descriptor, wait=False)
    try:
        yield folder
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _cut(prefix: str) -> str:
    """Return a prefix cut to 200 bytes, because a whole name may have at most 255 bytes."""
    return os.fsencode(prefix)[:200].decode(errors="ignore")


def abandoned(folder: Path, prefix: str) -> set[str]:
    """Return the names of files and folders that `new_file` or `new_folder` created for writers that have ended.

    Args:
        folder: Folder, which the caller has locked.
        prefix: Start of the names.
    """
    names = re.compile(re.escape(prefix) + r"([0-9a-f]{16}|[0-9a-z_]{8})")  # earlier versions used eight characters
    return {path.name for path in folder.iterdir() if names.fullmatch(path.name) and _is_unlocked(path)}


def _is_unlocked(path: Path) -> bool:
    descriptor = _open(path)
    if descriptor is None:
        return False
    try:
        return lock(descriptor, wait=False)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for its writer
    except OSError:  # Windows cannot open directories
        return None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes and threads; on systems without such locks, do nothing."""
    descriptor = _open(directory)
    if descriptor is None:
        yield
        return
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file until it is closed, and return whether the lock was acquired.

    Args:
        descriptor: Descriptor of the open file.
        wait: Whether to wait while another process or thread holds the lock.
    """
    if importlib.util.find_spec("fcntl") is None:
        return False
    fcntl = importlib.import_module("fcntl")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process or thread holds the lock, or the file system does not support locks
        return False
    return True


@contextmanager
def new_directory(directory: Path, *, replaces: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yield an empty folder that becomes `directory` in one step at the end, unless the block raises.

    Other processes see either the old or the new contents. If several processes write at once, the last one wins. If a
    directory cannot be renamed (a mount, the working directory, a parent that is not writable), its new files are moved
    one by one. Meanwhile, it lacks the file `last`, without which readers reject it.

    Args:
        directory: Directory to write, created with its parents if needed.
        replaces: Function that tells whether a file name belongs to the old contents; other files stay.
        last: Name of the file that readers need first, which is therefore moved last.

    Raises:
        OSError: If the disk is full or another file is in the way; the directory is then unchanged.
    """
    directory = directory.resolve()
    created = [folder for folder in directory.parents if not folder.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    inside = directory.exists() and not os.access(directory.parent, os.W_OK)
    parent, prefix = (directory, ".quark_fx-") if inside else (directory.parent, f".{directory.name}.quark_fx-")
    try:
        with new_folder(parent, prefix) as folder:
            yield folder
            sync_tree(folder)
            with locked(parent):
                _put_in_place(folder, directory, replaces, last)
    finally:
        for unused in created:
            with suppress(OSError):  # the directory is not empty
                unused.rmdir()


def _put_in_place(folder: Path, directory: Path, replaces: Callable[[str], bool], last: str) -> None:
    if not directory.exists():
        folder.replace(directory)
        sync_directory(directory.parent)
        return
    kept = [path for path in directory.iterdir() if not replaces(path.name) and not (folder / path.name).exists()]
    if folder.parent != directory and not Path.cwd().is_relative_to(directory):
        for path in kept:
            _link_tree(path, folder / path.name)
        shutil.copymode(directory, folder)
        if _exchange(folder, directory):
            sync_directory(directory.parent)
            return
        for path in kept:
            _remove(folder / path.name)
    (directory / last).unlink(missing_ok=True)
    sync_directory(directory)
    for old in [path for path in directory.iterdir() if path not in kept and path != folder]:
        _remove(old)
    for new in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if new.name == last:
            sync_directory(directory)
        new.replace(directory / new.name)
    sync_directory(directory)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step, and return whether the system supports it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return bool(function(working_directory, names[0], working_directory, names[1], exchange) == 0)


def _link_tree(source: Path, place: Path) -> None:
    """Create a hard link `place` to a file, or a folder `place` with hard links to the files of a folder."""
    if source.is_symlink():
        place.symlink_to(source.readlink())
    elif source.is_dir():
        place.mkdir()
        for path in source.iterdir():
            _link_tree(path, place / path.name)
        shutil.copystat(source, place)
    elif source.is_file():
        try:
            place.hardlink_to(source)
        except OSError:  # the file system does not support links
            shutil.copy2(source, place)
    else:
        raise OSError(f"{source} is a device or a pipe, which cannot be moved; choose another directory")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync_tree(folder: Path) -> None:
    """Flush the files of a folder to disk, so that they are complete even after a power failure."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    sync_directory(folder)


__all__ = [
    *("abandoned", "lock", "locked", "new_directory", "new_file", "new_folder", "replace_synced"),
    *("require_file_place", "require_possible", "require_writable", "sync_directory", "write_text", "writing"),
]
