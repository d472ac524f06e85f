"""`quark-fx search`, which chooses a format for each operator under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import FloatModel, Html, Json, Metric, Reading, shares_options
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import calibration
from quark_fx.command_line.subjects import float_subject
from quark_fx.mixed_precision.budget import Output
from quark_fx.system.writable import require_file_place, write_text


@shares_options
def search(
    model: FloatModel,
    reading: Reading,
    candidate: Annotated[
        list[str],
        typer.Option(
            help="A preset, a YAML file, float, or a number format for the weights of the first one. Give several."
        ),
    ],
    bits: Annotated[float | None, typer.Option(help="Budget: bits per weight, on average, scales included.")] = None,
    size: Annotated[
        str | None, typer.Option(help='Budget: bytes of the part that --size-of names, such as "60MiB".')
    ] = None,
    size_of: Annotated[
        Output, typer.Option(help="Part that --size limits: weights in the report, or all bytes of a written output.")
    ] = "report",
    latency: Annotated[
        str | None,
        typer.Option(help='Budget: time of a call, as a fraction of float ("0.6"), or absolute ("12ms").'),
    ] = None,
    error: Annotated[float | None, typer.Option(help="Budget: the largest error, for the smallest size.")] = None,
    metric: Metric = "error",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="YAML file for the configuration.")] = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Choose a format for each operator to minimize the error under a budget."""
    if [bits, size, latency, error].count(None) != 3:
        raise typer.BadParameter("pass exactly one budget: --bits 4.5, --size 60MiB, --latency 0.6 or --error 0.01")
    for place in filter(None, (html, output)):
        require_file_place(place)
    budget = qfx.Budget(bits=bits, size=size, latency=_number(latency), error=error, output=size_of)
    files = (".yaml", ".yml")
    candidates = [qfx.QuantConfig.from_yaml(Path(c)) if c.endswith(files) else c for c in candidate]
    source = float_subject(model)
    batches = calibration(reading, source, needed=True)
    outcome = qfx.search(source.model, candidates, budget=budget, data=batches, metric=metric)
    show(json, outcome.to_dict(), str(outcome))  # print first, because writing a file may fail
    if html is not None:
        outcome.html(html)
    if output is not None:
        write_text(output, outcome.to_yaml())


def _number(text: str | None) -> float | str | None:
    """Convert text such as "0.6", a fraction of the float model's time, to a number; leave times such as "12ms"."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
