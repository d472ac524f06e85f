"""Several processes that quantize one model end with one result, that of a single process up to the order of sums."""

from __future__ import annotations

import faulthandler
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from captured_once import CAPTURES
from extensions.clip_activations import ClipActivations
from extensions.deviation_scales import DeviationScales
from extensions.refit_scales import RefitScales
from extensions.shift_channels import ShiftChannels
from forked import start_method
from safetensors.torch import load_file
from test_resume import assert_same, outcome
from tiny import quantize, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

import quark_fx as qfx
from quark_fx import passes, session
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.engine.block_walk import walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.checkpoint import Checkpoint
from quark_fx.engine.context import Context
from quark_fx.engine.ranks import _DONE, Ranks
from quark_fx.engine.resources import Resources, require_usable, usable_device
from quark_fx.errors import CalibrationError
from quark_fx.graph.pass_manager import GraphPass, Stage, graph_pass
from quark_fx.model.model_directory import tensor_file
from quark_fx.numbers.formats import INT4, UINT4, UINT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.observers import Percentile
from quark_fx.passes import (
    GPTQ,
    AdaQuant,
    AdaRound,
    AutoRound,
    BiasCorrection,
    FitScales,
    LearnRotations,
    LowRank,
    NormalizeColumns,
    SmoothQuant,
    TuneScales,
)
from quark_fx.presets import INT8_STATIC, W4A4_DYNAMIC, W4A16_AWQ, W4A16_GPTQ
from quark_fx.quantization import _require_distributed, _shared_checkpoint
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal, Skip, Solver, solver
from quark_fx.solvers.starts import Start

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.mark.parametrize(
    ("device", "distributed", "local", "used"),
    [
        *(("cuda", True, "0", "cuda:0"), ("cuda", True, "3", "cuda:3"), (torch.device("cuda"), True, "3", "cuda:3")),
        *(("cuda", True, "4", "cuda"), ("cuda", True, None, "cuda"), ("cuda", False, "3", "cuda")),
        *(("cuda:0", True, "3", "cuda:0"), ("cpu", True, "x", "cpu"), (None, True, "x", None)),
    ],
)
def test_each_rank_uses_the_gpu_of_its_own(
    device: Any, distributed: bool, local: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*shape: int, device: Any, dtype: torch.dtype) -> Tensor:
        return SimpleNamespace(device=torch.device(device))  # type: ignore[return-value]

    if local is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "empty", empty)
    for initializing in ("current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, initializing, lambda *_: pytest.fail("it makes a context on another GPU"))
    found = usable_device(Resources(device=device, distributed=distributed))
    assert found == (None if used is None else torch.device(used))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert Ranks.current(found).device == (found if "cuda" in str(found) else torch.device("cuda:2"))


@pytest.mark.parametrize("local", ["", "x", "-1", "1.0", "٣"])
def test_a_local_rank_that_is_no_number_is_refused_by_name(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    require_usable(Resources(device="cpu", distributed=True))
    with pytest.raises(qfx.ConfigError, match=rf"LOCAL_RANK must be .*, not {local!r}"):
        require_usable(Resources(device="cuda", distributed=True))


class Feed(nn.Module):
    """Two operators that read one value, and one that reads what becomes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate, self.lift, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(torch.relu(self.gate(y)) * self.lift(y))
        return out


class Blocks(nn.Module):
    """Blocks one behind the other."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Feed() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def batches(count: int = 5) -> list[Tensor]:
    """Return batches of different sizes; inputs depend on each other, so that there is something to learn."""
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(99))
    return [torch.randn(4 + i, 6, 16, generator=torch.Generator().manual_seed(i)) @ mix + 1 for i in range(count)]


def in_groups(config: QuantConfig, **options: Any) -> QuantConfig:
    assert config.weight is not None
    return config.replace(weight=config.weight.replace(group_size=16, **options), exclude=())


FOUR_BITS = INT8_STATIC.replace(
    weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL),
    input=TensorSpec(format=UINT4),
    output=TensorSpec(format=UINT4),
)


