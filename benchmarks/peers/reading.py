"""One program reads a checkpoint in a process of its own; started by `benchmarks.checkpoints`.

    reader/bin/python -m benchmarks.peers.reading job.json

A reader's environment needs safetensors and the reader, not quark_fx. A job is a JSON object; paths in it are relative
to its own folder.

    reader      a key of `READERS`
    checkpoint  folder or file
    tokens      safetensors file of `tokens`, token ids `(windows, length)`
    output      safetensors file to write: `logits`, `(windows, length, vocabulary)`, float32
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers.worker import work


def transformers(checkpoint: Path, tokens: Tensor) -> Tensor:
    """Load with `from_pretrained`, in the dtype of the checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    logits: Tensor = model(input_ids=tokens).logits
    return logits


def gptqmodel(checkpoint: Path, tokens: Tensor) -> Tensor:
    """Load with its kernels in torch, which compute in float16."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel  # type: ignore[import-not-found]

    method = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["quantization_config"]["quant_method"]
    backend = BACKEND.TORCH_AWQ if method == "awq" else BACKEND.TORCH
    model = GPTQModel.load(str(checkpoint), device="cpu", dtype=torch.float16, backend=backend)
    logits: Tensor = model.model(input_ids=tokens).logits
    return logits


def llama_cpp(checkpoint: Path, tokens: Tensor) -> Tensor:
    """Load with llama-cpp-python, which rounds activations to 8 bits."""
    from llama_cpp import Llama

    model = Llama(str(checkpoint), n_ctx=tokens.shape[1], logits_all=True, n_threads=1, verbose=False)
    found = []
    for window in tokens.tolist():
        model.reset()
        model.eval(window)
        found.append(torch.tensor(model.scores[: len(window)]))
    return torch.stack(found)


READERS: dict[str, Callable[[Path, Tensor], Tensor]] = {
    "transformers": transformers,
    "GPTQModel": gptqmodel,
    "llama.cpp": llama_cpp,
}


def run(path: Path) -> None:
    """Do the job of the JSON file at `path`."""
    options = json.loads(path.read_text(encoding="utf-8"))
    tokens = load_file(path.parent / options["tokens"])["tokens"]
    with torch.no_grad():
        logits = READERS[options["reader"]](path.parent / options["checkpoint"], tokens)
    save_file({"logits": logits.float().contiguous()}, path.parent / options["output"])


if __name__ == "__main__":
    work(__doc__, run)
