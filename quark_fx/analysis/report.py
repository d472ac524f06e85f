"""Results of `analyze`: contributions of operators to the error, and remedies."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import Override, QuantConfig
from quark_fx.graph.pass_manager import GraphPass, Stage, pass_stage
from quark_fx.plan.table import Column, Table
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the configuration, and its reduction of the error.

    Attributes:
        what: Description in a few words.
        gain: Estimated reduction of the error.
        measured: Measured reduction of the error; `None` if it was not measured.
        exclude: Patterns to add to `exclude` of the configuration.
        overrides: Overrides to add.
        passes: Passes to add, after the passes on the float graph.
    """

    what: str
    gain: float
    measured: float | None = None
    exclude: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    passes: tuple[GraphPass, ...] = ()

    def applied(self, config: QuantConfig) -> QuantConfig:
        """Return `config` with the change.

        Raises:
            ConfigError: If the changed configuration is not valid, for example because of its target.
        """
        floats = [p for p in config.passes if pass_stage(p) is Stage.FLOAT]
        added = [p for p in self.passes if p not in config.passes]
        return config.replace(
            exclude=(*config.exclude, *(name for name in self.exclude if name not in config.exclude)),
            overrides=(*config.overrides, *(o for o in self.overrides if o not in config.overrides)),
            passes=(*floats, *added, *config.passes[len(floats) :]),
        )

    @property
    def best_known(self) -> float:
        """Measured gain if there is one; otherwise, the estimated gain."""
        return self.gain if self.measured is None else self.measured


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Contribution of one operator to the error.

    The error of a value with several quantized consumers is divided equally among them. If a value does not have any,
    its error is attributed to the operator that computes the value.

    Attributes:
        name: Path of the operator's module.
        kind: Operator kind.
        place: Index of the operator in graph order, from 0.
        weight: Estimated error from rounding the operator's weight and bias.
        activation: Estimated error from rounding the operator's activations.
        alone: Measured error with only this operator rounded; `None` if it was not measured.
        remedies: Remedies, the recommended one first; empty if none was tried.
    """

    name: str
    kind: str
    place: int
    weight: float
    activation: float
    alone: float | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def error(self) -> float:
        """Estimated error from rounding the operator's weight, bias, and activations."""
        return self.weight + self.activation

    @property
    def in_float(self) -> Remedy | None:
        """Remedy that leaves the operator in float; `None` if it was not tried."""
        return next((remedy for remedy in self.remedies if remedy.exclude), None)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Result of `quark_fx.analyze`: the error of a configuration by operator; `str(analysis)` is a table.

    Attributes:
        metric: `"error"`, the squared error relative to the square of the float outputs; `"kl"`, in nats; or the name
            of a function.
        error: Measured error of the configuration.
        rows: Contributions of all operators with rounded values, the largest first; they add up to `error`.
        config: Proposed configuration, with remedies that reduced the measured error. An operator stays in float only
            if its contribution is at least 1.5 times the average.
        remedied: Measured error of `config`.
        advice: Further proposals: another round of `analyze`, or 16-bit activations.
        preset: Name of the preset that was analyzed; empty for other configurations.
        samples: Number of samples on which errors were measured.
        seconds: Duration of the analysis in seconds, without the capture of the model.
        forward_seconds: Duration of the float model's forward passes on the samples, in seconds.
    """

    metric: str = "error"
    error: float
    rows: tuple[Contribution, ...]
    config: QuantConfig
    remedied: float
    advice: tuple[str, ...] = ()
    preset: str = ""
    samples: int = 0
    seconds: float = field(default=math.nan, compare=False)
    forward_seconds: float = field(default=math.nan, compare=False)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio of the outputs in dB; NaN unless `metric` is `"error"`."""
        return _decibel(self.error) if self.metric == "error" else math.nan

    def to_yaml(self) -> str:
        """Return `config` as text for `QuantConfig.from_yaml`: differences from `preset`, or all fields without one."""
        return yaml_of(self.config, self.preset)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the configuration has the fields of `to_yaml`."""
        rows = [asdict(row) | {"remedies": [self._plain(r) for r in row.remedies]} for row in self.rows]
        plain = {key: getattr(self, key) for key in ("metric", "error", "remedied", "samples", "seconds")}
        plain |= {"forward_seconds": self.forward_seconds, "advice": [*self.advice]}
        return plain | {"rows": rows, "config": yaml.safe_load(self.to_yaml())}

    @staticmethod
    def _plain(remedy: Remedy) -> dict[str, Any]:
        return {"what": remedy.what, "gain": remedy.gain, "measured": remedy.measured}

    def facts(self) -> dict[str, str]:
        """Return the summary for a page, text by label."""
        weight, activation, _ = self._parts(self.rows)
        return {
            **({"configuration": self.preset} if self.preset else {}),
            "error": format_error(self.error, self.metric),
            "from weights": weight,
            "from activations": activation,
            "with the proposed configuration": format_error(self.remedied, self.metric),
            **({"further advice": "; ".join(self.advice)} if self.advice else {}),
        }

    def figures(self) -> dict[str, Figure]:
        """Return matplotlib plots: `"error"`, the error by operator, and `"build_up"`, the error through the graph.

        Raises:
            QuarkError: If matplotlib is not installed.
        """
        from quark_fx.plan.page import bars, build_up

        def shares(rows: Sequence[Contribution]) -> tuple[list[str], list[float]]:
            return [row.name for row in rows], [100 * row.error / (self.error or 1.0) for row in rows]

        placed = sorted(self.rows, key=lambda row: row.place)
        return {
            "error": bars("Error by operator, estimated", *shares(self.rows), "% of the error of the outputs"),
            "build_up": build_up("Error through the graph", *shares(placed), "% of the error"),
        }

    def tables(self) -> list[Table[Any]]:
        """Return the tables of a page: one, of operators and their remedies."""
        return [self.operators()]

    def operators(self, rows: int | None = None) -> Table[Contribution]:
        """Return the table of operators and remedies, with errors in percent of the whole error.

        As text, the table shows the first remedy of each operator.

        Args:
            rows: Number of operators to show; a last row sums the remaining operators. Default: all.
        """
        rest = self.rows[len(self.rows[:rows]) :]
        summed = [
            Contribution(
                name=f"{len(rest)} more",
                kind="",
                place=len(self.rows),
                weight=sum(row.weight for row in rest),
                activation=sum(row.activation for row in rest),
            )
        ]
        share = self._share_column
        return Table(
            "Error by operator",
            [
                Column("operator", lambda row: row.name),
                Column("op", lambda row: row.kind),
                share("weight", lambda row: row.weight),
                share("activations", lambda row: row.activation),
                share("error", lambda row: row.error),
                share("alone", lambda row: row.alone),
                share("in float", lambda row: None if row.in_float is None else -row.in_float.best_known),
                Column(
                    "remedies",
                    lambda row: ", ".join(map(self._remedy, row.remedies)),
                    lambda row: ", ".join(map(self._remedy, row.remedies[:1])),
                ),
            ],
            [*self.rows[:rows], *(summed if rest else [])],
        )

    def _share_column(self, title: str, error: Callable[[Contribution], float | None]) -> Column[Contribution]:
        """Return a column of errors as percentages of the whole error."""

        def percent(row: Contribution) -> float | None:
            value = error(row)
            return None if value is None else 100 * value / (self.error or 1.0)

        return Column(title, percent, lambda row: self._share(error(row) or 0.0))

    def texts(self) -> dict[str, str]:
        """Return the texts to copy from a page, by title: the proposed configuration."""
        return {"Proposed configuration": self.to_yaml()}

    @checked_call
    def html(self, path: str | Path) -> None:
        """Write one self-contained page; `Report.html(path, analysis)` adds it to the report of a model.

        Raises:
            QuarkError: If matplotlib is missing (`pip install 'quark_fx[report]'`), or the file cannot be written.
        """
        from quark_fx.plan.page import write_page

        write_page(path, "Error by operator", self.facts(), [*self.figures().values()], self.tables(), self.texts())

    def table(self, rows: int | None = 12) -> str:
        """Return the table of operators and remedies as text.

        Args:
            rows: Number of operators; `None` for all.
        """
        return "\n".join(self.operators(rows).lines())

    def _parts(self, rows: Any) -> tuple[str, str, str]:
        weight, activation = sum(row.weight for row in rows), sum(row.activation for row in rows)
        return self._share(weight), self._share(activation), self._share(weight + activation)

    def _remedy(self, remedy: Remedy) -> str:
        return f"{remedy.what} ({self._gain(remedy)})"

    def _gain(self, remedy: Remedy) -> str:
        return f"{self._share(-remedy.best_known)}{'' if remedy.measured is not None else ' estimated'}"

    def _share(self, error: float) -> str:
        share = 100 * error / self.error if self.error else 0.0
        return f"{share:.1f}%" if round(abs(share), 1) < 10 else f"{share:.0f}%"

    def __str__(self) -> str:
        weight, activation, _ = self._parts(self.rows)
        return "\n".join(
            [
                f"error {format_error(self.error, self.metric)}, on {self.samples} samples: "
                f"{weight} from weights, {activation} from activations",
                "",
                self.table(),
                "",
                "weight, activations, error: estimated shares. alone: error with only this operator rounded; in float:",
                "change of the error with this operator in float; both measured.",
                *(textwrap.fill(line, 120) for line in self.advice),
                f"with this configuration the error is {format_error(self.remedied, self.metric)} "
                f"({self._share(self.remedied - self.error)}, measured):",
                "",
                self.to_yaml().rstrip(),
            ]
        )


def yaml_of(config: QuantConfig, preset: str) -> str:
    """Return a configuration as YAML: the differences from a preset, or all fields if `preset` is empty."""
    data = config.to_dict()
    if preset:
        base = PRESETS[preset].to_dict()
        emptied: dict[str, Any] = {
            key: [] if isinstance(value, list) else None for key, value in base.items() if key not in data
        }
        data = {"preset": preset} | {key: value for key, value in data.items() if base.get(key) != value} | emptied
    return yaml.safe_dump(data, sort_keys=False)


UNITS: Final = {"error": "of the outputs' square", "kl": "nats"}
"""Units of errors by metric; metrics of users do not have a unit."""


def format_error(error: float, metric: str) -> str:
    """Return an error as text, with its unit, or the name of a user's metric."""
    decibel = f", {_decibel(error):.1f} dB" * (metric == "error")
    return f"{error:.3g} {UNITS.get(metric, f'({metric})')}{decibel}"


def _decibel(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf


__all__ = ["UNITS", "Analysis", "Contribution", "Remedy", "format_error", "yaml_of"]
