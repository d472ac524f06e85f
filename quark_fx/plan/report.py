"""The report: the quantization of every weighted operator."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from quark_fx.config.specs import TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.graph.pass_manager import Change, PassRecord
from quark_fx.numbers.quantized_tensor import QuantizedTensor, decibels
from quark_fx.plan.table import Column, Table, tuples
from quark_fx.plan.weights import stored_bytes
from quark_fx.system import accelerator
from quark_fx.system.names import nearest
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from quark_fx.graph.linear import Linear

_WIDEST = 70


@dataclass(frozen=True, kw_only=True)
class Row:
    """A weight in one use, or a product of two activations.

    Operators that read a weight in the same way, such as the two calls of a module that runs twice, are one row.

    Attributes:
        name: Module path.
        kind: Operator family.
        weight: Weight format, empty if it stays in float.
        activation: Input format, empty if it stays in float.
        scale_min: Smallest weight scale; `None` without scales.
        scale_max: Largest weight scale; `None` without scales.
        sqnr: Signal-to-quantization-noise ratio of the weight, dB; `None` if it stays in float.
        bytes_before: Bytes of the weight in the captured model.
        bytes_after: Bytes of codes, scales, and zero points, and of a `LowRank` branch.
        reason: Reason for staying in float; empty if the operator is quantized.
        parameter: Name of the weight; rows with the same weight share its bytes.
        computed_from: Names of the parameters that the weight is computed from; empty if the weight is a parameter.
    """

    name: str
    kind: str
    weight: str = ""
    activation: str = ""
    scale_min: float | None = None
    scale_max: float | None = None
    sqnr: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    reason: str = ""
    parameter: str = ""
    computed_from: str = ""

    @classmethod
    def of_quantized(
        cls, *, original: Tensor, quantized: QuantizedTensor, spec: TensorSpec, linear: Linear | None, **fields: Any
    ) -> Self:
        """Build the row of a quantized weight; `linear` is the operator that multiplies by it, if any."""
        return cls(bytes_before=original.nbytes, bytes_after=stored_bytes(quantized, spec, linear), **fields)


class Measured(NamedTuple):
    """Properties of the values of a row's weight, on the device of the weight.

    Attributes:
        norms: Norms of the weight and of its error, shapes (), alternating; for a weight in pieces, two for each piece.
        ends: Smallest and largest scale, shapes (); empty if the scales in the row stay.
    """

    norms: Sequence[Tensor]
    ends: Sequence[Tensor]

    @classmethod
    def of(cls, norms: Sequence[Tensor], scale: Tensor | None) -> Self:
        """Return the reported properties of a weight, including the ends of its scale if `scale` is given."""
        return cls(norms, () if scale is None else (scale.min(), scale.max()))


def with_measured(rows: Sequence[Row], measured: Mapping[int, Measured]) -> list[Row]:
    """Return the rows with the SQNR, smallest scale, and largest scale of their weights; wait once for each device.

    Args:
        rows: Rows of operators.
        measured: New properties of the weights, keyed by the indices of their rows.
    """
    numbers = iter(accelerator.read([x for one in measured.values() for x in (*one.ends, *one.norms)]))
    results = list(rows)
    for i, one in measured.items():
        least, most = (next(numbers), next(numbers)) if one.ends else (rows[i].scale_min, rows[i].scale_max)
        noise = decibels([next(numbers) for _ in one.norms])
        results[i] = replace(rows[i], scale_min=least, scale_max=most, sqnr=noise)
    return results


@dataclass(frozen=True)
class Histogram:
    """The values of an activation, and the range that its codes represent.

    Attributes:
        name: Module that computes the activation.
        edges: Edges of the bins, increasing, one more than there are counts.
        counts: Number of values in each bin.
        low: Smallest representable value.
        high: Largest representable value.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    low: float
    high: float

    @property
    def clipped(self) -> float:
        """Fraction of the values that saturate, measured at the centers of the bins."""
        middles = ((a + b) / 2 for a, b in itertools.pairwise(self.edges))
        outside = (n for n, x in zip(self.counts, middles, strict=True) if not self.low <= x <= self.high)
        return sum(outside) / (sum(self.counts) or 1.0)


@runtime_checkable
class Page(Protocol):
    """Additional content for the page of a report."""

    def facts(self) -> dict[str, str]:
        """Return the summary at the top."""
        ...

    def figures(self) -> dict[str, Figure]:
        """Return charts, keyed by their names."""
        ...

    def tables(self) -> list[Table[Any]]:
        """Return the tables to list."""
        ...

    def texts(self) -> dict[str, str]:
        """Return texts to copy, keyed by title."""
        ...


