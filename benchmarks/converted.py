"""`convert` on a generated checkpoint of any size: peak memory, time, and bytes.

    python -m benchmarks.converted [--gib 20] [--scheme fp8_dynamic ...] [--processes 1 2] [--kills 1]
        [--folder DIRECTORY]

The checkpoint has pseudo-random weights in bfloat16, in several shards, with names of no known architecture, and layers
of 4096 by 14336. *Peak* is of all memory, mapped files included (`VmHWM`): of the largest process, and of all together
at most. torch and quark_fx take the column *before* of each. *Resumed* counts conversions that SIGKILL ended at a
random moment, with their processes, and whose directories have equal bytes once the call was repeated; in parentheses,
the units that were finished then.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import save_file

from benchmarks.common import environment, table
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
made = qfx.convert(*sys.argv[1:4], processes=int(sys.argv[4]), progress=False)
print(before, time.perf_counter() - start, sum(t.bytes_after for t in made.tensors) >> 20)
"""


def _peaks(session: int) -> dict[str, int]:
    """Return the largest memory so far of each process of a session, in MiB."""
    peaks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                peaks[folder.name] = int((folder / "status").read_text().split("VmHWM:")[1].split()[0]) >> 10
        except (OSError, IndexError):  # it has ended
            continue
    return peaks


def _run(source: Path, scheme: str, output: Path, processes: int, moment: int = 1 << 60) -> tuple[str, dict[str, int]]:
    """Convert in a session of its own, which ends when so many units are finished; return its text and peaks."""
    command = [sys.executable, "-c", _RUN, str(source), scheme, str(output), str(processes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    log, peaks = output.with_name(f"{output.name}.unfinished") / "done", dict[str, int]()
    while process.poll() is None:
        peaks |= _peaks(process.pid)
        if log.exists() and len(log.read_bytes().split()) >= moment:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    if process.returncode and moment == 1 << 60:
        raise RuntimeError(f"the conversion ended with {process.returncode}")
    return process.communicate()[0], peaks


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
    return f"{equal} of {kills} ({', '.join(map(str, finished))})"


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
            codes = torch.randint(-(1 << 10), 1 << 10, shape, generator=generator, dtype=torch.int16)
            tensors[f"trunk.blocks.{index // 3}.{names[index % 3]}.weight"] = codes.bfloat16().mul_(2.0**-14)
        save_file(tensors, folder / f"part-{first:05}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "generated", "dtype": "bfloat16"}))
    return count * each >> 20


@experiment()
def main(
    gib: float = 20,
    scheme: Sequence[str] = ("fp8_dynamic",),
    processes: Sequence[int] = (1,),
    kills: Annotated[int, "conversions that are killed and repeated"] = 0,
    folder: Annotated[Path | None, "where there is room for the checkpoint and one result"] = None,
) -> None:
    """Convert a generated checkpoint with each scheme, and print the measurements."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, output = Path(scratch, "source"), Path(scratch, "output")
        start = time.perf_counter()
        size = generate(source, gib)
        print(f"generated {size} MiB in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        for one, count in itertools.product(scheme, processes):
            text, peaks = _run(source, one, output, count)
            before, seconds, made = text.split()
            units = round(gib * 2**30 / (_WIDTH * _INNER * 2))
            resumed = _resumed(source, one, output, units, count, kills)
            memory = [before, str(max(peaks.values())), str(sum(peaks.values()))]
            rows.append([one, str(count), str(size), made, *memory, f"{float(seconds):.0f}", resumed])
            print(*rows[-1], file=sys.stderr)
            shutil.rmtree(output)
    header = [
        "scheme",
        "processes",
        "MiB",
        "MiB after",
        "before, MiB",
        "peak, MiB",
        "of all, MiB",
        "seconds",
        "resumed",
    ]
    print(table(header, rows))
    print(environment())


if __name__ == "__main__":
    main()
