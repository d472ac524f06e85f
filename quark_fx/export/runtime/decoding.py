"""Decode the same tokens in torch and in a folder of graphs with a KV cache, to compare the logits."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quark_fx.data.cache_names import CACHE_NAMES
from quark_fx.errors import ExportError, QuarkError
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.generation.generator import generator
from quark_fx.export.generation.to_genai import CONFIG, GRAPH
from quark_fx.export.runtime.rounding_noise import RoundingNoise
from quark_fx.export.runtime.session import open_session
from quark_fx.graph.signature import split_batch
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.isolation import quiet, without_warnings
from quark_fx.system.untrusted import read_json

_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "use_cache": True,
    "cache_implementation": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
"""Options of `generate` that override the model's generation configuration."""

Steps = dict[str, tuple[Tensor, Tensor]]
"""Logits of torch and logits of the folder, both of shape `(batch, vocabulary)`, for the name of each step."""

_MANIFEST, _LIMIT = "export.json", 1 << 24
"""File that transformers writes into a folder, and limit on the size of a folder's configuration file, in bytes."""


@dataclass(frozen=True)
class _Folder:
    """The graphs of a folder, ready to decode.

    Attributes:
        decode: Function of prompts and the tokens after them; returns the logits after the prompts and after each token
            except the last.
        cache: Function that returns a cache for torch that rounds like the graphs; `None` for a float cache.
        config: Configuration of transformers; `None` if the folder does not contain one.
    """

    decode: Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]]
    cache: Callable[[], Any] | None
    config: Any = None


def is_generation_folder(path: Path) -> bool:
    """Tell whether `ExportedModel.save_pretrained` of transformers or `quark_fx.export.genai` wrote a folder."""
    return any(os.path.isfile(path / name) for name in (_MANIFEST, CONFIG))  # False for names that no file can have


def decoded_steps(
    model: nn.Module, path: Path, batches: Iterable[Any], steps: int
) -> Iterator[tuple[Steps, Callable[[int], Sequence[Tensor]]]]:
    """Yield, for each batch of prompts, the logits after the prompts and after each token that torch then chooses.

    The second item of each pair is a function of a seed. It returns torch's logits for the same tokens with slightly
    different rounding in each operator.

    Args:
        model: Exported model, or its `QuantizedModel`.
        path: Folder with the exported graphs.
        batches: Prompts: `input_ids`, and `attention_mask` if they are padded on the left.
        steps: Number of decode steps after the prompts.

    Raises:
        ExportError: If the folder cannot be loaded, or the model or the folder does not decode a batch.
    """
    folder = _opened(path, _of_transformers if os.path.isfile(path / _MANIFEST) else _of_genai)
    reference: Any = _in_torch(model, folder.config)
    for number, batch in enumerate(batches):
        prompt = _prompt(batch, number)
        length = prompt["input_ids"].shape[1]
        placed = {name: value.to(reference.device) for name, value in prompt.items()}
        with _named(number, "torch", steps, length), _caching(reference, folder.cache):
            expected = _generate(reference, placed, steps)
        tokens = expected.sequences[:, length:].cpu()
        with _named(number, str(path), steps, length):
            theirs = folder.decode({name: value.cpu() for name, value in prompt.items()}, tokens)

        def disturbed(seed: int, placed: Any = placed, chosen: Tensor = expected.sequences[:, length:]) -> Any:
            forced = _forcing(chosen, placed["input_ids"].shape[1])
            with _caching(reference, folder.cache), RoundingNoise(seed):
                return _generate(reference, placed, steps, logits_processor=[forced]).logits

        names = ["prompt", *(f"step {step}" for step in range(1, steps + 1))]
        yield dict(zip(names, zip(expected.logits, theirs, strict=True), strict=True)), disturbed


def _opened(path: Path, read: Callable[[Path], _Folder]) -> _Folder:
    """Return the graphs in a folder; raise `ExportError` if `read` fails."""
    try:
        return read(path)
    except ExportError:
        raise
    except Exception as error:  # transformers, onnx_ir, and ONNX Runtime raise various errors for files
        raise ExportError(f"{path} cannot be loaded: {error}; export it again, as in docs/generation.md") from error


def _of_transformers(path: Path) -> _Folder:
    """Return the graphs that transformers wrote, one for prompts and one for steps, which `generate` runs."""
    try:
        from transformers.exporters import ExportedModel  # pyright: ignore[reportPrivateImportUsage]
    except ImportError as error:
        raise ExportError(
            f"decoding needs a transformers version with exporters ({error}): pip install -U 'quark_fx[onnx,hf]'"
        ) from error
    exported = ExportedModel.from_pretrained(path)
    model = generator(exported)

    def decode(prompt: dict[str, Tensor], tokens: Tensor) -> Sequence[Tensor]:
        forced = _forcing(tokens, prompt["input_ids"].shape[1])
        logits: Sequence[Tensor] = _generate(model, prompt, tokens.shape[1] - 1, logits_processor=[forced]).logits
        return logits

    scales = CacheScales.written(exported.components["decode"].program)
    return _Folder(decode, scales.cache if scales.scales else None, exported.config)


