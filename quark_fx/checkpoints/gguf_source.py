"""A GGUF file as a source: its configuration, and its tensors, decoded to the values of the model one by one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quark_fx.checkpoints.configuration import limited_modules
from quark_fx.checkpoints.decoded import write_values
from quark_fx.checkpoints.files import TORCH_DTYPES, CheckpointFiles, some_of
from quark_fx.checkpoints.gguf_architectures import ARCHITECTURES
from quark_fx.checkpoints.gguf_file import open_gguf
from quark_fx.checkpoints.gguf_reader import (
    Known,
    architectures,
    file_fields,
    frequencies_name,
    plain_name,
    rope_of,
    scale_of_scores,
)
from quark_fx.errors import CheckpointError
from quark_fx.system.isolation import quiet
from quark_fx.system.untrusted import brief

_FLOATS = frozenset({"F32", "F16", "BF16"})
"""Names of GGUF types that store values, not codes."""

_TURNS = (1.0, 4.0)
"""Turns within the original context below which Llama 3 divides frequencies, and above which it does not."""


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file with the names and transforms of its architecture.

    Attributes:
        path: File.
        config: Content of `config.json` for the model.
        shapes: Shapes of the model's tensors that the file holds; keys are names in the model.
        parts: Tensors of the file that hold a tensor of the model; keys are names in the model.
        unused: Names of tensors of the file that the model does not have.
        method: `"gguf"` if the file holds codes; empty if it holds floats.
        names: Names in the model; keys are names in the file.
        processor: Object of transformers that turns tensors of the file into tensors of the model.
    """

    path: Path
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, list[Any]]
    unused: list[str]
    method: str
    names: Mapping[str, str]
    processor: Any

    @classmethod
    def of(cls, path: str | Path) -> GgufSource:
        """Read the header of a file, but not its tensors.

        Raises:
            CheckpointError: If the file is damaged or one part of several, its architecture, a type of its tensors, or
                its scaling of positions is not supported, or it lacks tensors of the model.
        """
        path = Path(path)
        file, package = open_gguf(path), importlib.import_module("gguf")
        _require_decoded({tensor.tensor_type for tensor in file.tensors}, path, package)
        stored = {tensor.name: tensor for tensor in file.tensors}
        with quiet():
            try:
                settings, known = _settings(file, stored, path, package)
            except CheckpointError:
                raise
            except Exception as error:  # values of any type in the header, which transformers' code reads too
                raise CheckpointError(
                    f"{path} has an invalid header: {type(error).__name__}: {brief(str(error))}; export it again"
                ) from error
            config, model = _empty(settings, len(stored), path)
        processor, names = known.reading(model)
        parts = dict[str, list[Any]]()
        for name, tensor in stored.items():
            if target := names.get(name) or names.get(name.removesuffix(".weight")):
                parts.setdefault(target, []).append(tensor)
        what = type(model).__name__
        if missing := [name for name, _ in model.named_parameters() if name not in parts]:
            raise CheckpointError(
                f"{path} lacks weights for {some_of(missing)} of the {what} that its configuration describes; copy or "
                "export the checkpoint again"
            )
        read = {tensor.name for tensors in parts.values() for tensor in tensors} | {frequencies_name(package)}
        unused = sorted(stored.keys() - read)
        if layers := [name for name in unused if name.startswith("blk.")]:
            raise CheckpointError(
                f"{path} holds {some_of(layers)}, which {what} does not have; pass the checkpoint that the file was "
                "exported from"
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in parts}
        for name, shape in shapes.items():
            sizes = [tuple(map(int, reversed(tensor.shape))) for tensor in parts[name]]
            if sum(map(math.prod, sizes)) != math.prod(shape):
                raise CheckpointError(
                    f"{path} holds {name} with shape {', '.join(map(str, sizes))}, and {what} expects {shape}; copy or "
                    "export the checkpoint again"
                )
        codes = any(tensor.tensor_type.name not in _FLOATS for tensor in file.tensors)
        return cls(path, config, shapes, parts, unused, "gguf" * codes, names, processor)

    def tensor(self, name: str) -> Tensor:
        """Return the values of a tensor of the model, float32.

        Raises:
            CheckpointError: If the data is damaged, or its shape does not fit the model.
        """
        dequantize, values = importlib.import_module("gguf").quants.dequantize, dict[str, Any]()
        try:
            for part in self.parts[name]:
                result = self.processor.process(
                    weights=dequantize(part.data, part.tensor_type),
                    name=part.name,
                    tensor_key_mapping=self.names,
                    parsed_parameters={"tensors": values},
                )
                if result.name in self.names:
                    values[self.names[result.name]] = result.weights
            tensor = torch.from_numpy(np.require(values[name], np.float32, ["C", "W"]))
            if tensor.shape != self.shapes[name]:
                raise ValueError(f"shape {tuple(tensor.shape)} instead of {self.shapes[name]}")
        except Exception as error:  # the packages' code may raise any error for unexpected data
            raise CheckpointError(
                f"{name} in {self.path} cannot be decoded: {brief(str(error))}; copy or export the file again"
            ) from error
        return tensor

    def stored(self, folder: Path, dtype: torch.dtype | None) -> CheckpointFiles:
        """Write the values to safetensors files, tensor by tensor.

        Args:
            folder: Empty directory.
            dtype: Dtype of the values; `None` for float32.

        Raises:
            CheckpointError: If a tensor cannot be decoded, or the disk is full.
        """
        kind = torch.float32 if dtype is None else dtype
        headers = {name: (TORCH_DTYPES[kind], shape) for name, shape in self.shapes.items()}
        return write_values(self.path, folder, headers, lambda name, _: [self.tensor(name).to(kind)])


