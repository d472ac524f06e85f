"""Size of written models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
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
        QuarkError: If the export refuses the model, or it does not fit the temporary directory.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, without_warnings():
            _WRITERS[output](qmodel, Path(folder, "model"))
            return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    except OSError as error:
        raise ExportError(
            f"the directory of temporary files, where a model is written to measure its size, cannot be used: {error}; "
            "make room, or set TMPDIR to another one"
        ) from error


__all__ = ["written_size"]
