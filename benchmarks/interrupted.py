"""Kill runs at random moments, continue them, and compare with a run that nothing happened to.

    python -m benchmarks.interrupted [--kills 20] [--seed 0]

The first half of a narrow MobileNetV2 with random weights and images of 64 x 64 is quantized to `int8_static` with
corrected biases and learned rounding, in a process of its own, with a checkpoint directory. When it has finished a
random number of blocks it is killed (`SIGKILL`), a random time later, up to that of two blocks; then the same call is
made again. *Identical*: every tensor of the result bit by bit, every row of the report, and every change a pass noted
but for its seconds. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from tqdm.auto import tqdm

import quark_fx as qfx
from benchmarks.common import environment, estimate_batch_norm, images, spread, table
from quark_fx.graph import stored_tensors
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.presets import INT8_STATIC

CONFIG = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, BiasCorrection(), AdaRound(iterations=10, batch_size=4)))

STAGES = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2]]
"""Expansion, channels, number and stride of the inverted residuals."""


@dataclass(frozen=True)
class Kill:
    """One run that was killed and continued.

    Attributes:
        after: seconds from the call to the kill; `None` where the run was faster.
        aim: finished blocks after which it was to be killed.
        blocks: finished blocks that it left.
        partial: files that it left half written.
        seconds: what the second call took.
        identical: whether it ended as the undisturbed run did.
    """

    after: float | None
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


def work(directory: Path, began: Connection, result: Path) -> None:
    """Do a run in this process; say on `began` when it begins, and write its seconds and digest to `result`."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # the default one is a semaphore that would outlive a kill
    model, batches = model_and_data()
    began.send(None)
    start = time.perf_counter()
    qmodel = qfx.quantize(model, CONFIG, batches, progress=False, checkpoint=directory)
    seconds = time.perf_counter() - start
    result.write_text(json.dumps([seconds, digest(qmodel)]))


class Runs:
    """Starts runs in processes forked from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benchmarks.common", "quark_fx", "torchvision", "torch._dynamo"])
        self.count = 0

    def start(self, directory: Path) -> tuple[Any, Path]:
        """Return a process whose run has begun, and where its result will be."""
        self.count += 1
        result = self.folder / f"result-{self.count}.json"
        receive, send = self.context.Pipe(duplex=False)
        process = self.context.Process(target=work, args=(directory, send, result))
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

    def kill(self, directory: Path, aim: int, delay: float, expected: str) -> Kill:
        """Do a run, kill it some seconds after it has finished `aim` blocks, and do it again."""
        process, _ = self.start(directory)
        start = time.perf_counter()
        while finished(directory) < aim and process.exitcode is None:
            time.sleep(0.001)
        process.join(delay)
        after = time.perf_counter() - start
        process.kill()
        process.join()
        blocks, partial = finished(directory), len(list(directory.glob("*.partial")))
        seconds, found = self.finish(directory)
        killed = process.exitcode == -signal.SIGKILL
        return Kill(after if killed else None, aim, blocks, partial, seconds, found == expected)


def finished(directory: Path) -> int:
    """Return how many blocks a run has finished."""
    return len(list(directory.glob("*.safetensors")))


def page(kills: Sequence[Kill], blocks: int, undisturbed: Sequence[float]) -> str:
    """Return the table and what it comes to."""
    rows = [
        (
            "finished before" if kill.after is None else f"{kill.after:.2f}",
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


def main() -> int:
    """Run and report; 1 if a continued run ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        complete = [runs.finish(Path(folder) / f"complete-{i}") for i in range(3)]
        undisturbed, (expected, *others) = [seconds for seconds, _ in complete], [found for _, found in complete]
        assert {*others} == {expected}, "undisturbed runs differ from each other"
        blocks = finished(Path(folder) / "complete-0")
        longest = 2 * min(undisturbed) / blocks
        moments = [(draw.randrange(blocks), draw.uniform(0, longest)) for _ in range(arguments.kills)]
        kills = [
            runs.kill(Path(folder) / f"killed-{i}", *moment, expected)
            for i, moment in enumerate(tqdm(moments, desc="kills", unit="run"))
        ]
    print(page(kills, blocks, undisturbed))
    return int(not all(kill.identical for kill in kills))


if __name__ == "__main__":
    sys.exit(main())