def learning(learner: GraphPass) -> QuantConfig:
    """Return a configuration with 4-bit weights, 8-bit activations and int32 biases that learns codes."""
    return INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL), passes=(learner,))


SHORT: dict[str, Any] = {"iterations": 8, "batch_size": 12}
"""A mini-batch takes samples from two batches or three, of one rank or of both."""

LEARNERS: dict[str, GraphPass] = {
    "adaround": AdaRound(start=Start.CODES, softness=1.0, learning_rate=0.3, **SHORT),
    "adaround, descent": AdaRound(**SHORT),
    "qdrop": AdaRound(unit=Unit.BLOCK, start=Start.CODES, drop=0.5, scale_rate=0.01, learning_rate=0.3, **SHORT),
    "adaquant": AdaQuant(start=Start.CODES, learning_rate=0.1, **SHORT),
    "adaquant, blocks": AdaQuant(unit=Unit.BLOCK, start=Start.CODES, learning_rate=0.1, **SHORT),
    "autoround": AutoRound(unit=Unit.OPERATOR, **SHORT),
    "shifted channels": ShiftChannels(**SHORT),
    "autoround, blocks": AutoRound(start=Start.CODES, range_rate=1.0, drop=0.2, **SHORT),
}

CONFIGS: dict[str, QuantConfig] = {
    "gptq": in_groups(W4A16_GPTQ),
    "gptq, asymmetric": in_groups(W4A16_GPTQ).replace(passes=(GPTQ(asymmetry=0.5, fit_scales=True, sweeps=2),)),
    "gptq, guided": in_groups(W4A16_GPTQ).replace(passes=(GPTQ(guided=True),)),
    "gptq, two-sided": in_groups(W4A16_GPTQ).replace(passes=(GPTQ(two_sided=True),)),
    # With a full range the largest weight of a group lies between two codes, which the last bits of a sum decide.
    "awq": in_groups(W4A16_AWQ, symmetry=Symmetry.SYMMETRIC),
    "branches": in_groups(W4A16_GPTQ, symmetry=Symmetry.SYMMETRIC).replace(passes=(LowRank(rank=2, overhead=9),)),
    "learned rotations": in_groups(W4A4_DYNAMIC).replace(
        passes=(LearnRotations(overhead=9, streams=False, iterations=20),)
    ),
    "normalized columns": in_groups(W4A16_GPTQ).replace(passes=(NormalizeColumns(explicit=True), GPTQ())),
    "fitted scales": in_groups(W4A16_GPTQ).replace(passes=(FitScales(),)),
    "tuned scales": in_groups(W4A16_GPTQ).replace(passes=(TuneScales(iterations=3, batches=3),)),
    "refitted scales": in_groups(W4A16_GPTQ).replace(passes=(RefitScales(),)),
    "clipped activations": FOUR_BITS.replace(passes=(*FOUR_BITS.passes, ClipActivations())),
    "corrected biases": FOUR_BITS.replace(passes=(*FOUR_BITS.passes, BiasCorrection())),
    **{name: learning(learner) for name, learner in LEARNERS.items()},
    "autoround, weights": in_groups(W4A16_GPTQ).replace(passes=(AutoRound(iterations=5, batch_size=12),)),
    "static": INT8_STATIC,
    "smooth": INT8_STATIC.replace(passes=(*INT8_STATIC.passes, SmoothQuant())),
    "smooth, explicit": INT8_STATIC.replace(passes=(*INT8_STATIC.passes, SmoothQuant(explicit=True))),
    "deviations": INT8_STATIC.replace(passes=(*INT8_STATIC.passes, DeviationScales(explicit=True))),
    "percentile": INT8_STATIC.replace(input=TensorSpec(format=UINT8, observer=Percentile())),
}


SCALED = ("smooth", "smooth, explicit", "deviations")
"""Those that learn from samples and ranges: nothing is summed over the data."""


