"""`quark-fx inspect`, which shows the contents of a model's file or directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import Json
from quark_fx.command_line.printing import show


def inspect(
    path: Annotated[
        Path, typer.Argument(help="An .onnx or .gguf file, a checkpoint, or a quantized model of quark_fx.")
    ],
    every: Annotated[bool, typer.Option("--all", help="Show one operator per line.")] = False,
    json: Json = False,
) -> None:
    """Show formats and sizes by operator, the operators in float, and those that ONNX Runtime runs in integers."""
    inspection = qfx.inspect(path)
    show(
        json, inspection.to_dict(every=every), inspection.title, *inspection.tables(every=every), *inspection.summary()
    )
