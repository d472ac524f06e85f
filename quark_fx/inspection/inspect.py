"""`inspect`: the number formats and sizes of the operators in any model file."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.checkpoints.gguf_file import is_gguf
from quark_fx.errors import ExportError, QuarkError
from quark_fx.inspection.parts import NO_WEIGHT, Part, grouped, parts_of, parts_table
from quark_fx.model.serialization import load
from quark_fx.plan.table import Column, Table, tuples
from quark_fx.system.memory import bytes_text
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import require_regular

if TYPE_CHECKING:
    from quark_fx.export.runtime.report import RuntimeReport


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The contents of a file or directory. Its `str` is a text with tables.

    Attributes:
        path: Path of the file or directory.
        kind: Kind of the file or directory, such as `"ONNX file"`.
        bytes: Size in bytes, including external data.
        parts: Operators with weights, and products of two activations.
        runtime: Kernels with which ONNX Runtime runs an ONNX file on this processor; `None` for other files.
        unknown: Reason why the kernels of an ONNX file are unknown; empty if they are known, and for other files.
    """

    path: Path
    kind: str
    bytes: int
    parts: tuple[Part, ...]
    runtime: RuntimeReport | None = None
    unknown: str = ""

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Size of the weights in bytes, by number format, the largest first; a shared weight counts once."""
        formats = Counter[str]()
        sizes = {(part.weight, part.stored or index): part.bytes for index, part in enumerate(self.parts)}
        for (name, _), count in sizes.items():
            formats[name] += count
        formats.pop(NO_WEIGHT, None)
        return dict(formats.most_common())

    def operators(self, *, every: bool = False) -> Table[Part]:
        """Return the table of operators; similar operators share a row unless `every`."""
        return parts_table(self.parts if every else grouped(self.parts))

    def formats(self) -> Table[tuple[str, int]]:
        """Return the table of number formats, with the size of the weights in each."""
        columns: list[Column[tuple[str, int]]] = [
            Column("weights in", lambda row: row[0]),
            Column("size", lambda row: row[1], lambda row: bytes_text(row[1])),
            Column("operators", lambda row: sum(part.weight == row[0] for part in self.parts)),
        ]
        return Table("Formats of weights", columns, [*self.bytes_by_format.items()])

    def tables(self, *, every: bool = False) -> list[Table[Any]]:
        """Return the tables of operators, formats, and kernels; similar operators share a row unless `every`."""
        kernels = [] if self.runtime is None else [_kernels(self.runtime)]
        return [self.operators(every=every), self.formats(), *kernels]

    def summary(self) -> list[str]:
        """Return sentences about the kernels of an ONNX file; empty for other files."""
        if self.unknown:
            return [f"cannot tell which operators run in integers: {self.unknown}"]
        if self.runtime is None:
            return []
        inexact = len(self.runtime.saturating)
        return [
            f"{len(self.runtime.quantized)} of {len(self.runtime.nodes)} nodes run in integers on this processor, "
            f"{self.runtime.conversions} conversions between them, opset {self.runtime.opset}",
            f"{inexact} nodes are not exact on x64 processors without VNNI" if inexact else "exact on every processor",
        ]

    def to_dict(self, *, every: bool = True) -> dict[str, Any]:
        """Return the contents as JSON-like data; similar operators share an entry unless `every`."""
        parts = self.parts if every else grouped(self.parts)
        data: dict[str, Any] = {"path": str(self.path), "kind": self.kind, "bytes": self.bytes}
        data |= {"operators": [asdict(part) for part in parts], "bytes_by_format": self.bytes_by_format}
        if self.unknown:
            return data | {"runtime": {"unknown": self.unknown}}
        if self.runtime is None:
            return data
        kernels = [
            {"kernel": kernel, "count": count, "in_integers": quantized, "reason": reason}
            for (kernel, quantized, reason), count in _counted(self.runtime)
        ]
        counts = {
            "in_integers": len(self.runtime.quantized),
            "nodes": len(self.runtime.nodes),
            "conversions": self.runtime.conversions,
            "inexact_without_vnni": len(self.runtime.saturating),
            "opset": self.runtime.opset,
        }
        return data | {"runtime": counts | {"kernels": kernels}}

    @property
    def title(self) -> str:
        """Text with the path, kind, and size of the file or directory."""
        return f"{self.path}: {self.kind}, {bytes_text(self.bytes)}"

    def __str__(self) -> str:
        return "\n\n".join([self.title, *("\n".join(table.lines()) for table in self.tables()), *self.summary()])


@checked_call
def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Return the number formats and sizes of the operators in a model file, without running code from the file.

    Args:
        path: ONNX or GGUF file, checkpoint, or directory that `save` wrote.

    Raises:
        QuarkError: If the path is not such a file or directory, or cannot be read.
    """
    path = Path(path)
    if not os.path.exists(path):  # also for names that are too long, for which Path.exists raises
        raise QuarkError(f"{path} does not exist; pass an .onnx or .gguf file, or the directory of a model")
    if not path.is_dir():
        _require_file(path)
    if path.suffix == ".onnx":
        return _of_onnx(path)
    from quark_fx.inspection.checkpoint_parts import checkpoint_parts, gguf_parts

    if is_gguf(path):
        kind, parts = "GGUF file", gguf_parts(path)
    elif (path / GRAPH_FILE).is_file():
        kind, parts = "quantized model of quark_fx", parts_of(load(path).report())
    else:
        parts, config = checkpoint_parts(path)
        method = config.get("quant_method") or ("quantized" if config else "float")
        spelled = next((config[key] for key in ("checkpoint_format", "format") if config.get(key)), method)
        kind = f"checkpoint ({method if spelled == method else f'{method}, {spelled}'})"
    return Inspection(path=path, kind=kind, bytes=written_bytes(path), parts=tuple(parts))


def _of_onnx(path: Path) -> Inspection:
    if importlib.util.find_spec("onnx_ir") is None:
        raise ExportError("inspecting an ONNX file needs onnx_ir: pip install 'quark_fx[onnx]'")
    from quark_fx.export.runtime.report import runtime_report
    from quark_fx.inspection.onnx_parts import onnx_parts

    parts, runtime, unknown = tuple(onnx_parts(path)), None, ""
    try:
        runtime = runtime_report(path)
    except QuarkError as error:
        unknown = str(error)
    size = written_bytes(path)
    return Inspection(path=path, kind="ONNX file", bytes=size, parts=parts, runtime=runtime, unknown=unknown)


def _require_file(path: Path) -> None:
    try:
        require_regular(path)
    except OSError as error:
        raise QuarkError(f"{path} cannot be read: {error}; pass a file or a directory") from error


def _counted(report: RuntimeReport) -> list[tuple[tuple[str, bool, str], int]]:
    """Return each kind of kernel with its number of nodes, kernels in integers first."""
    count = Counter((node.kernel, node.quantized, node.reason) for node in report.nodes)
    return sorted(count.items(), key=lambda item: (-item[0][1], -item[1]))


def _kernels(report: RuntimeReport) -> Table[Any]:
    header = ("ONNX Runtime's kernel", "count", "in integers", "in float because")
    rows = [(kernel, n, "yes" if exact else "no", reason) for (kernel, exact, reason), n in _counted(report)]
    return tuples("Kernels", header, rows)


def written_bytes(path: Path) -> int:
    """Return the size of a file and its external data, or of all files of a directory, in bytes."""
    files = path.rglob("*") if path.is_dir() else (path, path.with_name(f"{path.name}.data"))
    return sum(file.stat().st_size for file in files if file.is_file())


__all__ = ["Inspection", "inspect", "written_bytes"]