IN_BLOCKS = (
    *("gptq", "awq", "tuned scales", "qdrop", "adaquant, blocks", "autoround, blocks", "autoround, weights"),
    *("smooth", "smooth, explicit"),
)
"""Configurations whose passes learn a block from what the block before it became, or all blocks together."""


def model_of(name: str) -> nn.Module:
    """Return the model of a configuration; where channels are to be scaled, some stand out."""
    model = seeded(Blocks(2 if name in IN_BLOCKS else 1))
    if name in SCALED:
        with torch.no_grad():
            for feed in model.blocks:
                assert isinstance(feed, Feed)
                feed.norm.weight[[3, 11]] *= 100
    return model


def job(rank: int, count: int, folder: Path, work: Callable[[Path], Any]) -> None:
    """Be one of the ranks, which capture models of one structure once, as tests do (`captured_once.py`)."""
    faulthandler.enable()
    torch.set_num_threads(1)
    patch.object(session, "capture_graph", CAPTURES).start()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
    work(folder)
    dist.barrier()  # who leaves early takes the others' connections along
    dist.destroy_process_group()
    # Threads of gloo outlive their group: one that lets go of a tensor while the interpreter ends, aborts the process
    # (https://github.com/pytorch/pytorch/pull/179291).
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def run(count: int, folder: Path, work: Callable[[Path], Any]) -> None:
    (folder / "meet").unlink(missing_ok=True)
    start_processes(job, (count, folder, work), nprocs=count, start_method=start_method())


def quantize_all(folder: Path) -> None:
    """Quantize with every configuration; save what each rank has."""
    ranks = Ranks.current()
    for name, config in CONFIGS.items():
        qmodel = quantize(model_of(name), config, batches(), resources=qfx.Resources(distributed=True))
        qmodel.save(folder / f"{name} {ranks.index}")


