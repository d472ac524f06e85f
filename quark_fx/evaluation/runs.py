"""Run batches through a model in any form: module, function, checkpoint, or exported file."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quark_fx.checkpoints.files import GRAPH_FILE, CheckpointFiles, some_of
from quark_fx.checkpoints.gguf_file import open_gguf, require_bounded
from quark_fx.checkpoints.open_checkpoint import (
    class_of,
    limited_modules,
    open_checkpoint,
    quantized_by,
    read_configuration,
    require_unrotated,
    stage,
)
from quark_fx.errors import CheckpointError, ExportError, QuarkError
from quark_fx.export.runtime.checkpoint_process import named_tensors
from quark_fx.export.runtime.session import file_may_optimize, open_session, session_options
from quark_fx.graph.signature import split_batch
from quark_fx.model.serialization import load

Run = Callable[[Any], Any]
"""Function from a batch, in the form of calibration data, to the result of the model."""


def run_of(model: Any) -> Run:
    """Return a function that runs batches through a model.

    Args:
        model: Module in eval mode, result of `quantize`, function that is called like the model, or path for
            `open_model`.

    Raises:
        QuarkError: For a model of another type.
    """
    if isinstance(model, str | os.PathLike):
        model = open_model(model)
    if isinstance(model, OnnxModel):
        return model.run_batch
    if isinstance(model, nn.Module) and model.training:
        raise QuarkError(f"the {type(model).__name__} is in training mode, where results are random; call eval() first")
    if not callable(model):
        raise QuarkError(f"expected a model, its path, or a function, not {type(model).__name__}")

    def run(batch: Any) -> Any:
        args, kwargs = split_batch(batch)
        try:
            with torch.no_grad():
                return model(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # errors of modules about their inputs
            if not isinstance(model, nn.Module) or isinstance(error, QuarkError):
                raise
            raise QuarkError(f"the {type(model).__name__} does not run on a batch: {error}") from error

    return run


def open_model(path: str | os.PathLike[str]) -> Any:
    """Return the model in a file or directory, ready to run: a `QuantizedModel`, an `OnnxModel`, or a module.

    Args:
        path: ONNX file, directory that `save` wrote, checkpoint of transformers (float or quantized), or GGUF file,
            which transformers decodes to float32. No code of it is run.

    Raises:
        QuarkError: If the path is not a model of these kinds, or cannot be read.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return OnnxModel(path)
    if not os.path.exists(path):  # Path.exists raises an error for names that are too long
        raise QuarkError(f"{path} does not exist")
    if (path / GRAPH_FILE).is_file():
        return load(path)
    if (path / "config.json").is_file():
        return _quantized_checkpoint(path) if quantized_by(read_configuration(path)) else open_checkpoint(path)
    if path.suffix == ".gguf":
        return _gguf_model(path)
    raise QuarkError(
        f"{path} is not a model that can be run; pass an .onnx or .gguf file, a directory that save() wrote "
        f"({GRAPH_FILE}), or a checkpoint of transformers (config.json)"
    )


class OnnxModel:
    """An ONNX file that ONNX Runtime runs on the CPU, with the arithmetic of the file.

    Attributes:
        path: Path of the file.
        inputs: Names of the inputs, in order.
        outputs: Names of the outputs, in order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            import onnxruntime  # noqa: F401
        except ImportError as error:
            raise ExportError("running an ONNX file needs onnxruntime: pip install 'quark_fx[onnx]'") from error
        try:
            self._session = open_session(self.path, session_options(optimize=file_may_optimize(self.path)))
        except Exception as error:  # from protobuf or ONNX Runtime
            raise ExportError(f"{self.path} cannot be loaded: {error}") from error
        self.inputs = tuple(value.name for value in self._session.get_inputs())
        self.outputs = tuple(value.name for value in self._session.get_outputs())

    def run_batch(self, batch: Any) -> dict[str, Tensor]:
        """Return the outputs and their names; keywords of a batch are names of inputs, other values go in order.

        Raises:
            ExportError: If the file has other inputs, or does not run.
        """
        args, kwargs = split_batch(batch)
        values = kwargs if kwargs else dict(zip(self.inputs, leaves := pytree.tree_leaves(args), strict=False))
        if set(values) != set(self.inputs) or (not kwargs and len(leaves) != len(self.inputs)):
            passed = ", ".join(map(str, kwargs)) if kwargs else f"{len(leaves)} by position"
            raise ExportError(f"{self.path} has the inputs {', '.join(self.inputs)}; the batch has {passed}")
        feed = {n: v.numpy(force=True) if isinstance(v, Tensor) else np.asarray(v) for n, v in values.items()}
        try:
            results = self._session.run(None, feed)
        except Exception as error:  # from ONNX Runtime
            raise ExportError(
                f"ONNX Runtime does not run {self.path}: {error}; pass batches of the sizes and types of its inputs"
            ) from error
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(self.outputs, results, strict=True)}


def _gguf_model(path: Path) -> nn.Module:
    """Return a language model with the decoded weights of a GGUF file."""
    options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    try:
        require_bounded(path)
        model: nn.Module
        model, loaded = _transformers().AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, output_loading_info=True, **options
        )
    except Exception as error:  # the reader of the format can raise anything
        open_gguf(path)  # raises a better error if the file is damaged
        raise CheckpointError(
            f"transformers does not load {path}: {error}\nIt knows some architectures and types of blocks only; "
            "evaluate the model that the file was exported from, which has the same weights, or "
            "run the file in llama.cpp (llama-perplexity)"
        ) from error
    if names := sorted(loaded["missing_keys"]):  # transformers gives these random numbers
        raise CheckpointError(
            f"{path} lacks weights for {some_of(names)} of the {type(model).__name__} that it describes; copy or "
            "export it again"
        )
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
    """Return the tensor of a model's result with one of the names, or the first tensor.

    Raises:
        QuarkError: If the result does not contain tensors.
    """
    tensors = named_tensors(output)
    if not tensors:
        raise QuarkError(f"the model returns {type(output).__name__}, not tensors; wrap it to return its logits")
    return next((tensors[name] for name in names if name in tensors), next(iter(tensors.values())))


def same_place(name: str) -> str:
    """Return the spelling of an output's name common to all forms of a model: `past.0.1` becomes `past_0_1`."""
    return re.sub(r"\W", "_", name)


__all__ = ["OnnxModel", "Run", "main_tensor", "named_tensors", "open_model", "run_of", "same_place"]
