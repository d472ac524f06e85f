"""The layers of a checkpoint or a GGUF file, and the number formats of their weights, whoever wrote it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from quark_fx.checkpoints.files import CheckpointFiles
from quark_fx.checkpoints.open_checkpoint import quantized_by, read_configuration
from quark_fx.command_line.contents import Part
from quark_fx.errors import ExportError

_CODES = ("weight_packed", "qweight", "weight")
"""What the codes of a layer are called, in compressed-tensors, in GPTQ and AWQ, and where they take whole bytes."""

_BESIDE = frozenset(
    {
        *(
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_global_scale",
            "weight_g_idx",
            "scales",
            "qzeros",
        ),
        *("g_idx", "input_scale", "input_zero_point", "input_global_scale"),
    }
)
"""What a quantized layer has besides its codes."""

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}

_NAMES = {"F64": "float64", "F32": "float32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3", "I8": "int8"}


def checkpoint_parts(path: Path) -> tuple[list[Part], Mapping[str, Any]]:
    """Return the tensors with two dimensions or more, layer by layer, and what the checkpoint says of their codes.

    Raises:
        QuarkError: if the files are damaged.
    """
    files = CheckpointFiles.of(path)
    config = read_configuration(files.directory) if (files.directory / "config.json").is_file() else {}
    key = quantized_by(config)
    method: Any = config
    for step in key.split(".") if key else ():
        method = method[step]
    said: Mapping[str, Any] = method if key else {}
    headers = _headers(files)
    layers: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, header in headers.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = header
    return [part for name, tensors in layers.items() for part in _parts(name, tensors, said)], said


def _headers(files: CheckpointFiles) -> dict[str, tuple[str, list[int]]]:
    found: dict[str, tuple[str, list[int]]] = {}
    for file in dict.fromkeys(files.files.values()):
        with safe_open(file, "pt") as stored:
            slices = ((name, stored.get_slice(name)) for name in stored.keys())  # noqa: SIM118 (not a mapping)
            found |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices}
    return found


def _parts(name: str, tensors: Mapping[str, tuple[str, list[int]]], said: Mapping[str, Any]) -> list[Part]:
    beside = _BESIDE & tensors.keys()
    if beside:
        codes = next((leaf for leaf in _CODES if leaf in tensors), "")
        own = {codes, *beside} - {""}
        scheme = _scheme(name, said)
        weight = (
            _spec(scheme.get("weights")) or _plain(said) or _NAMES.get(tensors[codes][0], tensors[codes][0].lower())
        )
        activation = _spec(scheme.get("input_activations")) or "float"
        whole = sum(_size(*tensors[leaf]) for leaf in own)
        return [Part(name=name, kind="layer", weight=weight, activation=activation, bytes=whole)]
    return [
        Part(
            name=f"{name}.{leaf}".removesuffix(".weight"),
            kind="layer",
            weight=_NAMES.get(dtype, dtype.lower()),
            activation="float",
            bytes=_size(dtype, shape),
        )
        for leaf, (dtype, shape) in tensors.items()
        if len(shape) > 1
    ]


def _size(dtype: str, shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * _BYTES.get(dtype, 1)


def _scheme(layer: str, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the group of compressed-tensors that a layer is in."""
    groups = [group for group in (said.get("config_groups") or {}).values() if isinstance(group, dict)]
    for group in groups:
        for target in group.get("targets", ()):
            if target == layer or (str(target).startswith("re:") and re.match(str(target)[3:], layer)):
                return group
    return next((group for group in groups if "Linear" in group.get("targets", ())), groups[0] if groups else {})


def _spec(said: Any) -> str:
    """Return a format of compressed-tensors as the reports of quark_fx write it."""
    if not isinstance(said, dict):
        return ""
    bits, kind = said.get("num_bits"), said.get("type")
    name = f"fp{bits}" if kind == "float" else f"{'' if said.get('symmetric', True) else 'u'}int{bits}"
    strategy = said.get("strategy") or ""
    shared = f"group {said.get('group_size')}" if "group" in strategy else "" if strategy == "tensor" else strategy
    return " ".join(word for word in (name, shared, "dynamic" if said.get("dynamic") else "") if word)


def _plain(said: Mapping[str, Any]) -> str:
    """Return a format of GPTQ and AWQ."""
    bits, group = said.get("bits"), said.get("group_size")
    if not isinstance(bits, int):
        return ""
    return f"int{bits} group {group}" if isinstance(group, int) and group > 0 else f"int{bits} channel"


def gguf_parts(path: Path) -> list[Part]:
    """Return the tensors of a GGUF file with two dimensions or more.

    Raises:
        ExportError: if it is none, or the package is missing.
    """
    try:
        package = importlib.import_module("gguf")
    except ImportError as error:
        raise ExportError("reading GGUF needs the package gguf: pip install 'quark_fx[hf]'") from error
    try:
        tensors = package.GGUFReader(path).tensors
    except Exception as error:  # whatever its reader raises about a damaged file
        raise ExportError(f"{path} cannot be read as a GGUF file: {error}") from error
    return [
        Part(name=t.name, kind="tensor", weight=t.tensor_type.name, activation="float", bytes=int(t.n_bytes))
        for t in tensors
        if len(t.shape) > 1
    ]
