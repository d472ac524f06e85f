"""A run that was interrupted, and called again with the same checkpoint directory, ends as if nothing had happened."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from devices import on_devices
from extensions.clip_activations import ClipActivations
from extensions.deviation_scales import DeviationScales
from extensions.refit_scales import RefitScales
from extensions.shift_channels import ShiftChannels
from forked import FORKS, processes
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import Residual, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule
from tqdm.auto import tqdm

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.engine.block_walk import walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import Change, PassRecord, Promise, Stage
from quark_fx.numbers.formats import INT4, UINT4
from quark_fx.passes import AWQ, GPTQ, LearnRotations, LowRank, SmoothQuant, TuneScales
from quark_fx.passes.adaquant import AdaQuant
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, W4A4_DYNAMIC
from quark_fx.solvers.sampled_scaling import SampledScaling
from quark_fx.solvers.scaling import ScalingSolver


def chain() -> nn.Sequential:
    """Residual blocks between two convolutions."""
    return seeded(nn.Sequential(nn.Conv2d(3, 4, 1), *(Residual(4) for _ in range(3)), nn.Conv2d(4, 2, 1)))


class Branches(nn.Module):
    """A value that operators far from each other read: what its scale becomes matters to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        out: Tensor = self.c(torch.tanh(self.b(y))) + self.d(y)
        return out


def learning(*passes: Any) -> QuantConfig:
    return INT8_STATIC.replace(passes=(*INT8_STATIC.passes, *passes))


def uneven() -> nn.Module:
    """Three places where channels can be scaled: the first are even already, for the last a factor is inserted."""
    layers = [nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)]
    model: Any = seeded(nn.Sequential(*layers))
    with torch.no_grad():
        model[1].weight.copy_(model[1].weight.sign())
        for before, after in ((model[1], model[3]), (model[3], model[5])):
            before.weight.mul_(torch.logspace(-1, 1, 32)[:, None])
            before.bias.mul_(torch.logspace(-1, 1, 32))
            after.weight.mul_(torch.logspace(1, -1, 32))
    return model  # type: ignore[no-any-return]


def scaling(config: QuantConfig, solver: Any) -> tuple[nn.Module, QuantConfig, list[Any]]:
    data = [rand(32, 16, seed=i) for i in range(4)]
    return uneven(), config.replace(passes=(*config.passes, solver), exclude=()), data


IN_GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16)

Run = Callable[[], tuple[nn.Module, QuantConfig, list[Any]]]

RUNS: dict[str, Run] = {
    "adaround": lambda: (
        chain(),
        learning(AdaRound(iterations=20, batch_size=2, drop=0.5)),
        images(4, 4, 4),
    ),
    "adaround, block by block": lambda: (
        mlp(),
        learning(AdaRound(iterations=20, batch_size=2, unit=Unit.BLOCK)),
        tokens(4, 4),
    ),
    "adaquant": lambda: (
        seeded(Branches()),
        learning(AdaQuant(iterations=40, scale_rate=0.02)),
        [rand(32, 8, seed=i) for i in range(3)],
    ),
    "bias correction, then adaround": lambda: (
        cnn(),
        learning(BiasCorrection(), AdaRound(iterations=20, batch_size=2)),
        images(4, 4),
    ),
    "clipped activations": lambda: (
        seeded(Branches()),
        INT8_STATIC.replace(input=TensorSpec(format=UINT4), passes=(*INT8_STATIC.passes, ClipActivations())),
        [rand(32, 8, seed=i) for i in range(3)],
    ),
    "awq": lambda: scaling(INT4_WEIGHT_ONLY.replace(weight=IN_GROUPS), AWQ(explicit=True)),
    "smooth": lambda: scaling(INT8_STATIC, SmoothQuant(explicit=True)),
    "branches": lambda: (
        mlp(),
        INT4_WEIGHT_ONLY.replace(exclude=(), passes=(LowRank(rank=2, overhead=9),)),
        tokens(4, 4),
    ),
    "learned rotations": lambda: (
        mlp(),
        W4A4_DYNAMIC.replace(exclude=(), passes=(LearnRotations(overhead=9, streams=False, iterations=20),)),
        tokens(4, 4),
    ),
    "deviations": lambda: scaling(INT8_STATIC, DeviationScales()),
    "shifted channels": lambda: (cnn(), learning(ShiftChannels(iterations=20, batch_size=2)), images(4, 4)),
    "tuned scales": lambda: (
        mlp(),
        INT4_WEIGHT_ONLY.replace(exclude=(), passes=(GPTQ(), TuneScales(iterations=6))),
        tokens(4, 4),
    ),
    "refitted scales": lambda: (mlp(), INT4_WEIGHT_ONLY.replace(exclude=(), passes=(RefitScales(),)), tokens(4, 4)),
}


