"""A script, run as a separate process, that loads a checkpoint with transformers or llama.cpp and runs batches.

It does not import this package: changes that this package makes to transformers in the quantizing process cannot affect
the results. Its memory is freed when it ends.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def named_tensors(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's result, with their names.

    A single tensor has the name `""`. Keys and positions of nested containers are joined with dots.
    """
    return dict(_named(output, ""))


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named(item, f"{name}.{key}" if name else str(key))


Batches = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments of a model, one pair per batch."""


def in_transformers(path: Path, batches: Batches) -> list[dict[str, Tensor]]:
    """Return the named outputs that transformers computes from a checkpoint directory or GGUF file for each batch."""
    model = _load(path).eval()
    with torch.no_grad():
        return [named_tensors(model(*args, **kwargs)) for args, kwargs in batches]


def in_llama_cpp(path: Path, batches: Batches) -> list[dict[str, Tensor]]:
    """Return the logits that llama.cpp computes from a GGUF file for each batch of `input_ids`.

    One context with room for the longest sequence runs all sequences, one after another.
    """
    tokens = [kwargs["input_ids"] for _, kwargs in batches]
    longest = max(ids.shape[1] for ids in tokens)
    # Its log, which says why a file does not load, goes to stderr.
    threads, llama_cpp = torch.get_num_threads(), importlib.import_module("llama_cpp")
    options = {"n_threads": threads, "n_threads_batch": threads, "logits_all": True, "verbose": True}
    model = llama_cpp.Llama(str(path), n_ctx=longest, **options)

    def logits(row: list[int]) -> Tensor:
        model.reset()
        model.eval(row)
        return torch.tensor(model.scores[: len(row)], dtype=torch.float32)

    return [{"logits": torch.stack([logits(row) for row in ids.tolist()])} for ids in tokens]


def _load(path: Path) -> Any:
    import transformers

    if path.is_file():
        options = {"gguf_file": path.name, "dtype": torch.float32, "local_files_only": True}
        return scale_positions(transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options), path)
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    options = {"dtype": "auto", "local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    return _measure_tokens(getattr(transformers, architecture).from_pretrained(path, **options))


def _measure_tokens(model: Any) -> Any:
    """Let quantized layers of a model measure one scale for each token in inputs of any rank, as servers do.

    compressed-tensors 0.20 measures one scale for each index of the first two dimensions.

    Returns:
        The same model.
    """
    for module in model.modules():
        read = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
        if read is not None and read.dynamic and read.strategy == "token":
            shapes = list[torch.Size]()
            module.register_forward_pre_hook(partial(_flatten, shapes), with_kwargs=True)
            module.register_forward_hook(partial(_unflatten, shapes))
    return model


def _flatten(shapes: list[torch.Size], _: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
    (x,) = (*args, *kwargs.values())  # the input of a linear layer
    shapes[:] = [x.shape]
    return (x.reshape(1, -1, x.shape[-1]),), {}


def _unflatten(shapes: list[torch.Size], _module: Any, _args: Any, result: Tensor) -> Tensor:
    return result.reshape(*shapes[0][:-1], result.shape[-1])


FREQUENCIES = "rope_freqs.weight"
"""Name of the tensor of a GGUF file that holds the divisors of the frequencies of a scaled rotary embedding."""


def scale_positions(model: Any, path: Path) -> Any:
    """Divide the rotary frequencies of a model by the divisors in its GGUF file, which transformers does not read.

    Returns:
        The same model.
    """
    import gguf

    for stored in gguf.GGUFReader(path).tensors:
        if stored.name == FREQUENCIES:
            for module in model.modules():
                if isinstance(getattr(module, "inv_freq", None), Tensor):
                    module.inv_freq.div_(torch.tensor(stored.data, dtype=torch.float32))
    return model


RUNTIMES = {"transformers": in_transformers, "llama.cpp": in_llama_cpp}
"""Functions that run a checkpoint, by the name of the runtime."""


def main(runtime: str, path: str, given: str, made: str) -> None:
    """Run the batches in the file `given`, and write the outputs of a checkpoint to the file `made`."""
    torch.save(RUNTIMES[runtime](Path(path), torch.load(given, map_location="cpu", weights_only=True)), made)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # any error of the runtime, reported to the calling process
        sys.exit(f"{type(error).__name__}: {error}")


__all__ = ["RUNTIMES", "named_tensors", "scale_positions"]