def exact(folder: Path) -> None:
    """Quantize a layer whose sums are exact in any order."""
    data = [batch.round() for batch in batches()]
    qmodel = quantize(seeded(nn.Linear(16, 48)), CONFIGS["gptq"], data, resources=qfx.Resources(distributed=True))
    torch.save(outcome(qmodel), folder / f"exact-{Ranks.current().index}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run(2, folder, quantize_all)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_end_as_one_process_does(name: str, results: Path) -> None:
    first, second = (load_file(tensor_file(results / f"{name} {rank}")) for rank in range(2))
    assert all(
        torch.equal(first[key].flatten().view(torch.uint8), second[key].flatten().view(torch.uint8)) for key in first
    )
    alone = quantize(model_of(name), CONFIGS[name], batches())
    with torch.no_grad():
        y, float_y = (torch.cat([m(x).flatten() for x in batches()]) for m in (alone, model_of(name)))
        loaded = qfx.load(results / f"{name} 0")
        again = torch.cat([loaded(x).flatten() for x in batches()])
    lost, apart = (y - float_y).norm(), (again - y).norm()
    # Sums in another order may send a code in a thousand to the other side of a tie, 3 % of what rounding takes.
    assert apart <= (0 if name in SCALED else 0.05 * lost)
    rows, expected = (
        [c for p in m.report().passes for c in p.changes] for m in (qfx.load(results / f"{name} 1"), alone)
    )
    assert [change.name for change in rows] == [change.name for change in expected]
    if name in SCALED:
        assert rows == expected
        assert any(change.changed for change in rows if change.before is not None)


def test_the_first_rank_creates_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    """Other ranks open it after they waited for the first one."""
    created = list[bool]()

    def first(work: Callable[[], Checkpoint]) -> None:
        work()
        created.append((tmp_path / "run").is_dir())

    ranks: Any = SimpleNamespace(first=first)
    assert _shared_checkpoint(tmp_path / "run", {"model": "a"}, ranks).directory == tmp_path / "run"
    assert created == [True]


def learn_little(folder: Path) -> None:
    """Learn from two batches, of which the second is divided: the third rank has validation data only."""
    qmodel = quantize(seeded(Blocks()), CONFIGS["qdrop"], batches(2), resources=qfx.Resources(distributed=True))
    torch.save(outcome(qmodel), folder / f"little-{Ranks.current().index}.pt")


def test_a_rank_without_calibration_samples_takes_the_same_steps(tmp_path: Path) -> None:
    run(3, tmp_path, learn_little)
    alone = outcome(quantize(seeded(Blocks()), CONFIGS["qdrop"], batches(2)))
    found = [torch.load(tmp_path / f"little-{rank}.pt", weights_only=False) for rank in range(3)]
    for other in found[1:]:
        assert_same(other, found[0])
    for name, tensor in alone.tensors.items():
        # Sums in another order may send a code to the other side of a tie.
        nearly = {"rtol": 0, "atol": 1} if name.endswith("codes") else {"rtol": 1e-4, "atol": 0}
        torch.testing.assert_close(found[0].tensors[name].float(), tensor.float(), **nearly)
    assert [row.what for row in found[0].passes[-1].changes] == [row.what for row in alone.passes[-1].changes]


@pytest.mark.parametrize("count", [2, 4])
def test_where_sums_are_exact_the_bits_are_those_of_one_process(count: int, tmp_path: Path) -> None:
    run(count, tmp_path, exact)
    alone = outcome(quantize(seeded(nn.Linear(16, 48)), CONFIGS["gptq"], [batch.round() for batch in batches()]))
    for rank in range(count):
        assert_same(torch.load(tmp_path / f"exact-{rank}.pt", weights_only=False), alone)


def streamed(folder: Path) -> None:
    quantize(
        seeded(Blocks()),
        CONFIGS["gptq"],
        batches(),
        resources=qfx.Resources(output_dir=folder / "out", distributed=True),
    )


def interrupted(folder: Path) -> None:
    """End one of the ranks in the middle of the work."""
    saved, save = [0], Checkpoint.save

    def keep(self: Checkpoint, *args: Any) -> None:
        save(self, *args)
        saved[0] += 1
        if saved[0] == 2:
            os._exit(7)

    Checkpoint.save = keep  # type: ignore
    with pytest.raises(qfx.QuarkError, match=r"rank 1 of 2 cannot reach the others .*Start the job again"):
        streamed(folder)
    (folder / "told").touch()


def test_a_rank_that_dies_ends_the_job_which_continues(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run(2, tmp_path, interrupted)
    blocks = sorted((tmp_path / "out" / "unfinished" / "blocks").glob("*.safetensors"))
    assert len(blocks) == 2
    run(2, tmp_path, streamed)
    (tmp_path / "undisturbed").mkdir()
    run(2, tmp_path / "undisturbed", streamed)
    a, b = (load_file(tensor_file(folder / "out")) for folder in (tmp_path, tmp_path / "undisturbed"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    out = tmp_path / "out"
    assert sorted(file.name for file in out.iterdir()) == ["graph.json", tensor_file(out).name]


def full_disk(folder: Path) -> None:
    """Fail on the first rank alone, between collectives."""
    saved, wrong = Checkpoint.save, CalibrationError("no room") if folder.name == "ours" else OSError("no room")

    def fail(self: Checkpoint, *args: Any) -> None:
        raise wrong

    Checkpoint.save = fail  # type: ignore
    first = Ranks.current().index == 0
    kind = type(wrong) if first else qfx.QuarkError
    try:
        with pytest.raises(
            kind, match=r"^no room" if first or folder.name == "ours" else "rank 0 of 2 failed: OSError: no"
        ):
            streamed(folder)
    finally:
        Checkpoint.save = saved  # type: ignore


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_what_fails_on_one_rank_fails_on_all(kind: str, tmp_path: Path) -> None:
    (tmp_path / kind).mkdir()
    run(2, tmp_path / kind, full_disk)


def other_number(folder: Path) -> None:
    quantize(
        seeded(Blocks()),
        CONFIGS["gptq"],
        batches(),
        resources=qfx.Resources(checkpoint=folder / "blocks", distributed=True),
    )


def test_blocks_of_several_ranks_are_not_those_of_one(tmp_path: Path) -> None:
    run(2, tmp_path, other_number)
    with pytest.raises(qfx.ConfigError, match="contains finished blocks of a run with different number of ranks"):
        quantize(seeded(Blocks()), CONFIGS["gptq"], batches(), resources=qfx.Resources(checkpoint=tmp_path / "blocks"))


def refuse(folder: Path) -> None:
    @graph_pass(exact=False, stage=Stage.QUANTIZED)
    def guess(gm: GraphModule, context: Context) -> int:
        return 0

    with pytest.raises(qfx.ConfigError, match="guess cannot divide data among 2 ranks"):
        quantize(
            seeded(Blocks()), INT8_STATIC.replace(passes=(guess,)), batches(), resources=qfx.Resources(distributed=True)
        )
    with pytest.raises(qfx.CalibrationError, match="1 calibration batches cannot be shared by 2 ranks"):
        quantize(seeded(Blocks()), CONFIGS["gptq"], [torch.ones(1, 6, 16)], resources=qfx.Resources(distributed=True))


def judge(folder: Path) -> None:
    """Note the error of each block as it is, walking with a share of the data or, after the others, with all of it."""
    ranks, found = Ranks.current(), []

    @graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True)
    def look(gm: GraphModule, context: Context) -> int:
        found.append([run.validation_error() for run in walk_blocks(gm, context)])
        return 0

    config = in_groups(W4A16_GPTQ).replace(passes=(look,))
    quantize(seeded(Blocks()), config, batches(17), resources=qfx.Resources(distributed=True))
    quantize(seeded(Blocks()), config, batches(17))
    torch.save(found, folder / f"errors-{ranks.index}.pt")


def test_all_ranks_judge_by_the_validation_data_of_all(tmp_path: Path) -> None:
    """Only the last one has any: two batches of seventeen."""
    run(3, tmp_path, judge)
    found = [torch.load(tmp_path / f"errors-{rank}.pt") for rank in range(3)]
    (shared, alone), *others = found
    assert others == [[shared, alone]] * 2
    assert shared == pytest.approx(alone, rel=1e-5)


@solver
@dataclass(frozen=True, kw_only=True)
class FailOnSecond(Solver):
    """Fail on the second rank."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Skip:
        if Ranks.current().index == 1:
            raise CalibrationError("it is rank 1 that fails")
        return Skip("nothing to do")


def disagree(folder: Path) -> None:
    ranks = Ranks.current()
    with pytest.raises(qfx.ConfigError, match="the ranks must agree, but differ in model; pass the same model"):
        quantize(
            seeded(Blocks(), seed=ranks.index), CONFIGS["gptq"], batches(), resources=qfx.Resources(distributed=True)
        )
    with pytest.raises(qfx.ConfigError, match="the ranks must agree, but differ in data;"):
        quantize(seeded(Blocks()), CONFIGS["gptq"], batches(4 + ranks.index), resources=qfx.Resources(distributed=True))
    quantize(seeded(Blocks(), seed=ranks.index), CONFIGS["gptq"], batches())  # each for itself
    # What one rank fails at, all do, and go on together.
    far = [*batches()[:-1], batches()[-1] / 0]
    with pytest.raises(qfx.CalibrationError, match="calibration batch 4: input input holds NaN or infinity"):
        quantize(seeded(nn.Linear(16, 48)), INT8_STATIC, far, resources=qfx.Resources(distributed=True))
    with pytest.raises(qfx.CalibrationError, match="it is rank 1 that fails"):
        quantize(
            seeded(Blocks()),
            in_groups(W4A16_GPTQ).replace(passes=(FailOnSecond(),)),
            batches(),
            resources=qfx.Resources(distributed=True),
        )
    assert ranks.gather(ranks.index) == [0, 1]


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    run(2, tmp_path, disagree)


class UnluckyError(Exception):
    """An exception that nothing here knows, which cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"no luck with {first} and {second}")


@solver
@dataclass(frozen=True, kw_only=True)
class UnluckyOnSecond(Solver):
    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Skip:
        if Ranks.current().index == 1:
            raise UnluckyError(1, 2)
        return Skip("nothing to do")


def fail_unexpectedly(folder: Path) -> None:
    """Fail on one rank, which lives on: first in a solver, at the same place on all, then where the others wait."""
    ranks = Ranks.current()
    unlucky = "UnluckyError: no luck with 1 and 2"
    config = in_groups(W4A16_GPTQ).replace(passes=(UnluckyOnSecond(),))
    with pytest.raises(qfx.PassError, match=rf"UnluckyOnSecond failed on blocks\.0\.\w+: {unlucky}"):
        quantize(seeded(Blocks()), config, batches(), resources=qfx.Resources(distributed=True))
    quantize(
        seeded(nn.Linear(16, 48)), CONFIGS["gptq"], batches(), resources=qfx.Resources(distributed=True)
    )  # the ranks are still together

    def unlucky_on_second(gm: GraphModule) -> int:
        if ranks.index == 1:
            raise UnluckyError(1, 2)
        return 0

    began = time.monotonic()
    config = CONFIGS["gptq"].replace(passes=(unlucky_on_second, GPTQ()))
    kind, message = (
        (UnluckyError, "^no luck") if ranks.index == 1 else (qfx.QuarkError, rf"^rank 1 of 2 failed: {unlucky}$")
    )
    with pytest.raises(kind, match=message):
        quantize(seeded(Blocks()), config, batches(), resources=qfx.Resources(distributed=True))
    assert time.monotonic() - began < 5
    (folder / f"told-{ranks.index}").touch()
    while not all((folder / f"told-{rank}").exists() for rank in range(2)):  # the group is out of step
        time.sleep(0.01)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def test_an_exception_of_any_type_reaches_all_ranks_soon(tmp_path: Path) -> None:
    run(2, tmp_path, fail_unexpectedly)
    assert len(list(tmp_path.glob("told-*"))) == 2


def count_sent(folder: Path) -> None:
    """Round a large layer; note the bytes of tensors that are broadcast, and of those that are gathered."""
    sent, gathered, broadcast, gather = list[int](), list[int](), Ranks.broadcast, Ranks.gather

    def sending(self: Ranks, tensor: Tensor, source: int) -> None:
        sent.append(tensor.nbytes)
        broadcast(self, tensor, source)

    def gathering(self: Ranks, value: Any) -> list[Any]:
        before = len(sent)
        found = gather(self, value)
        gathered.extend(sent[before:])
        return found

    Ranks.broadcast, Ranks.gather = sending, gathering  # type: ignore[method-assign]
    data = [batch.round() for batch in batches()]
    qmodel = quantize(seeded(nn.Linear(16, 4096)), CONFIGS["gptq"], data, resources=qfx.Resources(distributed=True))
    assert any(change.changed for record in qmodel.report().passes for change in record.changes)
    codes = 16 * 4096
    assert max(gathered) < codes / 4
    assert codes <= sum(sent) - sum(gathered) <= 1.5 * codes


def test_results_are_sent_once_by_their_owner(tmp_path: Path) -> None:
    run(2, tmp_path, count_sent)


def exchange(folder: Path) -> None:
    """Exchange values that hold small and large tensors of all kinds; note the memory and collectives that it takes."""
    ranks, size, before = Ranks.current(), 2**26, list[int]()

    def grown() -> int:
        before.append(1024 * getrusage(RUSAGE_SELF).ru_maxrss if sys.platform == "linux" else 0)
        return before[-1] - before[0]

    storage = torch.full((size,), ranks.index, dtype=torch.int8)
    column = torch.arange(12.0).reshape(3, 4)[:, 1] + ranks.index
    kinds = [torch.tensor(ranks.index), torch.empty(0, 3), torch.tensor([True, False]), column.to(torch.bfloat16)]
    kinds.append(torch.tensor([1 + 2j, 3j]).conj())
    grown()
    ours: dict[str, Any] = {"view": storage[3:5], "kinds": kinds, "text": str(ranks.index)}
    values = ranks.gather(ours)
    assert grown() < size / 4  # of the view, not of its storage
    whole = ranks.gather(storage)
    assert grown() <= 1.5 * size
    assert [x[-1].item() for x in whole] == [0, 1]
    for rank, value in enumerate(values):
        assert value["text"] == str(rank)
        assert torch.equal(value["view"], torch.full((2,), rank, dtype=torch.int8))
        expected = [torch.tensor(rank), kinds[1], kinds[2], torch.tensor([1.0, 5.0, 9.0], dtype=torch.bfloat16) + rank]
        expected.append(torch.tensor([1 - 2j, -3j]))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(value["kinds"], expected, strict=True))
    assert ranks.fold(torch.tensor([ranks.index]), lambda a, b: torch.cat([a, b])).tolist() == [0, 1]
    large = torch.arange(2.0**16).reshape(256, 256).T.to(torch.bfloat16) + ranks.index
    varied: list[Any] = [large, torch.empty(0), nn.Parameter(large.float()), torch.tensor(ranks.index), large > 7]
    mixed = ranks.gather(varied)
    for rank, (a, _, b, c, d) in enumerate(mixed):
        real = torch.arange(2.0**16).reshape(256, 256).T.to(torch.bfloat16) + rank
        assert torch.equal(a, real)
        assert torch.equal(b, real.float())
        assert c.item() == rank
        assert torch.equal(d, real > 7)
    done = _DONE["collectives"]
    ranks.gather([torch.rand(64) for _ in range(100)])
    assert _DONE["collectives"] - done == 3  # the lengths, and a message of each rank


def test_an_exchange_takes_little_more_memory_than_what_is_received(tmp_path: Path) -> None:
    run(2, tmp_path, exchange)


def test_work_is_divided_by_size() -> None:
    loads = [0.0, 0.0]
    assert Ranks(0, 2).owners([1, 1, 8, 1, 1], loads) == [1, 1, 0, 1, 1]
    assert loads == [8, 4]
    assert Ranks(0, 2).owners([3], loads) == [1]
    assert Ranks().owners([2, 1], [0.0]) == [0, 0]
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 8):
        sizes = torch.rand(40, generator=generator).tolist()
        loads = [0.0] * count
        Ranks(0, count).owners(sizes, loads)
        assert sum(loads) == pytest.approx(sum(sizes))
        assert max(loads) <= sum(sizes) / count + max(sizes)


