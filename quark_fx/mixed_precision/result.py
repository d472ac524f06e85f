"""What a search found: a configuration, what else fits, and what more bits would buy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quark_fx.analysis.report import format_error, yaml_of
from quark_fx.config.quant_config import QuantConfig
from quark_fx.mixed_precision.budget import Budget
from quark_fx.plan.report import aligned
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from quark_fx.plan.page import Table

MIXED = "mixed"
"""The name of what is no candidate by itself."""

_VALIDATION = "validation data, which calibrates nothing and decides among the configurations tried"
_MEASURED = f"Measured on {_VALIDATION}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one group of operators gets.

    Attributes:
        operators: their modules.
        candidate: the name of what they get.
        weight: format of their weights, empty for float.
        bits: on average, of a weight.
        size: bytes of their weights.
        errors: estimated, of each candidate, in the order of `Search.candidates`: what their roundings would add.
    """

    operators: tuple[str, ...]
    candidate: str
    weight: str
    bits: float
    size: int
    errors: tuple[float, ...]

    @property
    def name(self) -> str:
        """Their modules in few words."""
        first, *others = self.operators
        return first + "".join(f", {other.rpartition('.')[2]}" for other in others)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best choice of one size.

    Attributes:
        bits: on average, of each weight that at least one candidate quantizes.
        size: bytes of all weights.
        error: estimated, on data that calibrates.
    """

    bits: float
    size: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Verified(Point):
    """A configuration that was really quantized, and measured on validation data.

    That calibrates nothing and decides among the configurations tried.

    Attributes:
        name: of the candidate, or `"mixed"`.
        error: measured; infinite if an output is not finite that is so in float.
        fits: whether it keeps the budget.
    """

    name: str
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """The best configuration for a budget; `str(search)` is a table. See `quark_fx.search`.

    Attributes:
        config: the winner's, for `quantize`; as text: `to_yaml`.
        winner: `"mixed"`, or the name of the candidate that is as good for all operators.
        preset: that `config` starts from, empty if from none.
        budget: that it keeps.
        metric: `"error"`, squared over the square of the float outputs, or `"kl"`, in nats.
        candidates: their names.
        verified: what was really quantized and measured, the winner first.
        curve: from the smallest size to the largest, each better than those before.
        choices: of each group of operators that could be chosen for, in graph order.
        samples: that errors were estimated on.
        verified_on: samples that were measured on.
        seconds: what it took.
    """

    config: QuantConfig
    winner: str
    preset: str
    budget: Budget
    metric: str
    candidates: tuple[str, ...]
    verified: tuple[Verified, ...]
    curve: tuple[Point, ...]
    choices: tuple[Choice, ...]
    samples: int
    verified_on: int
    seconds: float = field(default=math.nan, compare=False)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def uniform(self) -> bool:
        """Whether one candidate for all operators is as good as any mixture that was found."""
        return self.winner != MIXED

    @property
    def found(self) -> Verified:
        """The winner, measured."""
        return self.verified[0]

    def to_yaml(self) -> str:
        """Return `config` as text for `QuantConfig.from_yaml`: what differs from the preset it starts from."""
        return yaml_of(self.config, self.preset)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the configuration as `to_yaml` has it."""
        return asdict(self) | {"config": yaml.safe_load(self.to_yaml()), "budget": str(self.budget)}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the curve, one dict per point: `pandas.DataFrame(search.to_rows())` is a data frame."""
        return [asdict(point) for point in self.curve]

    def facts(self) -> dict[str, str]:
        """Return what to know first, for a page."""
        return {
            "budget": str(self.budget),
            "winner": self.winner,
            "error, measured": format_error(self.found.error, self.metric),
            "bits per weight": f"{self.found.bits:.3f}",
            "weights": f"{self.found.size / 1024:,.1f} KiB",
        }

    def figures(self) -> dict[str, Figure]:
        """Return figures by name: `"curve"`, the error by size, and `"bits"` by operator; for notebooks, too.

        Raises:
            QuarkError: without matplotlib.
        """
        from quark_fx.plan.page import bars, frontier

        marks = {one.name: (one.bits, one.error) for one in self.verified if math.isfinite(one.error)}
        curve = [(point.bits, point.error) for point in self.curve]
        unit = "nats" if self.metric == "kl" else "of the outputs' square"
        names, bits = [choice.name for choice in self.choices], [choice.bits for choice in self.choices]
        return {
            "curve": frontier("The least error by bits", curve, marks, "bits per weight", f"error, {unit}"),
            "bits": bars("Bits by operator", names, bits, "bits per weight"),
        }

    def tables(self) -> list[Table]:
        """Return what a page lists: what was measured, operators, and the curve."""
        from quark_fx.plan.page import Table

        measured = [(v.name, v.bits, v.size / 1024, v.error, "yes" if v.fits else "no") for v in self.verified]
        choices = [(c.name, c.candidate, c.weight or "float", c.bits, c.size / 1024, *c.errors) for c in self.choices]
        errors = (f"error of {name}" for name in self.candidates)
        return [
            Table(_MEASURED, ("", "bits", "KiB", "error", "fits"), measured),
            Table("What operators get", ("operators", "candidate", "weight", "bits", "KiB", *errors), choices),
            Table("The curve", ("bits", "KiB", "error"), [(p.bits, p.size / 1024, p.error) for p in self.curve]),
        ]

    def texts(self) -> dict[str, str]:
        """Return what a page has to copy: the configuration."""
        return {"Configuration": self.to_yaml()}

    @checked_call
    def html(self, path: str | Path) -> None:
        """Write one page that needs nothing else; `Report.html(path, search)` has it with the report of a model.

        Raises:
            QuarkError: without matplotlib (`pip install 'quark_fx[report]'`), or if the file cannot be written.
        """
        from quark_fx.plan.page import write_page

        write_page(path, "Best bits", self.facts(), [*self.figures().values()], self.tables(), self.texts())

    def table(self, rows: int | None = 12) -> str:
        """Return operators as text, those with most to lose first.

        Args:
            rows: how many groups of operators, `None` for all.
        """
        most = sorted(self.choices, key=lambda choice: -max(filter(math.isfinite, choice.errors), default=0.0))
        header = ("operators", "gets", "bits", *(f"error of {name}" for name in self.candidates))
        body: list[tuple[str, ...]] = [
            (c.name, c.candidate, f"{c.bits:.2f}", *(f"{e:.2g}" for e in c.errors)) for c in most[:rows]
        ]
        if left := len(most) - len(body):
            body.append((f"{left} more", *[""] * (len(header) - 1)))
        return "\n".join(aligned(header, body, right=set(range(2, len(header)))))

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self._verdict()} ({self.budget})",
                "",
                *_measured(self.verified),
                "",
                self.table(),
                "",
                f"measured: on {self.verified_on} samples of {_VALIDATION}.",
                f"errors of operators: what their roundings would add, estimated on {self.samples} samples.",
                "",
                self.to_yaml().rstrip(),
            ]
        )

    def _verdict(self) -> str:
        what = f"{self.winner}, as good as any mixture that was found" if self.uniform else MIXED
        return f"{what}: error {format_error(self.found.error, self.metric)} at {self.found.bits:.3f} bits per weight"


def _measured(verified: Sequence[Verified]) -> list[str]:
    header = ("measured", "bits", "KiB", "error", "fits")
    body = [
        (v.name, f"{v.bits:.3f}", f"{v.size / 1024:,.1f}", f"{v.error:.3g}", "yes" if v.fits else "no")
        for v in verified
    ]
    return aligned(header, body, right={1, 2, 3})


__all__ = ["MIXED", "Choice", "Point", "Search", "Verified"]
