"""The examples run, on small models, and the pages about them show what they print."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quark_fx.graph.pass_manager import PASSES
from quark_fx.observers import OBSERVERS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def printed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return what an example prints; its page shows nothing that begins otherwise."""
    name, options = request.param
    monkeypatch.syspath_prepend(ROOT / "examples")  # where one that is run finds the others
    monkeypatch.setattr("quark_fx.observers.base.OBSERVERS", dict(OBSERVERS))
    monkeypatch.setattr("quark_fx.graph.pass_manager.PASSES", dict(PASSES))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, example)  # where dataclasses look their annotations up
    spec.loader.exec_module(example)
    example.main(tmp_path, **options)
    found = capsys.readouterr().out
    page = (ROOT / "docs" / f"journey_{name}.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    beginnings = {line.split()[0] for line in found.splitlines() if line.split()}
    assert {line.split()[0] for line in shown.splitlines() if re.match(r"[a-z]", line, re.IGNORECASE)} <= beginnings
    return found


@pytest.mark.parametrize("printed", [("huggingface", {"small": True})], indirect=True, ids=["small"])
def test_a_language_model_answers_the_same_as_a_checkpoint_and_in_onnx_runtime(printed: str) -> None:
    assert "model: a small Llama with random weights" in printed
    answers = dict(re.findall(r"^(int4|checkpoint|ONNX Runtime) +(['\"].*)$", printed, re.MULTILINE))
    assert len(answers) == 3
    assert len(set(answers.values())) == 1
    divergence = {name: float(kl) for name, kl in re.findall(r"^(\w+) +perplexity .* KL ([\d.]+)$", printed, re.M)}
    assert 0 == divergence["float"] < divergence["int4"] == divergence["checkpoint"]


@pytest.mark.parametrize("printed", [("deploy", {"epochs": 2})], indirect=True, ids=["short"])
def test_a_network_is_exact_in_onnx_runtime_and_on_processors_without_vnni(printed: str) -> None:
    (steps,) = re.findall(r"in steps: ([\d.]+)", printed)
    assert float(steps) <= 1
    nodes = {
        target: int(count) for target, count in re.findall(r"^target='(\w+)': (\d+) nodes can be wrong", printed, re.M)
    }
    assert nodes["onnx"] == 0 < nodes["onnx_vnni"]


@pytest.mark.parametrize("printed", [("research", {"small": True})], indirect=True, ids=["small"])
def test_a_sweep_compares_a_solver_and_an_observer_with_those_of_the_package(printed: str, tmp_path: Path) -> None:
    rows = {
        name: (float(a), float(b))
        for name, a, b in re.findall(r"^(.+?)  +int2 ([\d.]+)  int4 ([\d.]+)$", printed, re.M)
    }
    assert rows.keys() == {"to nearest", "ShrinkAll", "FitScales", "GPTQ"}
    assert all(two < four for two, four in rows.values())
    assert rows["ShrinkAll"] != rows["to nearest"]
    assert len(re.findall(r"uint8 0\.\d+$", printed, re.MULTILINE)) == 4
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
