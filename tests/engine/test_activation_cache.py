"""What goes into the cache comes out bit by bit, wherever it was kept; and it is kept within the budget."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_devices
from forked import run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import cnn, images, quantize, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

from quark_fx import Session, passes
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.engine.ranks import Ranks
from quark_fx.engine.resources import Resources
from quark_fx.errors import CalibrationError, ConfigError, QuarkError
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.presets import INT8_STATIC, PRESETS
from quark_fx.solvers.starts import Start

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def assert_identical(got: Any, expected: Tensor) -> None:
    assert isinstance(got, Tensor)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(got), bits(expected))


def some(dtype: torch.dtype) -> Tensor:
    """Return random bytes read as `dtype`, shape `(2, ...)`: infinities and NaN with payloads are among them."""
    pattern = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = (pattern % 2).bool() if dtype is torch.bool else pattern.view(dtype)
    return values.reshape(2, -1)


SHAPES: dict[str, Callable[[], Tensor]] = {
    "a scalar": lambda: torch.tensor(0.1),
    "empty": lambda: rand(3, 0, 2),
    "transposed": lambda: rand(3, 4).t(),
    "channels last": lambda: rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a column": lambda: rand(5, 6)[:, 2],
    "every other": lambda: rand(8, 6)[1::2, ::3],
    "expanded": lambda: rand(3, 1).expand(3, 7),
    "a parameter": lambda: torch.nn.Parameter(rand(3, 4)),
    "read in a graph": lambda: torch.nn.Parameter(rand(3, 4)) * 2,
}

PLACES = {"host": None, "disk": 0}


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@on_devices
@pytest.mark.parametrize("host_bytes", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype, host_bytes: int | None, device: torch.device) -> None:
    cache = ActivationCache(CacheBudget(device_bytes=0, host_bytes=host_bytes), device)
    value = some(dtype).to(device)
    cache.put("x", value)
    assert (cache.spilled_bytes, cache.peak_host_bytes) == ((value.nbytes, 0) if host_bytes == 0 else (0, value.nbytes))
    got = cache.get("x")
    assert got.device.type == device.type
    assert_identical(got, value)
    cache.close()


@on_devices
@pytest.mark.parametrize("host_bytes", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("make", SHAPES.values(), ids=list(SHAPES))
def test_every_shape_and_layout_comes_back(
    make: Callable[[], Tensor], host_bytes: int | None, device: torch.device
) -> None:
    cache = ActivationCache(CacheBudget(device_bytes=0, host_bytes=host_bytes), device)
    value = make().to(device)
    cache.put("x", value)
    got = cache.get("x")
    assert_identical(got, value)
    assert not got.requires_grad
    cache.close()


@pytest.mark.parametrize("host_bytes", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("name", ["transposed", "channels last", "empty"])
def test_the_layout_in_memory_is_kept(name: str, host_bytes: int | None) -> None:
    """Another order of dimensions may mean another kernel, and other bits in what is computed from a value."""
    cache = ActivationCache(CacheBudget(host_bytes=host_bytes))
    cache.put("x", SHAPES[name]())
    assert cache.get("x").stride() == SHAPES[name]().stride()
    cache.close()


def test_what_comes_from_disk_starts_where_a_new_tensor_would() -> None:
    """A matrix product adds in another order where its rows start between two vectors of the processor."""
    cache = ActivationCache(CacheBudget(host_bytes=0))
    for size in range(1, 9):
        cache.put("x", rand(size, 3))
        assert cache.get("x").data_ptr() % 64 == torch.empty(size, 3).data_ptr() % 64 == 0
    cache.close()


@pytest.mark.parametrize("value", [3, None, True, torch.Size([2]), 1.5], ids=str)
def test_what_is_no_tensor_is_kept_and_costs_nothing(value: Any) -> None:
    cache = ActivationCache(CacheBudget(host_bytes=0))
    cache.put("x", value)
    assert cache.get("x") is value
    assert (cache.spilled_bytes, cache.peak_host_bytes) == (0, 0)


@on_devices
@pytest.mark.parametrize("index", [slice(0, 1), (slice(None), 0), slice(5, 5)], ids=["rows", "column", "nothing"])
def test_a_view_does_not_keep_its_base_alive(index: Any, device: torch.device) -> None:
    cache = ActivationCache(CacheBudget(device_bytes=0), device)
    view = rand(1000, 10).to(device)[index]
    cache.put("x", view)
    assert cache.get("x").untyped_storage().nbytes() == view.nbytes == cache.peak_host_bytes
    assert_identical(cache.get("x"), view)


def test_a_key_that_is_put_again_stands_for_the_new_value_and_frees_the_old(tmp_path: Path) -> None:
    cache = ActivationCache(CacheBudget(host_bytes=40, directory=tmp_path))
    for seed in range(5):
        cache.put("host", rand(10, seed=seed))
        cache.put("disk", rand(11, seed=seed))
        assert len(files(tmp_path)) == 1
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (40, 5 * 44)
    assert_identical(cache.get("host"), rand(10, seed=4))
    assert_identical(cache.get("disk"), rand(11, seed=4))
    cache.close()


def test_dropping_frees_memory_and_disk(tmp_path: Path) -> None:
    cache = ActivationCache(CacheBudget(host_bytes=40, directory=tmp_path))
    cache.put("host", rand(10))
    cache.put("disk", rand(10))
    assert len(files(tmp_path)) == 1
    cache.drop("disk")
    assert files(tmp_path) == []
    cache.drop("host")
    cache.put("again", rand(10))
    assert files(tmp_path) == []
    assert [key in cache for key in ("host", "disk", "again")] == [False, False, True]
    cache.drop("never put")
    with pytest.raises(KeyError):
        cache.get("host")


def test_a_value_from_disk_outlives_its_file(tmp_path: Path) -> None:
    cache = ActivationCache(CacheBudget(host_bytes=0, directory=tmp_path))
    cache.put("x", rand(1000))
    got = cache.get("x")
    cache.drop("x")
    cache.put("y", rand(1000, seed=2))
    cache.close()
    assert_identical(got, rand(1000))


def test_closing_removes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "given").mkdir()
    for directory, where in ((None, "temporary"), (tmp_path / "given", "given")):
        cache = ActivationCache(CacheBudget(host_bytes=0, directory=directory))
        for i in range(3):
            cache.put(i, rand(10))
        assert len(files(tmp_path / where)) == 3
        cache.close()
        assert list((tmp_path / where).iterdir()) == []
        assert 0 not in cache
        cache.close()


def test_a_closed_cache_can_be_used_again(tmp_path: Path) -> None:
    cache = ActivationCache(CacheBudget(host_bytes=40, directory=tmp_path))
    for _ in range(2):
        cache.put("host", rand(10))
        cache.put("disk", rand(10))
        assert len(files(tmp_path)) == 1
        cache.close()


# A tensor's size in floats, or `None` to drop the key.
Moves = list[tuple[int, int | None]]


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(0, 400),
    moves=st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 60))), max_size=30),
)
def test_the_host_holds_what_fits_and_never_more_than_its_budget(budget: int, moves: Moves) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = ActivationCache(CacheBudget(host_bytes=budget, directory=directory))
        known: dict[int, Tensor] = {}
        peak = spilled = 0
        for seed, (key, size) in enumerate(moves):
            cache.drop(key)
            known.pop(key, None)
            if size is not None:
                value = rand(size, seed=seed)
                if in_memory(known, Path(directory)) + value.nbytes > budget:
                    spilled += value.nbytes
                known[key] = value
                cache.put(key, value)
            peak = max(peak, in_memory(known, Path(directory)))
            assert (cache.peak_host_bytes, cache.spilled_bytes) == (peak, spilled)
            assert peak <= budget
            for other, expected in known.items():
                assert_identical(cache.get(other), expected)
        assert all((key in cache) is (key in known) for key in range(6))
        cache.close()


def in_memory(known: dict[int, Tensor], directory: Path) -> int:
    """Return the bytes of what is known and not in a file."""
    written: int = sum(value.nbytes for file in files(directory) for value in load_file(file).values())
    return sum(value.nbytes for value in known.values()) - written


def test_a_budget_is_used_up_to_the_last_byte() -> None:
    cache = ActivationCache(CacheBudget(host_bytes=80))
    cache.put("a", rand(10))
    cache.put("b", rand(10))
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (80, 0)
    cache.put("c", torch.ones(1, dtype=torch.bool))
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (80, 1)
    cache.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_the_host_and_the_disk_are_filled_in_this_order() -> None:
    cache = ActivationCache(CacheBudget(device_bytes=80, host_bytes=40), torch.device("cuda"))
    values = [rand(10, seed=i).cuda() for i in range(5)]
    before = torch.cuda.memory_allocated()
    for i, value in enumerate(values):
        cache.put(i, value)
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (40, 80)
    assert torch.cuda.memory_allocated() == before  # those on the device are the caller's own
    for i, value in enumerate(values):
        assert cache.get(i).is_cuda
        assert_identical(cache.get(i), value)
    cache.drop(0)
    cache.put("again", values[0])
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (40, 80)
    cache.close()


@pytest.mark.parametrize("budget", [{"host_bytes": -1}, {"device_bytes": -1}], ids=str)
def test_a_negative_budget_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(budget))} of CacheBudget must be an integer of at least 0"):
        CacheBudget(**budget)


# Nowhere to write.

ADVICE = "`directory` with more free space, or more `host_bytes`, or pass fewer calibration batches"


def assert_says_what_to_do(message: str, directory: Path) -> None:
    assert str(directory) in message
    assert ADVICE in message


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_directory_that_is_none_is_named(what: str, tmp_path: Path) -> None:
    directory = tmp_path / what
    if what == "a file":
        directory.touch()
    cache = ActivationCache(CacheBudget(host_bytes=0, directory=directory))
    with pytest.raises(CalibrationError) as error:
        cache.put("x", rand(10))
    assert_says_what_to_do(str(error.value), directory)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="who may write anywhere")
def test_a_directory_one_may_not_write_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    cache = ActivationCache(CacheBudget(host_bytes=0, directory=tmp_path))
    with pytest.raises(CalibrationError) as error:
        cache.put("x", rand(10))
    assert_says_what_to_do(str(error.value), tmp_path)


FILL = """
import sys, torch
from quark_fx import Session, passes
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.engine.ranks import Ranks
from quark_fx.errors import CalibrationError

