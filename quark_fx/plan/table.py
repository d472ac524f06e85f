"""Tables of results: as text, as a section of a page, and as plain data."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SHOWN = 25
"""Initial number of rows on a page."""


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table.

    Attributes:
        title: Title.
        value: Function from an item to a number, a text, or `None` for an empty cell.
        text: Format of numbers in text, such as `".3g"`, or a function from an item to its text.
    """

    title: str
    value: Callable[[T], Any]
    text: str | Callable[[T], str] = ""

    def cell(self, item: T) -> str:
        """Return the text of an item's cell."""
        value = self.value(item)
        if value is None:
            return "-"
        if callable(self.text):
            return self.text(item)
        return format(value, self.text) if _is_number(value) else str(value)


@dataclass(frozen=True)
class Table(Generic[T]):
    """Items, one per row.

    Attributes:
        title: Title above the table on a page.
        columns: Columns from left to right.
        items: Items from top to bottom.
    """

    title: str
    columns: Sequence[Column[T]]
    items: Sequence[T]

    @property
    def header(self) -> list[str]:
        """The titles of the columns."""
        return [column.title for column in self.columns]

    @property
    def rows(self) -> list[list[Any]]:
        """The values of the cells, with `None` for empty cells and for numbers that are not finite."""
        return [[_finite(column.value(item)) for column in self.columns] for item in self.items]

    @property
    def right(self) -> list[bool]:
        """For each column, whether it holds numbers, which are aligned to the right."""
        return [any(_is_number(column.value(item)) for item in self.items) for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """The texts of the cells."""
        return [[column.cell(item) for column in self.columns] for item in self.items]

    def lines(self) -> list[str]:
        """Return the lines of the table as text."""
        header, body, right = self.header, self.cells, self.right
        widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
        return [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in (header, ["─" * width for width in widths], *body)
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return plain data: one dictionary per row, with the titles of the columns as keys."""
        return [dict(zip(self.header, row, strict=True)) for row in self.rows]

    def html(self) -> str:
        """Return a section of a page, with a filter and a choice of the number of rows; see `plan.page`."""
        data = json.dumps({"header": self.header, "rows": self.rows}, ensure_ascii=False)
        data = data.replace("<", "\\u003c")  # no text can close the script element
        return (
            f'<section data-shown="{SHOWN}"><h2>{html.escape(self.title)}</h2><p><input type="search" '
            f'placeholder="filter" aria-label="filter"> <select aria-label="rows"><option>{SHOWN}</option>'
            '<option>100</option><option value="1e9">all</option></select> <span></span></p><table></table>'
            f'<script type="application/json">{data}</script></section>'
        )


def tuples(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table[Sequence[Any]]:
    """Return a table of rows that are tuples already.

    Args:
        title: Title above the table.
        header: Titles of the columns.
        rows: Values of the cells.
    """

    def at(index: int) -> Callable[[Sequence[Any]], Any]:
        return lambda row: row[index]

    return Table(title, [Column(name, at(index)) for index, name in enumerate(header)], [*rows])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["SHOWN", "Column", "Table", "tuples"]
