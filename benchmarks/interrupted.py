"""Kill runs at random moments, continue them, and compare with a run that nothing happened to.

    python -m benchmarks.interrupted [--kills 20] [--seed 0] [--streamed] [--full-disks 5]

The first half of a narrow MobileNetV2 with random weights and images of 64 x 64 is quantized to `int8_static` with
corrected biases and learned rounding, in a process of its own, with a checkpoint directory. When it has finished a
random number of blocks it is killed (`SIGKILL`), a random time later, up to that of two blocks; then the same call is
made again. *Identical*: every tensor of the result bit by bit, every row of the report, and every change a pass noted
but for its seconds. Needs a system that can fork.

`--streamed`: instead a small Llama and its shards, streamed with GPTQ to an output directory; a result that was
complete when the kill came is loaded, not made again. And, where this process may mount one, runs into a disk of random
size that is too small, which is then made larger.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm

import quark_fx as qfx
from benchmarks.common import environment, estimate_batch_norm, images, spread, table
from benchmarks.experiment import experiment
from quark_fx.graph.nodes import stored_tensors
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.presets import INT8_STATIC

CONFIG = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, BiasCorrection(), AdaRound(iterations=10, batch_size=4)))

BLOCKS = 17
"""Blocks that a streamed run finishes, all before the head. When it has ended they are gone."""

LARGEST = 9 << 20
"""Bytes that a streamed run takes on disk, about."""

STAGES = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2]]
"""Expansion, channels, number and stride of the inverted residuals."""


@dataclass(frozen=True)
class Kill:
    """One run that was killed and continued.

    Attributes:
        after: seconds from the call to the kill.
        aim: finished blocks after which it was to be killed.
        blocks: finished blocks that it left.
        partial: files that it left half written.
        seconds: what the second call took.
        identical: whether it ended as the undisturbed run did.
    """

    after: float
    aim: int
    blocks: int
    partial: int
    seconds: float
    identical: bool


def model_and_data() -> tuple[nn.Module, list[Tensor]]:
    """Make a network and three batches, the same every time."""
    torch.manual_seed(0)
    model, batches = torchvision.models.MobileNetV2(10, 0.25, STAGES), images(24, 8, 64, seed=1)
    estimate_batch_norm(model, batches)
    return model, batches


def checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a small Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1MB")
    return folder


def quantized(directory: Path, source: Path | None) -> qfx.QuantizedModel:
    """Do a run: stream the checkpoint `source` to `directory`, or with none keep finished blocks of a network there."""
    if source is not None:
        if (directory / "graph.json").exists() and not (directory / "unfinished").exists():
            return qfx.load(directory)  # the kill came when all was done, and a finished result is not made again
        data = [
            {"input_ids": torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(i))} for i in range(4)
        ]
        return qfx.quantize(source, "w4a16_gptq", data, progress=False, resources=qfx.Resources(output_dir=directory))
    model, batches = model_and_data()
    return qfx.quantize(model, CONFIG, batches, progress=False, resources=qfx.Resources(checkpoint=directory))


def digest(qmodel: qfx.QuantizedModel) -> str:
    """Return what identifies the result of a run: tensors and report, but not the time it took."""
    found = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(qmodel.graph_module).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    report = qmodel.report()
    changes = [{**asdict(change), "seconds": 0.0} for record in report.passes for change in record.changes]
    found.update(json.dumps([report.to_rows(), changes]).encode())
    return found.hexdigest()


def work(directory: Path, source: Path | None, began: Connection, result: Path) -> None:
    """Do a run in this process; say on `began` when it begins, and write its seconds and digest to `result`.

    Of one that fails it is the error.
    """
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # the default one is a semaphore that would outlive a kill
    began.send(None)
    start = time.perf_counter()
    try:
        found = digest(quantized(directory, source))
    except qfx.QuarkError as error:
        found = f"{type(error).__name__}: {error}"
    result.write_text(json.dumps([time.perf_counter() - start, found]))


class Runs:
    """Starts runs in processes forked from one that has imported everything."""

    def __init__(self, folder: Path, source: Path | None) -> None:
        self.folder, self.source = folder, source
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["benchmarks.common", "quark_fx", "torchvision", "transformers", "torch._dynamo"]
        )
        self.count = 0

    def start(self, directory: Path) -> tuple[Any, Path]:
        """Return a process whose run has begun, and where its result will be."""
        self.count += 1
        result = self.folder / f"result-{self.count}.json"
        receive, send = self.context.Pipe(duplex=False)
        process = self.context.Process(target=work, args=(directory, self.source, send, result))
        process.start()
        send.close()
        receive.recv()
        return process, result

    def finish(self, directory: Path) -> tuple[float, str]:
        """Do a run to its end; return its seconds and digest."""
        process, result = self.start(directory)
        process.join()
        seconds, found = json.loads(result.read_text())
        return seconds, found

    def kill(self, directory: Path, aim: int, delay: float, expected: str) -> Kill | None:
        """Do a run, kill it some time after it finished `aim` blocks, do it again; `None` if it was faster."""
        process, _ = self.start(directory)
        start = time.perf_counter()
        while finished(directory) < aim and process.exitcode is None:
            time.sleep(0.001)
        process.join(delay)
        after = time.perf_counter() - start
        process.kill()
        process.join()
        blocks, partial = finished(directory), found_in(directory, "*.partial")
        if process.exitcode != -signal.SIGKILL:
            return None
        seconds, found = self.finish(directory)
        return Kill(after, aim, blocks, partial, seconds, found == expected)


def finished(directory: Path) -> int:
    """Return how many blocks a run has finished."""
    return found_in(directory, "pass-*.safetensors")


def found_in(directory: Path, pattern: str) -> int:
    """Return how many files match a pattern; unlike `rglob`, `os.walk` passes over folders that a run just removed."""
    return sum(len(fnmatch.filter(files, pattern)) for _, _, files in os.walk(directory))


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path | None]:
    """Mount a disk of `size` bytes at `folder`, meanwhile; `None` where that is not allowed."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(options, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disks(runs: Runs, sizes: Sequence[int], expected: str) -> str:
    """Run into full disks, make room, and say how that ended."""
    rows = []
    for number, size in enumerate(sizes):
        with disk(runs.folder / f"disk-{number}", size) as folder:
            if folder is None:
                return "No disk may be mounted here: full ones were not tried."
            _, first = runs.finish(folder / "output")
            blocks = finished(folder)
            subprocess.run(["mount", "-o", f"remount,size={1 << 30}", str(folder)], check=True)
            _, second = runs.finish(folder / "output")
        named = "finished before" if first == expected else first.replace(str(folder), "…")[:80]
        rows.append((f"{size / 2**20:.1f}", named, blocks, "yes" if second == expected else "NO"))
    return table(("disk, MiB", "error", "blocks finished", "identical with room"), rows)


