"""Decode in torch and in a folder of prefill and decode graphs, for the comparison of their logits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.errors import ExportError, QuarkError
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.generation.generator import generator
from quark_fx.graph.signature import split_batch
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.isolation import quiet, without_warnings

_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "use_cache": True,
    "cache_implementation": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
"""Options that override the model's generation configuration."""

Steps = dict[str, tuple[Tensor, Tensor]]
"""Logits in torch and in the folder, by name of the step."""


def is_generation_folder(path: Path) -> bool:
    """Tell whether `ExportedModel.save_pretrained` of transformers wrote a folder."""
    return os.path.isfile(path / "export.json")  # of a name that no file can have, False


def decoded_steps(model: nn.Module, path: Path, batches: Iterable[Any], steps: int) -> Iterator[Steps]:
    """Yield the logits after each batch of prompts and after each of the tokens that torch chooses then.

    Args:
        model: Exported model, or its `QuantizedModel`.
        path: The folder.
        batches: Prompts: `input_ids`, with `attention_mask` where they are padded on the left.
        steps: Number of decode steps.

    Raises:
        ExportError: If the folder cannot be loaded, or the model or the folder does not decode a batch.
    """
    exported = _opened(path)
    folder, scales = generator(exported), CacheScales.written(exported.components["decode"].program)
    reference: Any = _in_torch(model, exported.config)
    for number, batch in enumerate(batches):
        prompt = _prompt(batch, number)
        length = prompt["input_ids"].shape[1]
        prompt = {name: value.to(reference.device) for name, value in prompt.items()}
        cache = {"past_key_values": scales.cache()} if scales.scales else {}
        expected = _run(reference, prompt, steps, number, "torch", **cache)
        prompt = {name: value.cpu() for name, value in prompt.items()}
        forced = _forcing(expected.sequences[:, length:].cpu(), length)
        theirs = _run(folder, prompt, steps, number, str(path), logits_processor=[forced])
        names = ["prompt", *(f"step {step}" for step in range(1, steps + 1))]
        yield dict(zip(names, zip(expected.logits, theirs.logits, strict=True), strict=True))


def _opened(path: Path) -> Any:
    """Return the graphs in a folder."""
    try:
        from transformers.exporters import ExportedModel
    except ImportError as error:
        raise ExportError(
            f"decoding needs transformers with exporters ({error}): pip install -U 'quark_fx[onnx,hf]'"
        ) from error
    try:
        return ExportedModel.from_pretrained(path)
    except Exception as error:  # whatever transformers, onnx_ir and ONNX Runtime raise about files
        raise ExportError(f"{path} cannot be loaded: {error}; export it again, like docs/generation.md") from error


def _in_torch(model: nn.Module, config: Any) -> nn.Module:
    """Return the transformers module to compare with."""
    if isinstance(model, QuantizedModel):
        try:
            model = model.eager(None if model.source is not None else _of_the_same_class(config))
        except QuarkError as error:
            raise ExportError(
                f"the quantized model does not decode in torch: {error}; pass the exported module instead"
            ) from error
    if not callable(getattr(model, "generate", None)):
        raise ExportError(
            f"a {type(model).__name__} does not generate; give the exported transformers model, or what quantize() "
            "returned"
        )
    if model.training:
        raise ExportError(
            f"the {type(model).__name__} is in training mode, where results are random; call eval() first"
        )
    return model


def _of_the_same_class(config: Any) -> nn.Module:
    """Return a model with random weights, which `eager` replaces."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


def _prompt(batch: Any, number: int) -> dict[str, Tensor]:
    """Return what `generate` reads of a batch."""
    args, kwargs = split_batch(batch)
    given = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
    prompt = {name: given[name] for name in ("input_ids", "attention_mask") if isinstance(given.get(name), Tensor)}
    tokens = prompt.get("input_ids")
    if tokens is None or tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise ExportError(f"batch {number} lacks prompts: pass input_ids of shape (batch, tokens)")
    return prompt


def _forcing(tokens: Tensor, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor of logits that chooses the given tokens after prompts of `length` tokens."""

    def force(sequence: Tensor, scores: Tensor) -> Tensor:
        chosen = tokens[:, sequence.shape[1] - length, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    return force


def _run(model: Any, prompt: dict[str, Tensor], steps: int, number: int, where: str, **options: Any) -> Any:
    """Generate `steps + 1` tokens: the first comes from the prompt, and the last is never read."""
    length = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1}
    try:
        with quiet(), without_warnings(), torch.no_grad():
            return model.generate(**prompt, **_GREEDY, **length, **options)
    except ExportError:
        raise
    except Exception as error:  # whatever a model, transformers and ONNX Runtime raise about their inputs
        tokens = prompt["input_ids"].shape[1]
        raise ExportError(
            f"batch {number}: {where} does not decode {steps} steps after {tokens} tokens: {error}; give it prompts "
            "that the model takes, or lower decode_steps"
        ) from error


__all__ = ["decoded_steps", "is_generation_folder"]
