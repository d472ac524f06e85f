"""Destinations of results: files and directories, each with a format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from quark_fx import export
from quark_fx.checkpoints.configuration import require_no_weights
from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.config.target import Target
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.to_huggingface import FORMATS as CHECKPOINTS
from quark_fx.export.to_onnx.formats import FORMATS
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.names import unknown
from quark_fx.system.writable import require_file_place, require_possible, require_writable, writing

_FORMATS = {
    "ONNX": tuple(FORMATS),
    "checkpoint": CHECKPOINTS,
}
"""Names of formats; keys are kinds of outputs."""


@dataclass(frozen=True)
class Output:
    """A file or directory to write.

    Attributes:
        path: Path of the file or directory.
        kind: One of `"ONNX"`, `"GGUF"`, `"checkpoint"`, and `"saved"` (for `quark_fx.load`).
        format: Name of the format; `None` for the target's default.
    """

    path: Path
    kind: str
    format: str | None = None

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}{f', {self.format}' if self.format else ''})"

    @property
    def checked(self) -> str | None:
        """The name of the format in `quark_fx.check`; `None` if the format supports every model."""
        return {"ONNX": self.format or "qdq", "GGUF": "gguf", "checkpoint": self.format}.get(self.kind)

    @property
    def can_be_verified(self) -> bool:
        """Whether `quark_fx.verify` can read this output; for GPTQ and AWQ, it would need packages of kernels."""
        return self.kind in ("ONNX", "GGUF") or self.format == "compressed-tensors"


def outputs_of(paths: Sequence[Path], formats: Sequence[str]) -> list[Output]:
    """Return the outputs to write.

    Args:
        paths: Paths of the outputs.
        formats: Names of formats, at most one per kind of output.

    Raises:
        typer.BadParameter: If a format does not exist or does not apply to any output, two formats are of the same
            kind, or a path is unsuitable or given twice.
    """
    chosen: dict[str, str] = {}
    format_names = [name for names in _FORMATS.values() for name in names]
    for name in formats:
        kind = next((kind for kind, names in _FORMATS.items() if name in names), None)
        if kind is None:
            raise unknown("format", name, format_names, error=typer.BadParameter)
        if kind in chosen:
            raise typer.BadParameter(f"{chosen[kind]} and {name} are both formats of {kind}; pass one of them per call")
        chosen[kind] = name
    outputs = [_output(path, chosen) for path in paths]
    if twice := [path for path, count in Counter(path.absolute() for path in paths).items() if count > 1]:
        raise typer.BadParameter(f"{twice[0]} is passed as --output twice; use a different path for each output")
    if unused := [name for kind, name in chosen.items() if kind not in {output.kind for output in outputs}]:
        hint = (
            "add an --output file that ends with .onnx"
            if unused[0] in _FORMATS["ONNX"]
            else "add an --output directory"
        )
        raise typer.BadParameter(f"no output can be written in the format {', '.join(unused)}; {hint}")
    return outputs


def require_opset(opset: int | None, outputs: Sequence[Output], target: Target) -> None:
    """Raise an error if an opset is given and does not apply.

    Raises:
        typer.BadParameter: If no output is an ONNX file.
        ExportError: If files for the target cannot have this opset.
    """
    if opset is None:
        return
    if all(output.kind != "ONNX" for output in outputs):
        raise typer.BadParameter("--opset applies only to ONNX files; add an --output file that ends with .onnx")
    from quark_fx.export.to_onnx.opset import require_known

    require_known(opset, target)


_NOT_WRITTEN = frozenset(
    {
        *(".pte", ".engine", ".plan", ".pt", ".pt2", ".pth", ".bin", ".xml", ".tflite", ".safetensors", ".zip", ".pb"),
        *(".txt", ".json", ".yaml", ".yml", ".csv", ".html", ".md", ".log", ".py", ".npz", ".npy", ".pkl"),
        *(".tar", ".gz"),
    }
)
"""Suffixes of unsupported files; a path with one of them is probably not meant to be a directory."""


def _output(path: Path, chosen: dict[str, str]) -> Output:
    if path.suffix.lower() in _NOT_WRITTEN:
        hint = "; in Python, quark_fx.export.pt2e makes programs for ExecuTorch" if path.suffix == ".pte" else ""
        raise typer.BadParameter(f"{path}: write to .onnx, .gguf, or a directory without such a suffix{hint}")
    if path.suffix == ".onnx":
        return Output(path, "ONNX", chosen.get("ONNX"))
    if path.suffix == ".gguf":
        return Output(path, "GGUF")
    return Output(path, "checkpoint", chosen["checkpoint"]) if "checkpoint" in chosen else Output(path, "saved")


def require_room_for(output: Output) -> None:
    """Raise `ExportError`, before the work starts, if an output cannot be written to its path."""
    path, directory = output.path, output.kind in ("checkpoint", "saved")
    require_possible(path)
    if directory and path.exists() and not path.is_dir():
        raise ExportError(
            f"{path} is a file, but this output is a directory; choose another name, or one that ends with .onnx"
        )
    if not directory:
        require_file_place(path)
    other = {"checkpoint": GRAPH_FILE, "saved": "config.json"}.get(output.kind)
    if other is not None and (path / other).exists():
        raise ExportError(f"{path} holds {other}, which belongs to another kind of model; choose another directory")
    if output.kind == "checkpoint":
        require_no_weights(path)
    require_writable(path)


def write(
    qmodel: QuantizedModel, output: Output, *, tokenizer: Any = None, model: Any = None, opset: int | None = None
) -> Path:
    """Write a model to an output, and return the path.

    Args:
        qmodel: Model to write.
        output: Path and format.
        tokenizer: Tokenizer to write into the same directory or file.
        model: Float model of the same class, for checkpoints and GGUF files of a loaded model.
        opset: Opset of an ONNX file; `None` for the default.
    """
    if output.kind == "ONNX":
        return export.onnx(qmodel, output.path, format=output.format, opset=opset)
    if output.kind == "GGUF":
        return export.gguf(qmodel, output.path, tokenizer=tokenizer, model=model)
    if output.kind == "checkpoint":
        return export.huggingface(qmodel, output.path, format=str(output.format), tokenizer=tokenizer, model=model)
    qmodel.save(output.path)
    write_tokenizer(tokenizer, output.path)
    return output.path


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer into the directory of a saved model, if there is one."""
    if tokenizer is not None:
        with writing(directory):
            tokenizer.save_pretrained(directory)
