"""`convert` on a generated checkpoint of any size: peak memory, time, and bytes.

    python -m benchmarks.converted [--gib 20] [--scheme fp8_dynamic ...] [--processes 1 2] [--kills 1]
        [--folder DIRECTORY] [--write]

The checkpoint has pseudo-random weights in bfloat16, in several shards, with names of no known architecture, and layers
of 4096 by 14336. Peak memory includes mapped files: *each* is the largest of one process (`VmHWM`), *together* the
largest of all processes at one moment (from `smaps_rollup`, read about five times per second). What processes share,
mostly the code of torch, counts once in *together*. *imports* is the peak of a process that has imported quark_fx.
*Resumed* counts conversions that SIGKILL ended at a random moment, with their processes, and whose directories have
equal bytes once the call was repeated; in parentheses, the units that were finished then, and all units.

`--write` updates `benchmarks/results/converted.md`.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import save_file

from benchmarks.common import environment, rows_of, table, text_of
from benchmarks.experiment import experiment

_WIDTH, _INNER = 4096, 14336
_SHARD = 16
"""Layers in a shard."""

_RUN = """
import sys, time
from pathlib import Path
import quark_fx as qfx
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
before, start = peak(), time.perf_counter()
plan = qfx.convert(*sys.argv[1:4], processes=int(sys.argv[4]), progress=False)
print(before, time.perf_counter() - start, sum(t.bytes_after for t in plan.tensors) >> 20, len(plan.tensors))
"""


@dataclass
class _Memory:
    """The most memory of a session of processes so far, in MiB, and its processor time.

    Attributes:
        each: Of each process.
        together: Of all at one moment; what processes share counts once.
        processes: The most at one moment.
        ticks: Processor time of each process.
    """

    each: dict[str, int] = field(default_factory=dict)
    together: int = 0
    processes: int = 0
    ticks: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the processor of all processes, user and system."""
        return sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK")

    def look(self, session: int) -> None:
        """Read the memory of each process of a session."""
        own, shared = list[int](), list[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != session:
                    continue
                self.each[folder.name] = int((folder / "status").read_text().split("VmHWM:")[1].split()[0]) >> 10
                self.ticks[folder.name] = int(fields[11]) + int(fields[12])
                parts = [line.split()[:2] for line in (folder / "smaps_rollup").read_text().splitlines()[1:]]
            except (OSError, IndexError):  # it has ended
                continue
            own.append(sum(int(size) for name, size in parts if name.startswith("Private_")))
            shared.append(sum(int(size) for name, size in parts if name.startswith("Shared_")))
        self.together = max(self.together, sum(own) + max(shared, default=0) >> 10)
        self.processes = max(self.processes, len(own))


def _run(source: Path, scheme: str, output: Path, processes: int, moment: int = 1 << 60) -> tuple[str, _Memory]:
    """Convert in a session of its own, which ends when so many units are finished; return its text and memory."""
    command = [sys.executable, "-c", _RUN, str(source), scheme, str(output), str(processes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    log, memory = output.with_name(f"{output.name}.unfinished") / "done", _Memory()
    while process.poll() is None:
        memory.look(process.pid)
        if log.exists() and len(log.read_bytes().split()) >= moment:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.2)
    if process.returncode and moment == 1 << 60:
        raise RuntimeError(f"the conversion ended with {process.returncode}")
    return process.communicate()[0], memory


def _resumed(source: Path, scheme: str, whole: Path, units: int, processes: int, kills: int) -> str:
    """Return how many conversions have equal bytes after they were killed and repeated."""
    equal, finished, rng = 0, [], random.Random(scheme)
    names = sorted(str(file.relative_to(whole)) for file in whole.rglob("*"))
    for _ in range(kills):
        output = whole.with_name("again")
        _run(source, scheme, output, processes, rng.randrange(1, units))
        log = output.with_name("again.unfinished") / "done"
        finished.append(len(log.read_bytes().split()) if log.exists() else units)
        if not output.exists():
            _run(source, scheme, output, processes)
        same = sorted(str(file.relative_to(output)) for file in output.rglob("*")) == names
        equal += same and filecmp.cmpfiles(whole, output, names, shallow=False)[0] == names
        shutil.rmtree(output)
    return f"{equal} of {kills} ({', '.join(map(str, finished))} of {units})" if kills else "–"


def generate(folder: Path, gib: float) -> int:
    """Write a checkpoint, and return its size in MiB."""
    folder.mkdir()
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    each = _WIDTH * _INNER * 2
    count = max(1, round(gib * 2**30 / each))
    for first in range(0, count, _SHARD):
        tensors = {}
        for index in range(first, min(first + _SHARD, count)):
            shape = (_WIDTH, _INNER) if index % 3 == 2 else (_INNER, _WIDTH)
            generator = torch.Generator().manual_seed(index)
            words = torch.empty(_WIDTH * _INNER // 4, dtype=torch.int64).random_(generator=generator)
            codes = words.view(torch.int16).bitwise_and_(0x7FF).sub_(0x400).reshape(shape)
            tensors[f"trunk.blocks.{index // 3}.{names[index % 3]}.weight"] = codes.bfloat16().mul_(2.0**-14)
        save_file(tensors, folder / f"part-{first:05}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "generated", "dtype": "bfloat16"}))
    return count * each >> 20


HEADER = (
    *("scheme", "processes", "MiB", "MiB after", "imports, MiB", "each, MiB", "together, MiB"),
    *("processes at once", "CPU s", "wall s", "resumed"),
)


@experiment(page="converted.md", own_environment=True)
def main(
    gib: float = 20,
    scheme: Sequence[str] = ("fp8_dynamic",),
    processes: Sequence[int] = (1,),
    kills: Annotated[int, "conversions that are killed and repeated"] = 0,
    folder: Annotated[Path | None, "where there is room for the checkpoint and two results"] = None,
) -> Iterator[str]:
    """Convert a generated checkpoint with each scheme, and yield the page after each row."""
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, output = Path(scratch, "source"), Path(scratch, "output")
        start = time.perf_counter()
        size = generate(source, gib)
        print(f"generated {size} MiB in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        for one, count in itertools.product(scheme, processes):
            text, memory = _run(source, one, output, count)
            before, seconds, after, units = text.split()
            print(f"{one}, {count} processes: {text.strip()}, {memory}", file=sys.stderr)
            cells = [before, str(max(memory.each.values())), str(memory.together), str(memory.processes)]
            row = [one, str(count), str(size), after, *cells, f"{memory.seconds:.0f}", f"{float(seconds):.0f}"]
            yield page([*rows, [*row, "–"]])
            rows.append([*row, _resumed(source, one, output, int(units), count, kills)])
            yield page(rows)
            shutil.rmtree(output)


def page(rows: Sequence[Sequence[str]]) -> str:
    """Return the page, with rows of other runs."""
    others = rows_of(text_of("converted.md"))
    rows = [*(row for row in others if all(row[:3] != list(new[:3]) for new in rows)), *rows]
    return f"""# Converted file to file

A generated checkpoint of any size, converted without its model; see [checkpoints](../../docs/checkpoints.md). The
docstring of `benchmarks.converted` defines the columns.

{table(HEADER, rows)}

With several processes, the process of the caller plans and waits; it starts the others through a fork server. That and
Python's resource tracker are small processes that import nothing.

Rows may be of several runs. Reproduce with `python -m benchmarks.converted --processes 1 2 --kills 1`.

{environment()}
"""


if __name__ == "__main__":
    main()
