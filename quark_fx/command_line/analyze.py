"""`quark-fx analyze`, which finds the operators that cause the error of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import (
    ConfigOptions,
    FloatModel,
    Html,
    Json,
    Metric,
    Reading,
    shares_options,
)
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import calibration
from quark_fx.command_line.subjects import float_subject
from quark_fx.system.writable import require_file_place, write_text


@shares_options
def analyze(
    model: FloatModel,
    options: ConfigOptions,
    reading: Reading,
    metric: Metric = "error",
    top: Annotated[int, typer.Option(min=1, help="Operators that are measured and get remedies.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="YAML file for the proposed configuration.")
    ] = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Find the operators that cause the error of a configuration, and propose a configuration with less error."""
    chosen = options.chosen()
    for place in filter(None, (html, output)):
        require_file_place(place)
    source = float_subject(model)
    batches = calibration(reading, source, needed=True)
    named = None if options.exclude or options.changes else options.preset
    analysis = qfx.analyze(source.model, named or chosen, batches, metric=metric, top=top)
    show(json, analysis.to_dict(), str(analysis))  # print first, because writing a file may fail
    if html is not None:
        analysis.html(html)
    if output is not None:
        write_text(output, analysis.to_yaml())
