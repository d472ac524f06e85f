"""Size of a model's files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.to_gguf import gguf
from quark_fx.export.checkpoints.to_huggingface import huggingface
from quark_fx.export.to_onnx.export_onnx import onnx
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.isolation import without_warnings

_WRITERS: Mapping[str, Callable[[QuantizedModel, Path], object]] = {
    "onnx": onnx,
    "checkpoint": huggingface,
    "gguf": gguf,
    "saved": QuantizedModel.save,
}
"""Exporters by `Budget.output`."""


def written_size(qmodel: QuantizedModel, output: str) -> int:
    """Return the size in bytes of all files that an export writes.

    Raises:
        QuarkError: If the export refuses the model, or the files do not fit in the temporary directory.
    """
    with _temporary_folder() as folder:
        with without_warnings():
            _WRITERS[output](qmodel, folder / "model")
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def require_room_for_trials(size: int) -> None:
    """Raise `ExportError` if the temporary directory cannot hold a written model of `size` bytes."""
    with _temporary_folder() as folder:
        (folder / "model").write_bytes(bytes(4096))
        if (free := shutil.disk_usage(folder).free) < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free:,} bytes are free, {size:,} needed")


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        raise ExportError(
            f"a model cannot be written to the temporary directory to measure its size: {error}; free space there, or "
            "set TMPDIR to another directory"
        ) from error


__all__ = ["require_room_for_trials", "written_size"]
