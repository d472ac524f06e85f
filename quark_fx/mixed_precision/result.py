"""Result of a search: a configuration, its alternatives, and the error for each size or latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quark_fx.analysis.report import UNITS, format_error, yaml_of
from quark_fx.config.quant_config import QuantConfig
from quark_fx.mixed_precision.budget import Budget
from quark_fx.plan.table import Column, Table
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

MIXED = "mixed"
"""Name of a configuration that is not a single candidate."""

_VALIDATION = "validation data, which calibrates nothing and decides among the configurations tried"
_MEASURED = f"Measured on {_VALIDATION}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result for one group of operators.

    Attributes:
        operators: Names of the operators' modules.
        candidate: Name of the chosen candidate.
        weight: Format of the weights; empty for float.
        bits: Average number of bits per weight.
        size: Size of the weights in bytes, in the budget's `output`.
        errors: Estimated increase in error from rounding the group, for each candidate, in the order of
            `Search.candidates`.
        latencies: Estimated milliseconds that the group takes of a call, for each candidate; empty unless the budget is
            a latency.
    """

    operators: tuple[str, ...]
    candidate: str
    weight: str
    bits: float
    size: int
    errors: tuple[float, ...]
    latencies: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Names of the operators' modules, shortened."""
        first, *rest = self.operators
        return first + "".join(f", {other.rpartition('.')[2]}" for other in rest)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Best choice for one size, or for one latency if the budget is a latency.

    Attributes:
        bits: Average number of bits over all weights that at least one candidate quantizes.
        size: Size in bytes of all weights, or of the files of the budget's `output`.
        error: Error, estimated on calibration data.
        latency: Estimated milliseconds of a call; `None` unless the budget is a latency.
    """

    bits: float
    size: int
    error: float
    latency: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verified(Point):
    """A configuration that was quantized and measured on validation data.

    Validation data does not calibrate; it decides among the configurations tried.

    Attributes:
        name: Name of the candidate, or `"mixed"`.
        error: Measured error; infinite if an output that is finite in float is not finite.
        latency: Measured milliseconds of a call; `None` unless the budget is a latency.
        fits: Whether the configuration meets the budget.
    """

    name: str
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """Best configuration for a budget; `str(search)` is a table. See `quark_fx.search`.

    Attributes:
        config: Configuration of the winner, for `quantize`; `to_yaml` returns it as text.
        winner: `"mixed"`, or the name of a candidate that is as good for all operators.
        preset: Name of the preset that `config` is based on; empty if none.
        budget: Budget that the winner meets.
        metric: `"error"` (squared, relative to the square of the float outputs), `"kl"` (in nats), or the name of a
            function.
        candidates: Names of the candidates.
        verified: Configurations that were quantized and measured, the winner first.
        curve: Points from the smallest size or latency to the largest, each with a smaller error than the previous one.
        choices: Results of all groups of operators that at least one candidate quantizes, in graph order.
        samples: Number of samples on which errors were estimated.
        verified_on: Number of samples on which configurations were measured.
        float_latency: Milliseconds of a call of the float model; `None` unless the budget is a latency.
        seconds: Duration of the search in seconds.
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
    float_latency: float | None = None
    seconds: float = field(default=math.nan, compare=False)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def uniform(self) -> bool:
        """True if one candidate for all operators is as good as the best mixture."""
        return self.winner != MIXED

    @property
    def found(self) -> Verified:
        """Measurements of the winner."""
        return self.verified[0]

    def to_yaml(self) -> str:
        """Return `config` as text for `QuantConfig.from_yaml`: differences from `preset`, or all fields without one."""
        return yaml_of(self.config, self.preset)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the configuration has the fields of `to_yaml`."""
        return asdict(self) | {"config": yaml.safe_load(self.to_yaml()), "budget": str(self.budget)}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the curve, one dictionary per point, for `pandas.DataFrame(search.to_rows())`."""
        return [asdict(point) for point in self.curve]

    def facts(self) -> dict[str, str]:
        """Return the summary for a page, text by label."""
        facts = {
            "budget": str(self.budget),
            "winner": self.winner,
            "error, measured": format_error(self.found.error, self.metric),
            "bits per weight": f"{self.found.bits:.3f}",
            "weights": f"{self.found.size / 1024:,.1f} KiB",
        }
        if (speed := self._speed(self.found)) is not None:
            facts["latency, measured"] = "{:.4g} ms, {:.3f} of float".format(*speed)
        return facts

    def _speed(self, one: Point) -> tuple[float, float] | None:
        """Return the milliseconds, and their ratio to the float model's; `None` unless the budget is a latency."""
        if self.float_latency is None or one.latency is None:
            return None
        return one.latency, one.latency / self.float_latency

    def _across(self, one: Point) -> float:
        """Return the coordinate on the curve's horizontal axis: bits per weight, or milliseconds."""
        return one.bits if one.latency is None else one.latency

    def figures(self) -> dict[str, Figure]:
        """Return plots for notebooks: `"curve"`, the error by bits or latency, and `"bits"` by operator.

        Raises:
            QuarkError: If matplotlib is not installed.
        """
        from quark_fx.plan.page import bars, frontier

        marks = {one.name: (self._across(one), one.error) for one in self.verified if math.isfinite(one.error)}
        curve = [(self._across(point), point.error) for point in self.curve]
        title, across = "The least error by bits", "bits per weight"
        if self.float_latency is not None:
            title, across = "The least error by latency", "milliseconds of a call"
        names, bits = [choice.name for choice in self.choices], [choice.bits for choice in self.choices]
        return {
            "curve": frontier(title, curve, marks, across, f"error, {UNITS.get(self.metric, self.metric)}"),
            "bits": bars("Bits by operator", names, bits, "bits per weight"),
        }

    def tables(self) -> list[Table[Any]]:
        """Return the tables of a page: measurements, operators, and the curve."""
        return [self.measured(), self.operators(), Table("The curve", self._costs(), self.curve)]

    def measured(self) -> Table[Verified]:
        """Return the table of the configurations that were measured."""
        columns: list[Column[Verified]] = [
            Column("measured", lambda one: one.name),
            *self._costs(),
            Column("fits", lambda one: "yes" if one.fits else "no"),
        ]
        return Table(_MEASURED, columns, self.verified)

    def _costs(self) -> list[Column[Any]]:
        """Return the table columns of a `Point`: bits, size, latency, and error."""
        speed: list[Column[Any]] = [
            Column("ms", lambda point: point.latency, ".4g"),
            Column("of float", lambda point: (self._speed(point) or (None, None))[1], ".3f"),
        ]
        return [
            Column("bits", lambda point: point.bits, ".3f"),
            Column("KiB", lambda point: point.size / 1024, ",.1f"),
            *(speed if self.float_latency is not None else []),
            Column("error", lambda point: point.error, ".3g"),
        ]

    def operators(self, choices: Sequence[Choice] | None = None) -> Table[Choice]:
        """Return the table of groups of operators.

        Args:
            choices: Results of the groups to show. Default: all.
        """

        def of(values: str, index: int) -> Callable[[Choice], Any]:
            return lambda choice: getattr(choice, values)[index]

        columns: list[Column[Choice]] = [
            Column("operators", lambda choice: choice.name),
            Column("gets", lambda choice: choice.candidate),
            Column("weight", lambda choice: choice.weight or "float"),
            Column("bits", lambda choice: choice.bits, ".2f"),
            Column("KiB", lambda choice: choice.size / 1024, ",.1f"),
            *(Column(f"error of {name}", of("errors", i), ".2g") for i, name in enumerate(self.candidates)),
        ]
        if self.float_latency is not None:
            columns += [Column(f"ms of {name}", of("latencies", i), ".3g") for i, name in enumerate(self.candidates)]
        return Table("Formats of operators", columns, self.choices if choices is None else choices)

    def texts(self) -> dict[str, str]:
        """Return the texts to copy from a page, by title: the configuration."""
        return {"Configuration": self.to_yaml()}

    @checked_call
    def html(self, path: str | Path) -> None:
        """Write one self-contained page; `Report.html(path, search)` adds it to the report of a model.

        Raises:
            QuarkError: If matplotlib is missing (`pip install 'quark_fx[report]'`), or the file cannot be written.
        """
        from quark_fx.plan.page import write_page

        write_page(path, "Best bits", self.facts(), [*self.figures().values()], self.tables(), self.texts())

    def table(self, rows: int | None = 12) -> str:
        """Return the table of groups of operators as text, sorted by their largest error, descending.

        Args:
            rows: Number of groups; `None` for all.
        """
        most = sorted(self.choices, key=lambda choice: -max(filter(math.isfinite, choice.errors), default=0.0))
        lines = self.operators(most[:rows]).lines()
        remainder = len(most) - len(most[:rows])
        return "\n".join([*lines, *([f"{remainder} more"] if remainder else [])])

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self._verdict()} ({self.budget})",
                "",
                *self.measured().lines(),
                "",
                self.table(),
                "",
                f"measured on {self.verified_on} samples of {_VALIDATION}.",
                f"errors of operators: error added by rounding them, estimated on {self.samples} samples.",
                *([f"latency: float takes {self.float_latency:.4g} ms a call."] if self.float_latency else []),
                "",
                self.to_yaml().rstrip(),
            ]
        )

    def _verdict(self) -> str:
        what = f"{self.winner}, which no tried mixture outperforms" if self.uniform else MIXED
        speed = self._speed(self.found)
        cost = (
            f"{self.found.bits:.3f} bits per weight" if speed is None else "{:.4g} ms, {:.3f} of float".format(*speed)
        )
        return f"{what}: error {format_error(self.found.error, self.metric)} at {cost}"


__all__ = ["MIXED", "Choice", "Point", "Search", "Verified"]
