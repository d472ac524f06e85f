"""Models on the command line, given as a path, or as a function in a module that returns a model."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.configuration import read_configuration
from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.checkpoints.gguf_file import is_gguf
from quark_fx.checkpoints.gguf_source import GgufSource
from quark_fx.data.context import context_length
from quark_fx.errors import CaptureError, CheckpointError, ConfigError
from quark_fx.evaluation.runs import open_model
from quark_fx.export.runtime.runners import FileRunner
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.names import nearest

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.txt", "vocab.json", "spiece.model"),
)

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with the information needed to call it.

    Attributes:
        name: Argument of the command line.
        model: Module, quantized model, or runner of an ONNX file; for a checkpoint that is not opened yet, its path.
        folder: Folder that may contain the model's tokenizer.
        gguf: GGUF file that may contain the model's tokenizer.
        config: Configuration of a checkpoint.
        inputs: Names of the inputs, if known.
        example: Batch that a factory returned with its model.
    """

    name: str
    model: Any
    folder: Path | None = None
    gguf: Path | None = None
    config: Mapping[str, Any] | None = None
    inputs: tuple[str, ...] | None = None
    example: Any = None

    @property
    def reads_lines(self) -> bool:
        """Tell whether samples of text are padded lines, which encoders read, and not windows."""
        if self.config is not None:
            architecture = str(self.config["architectures"][0])
            return not architecture.endswith(("ForCausalLM", "LMHeadModel"))
        return self.inputs is not None and "attention_mask" in self.inputs

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that the model reads, if a checkpoint's configuration contains it."""
        return context_length(self.config or {})

    @property
    def dtype(self) -> str:
        """The name of the dtype of a checkpoint's weights; empty if the configuration does not contain it."""
        return str((self.config or {}).get("dtype") or (self.config or {}).get("torch_dtype") or "")

    def completed_by(self, other: Subject | None) -> Subject:
        """Return the subject with missing information, such as the tokenizer of an exported file, from `other`."""
        if other is None:
            return self
        folder = self.folder if self.folder is not None and has_tokenizer(self.folder) else other.folder
        example = other.example if self.example is None else self.example
        return replace(self, folder=folder, config=self.config or other.config, example=example)

    def made_up(self) -> dict[str, Tensor] | None:
        """Return a generated batch of tokens for capture, int64; `None` if the model is not a text model."""
        vocabulary = (self.config or {}).get("vocab_size")
        if not isinstance(vocabulary, int):
            return None
        rows = min(16, self.longest or 16)
        return {"input_ids": torch.arange(2 * rows, dtype=torch.int64).reshape(2, rows) % vocabulary}


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder contains the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def float_subject(name: str) -> Subject:
    """Return the float model to quantize; a checkpoint is not opened yet.

    Raises:
        QuarkError: If `name` is neither a checkpoint nor a factory, or the model is already quantized.
    """
    if _is_factory(name):
        return _made(name)
    path = Path(name)
    if path.suffix == ".onnx" or os.path.exists(path / GRAPH_FILE):
        raise ConfigError(
            f"{name} is not a PyTorch float model; pass the directory of a checkpoint, a GGUF file, or a function as "
            "package.module:name"
        )
    if not os.path.exists(path):  # Path.exists raises an error for names that are too long
        raise CheckpointError(
            f"{name} does not exist; pass the directory of a checkpoint, or a function as package.module:name"
        )
    if is_gguf(path):
        return Subject(name=name, model=path, folder=path.parent, gguf=path, config=GgufSource.of(path).config)
    config = read_configuration(path if path.is_dir() else path.parent)
    return Subject(name=name, model=path, folder=path, config=config)


def subject(name: str) -> Subject:
    """Return a model in any form, ready to run.

    Raises:
        QuarkError: If the model cannot be read or created.
    """
    if _is_factory(name):
        return _made(name)
    path = Path(name)
    model = open_model(path)
    if isinstance(model, FileRunner):
        inputs = tuple(value.name for value in model.inputs)
        return Subject(name=name, model=model, folder=path.parent, inputs=inputs)
    if isinstance(model, QuantizedModel):
        return Subject(name=name, model=model, folder=path, inputs=model.signature.input_names)
    if is_gguf(path):
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        return Subject(name=name, model=model, folder=path.parent, gguf=path, config=config)
    return Subject(name=name, model=model, folder=path, config=read_configuration(path))


def _is_factory(name: str) -> bool:
    return bool(_FACTORY.fullmatch(name)) and not Path(name).exists()


def _made(name: str) -> Subject:
    """Call a factory and return its model, with the batch of example inputs if the factory returns a pair.

    A module that is not a function's result but an attribute itself is also accepted.
    """
    module_name, _, path = name.partition(":")
    module = _imported(module_name)
    factory: Any = module
    for part in path.split("."):
        if not hasattr(factory, part):
            raise ConfigError(f"{module_name} has no {part!r}{nearest(part, vars(factory))}")
        factory = getattr(factory, part)
    product = factory
    if not isinstance(factory, nn.Module):
        if not callable(factory):
            raise ConfigError(f"{name} is a {type(factory).__name__}; name a function that returns a module")
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise ConfigError(
                f"{name} must be callable without arguments: {error}; add a default to each parameter"
            ) from error
        except ValueError:  # a C function without a signature
            pass
        try:
            product = factory()
        except Exception as error:  # an error of the user's code
            raise CaptureError(f"{name} raised {_described(error)}") from error
    model, example = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} returned a {type(product).__name__}; return a module, or a module and a batch of example inputs"
        )
    return Subject(name=name, model=model.eval(), example=example)


def _imported(name: str) -> ModuleType:
    if name.endswith(".py"):
        raise ConfigError(
            f"{name} is a file; write the function as package.module:name, such as {name.removesuffix('.py')}:name"
        )
    if (directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except Exception as error:  # an error of the user's code
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"module {error.name!r} is neither in {directory} nor installed; write the function as "
                "package.module:name"
            ) from error
        raise ConfigError(f"importing {name} raised {_described(error)}") from error


def _described(error: BaseException) -> str:
    """Return the type, the message, and the source line of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


__all__ = ["Subject", "float_subject", "has_tokenizer", "subject"]