@dataclass(frozen=True)
class Report:
    """One row per weight and use, the passes that ran, and totals. `str(report)` is a table.

    Attributes:
        rows: Rows of the operators.
        passes: Records of the passes, in the order they ran.
        histograms: Histograms of activations whose observers count values; a stored model has none.
        about: Facts about the run for the page, such as the model's class and the configuration.
        draws: Descriptions of nodes that draw random numbers, keyed by the output that depends on them.
    """

    rows: tuple[Row, ...]
    passes: tuple[PassRecord, ...] = ()
    histograms: tuple[Histogram, ...] = field(default=(), compare=False)
    about: Mapping[str, str] = field(default_factory=dict, compare=False)
    draws: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> list[str]:
        """Labels of the rows: the name of the operator, or of its weight if several weights share that name."""
        weights: dict[str, set[str]] = {}
        for row in self.rows:
            weights.setdefault(row.name, set()).add(row.parameter)
        several = {name for name, parameters in weights.items() if len(parameters - {""}) > 1}
        return [row.parameter if row.parameter and row.name in several else row.name for row in self.rows]

    def pass_table(self, name: str | None = None, *, full: bool = False) -> str:
        """Return the changes of the passes as a table, one line per operator or site.

        Args:
            name: Name of one pass; default: all passes that changed individual operators.
            full: Whether to keep long reasons in full.

        Raises:
            ConfigError: If no pass with that name ran.
        """
        names = list(dict.fromkeys(record.name for record in self.passes))
        if name is not None and name not in names:
            raise ConfigError(
                f"no pass {name!r} ran; passes of this run: {', '.join(names) or 'none'}{nearest(name, names)}"
            )
        changes = [(one.name, change) for one in self.passes if name in (None, one.name) for change in one.changes]
        return "\n".join(_changes("", changes, full=full).lines())

    @property
    def idle(self) -> dict[str, str]:
        """Passes that examined operators or sites and changed none of them, each with the most common reason."""
        reasons = {record.name: [change.what for change in record.changes] for record in self.passes}
        changed = {record.name for record in self.passes if any(change.changed for change in record.changes)}
        return {name: max(texts, key=texts.count) for name, texts in reasons.items() if texts and name not in changed}

    @property
    def random(self) -> list[str]:
        """One sentence per node that draws random numbers, with the outputs that depend on it."""
        outputs: dict[str, list[str]] = {}
        for name, where in self.draws.items():
            outputs.setdefault(where, []).append(name)
        return [
            f"{where} draws random numbers, so every call returns other values of {', '.join(names)}; to compare "
            "results, make the random numbers an input of the model"
            for where, names in outputs.items()
        ]

    @property
    def totals(self) -> dict[str, Any]:
        """Number of operators, number of quantized operators, bytes of weights before and after, and their ratio."""
        quantized = [row for row in self.rows if not row.reason]
        before = sum({row.parameter: row.bytes_before for row in self.rows}.values())
        after = stored_size(self.rows)
        return {
            "operators": len(self.rows),
            "quantized": len(quantized),
            "bytes_before": before,
            "bytes_after": after,
            "ratio": after / before if before else 1.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return rows, passes, totals, and sources of random numbers as plain data."""
        return {
            "rows": self.to_rows(),
            "passes": [asdict(record) for record in self.passes],
            "totals": self.totals,
            "draws": dict(self.draws),
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dict per row: `pandas.DataFrame(report.to_rows())` is a data frame."""
        return [asdict(row) for row in self.rows]

    def figures(self) -> dict[str, Figure]:
        """Return charts with their names, also for notebooks: `"noise"`, `"bytes"`, `"seconds"`, and `"histograms"`.

        Charts without data are left out.

        Raises:
            QuarkError: If matplotlib is not installed.
        """
        from quark_fx.plan.page import bars, histograms

        charts = {}
        named = [*zip(self.labels, self.rows, strict=True)]
        if noisy := [(name, row.sqnr) for name, row in named if row.sqnr is not None and math.isfinite(row.sqnr)]:
            noise = [10 ** (-sqnr / 20) * 100 for _, sqnr in noisy]
            charts["noise"] = bars("Rounding noise of weights", [name for name, _ in noisy], noise, "% of the weight")
        if stored := [*{row.parameter: (name, row) for name, row in named if row.bytes_before}.values()]:
            after, before = [r.bytes_after / 1024 for _, r in stored], [r.bytes_before / 1024 for _, r in stored]
            charts["bytes"] = bars("Bytes of weights", [name for name, _ in stored], after, "KiB", before)
        if timed := [record for record in self.passes if not math.isnan(record.seconds)]:
            seconds = [record.seconds for record in timed]
            charts["seconds"] = bars("Time of passes", [record.name for record in timed], seconds, "seconds")
        if self.histograms:
            charts["histograms"] = histograms("Activations that are clipped most, and their ranges", self.histograms)
        return charts

    @checked_call
    def html(self, path: str | Path, analysis: Page | None = None) -> None:
        """Write one self-contained page: error and bytes by operator, time by pass, and skipped operators with reasons.

        Args:
            path: Path of the file.
            analysis: Result of `quark_fx.analyze`, whose charts then come first.

        Raises:
            QuarkError: If matplotlib is missing (`pip install 'quark_fx[report]'`), or the file cannot be written.
        """
        from quark_fx.plan.page import write_page

        t = self.totals
        facts = {
            **self.about,
            "quantized": f"{t['quantized']} of {t['operators']} operators",
            "weights": f"{t['bytes_before'] / 1024:,.1f} KiB → {t['bytes_after'] / 1024:,.1f} KiB ({t['ratio']:.2f}×)",
        }
        facts |= {"random numbers": "; ".join(self.random)} if self.draws else {}
        figures, tables = [*self.figures().values()], self.tables()
        if analysis is not None:
            facts = analysis.facts() | facts
            figures, tables = [*analysis.figures().values(), *figures], [*analysis.tables(), *tables]
        write_page(path, "Quantization report", facts, figures, tables, {} if analysis is None else analysis.texts())

    def operators(self) -> Table[tuple[str, Row]]:
        """Return the table of the operators."""
        return Table("Operators", _OPERATORS, [*zip(self.labels, self.rows, strict=True)])

    def tables(self) -> list[Table[Any]]:
        """Return the tables of the page: operators, changes of passes, and skipped operators."""
        changes = [(record.name, change) for record in self.passes for change in record.changes]
        skipped = [(name, c.name, c.what) for name, c in changes if not c.changed]
        skipped += [("quantize", name, r.reason) for name, r in zip(self.labels, self.rows, strict=True) if r.reason]
        tables: list[Table[Any]] = [self.operators(), Table("Passes", _PASSES, self.passes)]
        if done := [(name, change) for name, change in changes if change.changed]:
            tables.append(_changes("Changes by passes", done, full=True))
        if skipped:
            tables.append(tuples("Skipped, with reasons", ("by", "operator", "reason"), skipped))
        return tables

    def __str__(self) -> str:
        lines = self.operators().lines()
        t = self.totals
        summary = (
            f"{t['quantized']} of {t['operators']} weighted operators quantized; weights "
            f"{t['bytes_before'] / 1024:.1f} KiB → {t['bytes_after'] / 1024:.1f} KiB ({t['ratio']:.2f}×)"
        )
        computed = [f"{row.name} is computed from {row.computed_from}" for row in self.rows if row.computed_from]
        done = [record.summary for record in self.passes if record.changes]
        source = [f"the source was {self.about['source']}"] if "source" in self.about else []
        return "\n".join([*lines, summary, *source, *dict.fromkeys(computed), *self.random, *done])


def _range(row: Row) -> str | None:
    """Return the smallest and the largest scale of a weight as text; `None` without scales."""
    return None if row.scale_min is None else f"{row.scale_min:.2e} … {row.scale_max:.2e}"


_OPERATORS: tuple[Column[tuple[str, Row]], ...] = (
    Column("name", lambda named: named[0]),
    Column("op", lambda named: named[1].kind),
    Column("weight", lambda named: named[1].weight or None),
    Column("activation", lambda named: named[1].activation or None),
    Column("scale", lambda named: _range(named[1])),
    Column("SQNR dB", lambda named: named[1].sqnr, ".1f"),
    Column("KiB before", lambda named: named[1].bytes_before / 1024, ".1f"),
    Column("KiB after", lambda named: named[1].bytes_after / 1024, ".1f"),
    Column("in float because", lambda named: named[1].reason),
)

_PASSES: tuple[Column[PassRecord], ...] = (
    Column("pass", lambda record: record.name),
    Column("changed", lambda record: record.rewrites),
    Column("seconds", lambda record: record.seconds, ".2f"),
    Column("remark", lambda record: record.remark),
)


def _changes(title: str, changes: Sequence[tuple[str, Change]], *, full: bool) -> Table[tuple[str, Change]]:
    """Return the table of changes with the names of their passes; long reasons are cut unless `full`."""
    columns: list[Column[tuple[str, Change]]] = [
        Column("pass", lambda named: named[0]),
        Column("operator", lambda named: named[1].name),
        Column("change", lambda named: named[1].what if full else _shortened(named[1].what)),
        Column("error before", lambda named: named[1].before, ".3g"),
        Column("error after", lambda named: named[1].after, ".3g"),
        Column("seconds", lambda named: None if math.isnan(named[1].seconds) else named[1].seconds, ".2f"),
    ]
    return Table(title, columns, changes)


def _shortened(text: str) -> str:
    """Return a reason without the path of the user's source, in at most `_WIDEST` characters."""
    text = re.sub(r" \(([^()]*:\d+|\?)(, module [^()]*)?\)", "", text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def stored_size(rows: Iterable[Row]) -> int:
    """Return the bytes of weights; a weight that several operators share counts once per format and scale."""
    return sum({(r.parameter, r.weight, r.scale_min, r.scale_max): r.bytes_after for r in rows}.values())
