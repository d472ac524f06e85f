"""Opening and running a model in any form: module, function, checkpoint, or exported file."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.configuration import (
    class_of,
    limited_modules,
    quantized_by,
    read_configuration,
    require_unrotated,
)
from quark_fx.checkpoints.files import GRAPH_FILE, CheckpointFiles, some_of
from quark_fx.checkpoints.gguf_file import is_gguf, open_gguf, require_bounded
from quark_fx.checkpoints.gguf_source import UnknownArchitectureError
from quark_fx.checkpoints.open_checkpoint import open_checkpoint, stage
from quark_fx.errors import CheckpointError, ExportError, QuarkError
from quark_fx.export.runtime.checkpoint_process import named_tensors, scale_positions
from quark_fx.export.runtime.checkpoint_runners import CHECKPOINT_RUNNERS
from quark_fx.export.runtime.runners import RUNNERS, FileRunner, Runner, TorchRunner
from quark_fx.model.serialization import load
from quark_fx.system.names import unknown

Run = Callable[[Any], Any]
"""Function, such as a `Runner`, from a batch in the form of calibration data to the result of the model."""

_FORMS = (
    f"pass an .onnx or .gguf file, a directory that save() wrote ({GRAPH_FILE}), or a checkpoint of transformers "
    "(config.json)"
)


def runner_of(model: Any, runtime: str | None = None) -> Runner:
    """Return a runner of a model: `runner(batch)` runs a batch in the form of calibration data.

    Args:
        model: Module in eval mode; result of `quantize`; function that is called like the model; path of an ONNX file,
            a GGUF file, a checkpoint, or a directory that `save` wrote; or a runner.
        runtime: Runtime of a file: `"onnxruntime"`, the `onnx.runtime` of another target, or, in a separate process
            for each batch, `"transformers"` or `"llama.cpp"`. Default: ONNX Runtime for ONNX files, and torch for other
            models.

    Raises:
        QuarkError: If the type of the model is not supported, or a path cannot be read.
    """
    if runtime is not None:
        runtimes: dict[str, type[Runner]] = {**RUNNERS, **CHECKPOINT_RUNNERS}
        if runtime not in (*runtimes, "torch"):
            raise unknown("runtime", runtime, runtimes, also=", or add one with register_runner")
        if runtime not in runtimes or not isinstance(model, str | os.PathLike):
            what = model if isinstance(model, str | os.PathLike) else f"a {type(model).__name__}"
            raise QuarkError(
                f"runtime={runtime!r} cannot open {what}; pass the path of a file for "
                f"{' or '.join(map(repr, runtimes))}, or omit runtime"
            )
        return (
            CHECKPOINT_RUNNERS[runtime](Path(model)) if runtime in CHECKPOINT_RUNNERS else _opened(Path(model), runtime)
        )
    model = open_model(model) if isinstance(model, str | os.PathLike) else model
    return model if isinstance(model, Runner) else TorchRunner(model)


def open_model(path: str | os.PathLike[str]) -> Any:
    """Return the model in a file or directory, ready to run: a `QuantizedModel`, a `FileRunner`, or a module.

    Args:
        path: ONNX file, directory that `save` wrote, checkpoint of transformers (float or quantized), or GGUF file,
            which transformers decodes to float32. Code in a checkpoint is never run.

    Raises:
        QuarkError: If the path is not one of these, or cannot be read.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return _opened(path, "onnxruntime")
    if not os.path.exists(path):  # Path.exists raises an error for names that are too long
        raise QuarkError(f"{path} does not exist; {_FORMS}")
    if (path / GRAPH_FILE).is_file():
        return load(path)
    if (path / "config.json").is_file():
        return _quantized_checkpoint(path) if quantized_by(read_configuration(path)) else open_checkpoint(path)
    if is_gguf(path):
        try:
            return open_checkpoint(path)
        except UnknownArchitectureError:
            return _gguf_model(path)
    raise QuarkError(f"{path} is not a model that can be run; {_FORMS}")


def _opened(path: Path, runtime: str) -> FileRunner:
    """Return the runner of a file; raise `ExportError` if the runtime does not load it."""
    try:
        return RUNNERS[runtime](path)
    except ExportError:
        raise
    except Exception as error:  # protobuf and the runtimes raise errors of many types
        raise ExportError(f"{path} cannot be loaded: {error}; pass a file that qfx.export.onnx wrote") from error


def _gguf_model(path: Path) -> nn.Module:
    """Return the language model in a GGUF file of an architecture that only transformers reads."""
    options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    try:
        require_bounded(path)
        model: nn.Module
        model, loaded = _transformers().AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, output_loading_info=True, **options
        )
    except Exception as error:  # the reader of the format can raise anything
        open_gguf(path)  # raises a clearer error if the file is damaged
        raise CheckpointError(
            f"transformers does not load {path}: {error}\ntransformers supports only some architectures and GGUF block "
            "types; evaluate the model that the file was exported from, which has the same weights, or run the file in "
            "llama.cpp: runner_of(path, 'llama.cpp')"
        ) from error
    if names := sorted(loaded["missing_keys"]):  # transformers initializes these weights at random
        raise CheckpointError(
            f"{path} lacks weights for {some_of(names)} of the {type(model).__name__} that its configuration "
            "describes; copy or export the file again"
        )
    scale_positions(model, path)
    return model.eval()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CheckpointError("reading a checkpoint needs transformers: pip install 'quark_fx[hf]'") from error


def _quantized_checkpoint(path: Path) -> nn.Module:
    """Return the transformers model of a quantized checkpoint; the reader of its format must be installed."""
    transformers = _transformers()
    config, files = read_configuration(path), CheckpointFiles.of(path)
    require_unrotated(config, path)
    kind = class_of(config, path, transformers)
    options = {"dtype": "auto", "local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with tempfile.TemporaryDirectory() as folder:
        checked = Path(folder, "checked")
        stage(files, config, checked)
        try:
            with limited_modules(config, len(files.files)):
                model: nn.Module = kind.from_pretrained(checked, **options)
        except Exception as error:  # the reader of the format can raise anything
            why = str(error).replace(str(checked), str(path))
            raise CheckpointError(f"transformers does not load {path}: {why}") from error
    return model.eval()


def main_tensor(output: Any, *names: str) -> Tensor:
    """Return the tensor of a model's result with the first of `names` that the result has, or else its first tensor.

    Raises:
        QuarkError: If the result does not contain tensors.
    """
    tensors = named_tensors(output)
    if not tensors:
        raise QuarkError(f"the model returns {type(output).__name__}, not tensors; wrap the model to return its logits")
    return next((tensors[name] for name in names if name in tensors), next(iter(tensors.values())))


def same_place(name: str) -> str:
    """Return an output's name in the spelling that all forms of a model share: `past.0.1` becomes `past_0_1`."""
    return re.sub(r"\W", "_", name)


__all__ = ["Run", "main_tensor", "named_tensors", "open_model", "runner_of", "same_place"]
