"""The examples run, on small models, and the pages about them show what they print."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import types
from collections import Counter
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let examples be imported, as where they are run."""
    monkeypatch.syspath_prepend(ROOT / "examples")


@pytest.fixture
def printed(
    request: pytest.FixtureRequest,
    examples: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Return what an example's notebook prints; its page shows nothing that begins otherwise."""
    name, options = request.param
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cells += [line.rstrip("\n") for line in cell["source"] if not line.startswith("%")]
        if "parameters" in cell["metadata"].get("tags", ()):
            cells += [f"{key} = {value!r}" for key, value in options.items()]
            cells.append(f"directory = Path({str(tmp_path)!r})")
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look their annotations up
    exec(compile("\n".join(cells), f"{name}.ipynb", "exec"), vars(module))
    found = capsys.readouterr().out
    page = (ROOT / "docs" / f"journey_{name}.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    beginnings = {line.split()[0] for line in found.splitlines() if line.split()}
    assert {line.split()[0] for line in shown.splitlines() if re.match(r"[a-z]", line, re.IGNORECASE)} <= beginnings
    return found


def is_main(statement: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(statement, ast.FunctionDef) and statement.name == "main"


def test_notebooks_are_the_scripts_in_cells(examples: None) -> None:
    writer = importlib.import_module("notebooks")
    for name in writer.NAMES:
        script = ROOT / "examples" / f"{name}.py"
        stored = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
        assert writer.without_outputs(stored) == writer.notebook(script), "run python examples/notebooks.py"
        # Each statement of the script is in one cell, and `main`'s in their order.
        code = ["".join(cell["source"]) for cell in stored["cells"] if cell["cell_type"] == "code"]
        statements = ast.parse(script.read_text(encoding="utf-8")).body[1:-1]
        expected = [part for s in statements for part in (s.body if is_main(s) else [s])]
        there = Counter(ast.unparse(s) for text in code for s in ast.parse(text.replace("%matplotlib", "#")).body)
        assert Counter(map(ast.unparse, expected)) <= there


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


def test_a_detector_finds_the_boxes_of_the_float_model(
    examples: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("detector").main(tmp_path)
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert re.sub(r"[\d.]+", "#", printed) == re.sub(r"[\d.]+", "#", shown)
    (integers, nodes, kernels), *_ = re.findall(r"^(\d+) of (\d+) nodes in integers \((\d+) QLinearConv", printed)
    assert int(kernels) == 23  # three stages, and ten convolutions of the head for each of two levels
    assert int(nodes) - int(integers) <= 2
    found = [(int(a), int(b)) for a, b in re.findall(r"(\d+) boxes in float, (\d+) of them", printed)]
    assert all(matched >= 0.75 * boxes for boxes, matched in found)