cache = ActivationCache(CacheBudget(host_bytes=0, directory=sys.argv[1]))
kept = torch.arange(1000.)
cache.put("small", kept)
try:
    for i in range(100):
        cache.put(i, torch.zeros(100_000))
except CalibrationError as error:
    print(error)
assert torch.equal(cache.get("small"), kept)
cache.drop("small")
cache.put("small", kept)
cache.close()
"""
"""Writes 4 kB, which fit, then 400 kB at a time until they do not; what fitted is still there."""

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of this kind")
def test_a_file_that_may_not_grow_is_reported(tmp_path: Path) -> None:
    done = run_program(f"{LIMITED}\n{FILL}", tmp_path)
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert_says_what_to_do(message, tmp_path)
    assert "cannot write 0.4 MiB" in message
    assert list(tmp_path.iterdir()) == []


def may_mount(directory: Path) -> bool:
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(directory)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("mounting a small file system is not allowed")
    script = 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"'
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, "-c", FILL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert_says_what_to_do(message, tmp_path)
    assert "No space left" in message
    assert "0.8 MiB were written before" in message


# In a run.

LEARNING = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, BiasCorrection()))


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_run_leaves_no_files(fails: bool, tmp_path: Path) -> None:
    kept = []

    def look(gm: Any, context: Any) -> int:
        kept.append(context)  # so that nothing is removed for want of readers
        assert files(tmp_path)
        if fails:
            raise CalibrationError("refused")
        return 0

    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, look))
    with pytest.raises(CalibrationError, match="refused") if fails else nullcontext():
        quantize(cnn(), config, images(4, 4), resources=Resources(cache=CacheBudget(host_bytes=0, directory=tmp_path)))
    assert len(kept) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_budget_is_made(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "down"
    qmodel = quantize(
        cnn(), LEARNING, images(4, 4), resources=Resources(cache=CacheBudget(host_bytes=0, directory=place))
    )
    assert len(qmodel.report()) == 3
    assert list(place.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    budget = CacheBudget(host_bytes=0, directory=tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"the directory .*below of the CacheBudget cannot be used: .*choose another"):
        quantize(nn.Linear(2, 2).train(), LEARNING, images(4, 4), resources=Resources(cache=budget))


def test_what_is_no_budget_is_refused_before_the_run_begins() -> None:
    with pytest.raises(ConfigError, match=r"cache of Resources must be a CacheBudget or None, not 1000000"):
        Resources(cache=10**6)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["no such device", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_cannot_be_used_is_refused_before_the_run_begins(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device}' cannot be used"):
        quantize(nn.Linear(2, 2).train(), LEARNING, images(4, 4), resources=Resources(device=device))


def test_a_run_without_room_says_so(tmp_path: Path) -> None:
    def remove(gm: GraphModule) -> int:
        shutil.rmtree(tmp_path / "cache")
        return 0

    (tmp_path / "cache").mkdir()
    config = LEARNING.replace(passes=(remove, *LEARNING.passes))
    with pytest.raises(CalibrationError) as error:
        quantize(
            cnn(),
            config,
            images(4, 4),
            resources=Resources(cache=CacheBudget(host_bytes=7000, directory=tmp_path / "cache")),
        )
    assert_says_what_to_do(str(error.value), tmp_path / "cache")


def test_a_run_that_finds_no_room_says_what_to_change() -> None:
    """After every step that makes room; meanwhile no rank begins what the others do not."""
    context = Context(QuantConfig(), CalibrationData(ActivationCache()), torch.device("cpu"))

    def full() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="pass `calibration_data` in batches of fewer or shorter samples"):
        context.with_room(full)
    assert [change.name for change in context.changes] == ["device memory"] * 7
    with pytest.raises(QuarkError, match="compute the sum before or after"):
        context.with_room(lambda: Ranks(0, 2).add(torch.zeros(1)))


@pytest.mark.parametrize(
    ("short", "learn"),
    [
        ("engine.block_walk._squares", passes.AdaRound(iterations=1)),
        ("engine.block_walk.BlockRun.targets", passes.AdaRound(iterations=1)),
        ("solvers.starts.gptq_round", passes.AdaRound(iterations=1, start=Start.FEEDBACK)),
        ("passes.low_rank._settled", passes.LowRank(rank=2)),
        ("engine.block_walk.FloatRun.inputs", passes.TuneScales(iterations=1)),
    ],
    ids=str,
)
def test_a_run_continues_where_a_step_found_no_room(short: str, learn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = PRESETS["w4a16_rtn"].replace(passes=(learn,)), pkgutil.resolve_name(f"quark_fx.{short}")
    expected, calls = quantize(two_layers(), config), []

    def once(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return step(*given, **options)

    monkeypatch.setattr(f"quark_fx.{short}", once)
    made = quantize(two_layers(), config)
    assert len(calls) > 1
    notes = [change.name for record in made.report().passes for change in record.changes]
    assert notes.count("device memory") == 1
    ours, theirs = (q.graph_module.state_dict() for q in (made, expected))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@cache
def two_layers() -> Session:
    """Return a network of two layers, and its data."""
    return Session(seeded(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))), [rand(4, 32), rand(4, 32)])
