"""Where the error of a quantized model comes from, and what to do about it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import Override, QuantConfig
from quark_fx.graph.pass_manager import GraphPass, Stage, pass_stage
from quark_fx.plan.report import aligned
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from quark_fx.plan.page import Table


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the configuration, and what it gains.

    Attributes:
        what: in a few words.
        gain: the error it takes away, estimated.
        measured: the same, measured; `None` where it was not.
        exclude: patterns that it adds to the configuration.
        overrides: likewise.
        passes: that it adds, behind those on the float graph.
    """

    what: str
    gain: float
    measured: float | None = None
    exclude: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    passes: tuple[GraphPass, ...] = ()

    def applied(self, config: QuantConfig) -> QuantConfig:
        """Return the configuration with the change.

        Raises:
            ConfigError: if the target refuses it.
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
        """The gain, measured where it was."""
        return self.gain if self.measured is None else self.measured


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What the roundings of one operator add to the error.

    A value that several quantized operators read counts to them in equal parts, and one that none of them reads to the
    operator that makes it.

    Attributes:
        name: module path.
        kind: operator family.
        place: in graph order, from 0.
        weight: estimated error that rounding its weight and bias makes.
        activation: estimated error that rounding its activations makes.
        alone: measured error where nothing else is rounded; `None` where it was not measured.
        remedies: what would help, the one to take first; empty where nothing was tried.
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
        """The estimated error of all its roundings."""
        return self.weight + self.activation

    @property
    def in_float(self) -> Remedy | None:
        """Leaving it in float, if that was tried: what it was estimated and measured to gain."""
        return next((remedy for remedy in self.remedies if remedy.exclude), None)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Where the error of a configuration comes from; `str(analysis)` is a table. See `quark_fx.analyze`.

    Attributes:
        metric: `"error"`, squared over the square of the float outputs, `"kl"`, in nats, or the name of a function.
        error: of the configuration, measured.
        rows: every operator that rounds something, the one that adds most first. They add up to `error`.
        config: with remedies of the operators that were looked at, each measured to help, to paste: `to_yaml`. One is
            left in float only if it adds half more than operators do on average.
        remedied: error of `config`, measured.
        advice: What else would help: another round of `analyze`, or 16-bit activations.
        preset: the name of the configuration that was analyzed, empty if it has none.
        samples: that errors are measured on.
        seconds: what it took, capturing the model left out.
        forward_seconds: what the float model takes for the samples.
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
        """Signal to quantization noise of the outputs, dB; NaN unless `metric` is `"error"`."""
        return _decibel(self.error) if self.metric == "error" else math.nan

    def to_yaml(self) -> str:
        """Return `config` as text for `QuantConfig.from_yaml`: what differs from the preset it started from."""
        return yaml_of(self.config, self.preset)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the configuration as `to_yaml` has it."""
        rows = [asdict(row) | {"remedies": [self._plain(r) for r in row.remedies]} for row in self.rows]
        plain = {key: getattr(self, key) for key in ("metric", "error", "remedied", "samples", "seconds")}
        plain |= {"forward_seconds": self.forward_seconds, "advice": [*self.advice]}
        return plain | {"rows": rows, "config": yaml.safe_load(self.to_yaml())}

    @staticmethod
    def _plain(remedy: Remedy) -> dict[str, Any]:
        return {"what": remedy.what, "gain": remedy.gain, "measured": remedy.measured}

    def facts(self) -> dict[str, str]:
        """Return what to know first, for a page."""
        weight, activation, _ = self._parts(self.rows)
        return {
            **({"configuration": self.preset} if self.preset else {}),
            "error": format_error(self.error, self.metric),
            "from weights": weight,
            "from activations": activation,
            "with the proposed configuration": format_error(self.remedied, self.metric),
            **({"what else would help": "; ".join(self.advice)} if self.advice else {}),
        }

    def figures(self) -> dict[str, Figure]:
        """Return figures by name: `"error"` by operator and `"build_up"` through the graph; for notebooks, too.

        Raises:
            QuarkError: without matplotlib.
        """
        from quark_fx.plan.page import bars, build_up

        def shares(rows: Sequence[Contribution]) -> tuple[list[str], list[float]]:
            return [row.name for row in rows], [100 * row.error / (self.error or 1.0) for row in rows]

        placed = sorted(self.rows, key=lambda row: row.place)
        return {
            "error": bars("Error by operator, estimated", *shares(self.rows), "% of the error of the outputs"),
            "build_up": build_up("How the error builds up", *shares(placed), "% of the error"),
        }

    def tables(self) -> list[Table]:
        """Return what a page lists: operators, with what was tried."""
        from quark_fx.plan.page import Table

        share = 100 / (self.error or 1.0)
        header = ("operator", "op", "place", "weight %", "activations %", "error %", "alone %, measured", "remedies")
        rows = [
            (
                *(row.name, row.kind, row.place, row.weight * share, row.activation * share, row.error * share),
                None if row.alone is None else row.alone * share,
                ", ".join(f"{remedy.what} ({self._gain(remedy)})" for remedy in row.remedies),
            )
            for row in self.rows
        ]
        return [Table("Where the error comes from", header, rows)]

    def texts(self) -> dict[str, str]:
        """Return what a page has to copy: the configuration."""
        return {"Proposed configuration": self.to_yaml()}

    @checked_call
    def html(self, path: str | Path) -> None:
        """Write one page that needs nothing else; `Report.html(path, analysis)` has it with the report of a model.

        Raises:
            QuarkError: without matplotlib (`pip install 'quark_fx[report]'`), or if the file cannot be written.
        """
        from quark_fx.plan.page import write_page

        write_page(
            path, "Where the error comes from", self.facts(), [*self.figures().values()], self.tables(), self.texts()
        )

    def table(self, rows: int | None = 12) -> str:
        """Return operators and remedies as text.

        Args:
            rows: how many operators, `None` for all.
        """
        header = ("operator", "op", "weight", "activations", "error", "alone", "in float", "remedy")
        body = [self._line(row) for row in self.rows[:rows]]
        left = self.rows[len(body) :]
        if left:
            body.append((f"{len(left)} more", "", *self._parts(left), "", "", ""))
        return "\n".join(aligned(header, body, right={2, 3, 4, 5, 6}))

    def _line(self, row: Contribution) -> tuple[str, ...]:
        tried, best = row.in_float, row.remedies[0] if row.remedies else None
        remedy = "" if best is None else f"{best.what} ({self._gain(best)})"
        gain = "-" if tried is None else self._share(-tried.best_known)
        alone = "-" if row.alone is None else self._share(row.alone)
        return (row.name, row.kind, *self._parts([row]), alone, gain, remedy)

    def _parts(self, rows: Any) -> tuple[str, str, str]:
        weight, activation = sum(row.weight for row in rows), sum(row.activation for row in rows)
        return self._share(weight), self._share(activation), self._share(weight + activation)

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
                "weight, activations, error: estimated shares. alone: with nothing else rounded; in float: what",
                "leaving it in float changes; both measured.",
                *(textwrap.fill(line, 120) for line in self.advice),
                f"with this configuration the error is {format_error(self.remedied, self.metric)} "
                f"({self._share(self.remedied - self.error)}, measured):",
                "",
                self.to_yaml().rstrip(),
            ]
        )


def yaml_of(config: QuantConfig, preset: str) -> str:
    """Return a configuration as YAML: what differs from a preset, or all of it if `preset` is empty."""
    data = config.to_dict()
    if preset:
        known = PRESETS[preset].to_dict()
        emptied: dict[str, Any] = {
            key: [] if isinstance(value, list) else None for key, value in known.items() if key not in data
        }
        data = {"preset": preset} | {key: value for key, value in data.items() if known.get(key) != value} | emptied
    return yaml.safe_dump(data, sort_keys=False)


UNITS: Final = {"error": "of the outputs' square", "kl": "nats"}
"""Units of errors by metric; a user's metric has none."""


def format_error(error: float, metric: str) -> str:
    """Return an error as text, with its unit or the name of a user's metric."""
    decibel = f", {_decibel(error):.1f} dB" * (metric == "error")
    return f"{error:.3g} {UNITS.get(metric, f'({metric})')}{decibel}"


def _decibel(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf


__all__ = ["UNITS", "Analysis", "Contribution", "Remedy", "format_error", "yaml_of"]
