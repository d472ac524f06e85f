"""How long and how much memory it takes to open, capture and plan a checkpoint much larger than memory.

    python -m benchmarks.captured [--folder FOLDER] [--write]

Checkpoints of Llama shapes in bfloat16, whose shards are files of zeros that take no room on disk: what is done here
reads their headers only. Each is opened, captured on two sequences of 2,048 tokens and foretold (`quark_fx.predict`,
streamed, 128 such batches) in a process of its own, on one thread. *Peak* is all of its resident memory, python, torch
and transformers included. `--write` updates `results/captured.md`.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers

import quark_fx as qfx
from benchmarks.common import apart_from_others, table
from benchmarks.experiment import HIDDEN, experiment
from quark_fx.checkpoints.files import header_of

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Sizes of Llama 3."""

_SHARD = 4 << 30


def write_checkpoint(directory: Path, shape: str) -> int:
    """Write a checkpoint of zeros; return the bytes of its tensors."""
    config = transformers.LlamaConfig(**SHAPES[shape], num_key_value_heads=8, vocab_size=128256, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        tensors = transformers.LlamaForCausalLM(config).state_dict()
    config.save_pretrained(directory)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(2 * t.numel() for t in shards[-1].values()) > _SHARD:
            shards.append({})
        shards[-1][name] = tensor
    placed: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        total += _write_zeros(directory / file, shard)
        placed |= dict.fromkeys(shard, file)
    index_file = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return total


def _write_zeros(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    header = header_of({name: ("BF16", tensor.shape) for name, tensor in tensors.items()}, {})
    size = sum(2 * tensor.numel() for tensor in tensors.values())
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return size


def _child(directory: str) -> None:
    torch.set_num_threads(1)
    batches = [{"input_ids": torch.zeros(2, 2048, dtype=torch.int64)} for _ in range(128)]
    began = time.perf_counter()
    model = qfx.open_checkpoint(directory)
    opened = time.perf_counter()
    qfx.capture_graph(model, batches[0])
    captured, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = qfx.predict(model, "w4a16_gptq", batches, resources=qfx.Resources(output_dir="out"))
    print(json.dumps([opened - began, captured - opened, peak / 2**20, time.perf_counter() - captured, str(found)]))


@experiment(page="captured.md")
def main(
    folder: Annotated[Path | None, "where the checkpoints are made; default: a temporary directory"] = None,
    child: Annotated[str | None, HIDDEN] = None,
) -> str | None:
    """Measure, and return the page."""
    if child:
        _child(child)
        return None
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            total = write_checkpoint(Path(scratch), shape)
            found = apart_from_others("benchmarks.captured", "--child", scratch)
            opened, captured, peak, told, text = found
        sizes = (f"{total / 2**30:.1f}", f"{opened:.1f}", f"{captured:.1f}", f"{peak:.2f}", f"{told:.1f}")
        rows.append((shape, *sizes, text.removeprefix("expected: ")))
    header = (
        "Llama",
        "checkpoint, GiB",
        "s to open",
        "s to capture",
        "peak, GiB",
        "s to foretell",
        "GPTQ is expected to take",
    )
    return f"""# Captured without weights

Written by `python -m benchmarks.captured --write`, whose docstring says what is measured.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