def _require_decoded(kinds: set[Any], path: Path, package: Any) -> None:
    """Raise `CheckpointError` if the package cannot decode one of the types."""
    names = []
    for kind in kinds:
        try:
            package.quants.dequantize(np.zeros((1, package.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names.append(kind.name)
    if names:
        raise CheckpointError(
            f"{path} holds tensors of type {', '.join(sorted(names))}, which the package gguf does not decode; "
            "update it, or pass the checkpoint that the file was exported from"
        )


def _settings(file: Any, stored: Mapping[str, Any], path: Path, package: Any) -> tuple[dict[str, Any], Known]:
    """Return the fields of the configuration that a file describes, with `model_type`, and its architecture.

    Sizes come from the file where transformers would use a default. Fields without a key have the value that llama.cpp
    assumes.
    """
    reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    name = file.fields["general.architecture"].contents() if "general.architecture" in file.fields else None
    values = {k.partition(".")[2]: f.contents() for k, f in file.fields.items() if k.startswith(f"{name}.")}
    if "split.count" in file.fields and (count := file.fields["split.count"].contents()) > 1:
        raise CheckpointError(f"{path} is one of {count} parts of a model; merge them with llama-gguf-split --merge")
    has_experts = bool(values.get("expert_count"))
    row = next((t for t, r in ARCHITECTURES.items() if r.name == name and r.has_experts == has_experts), None)
    token_ids = {
        field: file.fields[f"tokenizer.{key}"].contents() if f"tokenizer.{key}" in file.fields else None
        for key, field in reading.GGUF_CONFIG_MAPPING["tokenizer"].items()
    }
    if row is not None and (has_experts or name not in reading.GGUF_CONFIG_MAPPING):
        tokens = file.fields.get("tokenizer.ggml.tokens")
        settings = {"model_type": row, "tie_word_embeddings": "output.weight" not in stored}
        settings |= {} if tokens is None else {"vocab_size": len(tokens.data)}
    else:
        if plain_name(str(name)) not in map(plain_name, reading.GGUF_CONFIG_MAPPING):
            raise _unknown(name, path, package)
        settings = reading.load_gguf_checkpoint(path, return_tensors=False)["config"]
    known = Known.of(str(settings["model_type"]), package)
    if known is None or known.architecture != name:
        raise _unknown(name, path, package)
    settings = token_ids | settings
    settings.pop("_model_name_or_path", None)
    settings |= {field: values[key] for key, field in file_fields(known, values, package).items() if key in values}
    settings |= scale_of_scores(known.architecture, settings)
    return settings | _positions(settings, known, values, stored, path, package) | dict(known.assumed), known


class UnknownArchitectureError(CheckpointError):
    """A GGUF file holds a model of an architecture without names for its tensors here."""


def _unknown(name: Any, path: Path, package: Any) -> CheckpointError:
    return UnknownArchitectureError(
        f"{path} holds a model of the architecture {brief(str(name))}, which open_checkpoint does not support "
        f"(supported: {', '.join(architectures(package))}); pass the checkpoint that the file was exported from"
    )


def _positions(
    settings: Mapping[str, Any],
    known: Known,
    values: Mapping[str, Any],
    stored: Mapping[str, Any],
    path: Path,
    package: Any,
) -> dict[str, Any]:
    """Return the fields of rotary embeddings that transformers' reader ignores: how positions are scaled, and channels.

    Args:
        settings: Other fields of the configuration.
        known: Keys of the architecture.
        values: Values of the file; keys are keys of the file.
        stored: Tensors of the file; keys are their names.
        path: File.
        package: Module `gguf`.
    """
    divisors = stored.get(frequencies_name(package))
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0
    kind = values.get("rope.scaling.type", "none" if factor == 1 else "linear")  # llama.cpp's default is linear
    scaling: dict[str, Any] | None = {}
    if divisors is not None:
        scaling = _as_in_llama_3(divisors.data, settings.get("rope_theta", 1e4)) if kind == "none" else None
    elif kind == "linear":
        scaling = {"rope_type": kind, "factor": factor}
    elif "rope_scaling" not in settings and (kind != "none" or any(n.startswith("rope_factors") for n in stored)):
        scaling = None
    if scaling is None:
        raise CheckpointError(
            f"{path} scales positions in a way that open_checkpoint does not support (rope.scaling.type {kind!r}); "
            "pass the checkpoint that the file was exported from"
        )
    fields = {"rope_scaling": scaling} if scaling else {}
    default = importlib.import_module("transformers").AutoConfig.for_model(settings["model_type"])
    channels = values.get("rope.dimension_count")
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    if channels and known.keys.get("rope.dimension_count") in (None, "head_dim"):
        if "partial_rotary_factor" in rope_of(default):
            fields["partial_rotary_factor"] = channels / width
        elif channels != width:
            raise CheckpointError(
                f"{path} rotates {channels} of {width} channels of a head, but transformers rotates all in models of "
                f"type {settings['model_type']}; pass the checkpoint that the file was exported from"
            )
    return fields


def _as_in_llama_3(divisors: Any, theta: float) -> dict[str, Any] | None:
    """Return Llama 3's parameters of the rotary embedding with these divisors of frequencies; `None` if none has them.

    Args:
        divisors: Divisors, from the highest frequency to the lowest.
        theta: Base of the frequencies.
    """
    divisor = np.asarray(divisors, np.float64)
    turns = theta ** -(np.arange(len(divisor)) / len(divisor)) / (2 * math.pi)  # per token
    factor, (low, high) = round(float(divisor.max()), 4), _TURNS
    if not factor > 1:
        return {} if (divisor == 1).all() else None
    smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if not between.any():
        return None
    context = round(float(np.median((low + (high - low) * smooth[between]) / turns[between])))
    smooth = np.clip((context * turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisor, rtol=1e-4, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _empty(settings: dict[str, Any], tensors: int, path: Path) -> tuple[dict[str, Any], Any]:
    """Return the content of `config.json` and a model on the meta device.

    Args:
        settings: Fields of the configuration.
        tensors: Number of tensors in the file.
        path: File.
    """
    transformers = importlib.import_module("transformers")
    try:
        with limited_modules(settings, tensors), torch.device("meta"):
            config = transformers.AutoConfig.for_model(**settings)
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
            if kind is None:
                raise CheckpointError(
                    f"models of type {config.model_type} are not causal language models, which open_checkpoint needs; "
                    "pass the checkpoint that the file was exported from"
                )
            model = kind(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # transformers may raise any error for unexpected values
        raise CheckpointError(
            f"{path} does not describe a language model that transformers can build: {brief(str(error))}; copy or "
            "export the file again"
        ) from error
    return config.to_dict() | {"architectures": [kind.__name__], "dtype": "float32"}, model


__all__ = ["GgufSource", "UnknownArchitectureError"]
