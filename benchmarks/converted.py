"""`convert` on a generated checkpoint of any size: peak memory, time, and bytes.

    python -m benchmarks.converted [--gib 20] [--scheme fp8_dynamic ...] [--processes 1] [--folder DIRECTORY]

The checkpoint has pseudo-random weights in bfloat16, in several shards, with names of no known architecture, and layers
of 4096 by 14336. *Peak* is of all memory of each process, mapped files included (`VmHWM`), of which torch and quark_fx
take the column *before*.
"""

from __future__ import annotations

import json
import shutil
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
print(before, peak(), time.perf_counter() - start, sum(t.bytes_after for t in made.tensors) >> 20)
"""


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
    processes: int = 1,
    folder: Annotated[Path | None, "where there is room for the checkpoint and one result"] = None,
) -> None:
    """Convert a generated checkpoint with each scheme, and print the measurements."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, output = Path(scratch, "source"), Path(scratch, "output")
        start = time.perf_counter()
        size = generate(source, gib)
        print(f"generated {size} MiB in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        for one in scheme:
            arguments = [str(source), one, str(output), str(processes)]
            done = subprocess.run(
                [sys.executable, "-c", _RUN, *arguments], check=True, stdout=subprocess.PIPE, text=True
            )
            before, peak, seconds, made = done.stdout.split()
            rows.append([one, str(size), made, before, peak, f"{float(seconds):.0f}"])
            shutil.rmtree(output)
    print(table(["scheme", "MiB", "MiB after", "before, MiB", "peak, MiB", "seconds"], rows))
    print(environment())


if __name__ == "__main__":
    main()
