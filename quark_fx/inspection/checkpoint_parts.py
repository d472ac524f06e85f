"""The layers of any checkpoint or GGUF file, and the number formats of their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark_fx.checkpoints.configuration import quantized_by, read_configuration
from quark_fx.checkpoints.decoded import group_of, names_layer
from quark_fx.checkpoints.files import CheckpointFiles, stored_bytes
from quark_fx.checkpoints.gguf_file import open_gguf
from quark_fx.errors import CheckpointError
from quark_fx.inspection.parts import NO_WEIGHT, Part

_CODES = ("weight_packed", "qweight", "weight")
"""Names of a layer's codes in compressed-tensors, in GPTQ and AWQ, and in formats with one byte per code."""

_PARAMETERS = frozenset(
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
"""Names of the tensors of a quantized layer, except its codes."""

_CACHED = frozenset({"k_scale", "v_scale", "k_zero_point", "v_zero_point"})
"""Names of the tensors with which an attention layer quantizes cached keys and values."""

_Tensors = Mapping[str, tuple[str, list[int]]]
"""Dtype and shape of each tensor of a layer."""

_NAMES = {"F64": "float64", "F32": "float32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3", "I8": "int8"}


_FLOATS = {"8": "fp8_e4m3", "4": "fp4_e2m1"}
"""Float formats of compressed-tensors, by number of bits."""

_SCALES = {"F8_E4M3": "e4m3 scales", "float8_e4m3fn": "e4m3 scales", "U8": "e8m0 scales", "uint8": "e8m0 scales"}
"""Descriptions of the dtypes of block scales, by their names in safetensors and torch."""


def checkpoint_parts(path: Path) -> tuple[list[Part], Mapping[str, Any]]:
    """Return the quantized layers and other tensors of at least two dimensions, and the quantization configuration.

    Raises:
        QuarkError: If the files are damaged.
    """
    files = CheckpointFiles.of(path)
    config = read_configuration(files.directory) if (files.directory / "config.json").is_file() else {}
    key = quantized_by(config)
    method: Any = config
    for step in key.split(".") if key else ():
        method = method[step]
    quantization: Mapping[str, Any] = method if key else {}
    layers: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, header in files.headers.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = header
    try:
        parts = [part for name, tensors in layers.items() for part in _parts(name, tensors, quantization)]
        return [*parts, *_cached(layers, quantization)], quantization
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
        where = f" in {key}" if key else ""
        raise CheckpointError(
            f"{path}: config.json{where} does not match the tensors, or is not a supported format: {error!r}"
        ) from error


def _parts(name: str, tensors: _Tensors, quantization: Mapping[str, Any]) -> Iterator[Part]:
    parameters = _PARAMETERS & tensors.keys()
    if parameters:
        codes = next((leaf for leaf in _CODES if leaf in tensors), "")
        leaves = {codes, *parameters} - {""}
        scheme = group_of(name, quantization)
        scales, _ = tensors.get("weight_scale", ("", []))
        dtype, _ = tensors[codes] if codes else ("missing codes", [])
        yield Part(
            name=name,
            kind="layer",
            weight=_spec(scheme.get("weights"), scales)
            or _plain(name, tensors, quantization)
            or _NAMES.get(dtype, dtype.lower()),
            activation=_spec(scheme.get("input_activations")) or "float",
            bytes=sum(stored_bytes(*tensors[leaf]) for leaf in leaves),
        )
        return
    for leaf, (dtype, shape) in tensors.items():
        if len(shape) > 1:
            yield Part(
                name=f"{name}.{leaf}".removesuffix(".weight"),
                kind="layer",
                weight=_NAMES.get(dtype, dtype.lower()),
                activation="float",
                bytes=stored_bytes(dtype, shape),
                reason=_left_out(name, quantization),
            )


def _cached(layers: Mapping[str, _Tensors], quantization: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the format of cached keys and values for each attention with scales, or one part for all attentions."""
    scheme = quantization.get("kv_cache_scheme")
    if not (spec := scheme.lower() if isinstance(scheme, str) else _spec(scheme)):  # ModelOpt writes names
        return
    scales = {name: [header for leaf, header in tensors.items() if leaf in _CACHED] for name, tensors in layers.items()}
    attentions = {name: headers for name, headers in scales.items() if headers}
    for name, headers in (attentions or {"every attention": []}).items():
        whole = sum(stored_bytes(*header) for header in headers)
        yield Part(name=name, kind="attention", weight=NO_WEIGHT, activation=spec, bytes=whole)


def _left_out(layer: str, quantization: Mapping[str, Any]) -> str:
    """Return a text that names the configuration entry that keeps a layer in float; empty if there is none."""
    if any(names_layer(target, layer) for target in quantization.get("ignore") or ()):
        return "in ignore of its config.json"
    if any(str(part) in layer for part in quantization.get("modules_to_not_convert") or ()):
        return "in modules_to_not_convert of its config.json"
    if any(pattern.startswith("-:") and re.match(pattern[2:], layer) for pattern in quantization.get("dynamic") or ()):
        return "left out by dynamic in its config.json"
    if layer == "lm_head" and quantization.get("lm_head") is False:
        return "lm_head is false in its config.json"
    return ""


def _spec(scheme: Any, scales: str = "") -> str:
    """Return a format of compressed-tensors in the notation of quark_fx reports; empty if `scheme` is not a dict.

    Args:
        scheme: Entry of the configuration for weights or activations.
        scales: Dtype of the stored scales, which applies if the configuration does not name one.
    """
    if not isinstance(scheme, dict):
        return ""
    bits, kind = str(scheme.get("num_bits")), scheme.get("type")
    name = (
        _FLOATS.get(bits, f"fp{bits}")
        if kind == "float"
        else f"{'' if scheme.get('symmetric', True) else 'u'}int{bits}"
    )
    strategy = str(scheme.get("strategy") or "")
    shared = {
        "tensor": "",
        "attn_head": "head",
        "block": f"block {'x'.join(map(str, scheme.get('block_structure') or ()))}".strip(),
    }
    group = f"group {scheme.get('group_size')}" if "group" in strategy else strategy
    scaled = _SCALES.get(str(scheme.get("scale_dtype") or scales).removeprefix("torch."), "")
    words = (name, shared.get(strategy, group), scaled, "dynamic" if scheme.get("dynamic") else "")
    return " ".join(word for word in words if word)


def _plain(layer: str, tensors: _Tensors, quantization: Mapping[str, Any]) -> str:
    """Return the format of a layer in GPTQ or AWQ; bits and groups, which may vary by layer, come from the shapes."""
    if not {"qweight", "qzeros", "scales"} <= tensors.keys():
        return ""
    (_, codes), (_, zeros), (_, (groups, outputs)) = (tensors[leaf] for leaf in ("qweight", "qzeros", "scales"))
    bits = 32 * zeros[1] // outputs
    inputs = codes[0] if codes[1] == zeros[1] else 32 * codes[0] // bits  # AWQ packs outputs, GPTQ inputs
    override: Mapping[str, Any] = next(
        (v for k, v in (quantization.get("dynamic") or {}).items() if re.match(k.removeprefix("+:"), layer)), {}
    )
    symmetric = override.get("sym", quantization.get("sym", not quantization.get("zero_point")))
    name = f"{'' if symmetric else 'u'}int{bits}"
    return f"{name} group {inputs // groups}" if groups > 1 else f"{name} channel"


def gguf_parts(path: Path) -> list[Part]:
    """Return the tensors of a GGUF file that have at least two dimensions.

    Raises:
        CheckpointError: If the file is not a GGUF file, or the package `gguf` is missing.
    """
    return [
        Part(name=t.name, kind="tensor", weight=t.tensor_type.name, activation="float", bytes=int(t.n_bytes))
        for t in open_gguf(path).tensors
        if len(t.shape) > 1
    ]