def page(kills: Sequence[Kill], blocks: int, undisturbed: Sequence[float]) -> str:
    """Return the table and what it comes to."""
    rows = [
        (
            f"{kill.after:.2f}",
            kill.aim,
            f"{kill.blocks} of {blocks}",
            kill.partial,
            f"{kill.seconds:.2f}",
            "yes" if kill.identical else "NO",
        )
        for kill in sorted(kills, key=lambda kill: (kill.aim, kill.blocks))
    ]
    header = (
        "killed after, s",
        "aim, blocks",
        "blocks finished",
        "files half written",
        "seconds to the end",
        "identical",
    )
    same = sum(kill.identical for kill in kills)
    summary = f"{same} of {len(kills)} identical; undisturbed runs took {spread(undisturbed)} s."
    return "\n\n".join([table(header, rows), summary, environment()])


@experiment()
def main(
    kills: int = 20,
    seed: Annotated[int, "of the moments"] = 0,
    streamed: Annotated[bool, "a checkpoint, to an output directory"] = False,
    full_disks: Annotated[int, "of streamed runs"] = 5,
) -> int:
    """Run and report; 1 if a continued run ended otherwise."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), checkpoint(Path(folder) / "checkpoint") if streamed else None)
        complete = [runs.finish(Path(folder) / f"complete-{i}") for i in range(3)]
        undisturbed, (expected, *others) = [seconds for seconds, _ in complete], [found for _, found in complete]
        assert {*others} == {expected}, "undisturbed runs differ from each other"
        blocks = BLOCKS if streamed else finished(Path(folder) / "complete-0")
        longest = 2 * min(undisturbed) / blocks
        killed: list[Kill] = []
        bar, tries = tqdm(total=kills, desc="kills", unit="run"), itertools.count()
        while len(killed) < kills:
            moment = draw.randrange(blocks), draw.uniform(0, longest)
            kill = runs.kill(Path(folder) / f"killed-{next(tries)}", *moment, expected)
            if kill is not None:
                killed.append(kill)
                bar.update()
        sizes = [draw.randrange(1 << 20, LARGEST) for _ in range(full_disks * streamed)]
        filled = fill_disks(runs, sizes, expected)
    print(page(killed, blocks, undisturbed))
    if streamed:
        print(filled)
    return int("NO" in filled or not all(kill.identical for kill in killed))


if __name__ == "__main__":
    main()
