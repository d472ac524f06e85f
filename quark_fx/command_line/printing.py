"""Output of commands: tables and text for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from quark_fx.plan.table import Table

_PIPED = 200
"""Width of a table, in columns, if stdout is not a terminal."""


def show(as_json: bool, data: Any, *parts: Table[Any] | str) -> None:
    """Print a result on stdout.

    Args:
        as_json: Whether to print JSON instead of tables and text.
        data: Result as plain data, for JSON.
        parts: Result as tables and text, which are printed one below the other.
    """
    if as_json:
        print(json.dumps(_finite(data), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPED, highlight=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=True) if isinstance(part, str) else console.print(_drawn(part))


def say(text: str) -> None:
    """Print a message about the progress of a command on stderr."""
    print(text, file=sys.stderr, flush=True)


def _drawn(table: Table[Any]) -> RichTable:
    drawing = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(table.header, table.right, strict=True):
        drawing.add_column(name, justify="right" if right else "left", overflow="fold")
    for cells in table.cells:
        drawing.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return drawing


def _finite(data: Any) -> Any:
    """Return plain data with `None` for numbers that are not finite, which JSON does not support."""
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if isinstance(data, str | int | float | bool | None) else str(data)
