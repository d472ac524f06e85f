"""The operators of a model, and a table of them in which similar operators share a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quark_fx.config.selection import without_numbers
from quark_fx.plan.report import Report
from quark_fx.plan.table import Column, Table
from quark_fx.system.memory import bytes_text

NO_WEIGHT = "none"
"""Weight format of a product of two activations."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """An operator with weights or a product of two activations, or several similar operators.

    Attributes:
        name: Name of the operator; for several operators, `*` replaces numbers.
        kind: Kind of operator, such as `"linear"` or an ONNX operator.
        weight: Number format of the weight; `NO_WEIGHT` for a product of two activations.
        activation: Number format of the input.
        bytes: Size of the weight and its scales, in bytes.
        reason: Reason for staying in float; empty if unknown or quantized.
        count: Number of operators that the row stands for.
        stored: Name of the weight in the file, if other operators may read it, too; empty otherwise.
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
    """Return the operators in the report of a quantized model."""
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
    """Merge parts whose names differ only in numbers, and whose formats are equal, into one part per group."""
    groups: dict[Any, Part] = {}
    for part in parts:
        pattern = without_numbers(part.name)
        key = (pattern, part.kind, part.weight, part.activation, part.reason)
        old = groups.get(key)
        groups[key] = (
            replace(old, name=pattern, bytes=old.bytes + part.bytes, count=old.count + 1, stored="") if old else part
        )
    return list(groups.values())


_COLUMNS: tuple[Column[Part], ...] = (
    Column("operator", lambda part: part.name),
    Column("kind", lambda part: part.kind),
    Column("count", lambda part: part.count),
    Column("weight", lambda part: part.weight),
    Column("activation", lambda part: part.activation),
    Column("size", lambda part: part.bytes, lambda part: bytes_text(part.bytes)),
    Column("in float because", lambda part: part.reason),
)


def parts_table(parts: Iterable[Part]) -> Table[Part]:
    """Return a table with one row per part."""
    return Table("Operators", _COLUMNS, [*parts])
