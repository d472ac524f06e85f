"""Content of a checkpoint's `config.json`: the class of the model, and whether the weights are quantized."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from quark_fx.errors import CheckpointError
from quark_fx.system.untrusted import brief, read_json

METHOD = "quark_fx"
"""Value of `quant_method` in a `quantization_config` that makes transformers quantize float weights at load time."""

CONFIG_LIMIT = 1 << 24
"""Largest size of a configuration file, in bytes."""
_WEIGHTS = frozenset({".safetensors", ".bin"})
"""Suffixes of the files in which transformers stores weights."""
NO_CODES = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""Safetensors names of the dtypes of float weights, positions, and masks; other dtypes are codes."""


def read_configuration(directory: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises:
        CheckpointError: If the file cannot be read, does not name a class, or refers to other files or to code.
    """
    file = directory / "config.json"
    try:
        config = read_json(file, CONFIG_LIMIT)
        str(config["architectures"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{file} does not say which model this is ({type(error).__name__}: {error}); pass "
            "open_checkpoint(path, factory) for a model that is not from transformers"
        ) from error
    for key, value in entries(config):
        # transformers fetches kernels, which are code, for "owner/name".
        if "_implementation" in key and isinstance(value, str) and "/" in value:
            raise CheckpointError(f"{file} asks transformers to fetch code: {value}; remove {key}")
    if files := config.get("configuration_files"):
        raise CheckpointError(
            f"{file} refers to {files} for the configuration; replace it with the file for your transformers version"
        )
    if _on_load(config.get("quantization_config")):
        del config["quantization_config"]  # otherwise, transformers would quantize the float weights
    config.pop("transformers_weights", None)  # name of a weight file; the files to read are already chosen
    return config  # type: ignore[no-any-return]


def is_rotated(config: dict[str, Any]) -> bool:
    """Tell whether a configuration has transforms that rotate activations, which transformers ignores."""
    return any(key.rpartition(".")[2] == "transform_config" and bool(value) for key, value in entries(config))


def require_unrotated(config: dict[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if a checkpoint rotates activations, because transformers would compute wrong results."""
    if is_rotated(config):
        raise CheckpointError(
            f"{path} rotates activations, which transformers ignores, so its results would be wrong; run it in vLLM, "
            "or use the quantized model, saved or exported to ONNX"
        )


def quantized_by(config: dict[str, Any]) -> str:
    """Return the key of the entry that says that the weights are codes, joined by dots; empty for float weights.

    Weights are also float if the method is `METHOD`, with which transformers quantizes weights while it loads them.
    """
    names = ("quantization_config", "compression_config")
    found = (key for key, value in entries(config) if key.rpartition(".")[2] in names and value and not _on_load(value))
    return next(found, "")


def _on_load(settings: Any) -> bool:
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


def without_codes(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration without the entries that say that weights are quantized."""
    config = json.loads(json.dumps(config))
    while key := quantized_by(config):
        owner: Any = config
        *path, last = key.split(".")
        for step in path:
            owner = owner[int(step) if isinstance(owner, list) else step]
        del owner[last]
    return config


def require_no_weights(directory: Path) -> None:
    """Raise an error if a directory contains float weights, which a quantized checkpoint would overwrite.

    Raises:
        CheckpointError: If the directory holds weights and its `config.json` does not say that they are quantized.
    """
    names = sorted(f.name for f in directory.iterdir() if f.suffix in _WEIGHTS) if directory.is_dir() else []
    if not names:
        return
    try:
        config = read_json(directory / "config.json", CONFIG_LIMIT)
        earlier = isinstance(config, dict) and quantized_by(config)
    except (OSError, ValueError, RecursionError):
        earlier = ""
    if not earlier:
        raise CheckpointError(
            f"{directory} holds {names[0]}, which would be lost, and no config.json there marks it as quantized; "
            "choose another directory"
        )


def entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all entries of a nested JSON object: the path of keys, joined by dots, and the value."""
    rest: list[tuple[str, Any]] = list(config.items())
    while rest:
        key, value = rest.pop()
        yield key, value
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        rest += [(f"{key}.{part}", below) for part, below in parts]


@contextmanager
def limited_modules(config: dict[str, Any], tensors: int) -> Iterator[None]:
    """Limit the number of modules and parameters that this thread creates, relative to the tensors in a checkpoint.

    A configuration can ask for any number of layers, and transformers creates all of them before it finds that their
    weights are missing.

    Args:
        config: Configuration. Its numbers of layers are checked first, because configurations create lists
            of that length.
        tensors: Number of tensors in the checkpoint.

    Raises:
        CheckpointError: If the limit is exceeded.
    """
    most, created, thread = 64 * tensors + 4096, 0, threading.get_ident()
    for key, value in entries(config):
        if "layer" in key.rpartition(".")[2] and isinstance(value, int) and value > most:
            raise CheckpointError(
                f"the configuration asks for {key}={brief(value)}, but the checkpoint has {tensors} tensors; correct "
                f"{key}"
            )

    def count(*_: object) -> None:
        nonlocal created
        created += threading.get_ident() == thread
        if created > most:
            raise CheckpointError(
                f"the configuration describes more than {most} modules and parameters, but the checkpoint has "
                f"{tensors} tensors; correct the number of layers"
            )

    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def class_of(config: dict[str, Any], directory: Path, transformers: Any) -> Any:
    """Return the class of transformers that a configuration names.

    Args:
        config: Content of `config.json`.
        directory: Directory of the file, for messages.
        transformers: Module `transformers`.

    Raises:
        CheckpointError: If this version of transformers does not have the class.
    """
    name = str(config["architectures"][0])
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{directory / 'config.json'} names {name!r}, which transformers {transformers.__version__} does not have; "
            "update transformers, or load the model yourself and pass it to quantize"
        )
    return kind


__all__ = [
    "CONFIG_LIMIT",
    "METHOD",
    "NO_CODES",
    "class_of",
    "entries",
    "is_rotated",
    "limited_modules",
    "quantized_by",
    "read_configuration",
    "require_no_weights",
    "require_unrotated",
    "without_codes",
]
