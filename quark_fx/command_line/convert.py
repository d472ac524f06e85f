"""`quark-fx convert`, which quantizes the files of a checkpoint without the code of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import Json
from quark_fx.command_line.printing import show


def convert(
    source: Annotated[Path, typer.Argument(help="The directory of a Hugging Face checkpoint, of any architecture.")],
    scheme: Annotated[str, typer.Option(help="A preset that needs no data, such as fp8_block, nvfp4a16, or w4a16.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A directory to create.")],
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help='Layers that stay in float besides heads, embeddings, routers, and draft layers: a glob on names, or "'
            're:" and a regular expression. Repeatable.'
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, tensor by tensor, and write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Quantize the files of a checkpoint tensor by tensor, without building the model; an aborted call can continue."""
    conversion = qfx.convert(source, scheme, output, ignore=ignore or (), processes=processes, dry_run=dry_run)
    wrote = [] if dry_run else [f"wrote {output} (checkpoint, compressed-tensors)"]
    show(json, conversion.to_dict(), *[conversion.table()] * dry_run, *conversion.summary(), *wrote)
