"""One self-contained HTML page of charts and tables, readable with five rows and with thousands."""

from __future__ import annotations

import html
import io
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_fx.errors import QuarkError
from quark_fx.plan.table import SHOWN, Table
from quark_fx.system.writable import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from quark_fx.plan.report import Histogram

_HISTOGRAMS = 12
"""Number of histograms drawn."""

_STEP = 0.05
"""Smallest share of the sum at which a step gets a label."""

_BLUE, _GRAY, _INK = "#2563a8", "#c3c9d1", "#333a44"


def bars(title: str, names: Sequence[str], values: Sequence[float], unit: str, before: Sequence[float] = ()) -> Figure:
    """Return a bar chart of the largest values, largest first.

    Args:
        title: Title of the chart.
        names: Name of each value.
        values: Lengths of the bars.
        unit: Unit of the values.
        before: Earlier values, drawn as a second bar for each name; if given, the largest earlier values are selected.
    """
    keys = before or values
    order = sorted(range(len(values)), key=lambda i: -abs(keys[i]))[:SHOWN]
    figure, axes = _axes(title, 0.6 + 0.24 * max(1, len(order)))
    places = range(len(order))
    if before:
        axes.barh(places, [before[i] for i in order], height=0.78, color=_GRAY, label="float")
    axes.barh(places, [values[i] for i in order], height=0.46 if before else 0.7, color=_BLUE, label="quantized")
    axes.set_yticks(places, [_short(names[i]) for i in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlabel(unit)
    if before:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2, fontsize=8)
    if len(values) > len(order):
        axes.set_title(f"the {len(order)} largest of {len(values)}", loc="right", fontsize=9, color=_INK)
    return figure


def build_up(title: str, names: Sequence[str], values: Sequence[float], unit: str) -> Figure:
    """Return a chart of the running sum of values, with the names of the largest steps.

    Args:
        title: Title of the chart.
        names: Name of each value, in graph order.
        values: Steps.
        unit: Unit of the sum.
    """
    figure, axes = _axes(title, 2.8)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    axes.step(range(len(sums)), sums, where="post", color=_BLUE, linewidth=1.5)
    axes.set_xlabel("operators, in graph order")
    axes.set_ylabel(unit)
    for i in sorted(range(len(values)), key=lambda i: -values[i])[:3]:
        if values[i] < _STEP * sums[-1]:
            break
        on_left = i > len(values) / 2
        axes.annotate(
            _short(names[i]),
            (i + 1, (sums[i] + sums[i + 1]) / 2),
            (-6 if on_left else 6, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=8,
            color=_INK,
        )
    return figure


def frontier(
    title: str,
    curve: Sequence[tuple[float, float]],
    marks: Mapping[str, tuple[float, float]],
    across: str,
    up: str,
) -> Figure:
    """Return a chart of an estimated curve and measured points with labels.

    Args:
        title: Title of the chart.
        curve: Points, from left to right.
        marks: Measured points, keyed by label.
        across: Label of the x axis.
        up: Label of the y axis, which is logarithmic if all values are above zero.
    """
    figure, axes = _axes(title, 2.8)
    axes.plot(*zip(*curve, strict=True), color=_BLUE, linewidth=1.2, marker="o", markersize=3, label="estimated")
    axes.plot(
        *zip(*marks.values(), strict=True), color=_INK, marker="D", markersize=5, linestyle="none", label="measured"
    )
    for name, place in marks.items():
        axes.annotate(_short(name), place, (6, 4), textcoords="offset points", fontsize=8, color=_INK)
    axes.legend(frameon=False, fontsize=8)
    if all(y > 0 for _, y in [*curve, *marks.values()]):
        axes.set_yscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def histograms(title: str, found: Sequence[Histogram]) -> Figure:
    """Return a chart of the histograms with the most clipping, each with its representable range."""
    shown = sorted(found, key=lambda h: -h.clipped)[:_HISTOGRAMS]
    lines = -(-len(shown) // 3)
    figure = _figure(title, 0.4 + 1.6 * lines)
    for place, histogram in enumerate(shown):
        axes = figure.add_subplot(lines, 3, place + 1)
        axes.stairs(
            [max(count, 0.5) for count in histogram.counts], histogram.edges, fill=True, color=_GRAY, baseline=0.5
        )
        axes.set_yscale("log")
        for end in (histogram.low, histogram.high):
            axes.axvline(end, color=_BLUE, linewidth=1.2)
        axes.set_title(f"{_short(histogram.name, 26)}  {histogram.clipped:.2%}", fontsize=8, color=_INK)
        axes.tick_params(labelsize=7, colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_page(
    path: str | Path,
    title: str,
    facts: Mapping[str, str],
    figures: Sequence[Figure],
    tables: Sequence[Table[Any]],
    texts: Mapping[str, str],
) -> None:
    """Write a page that loads no other files and names the version of this package.

    Args:
        path: Path of the file.
        title: Title of the page.
        facts: Summary at the top.
        figures: Matplotlib charts, drawn as SVG.
        tables: Tables below the charts, with a filter and a choice of the number of rows.
        texts: Texts to copy, keyed by title.

    Raises:
        QuarkError: If the file cannot be written.
    """
    facts = {**facts, "quark_fx": sys.modules["quark_fx"].__version__}
    tiles = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items())
    drawn = "".join(f"<figure>{_svg(figure, i)}</figure>" for i, figure in enumerate(figures))
    listed = "".join(table.html() for table in tables)
    copied = "".join(f"<h2>{html.escape(k)}</h2><pre>{html.escape(v)}</pre>" for k, v in texts.items())
    name = html.escape(title)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><dl>{tiles}</dl><main>{drawn}</main>{copied}{listed}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
    write_text(Path(path), text)


def _figure(title: str, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise QuarkError("charts need matplotlib: pip install 'quark_fx[report]'") from error
    except OSError as error:
        raise QuarkError(
            f"matplotlib cannot make a folder for its cache: {error}; set MPLCONFIGDIR to a writable folder"
        ) from error
    figure = Figure(figsize=(7, height + 0.7), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    return figure


def _axes(title: str, height: float) -> tuple[Figure, Any]:
    figure = _figure(title, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=_INK)
    return figure, axes


def _short(name: str, longest: int = 38) -> str:
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def _svg(figure: Figure, number: int) -> str:
    """Return a chart as SVG with identifiers that are unique on the page."""
    from matplotlib import rc_context  # pyright: ignore[reportMissingImports]

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": f"quark_fx {number}"}):
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    text = re.sub(r' id="(?!\w{11}")', f' id="f{number}_', text)  # except link targets, which are hashed
    return text[text.index("<svg") :]


_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #333a44; background: #fff; max-width: 1200px }
body { margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .4em }
dl { display: flex; flex-wrap: wrap; gap: .6em }
dl div { border: 1px solid #dde1e6; border-radius: 6px; padding: .4em .9em }
dt { font-size: .8em; color: #69717d } dd { margin: 0; font-size: 1.25em }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(30em, 1fr)); gap: 1em; align-items: start }
pre { background: #f6f7f9; border-radius: 6px; padding: .8em 1em; overflow-x: auto }
figure { margin: .6em 0 } figure svg { max-width: 100%; height: auto }
section { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .9em }
td, th { text-align: left; padding: .25em .7em; border-bottom: 1px solid #e8ebee; vertical-align: top }
th { cursor: pointer; white-space: nowrap; background: #f6f7f9 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
input { padding: .25em .5em; width: 20em } span { color: #69717d }
"""

_SCRIPT = """
for (const section of document.querySelectorAll("section")) {
  const { header, rows } = JSON.parse(section.querySelector("script").textContent);
  const [input, select, count, table] = ["input", "select", "span", "table"].map(name => section.querySelector(name));
  const texts = rows.map(row => row.join("\\n").toLowerCase());
  const said = value => value === null ? "-" : typeof value !== "number" ? value
    : Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
  const numbers = header.map((_, i) => rows.some(row => typeof row[i] === "number"));
  let column = -1, sign = 1;
  const draw = () => {
    const wanted = input.value.toLowerCase();
    const found = rows.filter((row, i) => texts[i].includes(wanted));
    if (column >= 0) found.sort((a, b) => {
      const [x, y] = [a[column], b[column]];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    });
    const shown = found.slice(0, Number(select.value));
    count.textContent = `${shown.length} of ${found.length}`;
    const head = table.createTHead(); head.replaceChildren();
    const line = head.insertRow();
    header.forEach((name, i) => {
      const cell = document.createElement("th");
      if (numbers[i]) cell.className = "n";
      cell.textContent = name + (i === column ? (sign < 0 ? " ▼" : " ▲") : "");
      cell.onclick = () => { sign = i === column ? -sign : -1; column = i; draw(); };
      line.append(cell);
    });
    const body = document.createElement("tbody");
    for (const row of shown) {
      const line = body.insertRow();
      row.forEach((value, i) => {
        const cell = line.insertCell();
        cell.textContent = said(value);
        if (numbers[i]) cell.className = "n";
      });
    }
    for (const old of table.tBodies) old.remove();
    table.append(body);
  };
  input.oninput = select.onchange = draw;
  draw();
}
"""

__all__ = ["bars", "build_up", "frontier", "histograms", "write_page"]
