"""`quark-fx inspect`: show the contents of any file."""

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
    """Show number formats and sizes by operator, operators in float, and those that ONNX Runtime runs in integers."""
    found = qfx.inspect(path)
    show(json, found.to_dict(every=every), found.title, *found.tables(every=every), *found.summary())
