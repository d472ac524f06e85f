"""What happened to every weighted operator."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor

from quark_fx.config.specs import TensorSpec
from quark_fx.graph.pass_manager import PassRecord
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.weights import stored_bytes

_WIDEST = 70


@dataclass(frozen=True, kw_only=True)
class Row:
    """One weighted operator, or a product of two activations.

    Attributes:
        name: module path.
        kind: operator family.
        weight: weight format, empty if it stays in float.
        activation: input format, empty if it stays in float.
        scale_min: smallest weight scale.
        scale_max: largest weight scale.
        sqnr: signal to quantization noise of the weight, dB.
        bytes_before: bytes of the weight in the captured model.
        bytes_after: bytes of codes, scales and zero points.
        reason: why it is in float; empty if it is quantized.
        parameter: name of the weight; operators that share one share its bytes.
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

    @classmethod
    def of_quantized(cls, *, original: Tensor, quantized: QuantizedTensor, spec: TensorSpec, **fields: Any) -> Self:
        """Build the row of a quantized weight."""
        scale = None if spec.is_cast else quantized.scale
        return cls(
            scale_min=None if scale is None else float(scale.min()),
            scale_max=None if scale is None else float(scale.max()),
            bytes_before=original.nbytes,
            bytes_after=stored_bytes(quantized, spec),
            **fields,
        )


@dataclass(frozen=True)
class Report:
    """One row per weighted operator, the passes that ran, and totals. `str(report)` is a table."""

    rows: tuple[Row, ...]
    passes: tuple[PassRecord, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def pass_table(self, name: str | None = None) -> str:
        """Return what the passes changed, one line per operator or site, as a table; `passes` has all of long reasons.

        Args:
            name: of one pass; default: all that changed anything operator by operator.
        """
        header = ("pass", "operator", "change", "error before", "error after", "seconds")
        body = [
            (
                record.name,
                change.name,
                _shortened(change.what),
                _number(change.before),
                _number(change.after),
                "-" if math.isnan(change.seconds) else f"{change.seconds:.2f}",
            )
            for record in self.passes
            if name in (None, record.name)
            for change in record.changes
        ]
        return "\n".join(aligned(header, body, right={3, 4, 5}))

    @property
    def totals(self) -> dict[str, Any]:
        """Number of operators, how many are quantized, bytes before and after, and their ratio."""
        quantized = [row for row in self.rows if not row.reason]
        # A weight that several operators read counts once, and once per format after.
        before = sum({row.parameter: row.bytes_before for row in self.rows}.values())
        after = sum({(row.parameter, row.weight): row.bytes_after for row in self.rows}.values())
        return {
            "operators": len(self.rows),
            "quantized": len(quantized),
            "bytes_before": before,
            "bytes_after": after,
            "ratio": after / before if before else 1.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return rows, passes and totals as plain data."""
        return {
            "rows": self.to_rows(),
            "passes": [asdict(record) for record in self.passes],
            "totals": self.totals,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dict per row: `pandas.DataFrame(report.to_rows())` is a data frame."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        header = (
            "name",
            "op",
            "weight",
            "activation",
            "scale",
            "SQNR dB",
            "KiB before",
            "KiB after",
            "in float because",
        )
        body = [
            (
                row.name,
                row.kind,
                row.weight or "-",
                row.activation or "-",
                "-" if row.scale_min is None else f"{row.scale_min:.2e} … {row.scale_max:.2e}",
                "-" if row.sqnr is None else f"{row.sqnr:.1f}",
                f"{row.bytes_before / 1024:.1f}",
                f"{row.bytes_after / 1024:.1f}",
                row.reason,
            )
            for row in self.rows
        ]
        lines = aligned(header, body, right={5, 6, 7})
        t = self.totals
        summary = (
            f"{t['quantized']} of {t['operators']} weighted operators quantized; weights "
            f"{t['bytes_before'] / 1024:.1f} KiB → {t['bytes_after'] / 1024:.1f} KiB ({t['ratio']:.2f}×)"
        )
        return "\n".join([*lines, summary, *(_summary(record) for record in self.passes if record.changes)])


def _summary(record: PassRecord) -> str:
    """Return one line on a pass that noted what it did; `pass_table` has the rest."""
    judged = [(c.before, c.after) for c in record.changes if c.before is not None and c.after is not None]
    error = ""
    if judged:
        before, after = (sum(values) / len(judged) for values in zip(*judged, strict=True))
        where = "validation data" if record.validated else "the data it was learned from"
        error = f", mean error {before:.3g} → {after:.3g} on {where}"
    remark = f"; {record.remark}" if record.remark else ""
    seconds = "" if math.isnan(record.seconds) else f", {record.seconds:.1f} s"
    return f"{record.name}: {record.rewrites} changed of {len(record.changes)}{error}{seconds}{remark}"


def _shortened(text: str) -> str:
    """Return a reason without the path of the user's source, on at most `_WIDEST` characters."""
    text = re.sub(r" \(([^()]*:\d+|\?)(, module [^()]*)?\)", "", text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def aligned(header: Sequence[str], body: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Return the lines of a table; the columns in `right` are set to the right."""
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = (header, tuple("─" * w for w in widths), *body)
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
