"""`quark-fx inspect`: show the contents of any file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import quark_fx as qfx
from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.command_line.contents import NO_WEIGHT, Part, grouped, parts_of, parts_table
from quark_fx.command_line.options import Json
from quark_fx.command_line.outputs import written_bytes
from quark_fx.command_line.printing import show, size
from quark_fx.errors import ExportError, QuarkError
from quark_fx.plan.table import Column, Table, tuples
from quark_fx.system.untrusted import require_regular


def inspect(
    path: Annotated[
        Path, typer.Argument(help="An .onnx or .gguf file, a checkpoint, or a quantized model of quark_fx.")
    ],
    every: Annotated[bool, typer.Option("--all", help="Show one operator per line.")] = False,
    json: Json = False,
) -> None:
    """Show number formats and sizes by operator, operators in float, and those that ONNX Runtime runs in integers."""
    if not os.path.exists(path):  # also for names that are too long, for which Path.exists raises
        raise QuarkError(f"{path} does not exist")
    kind, parts, extra = _contents(path)
    shown = parts if every else grouped(parts)
    formats = Counter[str]()
    held = {(part.weight, part.stored or index): part.bytes for index, part in enumerate(parts)}
    for (name, _), count in held.items():
        formats[name] += count
    formats.pop(NO_WEIGHT, None)
    columns: list[Column[tuple[str, int]]] = [
        Column("weights in", lambda row: row[0]),
        Column("size", lambda row: row[1], lambda row: size(row[1])),
        Column("operators", lambda row: sum(part.weight == row[0] for part in parts)),
    ]
    data: dict[str, Any] = {"path": str(path), "kind": kind, "bytes": written_bytes(path)}
    data |= {"operators": [asdict(part) for part in shown], "bytes_by_format": dict(formats)}
    lines: list[Any] = [
        f"{path}: {kind}, {size(written_bytes(path))}",
        parts_table(shown),
        Table("Formats of weights", columns, formats.most_common()),
    ]
    if extra is not None:
        data |= {"runtime": extra}
        lines += _runtime_lines(extra)
    show(json, data, *lines)


def _contents(path: Path) -> tuple[str, list[Part], dict[str, Any] | None]:
    """Return the kind of a file or directory, its operators, and, for an ONNX file, its kernels in ONNX Runtime."""
    if not path.is_dir():
        _require_file(path)
    if path.suffix == ".onnx":
        _require("onnx_ir")
        from quark_fx.command_line.onnx_parts import onnx_parts

        return "ONNX file", onnx_parts(path), _runtime(path)
    from quark_fx.command_line.checkpoint_parts import checkpoint_parts, gguf_parts

    if path.suffix == ".gguf":
        return "GGUF file", gguf_parts(path), None
    if (path / GRAPH_FILE).is_file():
        return "quantized model of quark_fx", parts_of(qfx.load(path).report()), None
    parts, said = checkpoint_parts(path)
    method = said.get("quant_method") or ("quantized" if said else "float")
    spelled = next((said[key] for key in ("checkpoint_format", "format") if said.get(key)), method)
    return f"checkpoint ({method if spelled == method else f'{method}, {spelled}'})", parts, None


def _require_file(path: Path) -> None:
    try:
        require_regular(path)
    except OSError as error:
        raise QuarkError(f"{path} cannot be read: {error}; give a file or a directory") from error


def _require(package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ExportError(f"inspecting an ONNX file needs {package}: pip install 'quark_fx[onnx]'")


def _runtime(path: Path) -> dict[str, Any]:
    """Return the kernels with which ONNX Runtime runs a file on this processor."""
    from quark_fx.export.runtime.report import runtime_report

    try:
        report = runtime_report(path)
    except QuarkError as error:
        return {"unknown": str(error)}
    count = Counter((node.kernel, node.quantized, node.reason) for node in report.nodes)
    return {
        "in_integers": len(report.quantized),
        "nodes": len(report.nodes),
        "conversions": report.conversions,
        "inexact_without_vnni": len(report.saturating),
        "opset": report.opset,
        "kernels": [
            {"kernel": kernel, "count": n, "in_integers": quantized, "reason": reason}
            for (kernel, quantized, reason), n in sorted(count.items(), key=lambda item: (-item[0][1], -item[1]))
        ],
    }


def _runtime_lines(found: dict[str, Any]) -> Iterable[Any]:
    if "unknown" in found:
        return [f"operators that run in integers are not known: {found['unknown']}"]
    rows = [(k["kernel"], k["count"], "yes" if k["in_integers"] else "no", k["reason"]) for k in found["kernels"]]
    inexact = found["inexact_without_vnni"]
    return [
        tuples("Kernels", ("ONNX Runtime's kernel", "count", "in integers", "in float because"), rows),
        f"{found['in_integers']} of {found['nodes']} nodes run in integers on this processor, {found['conversions']} "
        f"conversions between them, opset {found['opset']}",
        f"{inexact} of them are not exact on x64 processors without VNNI" if inexact else "exact on every processor",
    ]
