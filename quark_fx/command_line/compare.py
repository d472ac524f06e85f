"""`quark-fx compare`, which compares two models on the same data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from quark_fx import evaluation
from quark_fx.command_line.options import AnyModel, Json, Reading, shares_options
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import read_batches
from quark_fx.command_line.subjects import subject
from quark_fx.evaluation import Distance
from quark_fx.plan.table import Column, Table


@shares_options
def compare(
    first: AnyModel,
    second: Annotated[str, typer.Argument(help="A second model, in any of these forms.")],
    reading: Reading,
    json: Json = False,
) -> None:
    """Run the same data through two models and report the differences of their outputs."""
    first_subject, second_subject = subject(first), subject(second)
    batches = read_batches(reading, first_subject.completed_by(second_subject))
    distances = evaluation.compare(first_subject.model, second_subject.model, batches)
    columns: list[Column[Distance]] = [
        Column("output", lambda distance: distance.name or None),
        Column("max |Δ|", lambda distance: distance.max_abs, ".3g"),
        Column("SQNR dB", lambda distance: distance.sqnr, ".1f"),
        Column("cosine", lambda distance: distance.cosine, ".6f"),
        Column("same largest", lambda distance: distance.agreement, ".2%"),
    ]
    show(json, {"outputs": [asdict(d) for d in distances]}, Table("Outputs", columns, distances))