class Outcome(NamedTuple):
    """What a run ends with, but not how long it took."""

    tensors: dict[str, Tensor]
    rows: list[dict[str, Any]]
    passes: list[PassRecord]


def outcome(qmodel: qfx.QuantizedModel) -> Outcome:
    report = qmodel.report()
    passes = [
        replace(record, seconds=0.0, changes=tuple(replace(change, seconds=0.0) for change in record.changes))
        for record in report.passes
    ]
    return Outcome(stored_tensors(qmodel.graph_module), report.to_rows(), passes)


def run(name: str, directory: Path | None = None, device: torch.device | None = None) -> Outcome:
    model, config, batches = RUNS[name]()
    place = device or torch.device("cpu")
    with torch.backends.cudnn.flags(deterministic=True):
        data = [batch.to(place) for batch in batches]
        return outcome(quantize(model.to(place), config, data, resources=qfx.Resources(checkpoint=directory)))


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert list(got.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name
    assert got.rows == expected.rows
    assert got.passes == expected.passes


def finished(directory: Path) -> list[Path]:
    """Return the files of finished blocks, oldest first."""
    return sorted(directory.glob("*.safetensors"), key=lambda path: [int(part) for part in path.stem.split("-")[1::2]])


def interrupted(complete: Path, directory: Path, blocks: int) -> Path:
    """Make `directory` that of a run which was interrupted when some blocks were finished."""
    directory.mkdir()
    for path in (complete / "run.json", *finished(complete)[:blocks]):
        shutil.copy(path, directory)
    return directory


# Every place a run can be interrupted at.


@on_devices
@pytest.mark.parametrize("name", RUNS)
def test_a_run_continues_from_every_block(name: str, device: torch.device, tmp_path: Path) -> None:
    expected = run(name, device=device)
    assert sum(record.rewrites for record in expected.passes if record.changes) > 0
    complete = tmp_path / "complete"
    assert_same(run(name, complete, device), expected)
    blocks = len(finished(complete))
    assert blocks > 1
    for done in range(blocks + 1):
        directory = interrupted(complete, tmp_path / str(done), done)
        assert_same(run(name, directory, device), expected)
        assert [path.name for path in finished(directory)] == [path.name for path in finished(complete)]


def measured_by_scalings(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return at how many sites a run measures."""
    solver: type[ScalingSolver] = AWQ if name == "awq" else SampledScaling
    counted, measure = list[int](), solver.measure

    def counting(self: ScalingSolver, gm: GraphModule, sites: Any, *rest: Any) -> Any:
        counted.append(len(sites))
        return measure(self, gm, sites, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(solver, "measure", counting)
        run(name, directory)
    return sum(counted)


@pytest.mark.parametrize("name", ["awq", "smooth", "deviations"])
def test_what_was_settled_is_not_measured_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = measured_by_scalings(name, tmp_path / "complete", monkeypatch)
    assert len(finished(tmp_path / "complete")) == sites
    directory = interrupted(tmp_path / "complete", tmp_path / "interrupted", 1)
    assert measured_by_scalings(name, directory, monkeypatch) == sites - 1
    assert measured_by_scalings(name, directory, monkeypatch) == 0


def test_learned_scales_are_among_what_is_compared() -> None:
    """Those of a value that two blocks read: the first of them settles it."""
    plain = outcome(quantize(seeded(Branches()), INT8_STATIC, RUNS["adaquant"]()[2])).tensors
    learned = run("adaquant").tensors
    assert not torch.equal(plain["tanh_quantizer_scale"], learned["tanh_quantizer_scale"])


def test_a_file_that_was_being_written_is_written_again(tmp_path: Path) -> None:
    expected = run("adaround", tmp_path / "complete")
    directory = interrupted(tmp_path / "complete", tmp_path / "interrupted", 2)
    content = finished(tmp_path / "complete")[2].read_bytes()
    (directory / "pass-0-block-2.partial").write_bytes(content[: len(content) // 2])
    (directory / "run.partial").write_text("{")
    assert_same(run("adaround", directory), expected)
    assert len(finished(directory)) == len(finished(tmp_path / "complete"))


def visiting(visited: list[tuple[int, bool]]) -> QuantConfig:
    """Return a configuration whose last pass stores and notes something in every block that is not finished."""

    def visit(gm: GraphModule, context: Context) -> int:
        for turn in walk_blocks(gm, context):
            visited.append((turn.index, turn.finished))
            for weight in quantized_weights(turn.module, context.plan):
                codes = stored_tensors(turn.module)[weight.codes]
                if turn.finished:
                    assert torch.equal(codes, turn.learned[weight.codes])
                    continue
                turn.store(weight.codes, codes // 2)
                context.note(Change(weight.name, what=f"halved in block {turn.index}", before=1.0, seconds=0.5))
        return len(context.changes)

    visit.promise = Promise(exact=False, stage=Stage.QUANTIZED)  # type: ignore[attr-defined]
    return learning(visit)


def test_a_finished_block_comes_with_its_changes_made(tmp_path: Path) -> None:
    first, second, third = list[tuple[int, bool]](), list[tuple[int, bool]](), list[tuple[int, bool]]()
    complete = quantize(
        chain(), visiting(first), images(4, 4), resources=qfx.Resources(checkpoint=tmp_path / "complete")
    )
    directory = interrupted(tmp_path / "complete", tmp_path / "interrupted", 2)
    continued = quantize(chain(), visiting(second), images(4, 4), resources=qfx.Resources(checkpoint=directory))
    again = quantize(chain(), visiting(third), images(4, 4), resources=qfx.Resources(checkpoint=directory))
    assert first == [(i, False) for i in range(5)]
    assert second == [(i, i < 2) for i in range(5)]
    assert third == [(i, True) for i in range(5)]
    for qmodel in (continued, again):
        assert_same(outcome(qmodel), outcome(complete))
        record, expected = qmodel.report().passes[-1], complete.report().passes[-1]
        assert (record.rewrites, record.changes) == (5, expected.changes)  # seconds are remembered


def test_a_run_without_passes_that_learn_may_have_a_checkpoint(tmp_path: Path) -> None:
    expected = outcome(quantize(cnn(), INT8_STATIC, images(4, 4)))
    for _ in range(2):
        qmodel = quantize(
            cnn(),
            INT8_STATIC,
            (batch for batch in images(4, 4)),
            resources=qfx.Resources(checkpoint=tmp_path / "deep" / "down"),
        )
        assert_same(outcome(qmodel), expected)
    assert finished(tmp_path / "deep" / "down") == []


# Directories of others.


def changed_weight() -> nn.Module:
    model = chain()
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    return model


OTHERS: dict[str, Callable[[], tuple[nn.Module, QuantConfig, list[Any]]]] = {
    "weight": lambda: (changed_weight(), *RUNS["adaround"]()[1:]),
    "model": lambda: (chain().append(nn.ReLU()).eval(), *RUNS["adaround"]()[1:]),
    "configuration": lambda: (chain(), learning(AdaRound(iterations=21, batch_size=2, drop=0.5)), images(4, 4, 4)),
    "first batch": lambda: (chain(), RUNS["adaround"]()[1], [rand(4, 3, 8, 8, seed=9), *images(4, 4, 4)[1:]]),
    "last batch": lambda: (chain(), RUNS["adaround"]()[1], [*images(4, 4, 4)[:2], rand(4, 3, 8, 8, seed=9)]),
    "number of batches": lambda: (chain(), RUNS["adaround"]()[1], images(4, 4)),
    "size of a batch": lambda: (chain(), RUNS["adaround"]()[1], images(3, 4, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_directory_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    directory = interrupted(run_once(), tmp_path / "theirs", 1)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    model, config, batches = OTHERS[name]()
    what = {"weight": "model", "model": "model", "configuration": "configuration"}.get(name, "data")
    hint = r" \(a DataLoader that shuffles gives other batches every time\)" if what == "data" else ""
    with pytest.raises(
        ConfigError, match=f"contains finished blocks of a run with different {what}{hint}; delete"
    ) as error:
        quantize(model, config, batches, resources=qfx.Resources(checkpoint=directory))
    assert str(directory) in str(error.value)
    assert "with it those blocks, or choose another directory" in str(error.value)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("where", ["data", "model"])
def test_every_value_of_a_large_tensor_tells_runs_apart(where: str, tmp_path: Path) -> None:
    """Most of a padded image is the padding."""
    for index in (None, 10_001):
        model, x = seeded(nn.Linear(100, 110)), rand(150, 100)
        if index is not None:
            with torch.no_grad():
                (x if where == "data" else model.weight).view(-1)[index] += 1e-3
        config = learning(BiasCorrection())
        with pytest.raises(ConfigError, match=f"different {where}") if index else nullcontext():
            quantize(model, config, [x, x], resources=qfx.Resources(checkpoint=tmp_path))


@cache
def run_once() -> Path:
    """Return the directory of a complete run of `"adaround"`."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    run("adaround", directory)
    return directory


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-10],
    "cut off in its header": lambda content: content[:40],
    "something else": lambda content: b"not what it should be" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    directory = interrupted(run_once(), tmp_path / "run", 3)
    file = finished(directory)[1]
    file.write_bytes(damage(file.read_bytes()))
    assert_names(directory, file)
    file.unlink()
    assert_same(run("adaround", directory), run("adaround", run_once()))


def rewritten(file: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Write a valid file that holds something else."""
    with safe_open(file, "pt") as stored:
        tensors, metadata = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, file, metadata)


def changed_notes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    (row, *rest) = json.loads(metadata["changes"])
    metadata["changes"] = json.dumps([row | {"after": 0.0}, *rest])


FALSE: dict[str, Callable[[dict[str, Tensor], dict[str, str]], object]] = {
    "zeroed": lambda tensors, metadata: tensors.update({name: torch.zeros_like(t) for name, t in tensors.items()}),
    "one bit": lambda tensors, metadata: next(iter(tensors.values())).view(torch.uint8).view(-1)[:1].bitwise_xor_(1),
    "another dtype": lambda tensors, metadata: tensors.update({name: t.double() for name, t in tensors.items()}),
    "another shape": lambda tensors, metadata: tensors.update({name: t.reshape(-1) for name, t in tensors.items()}),
    "a tensor less": lambda tensors, metadata: tensors.pop(next(iter(tensors))),
    "a tensor more": lambda tensors, metadata: tensors.update(more=torch.ones(3)),
    "another name": lambda tensors, metadata: tensors.update(more=tensors.pop(next(iter(tensors)))),
    "other notes": changed_notes,
    "another version": lambda tensors, metadata: metadata.update(version="quark_fx 0.0.1, torch 2.0.0"),
    "another run": lambda tensors, metadata: metadata.update(run="0" * 64),
    "no metadata": lambda tensors, metadata: metadata.clear(),
    "an earlier format": lambda tensors, metadata: [metadata.pop(key) for key in ("digest", "block", "run", "version")],
}


@pytest.mark.parametrize("name", FALSE)
def test_a_block_that_is_not_what_was_written_is_refused_and_computed_again(name: str, tmp_path: Path) -> None:
    directory = interrupted(run_once(), tmp_path / "run", 2)
    file = finished(directory)[1]
    rewritten(file, FALSE[name])
    assert_names(directory, file)
    if name == "zeroed":
        file.unlink()
        assert_same(run("adaround", directory), run("adaround", run_once()))


def test_blocks_that_changed_places_are_refused(tmp_path: Path) -> None:
    directory = interrupted(run_once(), tmp_path / "run", 2)
    first, second = finished(directory)
    shutil.copy(second, first)
    assert_names(directory, first)


def test_a_directory_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = interrupted(run_once(), tmp_path / "run", 1)
    monkeypatch.setattr(qfx, "__version__", "99.0")
    with pytest.raises(ConfigError, match="contains finished blocks of a run with different version; delete"):
        run("adaround", directory)


def test_a_block_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, replace_ = list[str](), os.fsync, os.replace

    def synced(number: int) -> None:
        done.append("fsync")
        fsync(number)

    def replaced(old: str, new: str) -> None:
        done.append(Path(new).suffix)
        replace_(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    run("refitted scales", tmp_path)
    names = [at for at, what in enumerate(done) if what == ".safetensors"]
    assert names
    assert all(done[at - 1] == done[at + 1] == "fsync" for at in names)  # the file's, then its directory's


def test_a_file_that_another_program_wrote_is_named(tmp_path: Path) -> None:
    directory = interrupted(run_once(), tmp_path / "run", 1)
    (file,) = finished(directory)
    save_file({"codes": torch.zeros(3)}, file)
    assert_names(directory, file)


def assert_names(directory: Path, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run("adaround", directory)
    assert f"checkpoint {file} cannot be read" in str(error.value)
    assert "delete this file" in str(error.value)


def test_a_directory_in_which_another_run_finished_nothing_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"fingerprint": {"model": "another"}}))
    model, config, batches = RUNS["adaround"]()
    quantize(model, config, batches, resources=qfx.Resources(checkpoint=tmp_path))
    assert json.loads((tmp_path / "run.json").read_text())["fingerprint"]["model"] != "another"
    assert finished(tmp_path) != []


@pytest.mark.parametrize("text", ["", "{", "[]", "not json", "{}"])
def test_a_directory_whose_owner_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        run("adaround", tmp_path)
    assert f"checkpoint directory {tmp_path} cannot be used" in str(error.value)


# Nowhere to write.


@pytest.mark.parametrize("where", ["a file", "in a file"])
def test_a_directory_that_cannot_be_made_is_named(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "below" if where == "in a file" else tmp_path / "file"
    with pytest.raises(ConfigError) as error:
        run("adaround", directory)
    assert f"checkpoint directory {directory} cannot be used" in str(error.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="who may write anywhere")
def test_a_directory_one_may_not_write_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError) as error:
        run("adaround", tmp_path)
    assert f"checkpoint directory {tmp_path} cannot be used" in str(error.value)


def test_a_directory_that_disappears_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def remove(gm: GraphModule, context: Context) -> int:
        for _ in walk_blocks(gm, context):
            shutil.rmtree(directory)
        return 0

    remove.promise = Promise(exact=False, stage=Stage.QUANTIZED)  # type: ignore[attr-defined]
    with pytest.raises(CalibrationError) as error:
        quantize(chain(), learning(remove), images(4, 4), resources=qfx.Resources(checkpoint=directory))
    assert f"cannot write checkpoint {directory / 'pass-0-block-0.safetensors'}" in str(error.value)


# Processes that die. Each is forked from one that has imported what it takes, and runs on one thread.


def work(name: str, directory: Path, result: Path) -> None:
    """Do a run; `result` gets what it ends with."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # the default one is a semaphore that would outlive a kill
    partial = result.with_suffix(".partial")
    torch.save(tuple(run(name, directory)), partial)
    partial.rename(result)


def starve(name: str, directory: Path, result: Path) -> None:
    """Do a run that may write files of 400 bytes; `result` gets the error."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        run(name, directory)
    except CalibrationError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        result.write_text(str(error))


on_posix = pytest.mark.skipif(not FORKS, reason="no forks, and no signal that cannot be caught")


def start(target: Callable[[str, Path, Path], None], name: str, directory: Path, result: Path) -> Any:
    process = processes().Process(target=target, args=(name, directory, result))
    process.start()
    return process


def complete_in_process(name: str, directory: Path, result: Path) -> Outcome:
    process = start(work, name, directory, result)
    process.join(120)
    assert process.exitcode == 0
    return Outcome(*torch.load(result, weights_only=False))


@on_posix
@pytest.mark.parametrize("name", ["adaround", "bias correction, then adaround"])
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    expected = complete_in_process(name, tmp_path / "complete", tmp_path / "expected")
    blocks = len(finished(tmp_path / "complete"))
    draw = random.Random(0)
    directory, result = tmp_path / "killed", tmp_path / "result"
    killed = 0
    for _ in range(3):
        before = min(len(finished(directory)), blocks - 1)
        enough = draw.randint(before, min(before + 2, blocks - 1))
        process = start(work, name, directory, result)
        wait_for(lambda: len(finished(directory)) >= enough, process)  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed
    assert_same(complete_in_process(name, directory, result), expected)


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.exitcode in (None, 0)
        assert time.monotonic() < deadline
        time.sleep(0.001)


@on_posix
def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    process = start(starve, "adaround", tmp_path / "run", tmp_path / "error")
    process.join(120)
    assert process.exitcode == 0
    message = (tmp_path / "error").read_text()
    assert f"cannot write checkpoint {tmp_path / 'run' / 'pass-0-block-0.safetensors'}" in message
    assert "free disk space and run again" in message
    assert json.loads((tmp_path / "run" / "run.json").read_text())
    assert finished(tmp_path / "run") == []
    assert_same(run("adaround", tmp_path / "run"), run("adaround"))
