"""Directories and files appear in one step, whatever stops their writer, and the next writer removes leftovers."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import run_program
from safetensors import SafetensorError

from quark_fx.errors import ExportError
from quark_fx.system import writable
from quark_fx.system.writable import new_directory, new_file, new_folder, replace_synced, write_text


def of_model(name: str) -> bool:
    return name == "config.json" or name.startswith("model")


@contextmanager
def writing(place: Path) -> Iterator[Path]:
    with new_directory(place, replaces=of_model, last="config.json") as folder:
        yield folder


def write(place: Path, text: str, *, shards: int = 2) -> None:
    with writing(place) as folder:
        for name in ("config.json", *(f"model-{i}.bin" for i in range(shards))):
            (folder / name).write_text(text)


def held(place: Path) -> dict[str, str]:
    return {str(p.relative_to(place)): p.read_text() for p in sorted(place.rglob("*")) if p.is_file()}


OLD = {"config.json": "old", "mine.txt": "mine", "model-0.bin": "old", "model-1.bin": "old", "notes/a": "mine"}
NEW = {"config.json": "new", "mine.txt": "mine", "model-0.bin": "new", "notes/a": "mine"}


def old(place: Path) -> Path:
    write(place, "old")
    (place / "mine.txt").write_text("mine")
    (place / "notes").mkdir()
    (place / "notes" / "a").write_text("mine")
    return place


def test_a_directory_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    place = old(tmp_path / "model")
    assert held(place) == OLD
    write(place, "new", shards=1)
    assert held(place) == NEW
    assert list(tmp_path.iterdir()) == [place]


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(old(tmp_path / "model"))
    write(tmp_path / "link", "new", shards=1)
    assert (tmp_path / "link").is_symlink()
    assert held(tmp_path / "model") == NEW


@pytest.mark.parametrize("where", ["working directory", "no exchange"])
def test_a_directory_that_cannot_be_renamed_gets_its_files_one_by_one(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = old(tmp_path / "model")
    number = place.stat().st_ino
    if where == "working directory":
        monkeypatch.chdir(place / "notes")
    else:
        monkeypatch.setattr(writable, "_exchange", lambda *_: False)
    write(place, "new", shards=1)
    assert held(place) == NEW
    assert place.stat().st_ino == number
    assert list(tmp_path.iterdir()) == [place]


def write_half(directory: Path, error: BaseException) -> None:
    with writing(directory) as folder:
        (folder / "model-0.bin").write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_a_writer_that_raises_leaves_the_old_directory(tmp_path: Path, error: BaseException) -> None:
    place = old(tmp_path / "model")
    for directory in (place, tmp_path / "a" / "b"):
        with pytest.raises(type(error)):
            write_half(directory, error)
    assert held(place) == OLD
    assert list(tmp_path.iterdir()) == [place], "folders that were created for it go"


KILL = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_writable import held, old, write
count = last = 0
def dying(call):
    def counted(*args, **options):
        global count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted
place = Path(sys.argv[1], "model")
for last in range(1, 1000):
    old(place)
    child = os.fork()
    if not child:
        for name in ("open", "replace", "rename", "unlink", "fsync", "mkdir", "link"):
            setattr(os, name, dying(getattr(os, name)))
        write(place, "new", shards=1)
        os._exit(0)
    killed = os.waitpid(child, 0)[1]
    print(held(place))
    if not killed:
        break
    write(place, "again")
    assert [path.name for path in place.parent.iterdir()] == ["model"], "leftovers"
    __import__("shutil").rmtree(place)
"""
"""Writers that are killed before their first, second, … call of the system, until one comes to its end."""


@pytest.mark.skipif(sys.platform != "linux", reason="directories are exchanged in one step on Linux")
def test_a_writer_that_is_killed_leaves_the_old_directory_or_the_new_one(tmp_path: Path) -> None:
    run = run_program(KILL, tmp_path, Path(__file__).parent)
    assert run.returncode == 0, run.stderr
    found = [line == str(NEW) for line in run.stdout.splitlines()]
    assert all(line in (str(OLD), str(NEW)) for line in run.stdout.splitlines())
    assert found == sorted(found), "once it is new, it stays new"
    assert {True, False} == set(found)
    assert len(found) > 8


def test_writers_at_once_leave_one_whole_directory(tmp_path: Path) -> None:
    for round_ in range(10):
        place = tmp_path / str(round_)
        threads = [
            threading.Thread(target=write, args=(place, text), kwargs={"shards": i}) for i, text in enumerate("abcd")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = held(place)
        assert len(set(found.values())) == 1
        assert len(found) == 1 + "abcd".index(found["config.json"])
    assert len(list(tmp_path.iterdir())) == 10


def test_leftovers_go_unless_their_writer_lives(tmp_path: Path) -> None:
    (tmp_path / ".m.onnx-0123456789abcdef").mkdir()
    (tmp_path / ".m.onnx-0123456789abcdef" / "m.onnx").write_text("half")
    (tmp_path / ".m.onnx-ab_12cde").mkdir()  # of earlier versions
    (tmp_path / ".m.onnx-mine").mkdir()
    with new_folder(tmp_path, ".m.onnx-") as first, new_folder(tmp_path, ".m.onnx-") as second:
        assert {p.name for p in tmp_path.iterdir()} == {first.name, second.name, ".m.onnx-mine"}
    assert [p.name for p in tmp_path.iterdir()] == [".m.onnx-mine"]


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("old")
    (tmp_path / ".model.gguf-0123456789abcdef").write_text("half")
    os.mkfifo(tmp_path / ".model.gguf-fedcba9876543210")
    with new_file(path, ".model.gguf-") as (file, place):
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        replace_synced(place, path)
    assert path.read_text() == "new"
    with new_file(path, ".model.gguf-") as (file, _):
        file.write(b"half")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("model.gguf", "new")]


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free disk space, or choose another path"),
        (
            SafetensorError("Error while serializing: I/O error: Full (os error 28)"),
            "free disk space, or choose another path",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), "make its directory writable, or choose another path"),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory"),
            "remove the directory that is in the way, or choose another path",
        ),
        (OSError("1 requested and 0 written"), "free disk space, or choose another path"),
        (OSError("odd"), "choose another path"),
    ],
)
def test_a_failure_of_the_file_system_names_the_place_and_a_remedy(
    failure: Exception, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as caught, writable.writing(tmp_path / "x"):
        raise failure
    assert str(caught.value) == f"{tmp_path / 'x'} cannot be written: {failure}; {remedy}"


def test_names_as_long_as_the_file_system_takes_can_be_written(tmp_path: Path) -> None:
    name = "ü" * 124 + ".html"  # 253 bytes
    write_text(tmp_path / name, "text")
    with new_directory(tmp_path / "ü" / name, replaces=of_model, last="config.json") as folder:
        (folder / "config.json").write_text("new")
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["config.json", "ü", name, name])


def test_a_text_is_replaced_in_one_step_where_it_is_a_file(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "third")
    assert os.read(reader, 9) == b"third"
    os.close(reader)
    for place, remedy in (("nowhere/x", "create its directory"), ("real/x", "remove the file that is in the way")):
        with pytest.raises(ExportError, match=f"{place} cannot be written: .*; {remedy}, or choose another path"):
            write_text(tmp_path / place, "")
    with pytest.raises(ExportError, match=r"real cannot be written: .*surrogates not allowed; choose another path"):
        write_text(real, "\ud800")
    real.chmod(0o640)
    write_text(real, "fourth")
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]
