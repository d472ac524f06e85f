"""One model quantized by one, two and four processes.

    python -m benchmarks.ranked [--write]

GPTQ (`w4a16_gptq`) of the trained Llama of `benchmarks.language_models` and its calibration data, on gloo. Each
process runs on one thread; they share the cores of one machine, so that seconds are those of its processor.
*Batches* and *rounded*: what a rank has of the data and of the weights. *Peak*: of its own memory (`RssAnon`).
*Codes that differ* from those of one process: sums are added in another order, and the last bit of one may move one
code, which everything after it answers to; *perplexity* on held-out text tells whether that matters.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

import quark_fx as qfx
from benchmarks.common import table
from benchmarks.experiment import experiment
from benchmarks.language_models import load
from benchmarks.watch import Watch
from quark_fx.engine.ranks import Ranks
from quark_fx.model.model_directory import read_model
from quark_fx.passes import GPTQ
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal

COUNTS = (1, 2, 4)


@experiment(page="ranked.md")
def main() -> str:
    """Measure, and return the page."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in COUNTS:
            (folder / "meet").unlink(missing_ok=True)
            spawn(_rank, (count, folder), nprocs=count)
        alone = _codes(folder / "1-0")
        for count in COUNTS:
            for rank in range(count):
                figures: dict[str, Any] = torch.load(folder / f"{count}-{rank}.pt")
                rows.append(
                    (
                        count,
                        rank,
                        figures["batches"],
                        figures["rounded"],
                        f"{figures['seconds']:.1f}",
                        f"{figures['peak'] / 2**20:.0f}",
                        f"{_differ(_codes(folder / f'{count}-{rank}'), alone):.3%}",
                        f"{_perplexity(folder / f'{count}-{rank}'):.3f}",
                    )
                )
    header = ("processes", "rank", "batches", "rounded", "processor, s", "peak, MiB", "codes that differ", "perplexity")
    return (
        "# Several processes\n\n"
        "Written by `python -m benchmarks.ranked --write`, whose docstring says what is measured.\n\n"
        f"{table(header, rows)}"
    )


def _rank(rank: int, count: int, folder: Path) -> None:
    """Quantize as one of `count` processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
    found = load("llama")
    rounded, solve = set(), GPTQ.solve

    def counting(self: GPTQ, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        rounded.add(weight.name)
        return solve(self, weight, seen)

    GPTQ.solve = counting  # type: ignore[method-assign]
    began = time.process_time()
    with Watch() as watch:
        qmodel = qfx.quantize(
            found.model, "w4a16_gptq", found.calibration, progress=False, resources=qfx.Resources(distributed=True)
        )
    seconds = time.process_time() - began
    qmodel.save(folder / f"{count}-{rank}")
    batches = len(Ranks(rank, count).share(found.calibration))
    figures = {"batches": batches, "rounded": len(rounded), "seconds": seconds, "peak": watch.peak}
    torch.save(figures, folder / f"{count}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _codes(directory: Path) -> torch.Tensor:
    model, file = read_model(directory)
    tensors = {model["tensors"][name]: tensor for name, tensor in load_file(file).items()}
    return torch.cat([t.flatten() for name, t in sorted(tensors.items()) if name.endswith("_codes")])


def _perplexity(directory: Path) -> float:
    qmodel, losses = qfx.load(directory), []
    with torch.no_grad():
        for batch in load("llama").held_out[:4]:
            logits, ids = qmodel(**batch).logits, batch["input_ids"]
            losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    return float(torch.stack(losses).mean().exp())


def _differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).float().mean())


if __name__ == "__main__":
    main()
