"""What a search found: a configuration, what else fits, and what more bits would buy."""

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
        size: bytes of their weights, in the budget's `output`.
        errors: estimated, of each candidate, in the order of `Search.candidates`: what their roundings would add.
        latencies: likewise, of a budget of latency: their part of a call, in milliseconds; otherwise empty.
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
        """Their modules in few words."""
        first, *others = self.operators
        return first + "".join(f", {other.rpartition('.')[2]}" for other in others)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best choice of one size, or of one latency where that is the budget.

    Attributes:
        bits: on average, of each weight that at least one candidate quantizes.
        size: bytes of all weights, or of the files of the budget's `output`.
        error: estimated, on data that calibrates.
        latency: estimated milliseconds of a call; `None` unless the budget is a latency.
    """

    bits: float
    size: int
    error: float
    latency: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verified(Point):
    """A configuration that was really quantized, and measured on validation data.

    That calibrates nothing and decides among the configurations tried.

    Attributes:
        name: of the candidate, or `"mixed"`.
        error: measured; infinite if an output is not finite that is so in float.
        latency: measured milliseconds of a call; `None` unless the budget is a latency.
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
        metric: `"error"`, squared over the square of the float outputs, `"kl"`, in nats, or the name of a function.
        candidates: their names.
        verified: what was really quantized and measured, the winner first.
        curve: from the smallest size, or latency, to the largest, each better than those before.
        choices: of each group of operators that could be chosen for, in graph order.
        samples: that errors were estimated on.
        verified_on: samples that were measured on.
        float_latency: milliseconds of a call of the float model; `None` unless the budget is a latency.
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
    float_latency: float | None = None
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
        facts = {
            "budget": str(self.budget),
            "winner": self.winner,
            "error, measured": format_error(self.found.error, self.metric),
            "bits per weight": f"{self.found.bits:.3f}",
            "weights": f"{self.found.size / 1024:,.1f} KiB",
        }
        if (speed := self._speed(self.found)) is not None:
            facts["latency, measured"] = "{:.4g} ms, {:.3f} times that of float".format(*speed)
        return facts

    def _speed(self, one: Point) -> tuple[float, float] | None:
        """Return milliseconds, and the share of what float takes; `None` unless the budget is a latency."""
        if self.float_latency is None or one.latency is None:
            return None
        return one.latency, one.latency / self.float_latency

    def _across(self, one: Point) -> float:
        """Return what the curve has from left to right."""
        return one.bits if one.latency is None else one.latency

    def figures(self) -> dict[str, Figure]:
        """Return figures for notebooks by name: `"curve"`, the error by bits or latency, and `"bits"` by operator.

        Raises:
            QuarkError: without matplotlib.
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
        """Return what a page lists: what was measured, operators, and the curve."""
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
            Table("What operators get", ("operators", "candidate", "weight", "bits", "KiB", *errors, *times), choices),
            Table("The curve", ("bits", "KiB", *speed, "error"), curve),
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
                *self._measured(),
                "",
                self.table(),
                "",
                f"measured: on {self.verified_on} samples of {_VALIDATION}.",
                f"errors of operators: what their roundings would add, estimated on {self.samples} samples.",
                *([f"latency: float takes {self.float_latency:.4g} ms a call."] if self.float_latency else []),
                "",
                self.to_yaml().rstrip(),
            ]
        )

    def _verdict(self) -> str:
        what = f"{self.winner}, as good as any mixture that was found" if self.uniform else MIXED
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