def count_rounded(folder: Path) -> None:
    rounded, solve = set(), GPTQ.solve

    def counting(self: GPTQ, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        rounded.add(weight.name)
        return solve(self, weight, seen)

    GPTQ.solve = counting  # type: ignore[method-assign]
    quantize(seeded(Blocks()), CONFIGS["gptq"], batches(), resources=qfx.Resources(distributed=True))
    # `down` is three times the work of the others.
    mine = {"blocks.0.gate", "blocks.0.down"}
    everything = {f"blocks.{i}.{name}" for i in range(2) for name in ("gate", "lift", "down")}
    assert rounded == (mine if Ranks.current().index == 0 else everything - mine)


def test_rounding_is_divided(tmp_path: Path) -> None:
    run(2, tmp_path, count_rounded)


@pytest.mark.parametrize("name", sorted(name for name, kind in vars(passes).items() if isinstance(kind, type)))
def test_every_pass_of_the_package_runs_on_several_ranks(name: str) -> None:
    kind = getattr(passes, name)
    if not inspect.isabstract(kind) and kind.__module__.startswith("quark_fx"):
        _require_distributed(SimpleNamespace(passes=(kind(),)), Ranks(0, 2))  # type: ignore[arg-type]


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, refuse)


def test_shares_are_all_there_is_in_order() -> None:
    for count in range(1, 9):
        for size in range(20):
            items = list(range(size))
            assert [i for rank in range(count) for i in Ranks(rank, count).share(items)] == items
