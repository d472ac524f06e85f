"""The operators of a quantized model, those alike in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from quark_fx.command_line.printing import size, table
from quark_fx.config.selection import without_numbers
from quark_fx.plan.report import Report

NO_WEIGHT = "none"
"""What a product of two activations has in the place of a weight's format."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """An operator with weights, or several alike.

    Attributes:
        name: of the operator; numbers that differ are `*`.
        kind: of operator.
        weight: number format of the weight.
        activation: number format of what it reads.
        bytes: of the weight with its scales.
        reason: why it is in float, where that is known.
        count: operators.
        stored: name of the weight in the file, which other operators may read, too; empty if no other does.
    """

    name: str
    kind: str
    weight: str
    activation: str
    bytes: int
    reason: str = ""
    count: int = 1
    stored: str = ""


def parts_of(report: Report) -> list[Part]:
    """Return the operators of a report."""
    return [
        Part(
            name=name,
            kind=row.kind,
            weight=row.weight or ("float" if row.parameter else NO_WEIGHT),
            activation=row.activation or "float",
            bytes=row.bytes_before if row.reason else row.bytes_after,
            reason=row.reason,
            stored=row.parameter,
        )
        for name, row in zip(report.labels, report, strict=True)
    ]


def grouped(parts: Iterable[Part]) -> list[Part]:
    """Return one part for all that differ in the numbers of their names alone."""
    found: dict[Any, Part] = {}
    for part in parts:
        pattern = without_numbers(part.name)
        key = (pattern, part.kind, part.weight, part.activation, part.reason)
        old = found.get(key)
        found[key] = (
            replace(old, name=pattern, bytes=old.bytes + part.bytes, count=old.count + 1, stored="") if old else part
        )
    return list(found.values())


def parts_table(parts: Iterable[Part]) -> Table:
    """Return them as a table."""
    header = ("operator", "kind", "count", "weight", "activation", "size", "in float because")
    rows = [(p.name, p.kind, p.count, p.weight, p.activation, size(p.bytes), p.reason) for p in parts]
    return table(header, rows, right=(2, 5))
