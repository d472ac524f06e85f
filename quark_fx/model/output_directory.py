"""The output directory of a streamed run: its ownership, its temporary contents, and a lock for one run at a time."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.engine.ranks import Ranks
from quark_fx.errors import CheckpointError, ConfigError
from quark_fx.model.model_directory import is_model_file
from quark_fx.system.untrusted import read_bytes

_UNFINISHED = "unfinished"
"""Folder for the temporary data of a run."""

_REMOVED = "unfinished.removed"
"""Name of that folder during its removal; the result next to it is complete."""

_BLOCKS = "blocks"
"""Subfolder for finished blocks."""

_LOCK = "lock"
"""File in the folder for temporary data that a run keeps locked; its contents identify the folder."""

_OURS = b"a run of quark_fx keeps its finished blocks here\n"
"""Contents of the lock file; a folder whose lock file has other contents is not touched."""


@contextmanager
def work_directory(
    output: str | Path | None, checkpoint: str | Path | None, ranks: Ranks
) -> Iterator[tuple[Path | None, str | Path | None]]:
    """Yield the directories for a run's tensors, `None` without an output directory, and for finished blocks.

    A run that fails before its first finished block leaves no files.

    Raises:
        ConfigError: If the directory has other contents, or belongs to another run; or if the ranks do not share it.
    """
    if output is None:
        yield None, checkpoint
        return
    output = Path(output)
    unfinished = output / _UNFINISHED
    new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
    locks: list[Any] = []
    ranks.first(lambda: locks.append(_taken(output, checkpoint)))
    try:
        if not _is_ours(unfinished):
            raise ConfigError(
                f"rank {ranks.index} does not see the files of the first rank in {output}; give all ranks the same "
                "output_dir, on a file system they share"
            )
        yield unfinished, checkpoint or unfinished / _BLOCKS
    except BaseException:
        if ranks.index == 0 and not any(unfinished.rglob("*.safetensors")):
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):  # it is not empty, or could not be created
                for folder in new_folders:
                    folder.rmdir()
        raise
    finally:
        for lock in locks:
            lock.close()


def clear(output: str | Path) -> None:
    """Remove the temporary data of a run when its result is complete."""
    removed = Path(output) / _REMOVED
    os.replace(Path(output) / _UNFINISHED, removed)
    _remove(removed)


def _remove(folder: Path) -> None:
    """Remove a folder of a run, its lock file last, so that a partly removed folder can be identified."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _is_ours(folder: Path) -> bool:
    try:
        said = read_bytes(folder / _LOCK, len(_OURS))
        # If a run ended before it wrote to its lock file, the folder holds nothing else.
        return said == _OURS or (not said and len(list(folder.iterdir())) == 1)
    except (OSError, ValueError):
        return False


def kept_blocks(checkpoint: str | Path) -> Path | None:
    """Return the output directory that contains `checkpoint`; `None` if the user chose `checkpoint`."""
    path = Path(checkpoint)
    return path.parent.parent if (path.name, path.parent.name) == (_BLOCKS, _UNFINISHED) else None


def _taken(output: Path, checkpoint: str | Path | None) -> Any:
    """Create the directory, reject one with other contents, and return the locked file."""
    _require_ours(output, checkpoint)
    lock = output / _UNFINISHED / _LOCK
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+b")
    except OSError as error:
        raise CheckpointError(f"output_dir {output} cannot be created: {error}; choose another directory") from error
    try:
        _lock(file)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"another run is writing to output_dir {output}; wait until it has ended, or choose another directory"
        ) from error
    if not lock.stat().st_size:
        file.write(_OURS)
        file.flush()
    return file


def _lock(file: Any) -> None:
    if importlib.util.find_spec("fcntl") is not None:  # on other systems, the user must keep runs apart
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _require_ours(output: Path, checkpoint: str | Path | None) -> None:
    run_files = {_UNFINISHED}
    if _is_ours(output / _REMOVED):
        _remove(output / _REMOVED)
    if checkpoint is not None and Path(checkpoint).absolute() == output.absolute():
        raise ConfigError(
            f"checkpoint and output_dir are both {output}; choose another directory for checkpoint, which holds the "
            "finished blocks"
        )
    if checkpoint is not None and Path(checkpoint).parent == output:
        run_files.add(Path(checkpoint).name)
    if _is_ours(output / _UNFINISHED):  # from an interrupted run, which may have been saving
        run_files |= {file.name for file in output.iterdir() if is_model_file(file.name)}
    elif (output / GRAPH_FILE).exists():
        raise ConfigError(
            f"output_dir {output} already contains graph.json: if that is a finished result, read it with "
            "quark_fx.load, otherwise choose a new directory"
        )
    elif (output / _UNFINISHED).exists():
        run_files.remove(_UNFINISHED)
    foreign_files = [file.name for file in output.iterdir() if file.name not in run_files] if output.is_dir() else []
    if output.is_file() or foreign_files:
        raise ConfigError(
            f"output_dir {output} already contains {', '.join(sorted(foreign_files)[:3]) or 'a file'}; choose a new "
            "directory, or the directory of an interrupted run"
        )


__all__ = ["clear", "kept_blocks", "work_directory"]
