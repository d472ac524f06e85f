"""The page of a report: one file that needs nothing else, readable at five operators and at 5,000."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tiny import cnn, images, quantize

import quark_fx as qfx
from quark_fx.analysis.report import Analysis, Contribution, Remedy
from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import Change, PassRecord
from quark_fx.plan.report import Histogram, Report, Row
from quark_fx.presets import preset

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""A browser that shows pages without a screen."""


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.count: dict[str, int] = {}
        self.tables: dict[str, list[list[object]]] = {}
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self._title = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.loads.append(str(value))

    def handle_data(self, data: str) -> None:
        tag = self._open[-1] if self._open else ""
        if tag == "h2":
            self._title = data
        elif tag == "script" and data.startswith("{"):
            found = json.loads(data)
            self.tables[self._title] = [found["header"], *found["rows"]]
        elif tag in ("pre", "dd", "dt"):
            self.texts[self._title if tag == "pre" else tag] = self.texts.get(tag, "") + data

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass


def report(count: int, name: str = "layers.{}.proj") -> Report:
    """Return a report of `count` operators, every fifth in float."""
    rows = tuple(
        Row(
            name=name.format(i),
            kind="linear",
            weight="" if i % 5 == 4 else "int8 channel",
            sqnr=None if i % 5 == 4 else 20 + i % 37,
            bytes_before=4096,
            bytes_after=4096 if i % 5 == 4 else 1040,
            reason="excluded by 'head'" if i % 5 == 4 else "",
            parameter=f"p{i}",
        )
        for i in range(count)
    )
    changes = tuple(
        Change(row.name, "skipped: no site" if i % 2 else "scaled", not i % 2, 0.5, 0.1) for i, row in enumerate(rows)
    )
    return Report(rows, (PassRecord("SmoothQuant", count // 2, 1.5, changes), PassRecord("loaded", 0, float("nan"))))


def analysis(count: int) -> Analysis:
    """Return an analysis of `count` operators."""
    remedy = Remedy(what="float", gain=0.1, measured=0.2, exclude=("layers.0.proj",))
    rows = [
        Contribution(name=f"layers.{i}.proj", kind="linear", place=i, weight=1 / count / (1 + i % 7), activation=0.0)
        for i in range(count)
    ]
    rows[0] = replace(rows[0], alone=0.1, remedies=(remedy,))
    config = preset("int8_static").replace(exclude=("layers.0.proj",))
    ranked = tuple(sorted(rows, key=lambda row: -row.error))
    return Analysis(error=1.0, rows=ranked, config=config, remedied=0.5, preset="int8_static", samples=32)


def test_a_page_needs_nothing_else_and_has_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report(5).html(tmp_path / "page.html", analysis(5))
    page = Page(tmp_path / "page.html")
    assert not page.loads
    assert not re.findall(r"@import|url\((?!#)", page.source)
    assert len(page.ids) == len(set(page.ids))
    assert page.count["figure"] == page.count["svg"] == 5
    titles = ["Error by operator", "Operators", "Passes", "Changes by passes", "Skipped, with reasons"]
    assert list(page.tables) == titles
    assert [len(page.tables[title]) - 1 for title in titles] == [5, 5, 2, 3, 3]
    assert page.tables["Passes"][2][2] is None  # the seconds of a loaded model
    assert qfx.QuantConfig.from_yaml(page.texts["Proposed configuration"]) == analysis(5).config
    assert "4 of 5 operators" in page.source
    assert "layers.4.proj" in page.source


def test_a_page_of_5000_operators_is_small_and_quick(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report(5).html(tmp_path / "page.html")  # imports, fonts
    start = time.process_time()
    report(5000).html(tmp_path / "page.html", analysis(5000))
    assert time.process_time() - start < 10
    page = Page(tmp_path / "page.html")
    assert len(page.source) < 3_000_000
    assert len(page.tables["Operators"]) == 5001
    drawn = page.source[: page.source.index("</main>")]
    assert len(set(re.findall(r">…?[^<]*\.proj<", drawn))) <= 3 * 25 + 3
    assert drawn.count("largest of") == 3
    assert len(drawn) < 400_000


def test_a_page_names_model_configuration_target_and_version(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    qmodel = quantize(cnn(), "int8_static", images())
    replace(qmodel.report(), draws={"y": "aten.rand.default at %rand"}).html(tmp_path / "page.html")
    texts = Page(tmp_path / "page.html").texts
    names, values = texts["dt"], texts["dd"]
    assert names.startswith("modelconfigurationtarget")
    assert names.endswith("quark_fx")
    assert values.startswith(f"{type(cnn()).__name__}int8_staticonnx")
    assert "aten.rand.default at %rand draws random numbers" in values
    assert values.endswith(qfx.__version__)
    changed = quantize(cnn(), qfx.presets.INT8_STATIC.replace(exclude=("head",)), images()).report()
    assert changed.about["configuration"] == "no preset, weights int8 channel"


def test_names_are_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = "</script><script>alert({})</script>"
    report(5, name).html(tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.count["script"] == 5  # of four tables, and the page's own
    assert page.tables["Operators"][1][0] == name.format(0)


class WithoutCache:
    """matplotlib where it may write nowhere."""

    def __getattr__(self, name: str) -> object:
        raise PermissionError("not writable")


def test_what_cannot_be_drawn_or_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(QuarkError, match=r"pip install 'quark_fx\[report\]'"):
            report(5).html(tmp_path / "page.html")
    pytest.importorskip("matplotlib")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", WithoutCache())
        with pytest.raises(
            QuarkError, match="cannot make a folder for its cache: not writable; set MPLCONFIGDIR to a writable folder"
        ):
            report(5).html(tmp_path / "page.html")
    with pytest.raises(QuarkError, match=r"cannot be written: .*; create its directory, or choose another path"):
        report(5).html(tmp_path / "missing" / "page.html")


def test_an_observer_that_counts_leaves_its_histogram_and_range() -> None:
    data = images(8, 8)
    assert not quantize(cnn(), "int8_static", data).report().histograms
    qmodel = quantize(cnn(), "int8_static_mse", data)
    found = {h.name: h for h in qmodel.report().histograms}
    image = torch.cat(data)
    assert sum(found["x"].counts) == image.numel()
    assert found["x"].edges[0] <= float(image.min()) + 0.05
    low, high = found["x"].low, found["x"].high
    scale = stored_tensors(qmodel.graph_module)["x_quantizer_scale"]
    assert high - low == pytest.approx(255 * float(scale), rel=1e-5)
    outside = ((image < low) | (image > high)).double().mean()
    assert found["x"].clipped == pytest.approx(float(outside), abs=1 / 64)
    assert qmodel.with_graph(qmodel.graph_module).report().histograms == qmodel.report().histograms


def test_histograms_that_are_clipped_most_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    found = tuple(Histogram(f"v{i}", (0.0, 1.0, 2.0, 3.0), (5.0, 5.0, float(i)), 0.0, 2.2) for i in range(40))
    figure = Report((), (), found).figures()["histograms"]
    names = [axes.get_title().split()[0] for axes in figure.axes]
    assert names == [f"v{i}" for i in range(39, 27, -1)]
    assert found[10].clipped == 0.5


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
@pytest.mark.parametrize("count", [5, 5000])
def test_a_browser_shows_rows_that_match_a_filter_in_order(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "page.html"
    report(count).html(path)
    assert [cells[0] for cells in shown(path)] == [f"layers.{i}.proj" for i in range(min(count, 25))]
    asked = 'const input = document.querySelector("input"); input.value = "excluded"; input.oninput();'
    sort = "document.querySelector('th').onclick();"
    path.write_text(path.read_text().replace("</body>", f"<script>{asked}{sort}</script></body>"))
    kept = sorted((f"layers.{i}.proj" for i in range(4, count, 5)), reverse=True)
    assert [cells[0] for cells in shown(path)] == kept[:25]


def shown(path: Path) -> Iterator[list[str]]:
    """Return the cells of the first table, line by line, as a browser has them."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command = [CHROMIUM, *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (table, *_) = re.findall(r"<table>.*?</table>", done.stdout, re.DOTALL)
    lines = re.findall(r"<tr>(.*?)</tr>", table.partition("</thead>")[2], re.DOTALL)
    return iter([re.findall(r"<td[^>]*>(.*?)</td>", line) for line in lines])
