"""`quark-fx compare`: compare two models on the same data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from quark_fx import evaluation
from quark_fx.command_line.options import AnyModel, Json, Reading, shares_options
from quark_fx.command_line.printing import show, table
from quark_fx.command_line.reading import read_batches
from quark_fx.command_line.subjects import subject


@shares_options
def compare(
    first: AnyModel,
    second: Annotated[str, typer.Argument(help="A second model, in any of these forms.")],
    reading: Reading,
    json: Json = False,
) -> None:
    """Run the same data through two models and report the differences of their outputs."""
    left, right = subject(first), subject(second)
    batches = read_batches(reading, left.completed_by(right))
    found = evaluation.compare(left.model, right.model, batches)
    header = ("output", "max |Δ|", "SQNR dB", "cosine", "same largest")
    rows = [
        (d.name or "-", f"{d.max_abs:.3g}", f"{d.sqnr:.1f}", f"{d.cosine:.6f}", f"{d.agreement:.2%}") for d in found
    ]
    show(json, {"outputs": [asdict(d) for d in found]}, table(header, rows, right=(1, 2, 3, 4)))
