"""One run has an output directory at a time, and takes or removes nothing that is not its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import cnn, images, quantize

import quark_fx as qfx
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.errors import ConfigError
from quark_fx.model.model_directory import tensor_file
from quark_fx.model.output_directory import work_directory
from quark_fx.presets import INT8_STATIC


def run(out: Path, checkpoint: Path | None = None) -> qfx.QuantizedModel:
    resources = qfx.Resources(output_dir=out, checkpoint=checkpoint)
    return quantize(cnn(), INT8_STATIC, images(4, 4), resources=resources)


def test_a_folder_that_no_run_left_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already contains unfinished; choose a new directory"):
        run(tmp_path)
    assert (tmp_path / "unfinished" / "thesis.txt").read_text() == "mine"


def test_a_folder_called_like_one_that_is_removed_is_not_touched(tmp_path: Path) -> None:
    for name in ("unfinished.removed", "unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("mine")
        (tmp_path / name / "thesis.txt").write_text("mine")
        with pytest.raises(ConfigError, match=f"already contains {name}; choose a new directory"):
            run(tmp_path)
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == ["lock", "thesis.txt"]
        shutil.rmtree(tmp_path / name)


def test_a_run_that_was_killed_before_it_wrote_anything_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "lock").touch()
    run(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"graph.json", tensor_file(tmp_path).name}


def test_a_finished_result_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def stop(folder: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, **options: None if options else stop(folder))
        with pytest.raises(KeyboardInterrupt):
            run(out)
    written = (out / "graph.json").read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"if that is a finished result, read it with quark_fx\.load"):
            quantize(cnn(), "int8_weight_only", images(4), resources=qfx.Resources(output_dir=out))
    assert {file.name for file in out.iterdir()} == {"graph.json", tensor_file(out).name}
    assert (out / "graph.json").read_bytes() == written


def test_two_runs_at_once_are_one_too_many(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with work_directory(out, None, ALONE):
        with pytest.raises(ConfigError, match=f"another run is writing to output_dir {out}; wait"):
            run(out)
        assert (out / "unfinished").exists()
        shutil.rmtree(out / "unfinished")
    run(out)


def test_the_directory_for_blocks_is_another_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint and output_dir are both"):
        run(tmp_path / "out", checkpoint=tmp_path / "out")
    with pytest.raises(ConfigError, match="output_dir must be the path of a directory"):
        quantize(cnn(), INT8_STATIC, images(4), resources=qfx.Resources(output_dir=""))


def test_a_rank_that_does_not_see_the_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value] * self.count)
    with (
        pytest.raises(ConfigError, match=r"rank 1 does not see the files of the first rank in"),
        work_directory(tmp_path / "elsewhere", None, Ranks(1, 2)),
    ):
        pass


def test_what_the_first_rank_raises_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("no")
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [error, value])
    for index in range(2):
        with pytest.raises(ConfigError, match="no"):
            Ranks(index, 2).first(lambda: None)
