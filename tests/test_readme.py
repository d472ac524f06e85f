"""The README keeps its word: its Python runs, its names exist, its first example prints what it shows."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quark_fx.observers import OBSERVERS
from quark_fx.pass_manager import PASSES
from quark_fx.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_every_python_block_runs_after_the_ones_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quark_fx.observers.base.OBSERVERS", dict(OBSERVERS))
    monkeypatch.setattr("quark_fx.pass_manager.PASSES", dict(PASSES))
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    blocks = [text for language, text in BLOCKS if language == "python"]
    assert len(blocks) == README.count("```python")
    for text in blocks:
        exec(compile(text, f"README.md, {text.splitlines()[0]!r}", "exec"), module.__dict__)
    assert (tmp_path / "model.onnx").is_file()
    assert (tmp_path / "quantized").is_dir()


def test_every_preset_has_its_row() -> None:
    assert re.findall(r"^\| `([a-z0-9_]+)` \|", README, re.MULTILINE) == list(PRESETS)


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_command_installs_an_extra_that_exists_and_runs_a_file_that_exists() -> None:
    commands = [text for language, text in BLOCKS if language == "bash"]
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"-e \"\.\[(\w+)\]\"", "".join(commands))
    assert len(extras) == len(commands) == 2
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    assert all((ROOT / file).is_file() for file in re.findall(r"python (\S+\.py)", "".join(commands)))


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers depend on the processor's order of additions; everything else is the same."""
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))["main"](tmp_path)
    (shown,) = [text for language, text in BLOCKS if language == "text"]
    printed = capsys.readouterr().out
    assert words(printed) == words(shown)
    accuracies = re.findall(r"(\d+\.\d+)%", printed)
    assert len(accuracies) == 4
    assert all(float(a) > 96 for a in accuracies)


def words(text: str) -> list[str]:
    """Return the words of a text without its numbers."""
    return re.findall(r"[a-z_]+\d*\b", re.sub(r"\d+\.\d+(e[+-]\d+)?", "", text))
