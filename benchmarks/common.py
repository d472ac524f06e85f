"""What the measurements share: clocks, seeded models and data, tables and the pages they end up in.

Workers of other tools import it, in environments without quark_fx, and their seconds are counted: it imports little.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""Pages that `--write` updates."""

PACKAGES = ("torch", "torchvision", "transformers", "onnx", "onnxruntime", "openvino", "executorch")


@dataclass(frozen=True)
class Seconds:
    """Time of one call: of all the process's threads, and on the clock."""

    cpu: float
    wall: float


def timed(function: Callable[[], object]) -> Seconds:
    """Call `function` once and return what it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def apart_from_others(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module in a process of its own, on one thread; return what its last line says, which is JSON.

    Args:
        module: to run.
        arguments: for it.
        variables: of its environment, besides those of this one.
    """
    alone = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=alone)
    return json.loads(done.stdout.splitlines()[-1])


def peer_job(
    python: Path, module: str, job: Mapping[str, Any], folder: Path, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a module of `benchmarks.peers` in the environment of another tool, on one thread.

    Args:
        python: of that environment.
        module: in `benchmarks.peers`.
        job: written to `job.json` in the folder.
        folder: where it runs.
        check: raise if it fails.

    Raises:
        RuntimeError: with the end of its log.
    """
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [str(python.absolute()), "-m", f"benchmarks.peers.{module}", str(path.absolute())]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"benchmarks.peers.{module} failed with {done.returncode}:\n{done.stderr[-1500:]}")
    return done


@contextmanager
def one_thread() -> Iterator[None]:
    """Leave torch one thread, so that sums do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_core() -> Iterator[None]:
    """Bind the process to one core and torch to one thread, so that no pool's idle spinning counts as work."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if affinity:
        os.sched_setaffinity(0, {max(affinity)})
    try:
        with one_thread():
            yield
    finally:
        if affinity:
            os.sched_setaffinity(0, affinity)


def estimate_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the statistics of every batch norm to the averages over `batches`, and put the model in eval mode.

    With random weights and the initial statistics (mean 0, variance 1) activations grow from layer to layer.
    """
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        for batch in batches if norms else ():
            model(batch)
    model.eval()


def images(count: int, batch: int, size: int, seed: int) -> list[Tensor]:
    """Return `count` random images in batches of shape `(batch, 3, size, size)`: noise at several resolutions."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count, 3, size, size)
    for cells in (4, 16, size):
        noise = torch.randn(count, 3, cells, cells, generator=generator)
        total += nn.functional.interpolate(noise, size=(size, size), mode="bilinear")
    return list(torch.split(total / 3**0.5, batch))


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal to noise ratio in dB."""
    noise = (reference - approximation).double().square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (smallest to largest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def judged(counts: Mapping[str, int]) -> int:
    """Print how many cells of a matrix are right, refused, and wrong, in one line; return the exit code.

    Args:
        counts: Number of cells by outcome.
    """
    known = ("right", "refused", "wrong")
    others = [kind for kind in counts if kind not in known]
    parts = [f"{counts.get(kind, 0)} {kind}" for kind in (*known, *others)]
    print(f"{sum(counts.values())} cells: {', '.join(parts)}", flush=True)
    return min(counts.get("wrong", 0), 1)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned Markdown table; a column whose cells all start with a digit or sign is set to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    right = [all(row[i][:1] in "0123456789+-–" for row in body) for i in range(len(header))]
    widths = [max(3, len(head), *(len(row[i]) for row in body)) for i, head in enumerate(header)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w - 1)}{':' if r else '-'}" for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(row) for row in body)])


def environment() -> str:
    """Return versions, processor and its load in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES if importlib.util.find_spec(name) is not None)
    # Where others used the machine too, absolute times say little; ratios of neighbors still do.
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"Python {platform.python_version()}, {packages}; {_processor()}, {os.cpu_count()} cores{load}."


def _processor() -> str:
    from quark_fx.system.processor import this_processor  # not where workers import this

    name, flags = this_processor()
    extensions = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{name} ({', '.join(extensions)})"


def text_of(page: str) -> str:
    """Return the text of `benchmarks/results/<page>`, empty if there is no page."""
    path = RESULTS / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of `benchmarks/results/<page>` by their titles, {} if there is no page.

    Each ends in the line of `environment` that it was measured in; one without has that at the end of the page.
    """
    text = text_of(page)
    last = text.strip().rpartition("\n")[2]
    found = {part.partition("\n")[0]: f"## {part.strip()}\n" for part in text.split("\n## ")[1:]}
    return {
        t: part if re.search(r"^(.*: )?Python \d", part, re.M) else f"{part}\n{last}\n" for t, part in found.items()
    }


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the rows of a text's Markdown tables, without those of the headers."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rules = [place for place, cells in enumerate(lines) if all(set(cell) <= {"-", ":"} for cell in cells)]
    return [cells for place, cells in enumerate(lines) if place not in rules and place + 1 not in rules]


def publish(text: str, page: str | None) -> None:
    """Print `text`, and write it to `benchmarks/results/<page>` if a page is named."""
    print(text)
    if page is not None:
        (RESULTS / page).write_text(text.rstrip() + "\n", encoding="utf-8")
