"""Checkpoints in the layout of NVIDIA ModelOpt that vLLM reads from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quark_fx.checkpoints.shelf import Shelf
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.compressed_tensors import (
    NVFP4_CACHE,
    Schemes,
    cache_of,
    cache_scheme,
    parts,
    share_global_scales,
)
from quark_fx.export.checkpoints.values import Checkpoint, Layer, Written, each_layer, unholdable
from quark_fx.numbers.formats import FP8_E4M3

_ALGORITHMS = {
    ("float-quantized", "tensor", "tensor"): "FP8",
    ("float-quantized", "channel", "token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("float-quantized", "block", "group"): "FP8_PB_WO",
    ("nvfp4-pack-quantized", "tensor_group", "tensor_group"): "NVFP4",
    ("nvfp4-pack-quantized", "tensor_group", ""): "W4A16_NVFP4",
    ("mxfp8-quantized", "group", "group"): "MXFP8",
}
"""Names of algorithms; keys are the layout and the strategies of weights and activations in compressed-tensors."""

_NAMES = {
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}
"""Names of tensors in ModelOpt that differ from compressed-tensors; keys are the names in compressed-tensors."""

_IN_FLOAT = ("vision_tower", "vision_model", "visual")
"""Substrings of names; vLLM leaves layers in float whose names contain one of them."""

_BLOCK = 128
"""Number of rows and of columns of a block; readers support only this size."""


def modelopt(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Return tensors and configuration in ModelOpt's layout, which has one algorithm for all layers.

    `weight_scale_2`, `input_scale`, and the scales of caches are factors, unlike the global scales of
    compressed-tensors, which are divisors.

    Source:
        vllm/model_executor/layers/quantization/modelopt.py of vLLM 0.32.
    """
    if checkpoint.rotations:
        raise unholdable([f"{path}: ModelOpt cannot store a rotation at run time" for path in checkpoint.rotations])
    schemes, chosen = Schemes(checkpoint.layers), dict[str, None]()

    def write(layer: Layer) -> dict[str, Tensor]:
        scheme = schemes.add(layer)
        chosen[_algorithm(layer, scheme)] = None
        first, *rest = chosen
        if rest:
            raise ExportError(f"layers use {first} and {rest[-1]}; ModelOpt needs the same algorithm in all layers")
        require_read(layer.name, checkpoint.left)
        tensors, strategy = parts(layer, scheme), scheme["weights"]["strategy"]
        if strategy == "block":
            tensors["weight_scale"] = tensors["weight_scale"][:, None, :, None]
        elif strategy == "channel":
            tensors["weight_scale"] = tensors["weight_scale"].flatten()
        return tensors

    tensors = each_layer(checkpoint.layers, write, shelf)
    share_global_scales(tensors)
    scales, cache = cache_of(checkpoint, (f"{FP8_E4M3} per tensor", NVFP4_CACHE))
    (algorithm,) = chosen
    named = {f"{path}.{_NAMES.get(leaf, leaf)}": x for n, x in tensors.items() for path, _, leaf in [n.rpartition(".")]}
    return named | scales, {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": 16 if "NVFP4" in algorithm else None,
        "kv_cache_scheme": "NVFP4" if cache == NVFP4_CACHE else cache_scheme(cache),
        "ignore": checkpoint.left,
        "producer": {"name": "quark_fx"},
    }


def _algorithm(layer: Layer, scheme: Mapping[str, Any]) -> str:
    """Return ModelOpt's name of a scheme; raise `ExportError` if ModelOpt does not support it for this layer."""
    weights, inputs = scheme["weights"], scheme["input_activations"] or {}
    key = scheme["format"], weights["strategy"], inputs.get("strategy", "")
    algorithm, other = _ALGORITHMS.get(key, ""), layer.stack or not layer.is_linear
    blocks = weights.get("block_structure") or [_BLOCK, _BLOCK]
    if not algorithm or other or blocks != [_BLOCK, _BLOCK] or (algorithm == "FP8" and inputs.get("dynamic")):
        algorithms = ", ".join(_ALGORITHMS.values())
        raise ExportError(
            f"{' '.join(filter(None, key))}; the ModelOpt layout supports {algorithms} in linear layers, but not in "
            "experts; use a preset: fp8_dynamic, fp8_block, nvfp4, nvfp4_weight_only, or mxfp8_e4m3"
        )
    if algorithm == "FP8_PB_WO" and any(size % _BLOCK for size in layer.weight.codes.shape):
        raise ExportError(
            f"the shape {tuple(layer.weight.codes.shape)} is not a multiple of {_BLOCK}, and vLLM reads only whole "
            "blocks; exclude this layer"
        )
    return algorithm


def require_read(name: str, left: list[str]) -> None:
    """Raise `ExportError` if vLLM would leave a quantized layer in float, because of its name."""
    if shadow := next((other for other in (*left, *_IN_FLOAT) if other != name and other in name), ""):
        raise ExportError(
            f"vLLM keeps layers whose names contain {shadow!r} in float; exclude this layer, or use "
            "format='compressed-tensors'"
        )


__all__ = ["modelopt", "require_read"]
