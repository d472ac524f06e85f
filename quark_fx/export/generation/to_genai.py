"""Export of quantized language models as folders for ONNX Runtime GenAI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.errors import ExportError, QuarkError
from quark_fx.export.checkpoints.values import require_no_hooks, require_tokenizer
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.generation.quantizer import GenerationQuantizer
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.isolation import isolated, quiet
from quark_fx.system.options import checked_call
from quark_fx.system.writable import new_folder, require_possible, writing

if TYPE_CHECKING:
    import onnx_ir as ir

CONFIG, GRAPH = "genai_config.json", "model.onnx"

_PROMPT = 4
"""Number of tokens in the traced prompt; the graph reads prompts of any length."""


@checked_call
@isolated
def genai(
    qmodel: QuantizedModel,
    directory: str | Path,
    *,
    format: str = "matmul_nbits",
    accuracy_level: int | None = None,
    cache: CacheScales | None = None,
    tokenizer: Any = None,
    model: nn.Module | None = None,
) -> Path:
    """Write `qmodel`, a quantized Hugging Face language model, as a folder for `onnxruntime_genai.Model`.

    The folder has one graph for prompts and single tokens, with a growing KV cache, and `genai_config.json`. The graph
    reads one sequence at a time, because ONNX Runtime's `GroupQueryAttention` can read several new tokens only for a
    single sequence.

    Args:
        qmodel: Result of `quantize`.
        directory: Directory to write, created if needed; an existing graph and configuration are replaced.
        format: Name of a format of `quark_fx.export.onnx`: `"matmul_nbits"`, `"qdq"`, or `"qoperator"`.
        accuracy_level: Option of `"matmul_nbits"`: 0 to 3 compute in float; 4 rounds activations to int8 and is faster.
        cache: Scales of an int8 KV cache, from `CacheScales.measure` or `CacheScales.of`; default: keys and values stay
            in float.
        tokenizer: Tokenizer to save in the folder; without one, pass token ids to `Generator.append_tokens`.
        model: Float model of the same architecture, if `qmodel` was loaded from a file.

    Returns:
        Path of the directory.

    Raises:
        ExportError: If the model needs inputs other than tokens, its cache has more than keys and values (such as
            recurrent states), the format does not support the model, or the directory cannot be written.
    """
    directory = Path(directory)
    require_possible(directory)
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory} is a file; choose another directory")
    if (directory / GRAPH_FILE).exists():
        raise ExportError(f"{directory} holds a model from qmodel.save; choose another directory")
    require_tokenizer(tokenizer)
    quantizer = GenerationQuantizer(format, accuracy_level, cache)
    require_no_hooks(qmodel, model)
    if (source := qmodel.source if model is None else model) is not None:
        require_generator(source)
    try:
        generating: Any = qmodel.eager(model)
    except QuarkError as error:
        raise ExportError(str(error)) from error
    return write_folder(generating, directory, quantizer, tokenizer)


def require_generator(model: nn.Module) -> None:
    """Raise `ExportError` if, according to the model's configuration, GenAI cannot generate with the model."""
    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    from transformers.exporters.utils import is_multimodal

    from quark_fx.export.generation.genai_config import require_context_length, token_of

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ExportError(f"{name} is not a Transformers model; use export.onnx")
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ExportError(f"{name} is not a decoder-only language model; use export.onnx")
    if is_multimodal(model):
        raise ExportError(
            f"{name} has inputs other than tokens; use export.GenerationQuantizer, which writes a graph for each part"
        )
    require_context_length(model)
    if token_of(model, "eos_token_id") is None:
        raise ExportError(f"{name} has no eos_token_id, which GenAI needs to stop; set it in model.generation_config")
    try:
        layers = DynamicCache(config=model.config).layers
    except (KeyError, AttributeError, ValueError) as error:
        raise ExportError(
            f"transformers cannot tell which cache {name} uses ({error!r}); use export.GenerationQuantizer and "
            "export.generator"
        ) from error
    # The exporters trace sliding-window layers as layers that keep all tokens; the mask has the window.
    supported = (DynamicLayer, DynamicSlidingWindowLayer)
    kinds = [type(layer).__name__ for layer in layers if type(layer) not in supported]
    if kinds or not layers:
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
        raise ExportError(
            f"GenAI needs a cache of keys and values in every layer; of the {len(layers)} cache layers of {name}, "
            f"these differ: {counts}; use export.GenerationQuantizer and export.generator"
        )


def write_folder(model: Any, directory: Path, quantizer: GenerationQuantizer | None, tokenizer: Any = None) -> Path:
    """Write the graph of a transformers model, its configuration, and its tokenizer to a folder for GenAI.

    Args:
        model: Model of transformers, such as the result of `eager()`.
        directory: Folder to write, created if needed.
        quantizer: Quantizer with the format of the graph; `None` for a float graph.
        tokenizer: Tokenizer to save in the folder, if any.

    Returns:
        Path of the folder.
    """
    import onnx_ir as ir

    from quark_fx.export.generation.genai_config import genai_config, name_cache
    from quark_fx.export.whole_files import put_in_place

    program = _traced(model, quantizer)
    name_cache(program.graph)
    config = json.dumps(genai_config(program.graph, GRAPH, model), indent=2)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with new_folder(directory, f".{GRAPH}-") as folder:
            written, text = folder / GRAPH, folder / CONFIG
            ir.save(program, written, external_data=f"{GRAPH}.data")
            text.write_text(config, encoding="utf-8")
            put_in_place(written, directory / GRAPH)
            os.replace(text, directory / CONFIG)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    return directory


def _traced(model: Any, quantizer: GenerationQuantizer | None) -> ir.Model:
    """Export one graph that reads any number of tokens of one sequence, after any number of cached tokens."""
    from transformers import GenerationConfig, exporters
    from transformers.exporters.utils import decompose_for_generation

    prompt = {"input_ids": torch.arange(1, 1 + _PROMPT)[None] % model.config.get_text_config(decoder=True).vocab_size}
    # The model's own configuration may turn off the cache, or ask for beam search.
    asked = {name: getattr(model.generation_config, name, None) for name in ("eos_token_id", "pad_token_id")}
    greedy = GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **asked)
    with quiet():
        parts = decompose_for_generation(model, prompt, generation_config=greedy, multi_token_decode=True)
        decoding, inputs = parts["decode"]
        library: Any = exporters
        config = library.OnnxConfig(dynamic=True, ort_fusions="cpu", quantizer=quantizer)
        program: ir.Model = library.OnnxExporter().export(decoding, inputs, config).program
    return program


__all__ = ["genai"]
