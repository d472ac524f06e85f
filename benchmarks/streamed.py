r"""Quantize checkpoints in a quarter of the memory their weights take, beside the same in memory.

    python -m benchmarks.streamed --folder FOLDER [--model llama moe] [--preset w4a16_gptq w4a16_awq] \
        [--streamed-only] [--write]

The checkpoints, seeded random weights in bfloat16 in shards of 200 MB, are made in FOLDER and stay, like the figures of
each run: a measurement can be continued. Every run is a process of its own on one thread. *Streamed*: `quantize` of
the directory with an output directory in a control group of Linux whose memory, what the system keeps of files with
it, is limited to a quarter of the checkpoint from before python starts; what exceeds it is killed. *In memory*: the
model is loaded with `from_pretrained`, quantized and saved without a limit. *Peak*: of the process's own memory
(`RssAnon`, seen every 10 ms), python, torch and transformers included, which take what the column *before* says:
150 MiB less where *torch* is built without CUDA. Calibration: 8 x 256 random tokens.

*Same bits*: for a small model of each shape both runs are compared tensor by tensor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from safetensors.torch import load_file

import quark_fx as qfx
from benchmarks.common import table
from benchmarks.experiment import HIDDEN, Option, experiment
from benchmarks.watch import Watch
from quark_fx.model.model_directory import tensor_file

VOCABULARY = 32000

_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}

MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "llama": (
        lambda: transformers.LlamaConfig(**_LLAMA, hidden_size=2048, intermediate_size=4096, num_hidden_layers=42),
        lambda: transformers.LlamaConfig(**_LLAMA, hidden_size=256, intermediate_size=512, num_hidden_layers=2),
    ),
    "moe": (
        lambda: transformers.Qwen3MoeConfig(
            **_EXPERTS, hidden_size=1024, moe_intermediate_size=1280, num_attention_heads=16, num_hidden_layers=54
        ),
        lambda: transformers.Qwen3MoeConfig(
            **_EXPERTS, hidden_size=256, moe_intermediate_size=128, num_attention_heads=4, num_hidden_layers=2
        ),
    ),
}
"""Configuration of each shape, large and small."""

PRESETS = ("w4a16_gptq", "w4a16_awq")


@experiment(page="streamed.md")
def main(
    folder: Path,
    model: Annotated[Sequence[str], Option(choices=MODELS)] = tuple(MODELS),
    preset: Annotated[Sequence[str], Option(choices=PRESETS)] = tuple(PRESETS),
    streamed_only: Annotated[bool, "leave out the large models in memory"] = False,
    child: Annotated[str | None, HIDDEN] = None,
) -> str | None:
    """Measure, and return the page."""
    if child:
        print(json.dumps(_run(**json.loads(child))))
        return None
    rows = []
    for name in model:
        directories = [_checkpoint(folder, name, small) for small in (False, True)]
        for one in preset:
            results = {
                (small, streamed): _measure(folder, directory, one, streamed)
                for small, directory in zip((False, True), directories, strict=True)
                for streamed in (True, False)
                if small or streamed or not streamed_only
            }
            rows.append(_row(directories, one, results))
    header = ("model", "preset", "checkpoint, GiB", "limit, MiB", "peak streamed, MiB", "before", "peak in memory")
    return (
        "# Larger than memory\n\n"
        "Written by `python -m benchmarks.streamed --folder FOLDER --write`, whose docstring says what is measured.\n\n"
        f"{table((*header, 'seconds streamed', 'seconds in memory', 'same bits', 'torch'), rows)}"
    )


def _row(directories: list[Path], preset: str, results: dict[tuple[bool, bool], dict[str, Any]]) -> tuple[str, ...]:
    large, memory = results[False, True], results.get((False, False))
    same = _equal(directories[1], preset)
    return (
        directories[0].name,
        preset,
        f"{_size(directories[0]) / 2**30:.2f}",
        f"{large['limit'] / 2**20:.0f}" if large["limit"] else "none",
        f"{large['peak'] / 2**20:.0f}",
        f"{large['before'] / 2**20:.0f}",
        f"{memory['peak'] / 2**20:.0f}" if memory else "–",
        f"{large['seconds']:.0f}",
        f"{memory['seconds']:.0f}" if memory else "–",
        "yes" if same else "NO",
        large["torch"],
    )


def _checkpoint(folder: Path, name: str, small: bool) -> Path:
    """Return the directory of a checkpoint, made if it is missing."""
    directory = folder / (f"{name}-small" if small else name)
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        config = MODELS[name][small]()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(torch.float32)
        unfinished = directory.with_suffix(".unfinished")
        model.save_pretrained(unfinished, max_shard_size="200MB")
        unfinished.rename(directory)
    return directory


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _output(directory: Path, preset: str, streamed: bool) -> Path:
    return directory.parent / f"{directory.name}-{preset}-{'streamed' if streamed else 'in-memory'}"


def _equal(directory: Path, preset: str) -> bool:
    a, b = (load_file(tensor_file(_output(directory, preset, streamed))) for streamed in (True, False))
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def _measure(folder: Path, directory: Path, preset: str, streamed: bool) -> dict[str, Any]:
    """Return the figures of one run in a process of its own, those of an earlier one if there was one."""
    output = _output(directory, preset, streamed)
    kept = output.with_suffix(".json")
    if not kept.exists():
        shutil.rmtree(output, ignore_errors=True)
        group = _control_group(_size(directory) // 4) if streamed and not directory.name.endswith("-small") else None
        job = {"directory": str(directory), "preset": preset, "output": str(output), "streamed": streamed}
        command = [sys.executable, "-m", "benchmarks.streamed", "--folder", str(folder), "--child", json.dumps(job)]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        enter = None if group is None else partial(_enter, group)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environ, preexec_fn=enter)
        if group is not None:
            group.rmdir()
        if done.returncode:
            raise SystemExit(f"{output.name} ended with {done.returncode}")
        figures = json.loads(done.stdout.splitlines()[-1])
        kept.write_text(json.dumps(figures | {"limit": _size(directory) // 4 if group is not None else None}))
        if not directory.name.endswith("-small"):
            shutil.rmtree(output)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def _control_group(limit: int) -> Path | None:
    """Return a new control group with so much memory, of either version, `None` where that is not allowed."""
    for root, file in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root) / f"quark_fx-{os.getpid()}-{limit}"
        try:
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(limit))
        except OSError:
            continue
        return group
    return None


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _run(directory: str, preset: str, output: str, streamed: bool) -> dict[str, Any]:
    """Quantize once, here."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(0, VOCABULARY, (2, 256), generator=generator)} for _ in range(4)]
    began = time.perf_counter()
    with Watch() as watch:
        if streamed:
            qfx.quantize(directory, preset, data, resources=qfx.Resources(output_dir=output))
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
            for p in model.parameters():  # files that are mapped would not count
                p.data = p.data.clone()
            qfx.quantize(model, preset, data).save(output)
    seconds = time.perf_counter() - began
    return {"before": watch.before, "peak": watch.peak, "seconds": seconds, "torch": torch.__version__}


if __name__ == "__main__":
    main()
