"""A directory with a stored model has a whole one at every moment, and says when it has not what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from stored import edit, read
from tiny import cnn, images, quantize, rand, seeded
from torch import nn

import quark_fx as qfx
from quark_fx.errors import QuarkError
from quark_fx.model.model_directory import tensor_file
from quark_fx.presets import INT8_DYNAMIC

X = rand(3, 4)


def small(seed: int) -> qfx.QuantizedModel:
    return quantize(seeded(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), seed), INT8_DYNAMIC, [rand(6, 4)])


@cache
def old() -> qfx.QuantizedModel:
    return small(0)


@cache
def new() -> qfx.QuantizedModel:
    return small(1)


KILL = """
import os, shutil, signal, sys
import torch
import quark_fx as qfx
torch.set_num_threads(1)  # a fork has none of the threads of its parent
place, x = sys.argv[3], torch.load(sys.argv[4])
old, new = (qfx.load(path) for path in sys.argv[1:3])
count = 0
def dying(call):
    def counted(*args, **options):
        global count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted
for last in range(1, 1000):
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sys.argv[1], place)
    child = os.fork()
    if not child:
        for name in ("open", "replace", "rename", "unlink", "fsync", "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        new.save(place)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    result = qfx.load(place)(x)
    print(next(name for name, model in (("old", old), ("new", new)) if torch.equal(result, model(x))))
"""
"""Saves in processes that are killed before their first, second, … call of the system, until one comes to its end, and
prints which model each of them left."""


@pytest.mark.slow
def test_a_saver_that_is_killed_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    new().save(tmp_path / "new")
    old().save(tmp_path / "old")
    torch.save(X, tmp_path / "x.pt")
    place = tmp_path / "place"
    done = run_program(KILL, tmp_path / "old", tmp_path / "new", place, tmp_path / "x.pt")
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found == sorted(found, reverse=True), "once it is new, it stays new"
    assert {"old", "new"} == set(found)
    assert len(found) > 8
    assert torch.equal(qfx.load(place)(X), new()(X))


def test_what_a_killed_saver_leaves_goes_with_the_next(tmp_path: Path) -> None:
    old().save(tmp_path)
    (tmp_path / ".saving-0123456789abcdef").write_bytes(b"half of a model")
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    new().save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"graph.json", tensor_file(tmp_path).name, "mine.safetensors"}


def test_savers_at_once_leave_one_of_their_models(tmp_path: Path) -> None:
    for round_ in range(10):
        place = tmp_path / str(round_)
        threads = [threading.Thread(target=model.save, args=(place,)) for model in (old(), new(), old(), new())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert any(torch.equal(qfx.load(place)(X), model(X)) for model in (old(), new()))
        assert len(list(place.iterdir())) == 2


def test_a_model_that_is_replaced_while_it_is_read_is_one_of_both(tmp_path: Path) -> None:
    old().save(tmp_path)
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            for model in (new(), old()):
                model.save(tmp_path)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(10):
            result = qfx.load(tmp_path)(X)
            assert any(torch.equal(result, model(X)) for model in (old(), new()))
    finally:
        done.set()
        thread.join()


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    for name in "ab":
        quantize(cnn(), "int8_static", images(4, 4)).save(tmp_path / name)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    loaded = qfx.load(tmp_path / "a")
    loaded.save(tmp_path / "c")
    assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == files[0]
    assert "seconds" not in files[0]["graph.json"].decode()


def test_the_graph_of_one_model_and_the_tensors_of_another_are_told_apart(tmp_path: Path) -> None:
    for name, model in (("old", old()), ("new", new())):
        model.save(tmp_path / name)
    wanted = tensor_file(tmp_path / "old")
    wanted.write_bytes(tensor_file(tmp_path / "new").read_bytes())
    with pytest.raises(QuarkError, match=r"is damaged: its SHA-256 differs from the one in graph\.json"):
        qfx.load(tmp_path / "old")


@pytest.mark.parametrize("name", ["graph", "tensors"])
def test_any_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    old().save(tmp_path)
    file = tmp_path / "graph.json" if name == "graph" else tensor_file(tmp_path)
    content = file.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        for bit in (1, 4):
            flipped = bytearray(content)
            flipped[place] ^= bit
            file.write_bytes(flipped)
            if name == "graph" and same_data(content, bytes(flipped)):
                continue  # a space for another
            with pytest.raises(QuarkError):
                qfx.load(tmp_path)


def same_data(a: bytes, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize("name", ["graph", "tensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    old().save(tmp_path)
    file = tmp_path / "graph.json" if name == "graph" else tensor_file(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(QuarkError, match="is not a regular file"):
        qfx.load(tmp_path)


DOCUMENTS: dict[str, Callable[[str], str]] = {
    "nested lists": lambda text: "[" * 100_000,
    "nested and closed": lambda text: "[" * 500 + "]" * 500,
    "nested objects": lambda text: '{"a":' * 100_000,
    "a number of many digits": lambda text: text.replace('"version": 4', '"version": ' + "9" * 5000),
    "a number that is none": lambda text: text.replace('"version": 4', '"version": NaN'),
    "another encoding": lambda text: text.replace("linear", "línear"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("option", ["", "-O"])
def test_json_that_no_saver_writes_is_refused_by_name(name: str, option: str, tmp_path: Path) -> None:
    old().save(tmp_path)
    file = tmp_path / "graph.json"
    file.write_bytes(DOCUMENTS[name](file.read_text()).encode("latin-1"))
    if not option:
        with pytest.raises(QuarkError):
            qfx.load(tmp_path)
    elif name == "nested lists":  # a process takes seconds
        edit_without_asserts(tmp_path)


def edit_without_asserts(directory: Path) -> None:
    """Hold loading to its promises where `assert` is left out."""
    old().save(directory)
    edit(directory, lambda d: d["nodes"][-2].update(args=[{"torch": "save"}]))
    code = f"import quark_fx\ntry: quark_fx.load({str(directory)!r})\nexcept quark_fx.QuarkError as e: print('no:', e)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "no: the stored graph contains the unknown argument {'torch': 'save'}" in done.stdout, done.stderr


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old().save(tmp_path)
    monkeypatch.setattr("quark_fx.model.model_directory.GRAPH_LIMIT", 100)
    with pytest.raises(QuarkError, match=r"graph.json is larger than the limit of .* MiB"):
        qfx.load(tmp_path)
    with pytest.raises(QuarkError, match=r"the graph takes .* MiB, more than quark_fx.load can read"):
        old().save(tmp_path)


def test_a_model_of_the_version_before_is_replaced_with_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text('{"version": 2, "nodes": []}')
    (tmp_path / "model.safetensors").write_bytes(b"of version 2")
    with pytest.raises(
        QuarkError, match="has format version 2, but this quark_fx reads version 4; save the model again"
    ):
        qfx.load(tmp_path)
    new().save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"graph.json", tensor_file(tmp_path).name}
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    old().save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_types_and_shapes_of_tensors_survive(tmp_path: Path) -> None:
    """What is written is read back by safetensors, aligned and in every type."""
    from safetensors.torch import load_file

    from quark_fx.checkpoints.files import TORCH_DTYPES
    from quark_fx.model.model_directory import write_model

    tensors: dict[str, Any] = {
        f"t{i}": torch.arange(6).reshape(2, 3).to(torch.uint8).to(dtype).t() for i, dtype in enumerate(TORCH_DTYPES)
    }
    tensors |= {"t90": torch.zeros(()), "t91": torch.zeros(0, 4), "t92": rand(70, 70)[::2, 1::3]}
    write_model(tmp_path, tensors, {"nodes": []})
    found = load_file(tensor_file(tmp_path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())
    assert read(tmp_path)["nodes"] == []