def _of_genai(path: Path) -> _Folder:
    """Return the graph that `genai` wrote, which decodes one sequence at a time."""
    import onnx_ir as ir

    decoder = read_json(path / CONFIG, _LIMIT)["model"]["decoder"]
    if decoder["filename"] != GRAPH:
        raise ExportError(f"{path / CONFIG} names a graph other than {GRAPH}; export it again with qfx.export.genai")
    optimize = "graph_optimization_level" not in decoder["session_options"]
    session = open_session(path / GRAPH, optimize=optimize)
    past, present = (
        [names[f"{prefix}_{kind}_names"] % layer for layer in range(decoder["num_hidden_layers"]) for kind in _KINDS]
        for prefix, names in (("past", decoder["inputs"]), ("present", decoder["outputs"]))
    )
    inputs = {value.name: value.type for value in session.get_inputs()}
    size = (1, decoder["num_key_value_heads"], 0, decoder["head_size"])

    def decode_row(row: Tensor, tokens: Tensor) -> Tensor:
        cache = [np.zeros(size, _DTYPES[inputs[name]]) for name in past]
        logits, length = [], 0
        for new in (row, *tokens[:-1, None]):
            positions = np.arange(length, length := length + len(new))[None]
            mask = np.ones((1, length), np.int64)
            feed = {"input_ids": new[None].numpy(), "position_ids": positions, "attention_mask": mask}
            feed = {name: value for name, value in feed.items() if name in inputs} | dict(zip(past, cache, strict=True))
            scores, *cache = session.run(["logits", *present], feed)
            logits.append(torch.from_numpy(scores[0, -1]))
        return torch.stack(logits)

    def decode(prompt: dict[str, Tensor], tokens: Tensor) -> Sequence[Tensor]:
        rows = prompt["input_ids"]
        masks = prompt["attention_mask"].bool()
        each = [decode_row(row[mask], after) for row, mask, after in zip(rows, masks, tokens, strict=True)]
        return torch.stack(each, 1).unbind()

    scales = CacheScales.written(ir.load(path / GRAPH))  # the graph also rounds the cache of a prompt
    return _Folder(decode, partial(scales.cache, prompt_in_float=False) if scales.scales else None)


_KINDS = ("key", "value")
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
"""Types of KV caches, by their names in ONNX Runtime."""


def _in_torch(model: nn.Module, config: Any) -> nn.Module:
    """Return the transformers module that decodes in torch; raise `ExportError` if `model` lacks `generate`."""
    if isinstance(model, QuantizedModel):
        try:
            has_class = model.source is not None or config is None
            model = model.eager(None if has_class else _of_the_same_class(config))
        except QuarkError as error:
            raise ExportError(
                f"the quantized model does not decode in torch: {error}; pass the exported module instead"
            ) from error
    if not callable(getattr(model, "generate", None)):
        raise ExportError(
            f"a {type(model).__name__} has no generate method; pass the exported transformers model, or the result "
            "of quantize()"
        )
    if model.training:
        raise ExportError(
            f"the {type(model).__name__} is in training mode, where results are random; call eval() first"
        )
    return model


def _of_the_same_class(config: Any) -> nn.Module:
    """Return a transformers model with random weights, which `eager` replaces."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


def _prompt(batch: Any, number: int) -> dict[str, Tensor]:
    """Return the `input_ids` and `attention_mask` of batch `number`."""
    args, kwargs = split_batch(batch)
    arguments = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
    prompt = {
        name: arguments[name] for name in ("input_ids", "attention_mask") if isinstance(arguments.get(name), Tensor)
    }
    tokens = prompt.get("input_ids")
    if tokens is None or tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise ExportError(f"batch {number} has no prompts: pass input_ids of shape (batch, tokens)")
    # Without a mask, `generate` treats every token equal to the padding token as padding.
    return {"attention_mask": torch.ones_like(tokens)} | prompt


def _forcing(tokens: Tensor, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a logits processor that forces `tokens` after prompts of `length` tokens."""

    def force(sequence: Tensor, scores: Tensor) -> Tensor:
        chosen = tokens[:, sequence.shape[1] - length, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    return force


def _generate(model: Any, prompt: dict[str, Tensor], steps: int, **options: Any) -> Any:
    """Generate `steps + 1` tokens: the first comes from the prompt, and the last is never read."""
    length = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1}
    with quiet(), without_warnings(), torch.no_grad():
        return model.generate(**prompt, **_GREEDY, **length, **options)


@contextmanager
def _caching(model: nn.Module, make: Callable[[], Any] | None) -> Iterator[None]:
    """Pass a new cache from `make` to every call of a model that starts without cached tokens.

    Phi3 with longrope drops its cache in the middle of `generate`, once the sequence outgrows the short factors, so a
    cache passed to `generate` would be lost.
    """
    if make is None:
        yield
        return
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[0])

    def replace(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cache = kwargs.get(name)
        return args, kwargs if cache is not None and cache.get_seq_length() else kwargs | {name: make()}

    handle = model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _named(number: int, where: str, steps: int, tokens: int) -> Iterator[None]:
    """Add the number of the batch to errors."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # models, transformers, and ONNX Runtime raise various errors for inputs
        raise ExportError(
            f"batch {number}: {where} does not decode {steps} steps after {tokens} tokens: {error}; pass prompts "
            "that the model accepts, or lower decode_steps"
        ) from error


__all__ = ["decoded_steps", "is_generation_folder"]
