"""The golden run finds each kind of difference between two commits, and none between two runs of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import golden


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    golden.record_case(golden.Case("cnn", "int8_static"), folder / "first")
    golden.record_case(golden.Case("cnn", "int8_static"), folder / "second")
    return folder


def _copies(recorded: Path, tmp_path: Path) -> tuple[Path, Path]:
    for side in ("first", "second"):
        shutil.copytree(recorded / side / "cnn__int8_static", tmp_path / side)
    return tmp_path / "first", tmp_path / "second"


def test_two_runs_of_one_commit_are_equal_in_every_aspect(recorded: Path, tmp_path: Path) -> None:
    before, after = _copies(recorded, tmp_path)
    assert golden.compared(before, after) == []
    aspects = {name.split(":")[0] for name in torch.load(before / "tensors.pt")}
    assert aspects >= {"tensors", "outputs", "loaded", "eager", "onnx qdq", "onnx qoperator"}
    texts = json.loads((before / "texts.json").read_text())
    assert texts.keys() >= {"graph", "report", "warnings", "onnx qdq: nodes", "onnx qdq: report", "checkpoint gptq"}


def test_one_code_that_moves_is_found(recorded: Path, tmp_path: Path) -> None:
    before, after = _copies(recorded, tmp_path)
    tensors = torch.load(after / "tensors.pt")
    tensors["tensors: stem.0.weight_codes"].flatten()[3] += 1
    torch.save(tensors, after / "tensors.pt")
    (found,) = golden.compared(before, after)
    assert found.aspect == "tensors"
    assert found.details == ("stem.0.weight_codes: 1 of 108 values, by at most 1",)


def test_a_changed_line_and_a_missing_aspect_are_found(recorded: Path, tmp_path: Path) -> None:
    before, after = _copies(recorded, tmp_path)
    texts = json.loads((after / "texts.json").read_text())
    texts["report"] = texts["report"].replace("int8 channel", "int4 channel", 1)
    del texts["graph"]
    (after / "texts.json").write_text(json.dumps(texts))
    found = {difference.aspect: difference.summary for difference in golden.compared(before, after)}
    assert found.keys() == {"report", "graph"}
    assert found["report"].startswith("2 lines")
    assert found["graph"].startswith("only before")


def test_a_process_that_died_is_a_difference(recorded: Path, tmp_path: Path) -> None:
    before, after = _copies(recorded, tmp_path)
    (after / "texts.json").unlink()
    (found,) = golden.compared(before, after)
    assert "after" in found.summary


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("took 1.25 s", "took 31 s"),
        ("/tmp/golden-ab12_x/qdq.onnx failed", "/tmp/golden-zz99/qdq.onnx failed"),
        ("at 0x7f3a12bc9d10", "at 0x7fffffffffff"),
        ("/work/before/quark_fx/graph/nodes.py:7", "/tmp/after/quark_fx/graph/nodes.py:7"),
    ],
)
def test_what_differs_between_two_runs_of_one_program_is_not_compared(before: str, after: str) -> None:
    assert golden.without_accidents(before) == golden.without_accidents(after)
    assert golden.without_accidents("scale 1.25") != golden.without_accidents("scale 1.26")


def test_the_order_of_nodes_that_onnx_runtime_adds_is_not_compared() -> None:
    names = ("ReorderOutput_token_9", "node_Conv_1", "ReorderOutput")
    before, after = ("\n".join(f"{name:<22}  no" for name in order) for order in (names, names[::-1]))
    assert before != after
    assert golden.without_order(before) == golden.without_order(after)
    assert golden.without_order(before) != golden.without_order(after.replace("node_Conv_1", "node_Conv_2"))
    assert golden.without_order(before) != golden.without_order(f"{before}\nReorderOutput_token_10  no")
