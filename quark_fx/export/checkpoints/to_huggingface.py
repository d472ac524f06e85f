"""Export of quantized models as checkpoints for Hugging Face transformers and LLM servers."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark_fx.checkpoints.configuration import require_no_weights
from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.errors import CheckpointError, ExportError
from quark_fx.export.checkpoints.compressed_tensors import compressed_tensors, decompress_to_bfloat16
from quark_fx.export.checkpoints.experts import as_saved
from quark_fx.export.checkpoints.gptq_and_awq import awq, gptq, gptq_v2
from quark_fx.export.checkpoints.model_card import CARD, is_own, model_card
from quark_fx.export.checkpoints.modelopt import modelopt
from quark_fx.export.checkpoints.mxfp4 import mxfp4
from quark_fx.export.checkpoints.values import (
    Checkpoint,
    Written,
    require_tokenizer,
    take_apart,
)
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.stored_weights import computed_leaves
from quark_fx.system.isolation import isolated, quiet
from quark_fx.system.names import unknown
from quark_fx.system.options import checked_call
from quark_fx.system.writable import new_directory, require_possible, writing

_DEFAULT, _OF_STACKS = "compressed-tensors", "mxfp4"


@checked_call
@isolated
def huggingface(
    qmodel: QuantizedModel,
    directory: str | Path,
    *,
    format: str = _DEFAULT,
    tokenizer: Any = None,
    model: nn.Module | None = None,
) -> Path:
    """Write `qmodel`, a quantized Hugging Face model, as a checkpoint directory.

    Scales stay in float32 in compressed-tensors; GPTQ and AWQ store them in float16. If the range of an activation is
    measured at run time, the checkpoint does not record how: transformers divides the largest magnitude by 127.5
    (`symmetry="symmetric_full"`), other readers by 127, and all readers choose exponents of MXFP8 by the rule
    `"e8m0_ceil"`. Readers decompress 4-, 6-, and 8-bit floats in groups to bfloat16.

    Weights of experts are stored separately, one matrix per expert and projection; transformers 5.23 dequantizes them
    at load time. Experts that stay in float are stored as stacks, because transformers would not find separate matrices
    next to quantized layers; with `target="vllm"` or `"sglang"`, they are stored separately, where servers find them.

    A model card (`README.md`) lists the recipe, the data, and the measured errors; a card that quark_fx did not write
    is not replaced.

    GPTQModel reads zero points correctly from `"gptq_v2"`, but from `"gptq"` only if GPTQModel wrote the file.
    Rotations at run time are supported only in compressed-tensors with `target="vllm"`.

    Args:
        qmodel: Result of `quantize`.
        directory: Directory to write, created if needed; an earlier quantized checkpoint in it is replaced.
        format: `"compressed-tensors"` (integers up to 8 bits, FP8 E4M3 also in square blocks, NVFP4, MXFP4, MXFP6 E2M3,
            and MXFP8 E4M3; activations in all of these), `"gptq"`, `"gptq_v2"`, or `"awq"` (integer weights with one
            group size, float activations), `"modelopt"` (FP8, FP8 blocks, NVFP4, or MXFP8, the same for all layers), or
            `"mxfp4"` (the layout of GPT-OSS: experts in MXFP4, everything else in float).
        tokenizer: Tokenizer to save in the same directory.
        model: Float model of the same architecture, if `qmodel` was loaded from a file.

    Returns:
        Path of the directory.

    Raises:
        ExportError: If the format does not support the quantization of an operator (all such operators are listed), the
            target does not read the format, the model is not from transformers, the directory cannot be written or
            contains float weights, or transformers does not load the checkpoint.
    """
    if format not in _WRITERS:
        other = ", or use export.gguf" * (format == "gguf")
        raise unknown("checkpoint format", format, _WRITERS, also=other, error=ExportError)
    directory = Path(directory)
    require_possible(directory)
    require_tokenizer(tokenizer)
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory} is a file; choose another directory")
    if (directory / GRAPH_FILE).exists():
        raise ExportError(f"{directory} holds a model from qmodel.save, under the same names; choose another directory")
    try:
        require_no_weights(directory)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    checkpoint = take_apart(qmodel, model, stacks_whole=format == _OF_STACKS)
    replaced = new_directory(directory, replaces=_is_of_checkpoint, last="config.json")
    with writing(directory), replaced as folder:
        _write(qmodel, checkpoint, folder, format, tokenizer)
        if not (directory / CARD).exists() or is_own(directory / CARD):
            card = model_card(qmodel, checkpoint.shell.config.name_or_path, format)
            (folder / CARD).write_text(card, encoding="utf-8")
    return directory


def _is_of_checkpoint(name: str) -> bool:
    return name in ("config.json", "generation_config.json") or bool(_WEIGHTS.fullmatch(name))


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?[.]safetensors|model[.]safetensors[.]index[.]json")


def _write(qmodel: QuantizedModel, checkpoint: Checkpoint, directory: Path, format: str, tokenizer: Any) -> None:
    """Write all files into an empty directory, and check that transformers finds the weights."""
    shell = checkpoint.shell
    try:
        stored, shell.config.quantization_config = _WRITERS[format](checkpoint, Shelf(directory))
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    target = qmodel.config.target
    if refused := target.checkpoints.refuses(format, shell.config.quantization_config, checkpoint.left_experts):
        raise ExportError(f"target={str(target)!r} does not support {refused}")
    apart = {layer.name for layer in checkpoint.layers if layer.stack}  # these already have their names in checkpoints
    whole = set(checkpoint.stacks) if format == _DEFAULT and target.checkpoints.stacks else set()
    every = checkpoint.tensors | stored
    final = {name for name in every if name in whole or name.rpartition(".")[0] in apart}
    rest = {name: tensor for name, tensor in every.items() if name not in final}
    tensors = as_saved(shell, rest) | {name: every[name] for name in final}
    if decompress_to_bfloat16(shell.config.quantization_config):
        shell.to(torch.bfloat16)
    vars(shell).pop("hf_quantizer", None)  # set if the float model was read from GGUF; save_pretrained would refuse it
    generation = _without_invalid_generation(shell)
    try:
        tensors |= {name: read() for name, read in checkpoint.unread.items() if name not in tensors}
    except CheckpointError as error:
        raise ExportError(f"{error}; the export copies tensors from the model's source checkpoint") from error
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    shell.save_pretrained(directory, state_dict=tensors, save_original_format=False)
    if generation is not None:
        generation.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if format == _OF_STACKS or (format == _DEFAULT and (whole or not checkpoint.stacks)):
        _require_found(shell, directory, format, checkpoint.computed)


def _without_invalid_generation(shell: Any) -> Any:
    """Remove and return the generation configuration if transformers refuses to save it; otherwise, return `None`."""
    generation = getattr(shell, "generation_config", None)
    if generation is None:
        return None
    try:
        with quiet(), warnings.catch_warnings(action="ignore"):
            generation.validate(strict=True)
    except ValueError:
        shell.generation_config = type(generation)()
        return generation
    return None


def _require_found(shell: Any, directory: Path, format: str, computed: Collection[str]) -> None:
    """Load a checkpoint with transformers, on the meta device.

    Raises:
        ExportError: If transformers does not find a weight, or fails.
    """
    with quiet(), redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            info = type(shell).from_pretrained(directory, device_map="meta", output_loading_info=True)[1]
        except ImportError:
            return  # compressed-tensors or accelerate is missing, so transformers cannot load the checkpoint here
        except Exception as error:  # the reader's code may raise any error
            why = f"{type(error).__name__}: {error}{_reader(error)}"
        else:
            missing = sorted(info["missing_keys"])
            why = f"it cannot find the tensors {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}" * bool(missing)
    parametrized = [
        f"{path}.{leaf}" for path, module in shell.named_modules() for leaf in sorted(computed_leaves(module))
    ]
    remedy = f"change the class to build {', '.join([*computed][:3])} without parametrizations; or " * bool(computed)
    remedy += f"remove the parametrizations of {', '.join(parametrized[:3])} before quantizing; or " * bool(
        parametrized
    )
    if why:
        raise ExportError(
            f"transformers cannot load {type(shell).__name__} from a {format} checkpoint: {why}; {remedy}leave these "
            "layers in float (exclude=, with all experts or none), choose another format, or use qmodel.save(directory)"
        )


def _reader(error: Exception) -> str:
    """Name the modules whose code reads a weight that a quantized layer lacks, if the traceback shows them."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [
        v
        for variables in frames
        for v in variables.values()
        if hasattr(v, "save_pretrained") and isinstance(v, nn.Module)
    ]
    reader = next((m for variables in reversed(frames) if isinstance(m := variables.get("module"), nn.Module)), None)
    if not models or reader is None:
        return ""
    names = [name for name, module in models[0].named_modules() if type(module) is type(reader)]
    shown = ", ".join(f"{name}.*" for name in names[:3]) + ", ..." * (len(names) > 3)
    return f" (the code of {type(reader).__name__} reads weights of {shown})" if names else ""


_WRITERS: Mapping[str, Callable[[Checkpoint, Shelf], Written]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "gptq_v2": gptq_v2,
    "awq": awq,
    "modelopt": modelopt,
    _OF_STACKS: mxfp4,
}

FORMATS = tuple(_WRITERS)
"""Names of the checkpoint formats; the first is the default."""

__all__ = ["FORMATS", "huggingface"]
