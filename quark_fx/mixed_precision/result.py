"""The result of a search: a configuration, the alternatives, and the benefit of more bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quark_fx.analysis.report import UNITS, format_error, yaml_of
from quark_fx.config.quant_config import QuantConfig
from quark_fx.mixed_precision.budget import Budget
from quark_fx.plan.report import aligned
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from quark_fx.plan.page import Table

MIXED = "mixed"
"""Name of a configuration that is not a single candidate."""

_VALIDATION = "validation data, which calibrates nothing and decides among the configurations tried"
_MEASURED = f"Measured on {_VALIDATION}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result for one group of operators.

    Attributes:
        operators: Names of their modules.
        candidate: Name of their candidate.
        weight: Format of their weights; empty for float.
        bits: Average number of bits of a weight.
        size: Size of their weights in bytes, in the budget's `output`.
        errors: Estimated increase in error from rounding them, for each candidate, in the order of
            `Search.candidates`.
        latencies: Estimated share of a call in milliseconds, for each candidate; empty unless the budget is a latency.
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
        """The names of their modules, shortened."""
        first, *others = self.operators
        return first + "".join(f", {other.rpartition('.')[2]}" for other in others)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best choice for one size, or for one latency if that is the budget.

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
        error: Measured error; infinite if an output is not finite that is finite in float.
        latency: Measured milliseconds of a call; `None` unless the budget is a latency.
        fits: Whether it meets the budget.
    """

    name: str
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """The best configuration for a budget; `str(search)` is a table. See `quark_fx.search`.

    Attributes:
        config: Configuration of the winner, for `quantize`; `to_yaml` returns it as text.
        winner: `"mixed"`, or the name of a candidate that is as good for all operators.
        preset: Name of the preset that `config` starts from; empty if none.
        budget: Budget that it meets.
        metric: `"error"` (squared, relative to the square of the float outputs), `"kl"` (in nats), or the name of a
            function.
        candidates: Names of the candidates.
        verified: Configurations that were quantized and measured, the winner first.
        curve: Points from the smallest size or latency to the largest, each better than all before.
        choices: Results of all groups of operators with a choice, in graph order.
        samples: Number of samples on which errors were estimated.
        verified_on: Number of samples on which configurations were measured.
        float_latency: Milliseconds of a call of the float model; `None` unless the budget is a latency.
        seconds: Duration of the search.
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
        """Tell whether one candidate for all operators is as good as the best mixture found."""
        return self.winner != MIXED

    @property
    def found(self) -> Verified:
        """The measurements of the winner."""
        return self.verified[0]

    def to_yaml(self) -> str:
        """Return `config` as text for `QuantConfig.from_yaml`: the differences from the preset it starts from."""
        return yaml_of(self.config, self.preset)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the configuration in the form of `to_yaml`."""
        return asdict(self) | {"config": yaml.safe_load(self.to_yaml()), "budget": str(self.budget)}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the curve, one dict per point: `pandas.DataFrame(search.to_rows())` is a data frame."""
        return [asdict(point) for point in self.curve]

    def facts(self) -> dict[str, str]:
        """Return the main facts for a page."""
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
        """Return the milliseconds, and the share of the float model's; `None` unless the budget is a latency."""
        if self.float_latency is None or one.latency is None:
            return None
        return one.latency, one.latency / self.float_latency

    def _across(self, one: Point) -> float:
        """Return the coordinate of the curve's horizontal axis."""
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

    def tables(self) -> list[Table]:
        """Return the tables of a page: measurements, operators, and the curve."""
        from quark_fx.plan.page import Table

        timed = self.float_latency is not None
        speed = ("ms", "of float") if timed else ()
        measured = [
            (v.name, v.bits, v.size / 1024, *(self._speed(v) or ()), v.error, "yes" if v.fits else "no")
            for v in self.verified
        ]
        choices = [
            (c.name, c.candidate, c.weight or "float", c.bits, c.size / 1024, *c.errors, *c.latencies)
            for c in self.choices
        ]
        errors = (f"error of {name}" for name in self.candidates)
        times = (f"ms of {name}" for name in self.candidates if timed)
        curve = [(p.bits, p.size / 1024, *(self._speed(p) or ()), p.error) for p in self.curve]
        return [
            Table(_MEASURED, ("", "bits", "KiB", *speed, "error", "fits"), measured),
            Table(
                "Formats of operators", ("operators", "candidate", "weight", "bits", "KiB", *errors, *times), choices
            ),
            Table("The curve", ("bits", "KiB", *speed, "error"), curve),
        ]

    def texts(self) -> dict[str, str]:
        """Return the text to copy from a page: the configuration."""
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
        """Return operators as text, those with the largest possible error first.

        Args:
            rows: Number of groups of operators; `None` for all.
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
                *self._measured(),
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

    def _measured(self) -> list[str]:
        columns = ("bits", "KiB", *(("ms", "of float") if self.float_latency is not None else ()), "error")
        body = []
        for v in self.verified:
            speed = self._speed(v)
            times = () if speed is None else (f"{speed[0]:.4g}", f"{speed[1]:.3f}")
            fits = "yes" if v.fits else "no"
            body.append((v.name, f"{v.bits:.3f}", f"{v.size / 1024:,.1f}", *times, f"{v.error:.3g}", fits))
        return aligned(("measured", *columns, "fits"), body, right={*range(1, len(columns) + 1)})


__all__ = ["MIXED", "Choice", "Point", "Search", "Verified"]
