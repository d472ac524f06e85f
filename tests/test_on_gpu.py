"""The script for a real GPU runs from end to end on the pretend one, and with small shapes on the CPU."""

from __future__ import annotations

import ast
import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quark_fx
from benchmarks import on_gpu
from quark_fx.model.kernels.gpu_products import KERNELS

STEPS = {
    "pretend": ("device", "tests", "syncs", "triton", "AutoRound 1B", "plain GPTQ 8B", "kernels", "codes int8_static"),
    "cpu": ("w4a16_gptq 8B",),
}
"""What runs where: between them all kinds of steps."""

ABSENT = (
    *("PIL", "accelerate", "datasets", "gguf", "hypothesis", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "pandas"),
    *("rich", "scipy", "sklearn", "torchvision", "typer"),
)
"""Packages that a bare machine does not have."""


@pytest.mark.slow
@pytest.mark.parametrize("device", STEPS)
def test_the_script_runs(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, done = tmp_path / "results.jsonl", "w4a16_best 1B"
    on_gpu.append(results, {"step": done, "state": "done", "seconds": 1})
    if device == "cpu":
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the worker, which finds the repository
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--small", "--device", device, "--seconds", "500", "--results", str(results)]
    on_gpu.main([*options, "--only", done, *STEPS[device]])
    rows = on_gpu.read(results)
    assert [name for name in STEPS[device] if rows.get(name, {}).get("state") != "done"] == [], rows
    assert rows[done]["seconds"] == 1  # not run again
    if device == "pretend":
        assert rows["syncs"]["calibration"] == rows["syncs"]["forward int8_static"] == "no wait"
        assert rows["syncs"]["w4a16_gptq"]["waits and blocking copies"] > 0
        assert rows["codes int8_static"]["int8_static"]["same codes"] == 1
        assert (rows["tests"]["passed"] > 20, rows["tests"]["failed"]) == (True, [])
    for name in STEPS[device]:
        if name.endswith("8B"):
            assert rows[name]["seconds of all layers (extrapolated)"] > 0
    if device == "pretend":
        products = {name: row for name, row in rows["kernels"].items() if isinstance(row, dict)}
        assert all(row["relative error to the simulated"] < 0.02 for row in products.values()), products
        kernels = {kernel for row in products.values() for kernel in row["kernels"]}
        assert kernels == {kernel.name for kernel in KERNELS if kernel.since <= (9, 0)}
    assert "w4a16_best 1B" in on_gpu.page(rows)


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is imported."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_device_tests_import_nothing_that_a_bare_machine_lacks() -> None:
    tests = Path(__file__).parent
    helpers = {file.stem: file for file in tests.rglob("*.py")}
    helpers |= {f"benchmarks.{file.stem}": file for file in Path(on_gpu.__file__).parent.glob("*.py")}
    found, left = set[Path](), {tests / name for name in on_gpu.DEVICE_TESTS}
    while left:
        found |= left
        left = {helpers[name] for file in left for name in imported(file) if name in helpers} - found
    packages = {name.split(".")[0]: file.name for file in found for name in imported(file)}
    assert {"hypothesis", "torch"} <= packages.keys()
    assert {name: packages[name] for name in ABSENT if name in packages and name != "hypothesis"} == {}


def test_the_page_judges_each_goal() -> None:
    gptq = {"state": "done", "seconds of all layers (extrapolated)": 119.0, "GPU busy": 0.7}
    memory = {"peak GiB of two blocks": 11.0, "goal GiB of two blocks": 10.4}
    codes = {"w4a16_gptq": {"same codes": 0.9995, "largest relative gap of an error": 2e-4}}
    verdicts = [row[-1] for row in on_gpu.judged({"w4a16_gptq 8B": gptq | memory, "codes": codes})]
    assert verdicts == ["met", "not run", "missed", "not run", "missed", "not run", "met", "missed"]
    assert "| met |" in on_gpu.page({"w4a16_gptq 8B": gptq})


def test_a_step_that_hangs_is_given_up_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of an earlier call, cut off or of a step that was begun, do not count as the step that runs now."""
    results = tmp_path / "results.jsonl"
    on_gpu.append(results, {"step": "kernels", "state": "begun"})
    with results.open("a", encoding="utf-8") as file:
        file.write('{"step": "tests", "sta\n')
    started: list[list[str]] = []
    killed: list[int] = []

    class Worker:
        returncode = -9

        def __init__(self, command: list[str], **_: object) -> None:
            self.pid = 0
            self.steps = command[command.index("--work") + 1 : command.index("--results")]
            started.append(self.steps)
            on_gpu.append(results, {"step": self.steps[0], "state": "begun", "seconds by layer": {"0": 1.5}})

        def poll(self) -> int | None:
            if self.steps[0] == "device":
                return -9 if killed else None
            for name in self.steps:
                on_gpu.append(results, {"step": name, "state": "done"})
            return 0

        def wait(self) -> None: ...

    monkeypatch.setattr("benchmarks.on_gpu.subprocess.Popen", Worker)
    monkeypatch.setattr("benchmarks.on_gpu.os.killpg", lambda pid, signal: killed.append(pid))
    monkeypatch.setitem(on_gpu.STEPS, "device", (on_gpu.step_device, 0))
    on_gpu.supervise(on_gpu.Place("cpu", True), ["kernels", "device", "codes"], results, 30)
    assert started == [["device", "codes", "kernels"], ["codes", "kernels"]]  # what never ran comes first
    rows = on_gpu.read(results)
    assert {name: row["state"] for name, row in rows.items()} == {
        "kernels": "done",
        "device": "cut off",
        "codes": "done",
    }
    assert rows["device"]["seconds by layer"] == {"0": 1.5}
    assert on_gpu.cut_off(results) == {"device": 1}  # the next call gives it twice the time


def test_steps_with_errors_inside_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    found = {"one": {"kernels": {}}, "other": {"error": "ValueError: no"}}
    monkeypatch.setitem(on_gpu.STEPS, "kernels", (lambda place: found, 0))
    monkeypatch.setitem(on_gpu.STEPS, "codes", (lambda place: {"one": found["one"]}, 0))
    on_gpu.work(on_gpu.Place("cpu", True), ["kernels", "codes"], results)
    assert {name: row["state"] for name, row in on_gpu.read(results).items()} == {"kernels": "failed", "codes": "done"}


def test_a_call_has_time_for_all_steps_but_codes_of_other_presets() -> None:
    assert sum(limit for name, (_, limit) in on_gpu.STEPS.items() if not name.startswith("codes ")) <= 290


def test_waits_are_counted_inside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "sync_mode", lambda place, mode: contextlib.nullcontext())

    def waits(*_: object, **__: object) -> None:
        for message in ("called a synchronizing CUDA operation", "something else"):
            warnings.warn(message, stacklevel=1)

    monkeypatch.setattr(quark_fx, "quantize", waits)
    model = torch.nn.Linear(1, 1)
    found = on_gpu.waits_of(on_gpu.Place("cpu", True), lambda: on_gpu.quantized(model, "w4a16_rtn", []))
    assert found["waits and blocking copies"] == 1


def test_only_samples_of_the_window_count(tmp_path: Path) -> None:
    flag = tmp_path / "busy"
    script = f"import os, time\nwhile True: print(100 * os.path.exists({str(flag)!r}), flush=True); time.sleep(0.01)"
    sampler = on_gpu.Sampler([sys.executable, "-c", script])
    flag.touch()
    time.sleep(0.3)
    began = time.perf_counter()
    while sampler.share(began, time.perf_counter()) is None:
        time.sleep(0.01)
    ended = time.perf_counter()
    flag.unlink()
    time.sleep(0.1)
    sampler.stop()
    assert sampler.share(began, ended) == 1
    assert (sampler.share(0, time.perf_counter()) or 0) < 1


def test_a_model_is_extrapolated_by_its_last_layer() -> None:
    measure = on_gpu.Measure(on_gpu.Place("cpu", True), replace(on_gpu.TINY, layers=2, of=10))
    with measure, measure.solving():
        for layer in measure.turns([None, 0, 1], lambda layer: layer):
            time.sleep(0.2 if layer == 0 else 0.02)
    assert 0.24 + 8 * 0.02 <= measure.result["seconds of all layers (extrapolated)"] < 1  # of the mean: 1.2
