"""Checkpoints in the format compressed-tensors: the quantization scheme and the tensors of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.files import some_of
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.checkpoints.words import pack, pack_columns
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.experts import as_saved, literal, name_patterns
from quark_fx.export.checkpoints.values import (
    Checkpoint,
    Layer,
    Written,
    each_layer,
    unholdable,
)
from quark_fx.export.packing import NO_OFFSETS, are_exponents, block_scales, exponents, group_size, unsigned
from quark_fx.model.rounded_attention import Size
from quark_fx.model.rounded_modules import UNROTATED, Activation
from quark_fx.numbers.formats import FP4_E2M1, FP6_E2M3, FP8_E4M3, INT8, Format, parse_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import E4M3_SCALES, E8M0_CEIL, E8M0_EVEN, scale_format
from quark_fx.system.isolation import warn


def decompress_to_bfloat16(config: Mapping[str, Any]) -> bool:
    """Tell whether readers of a `quantization_config` decompress weights to bfloat16.

    If they do, the whole model has this dtype.
    """
    return any(group.get("format", "") in _BLOCK_FORMS for group in config.get("config_groups", {}).values())


class Schemes:
    """Quantization schemes in the format compressed-tensors, with the layers that use each scheme.

    Args:
        layers: All layers that `add` will be called with.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        layers = list(layers)
        stacks = {layer.stack: layer for layer in layers if layer.stack}.values()
        self._sizes = groups_of(x for x in layers if not x.stack)
        self._of_experts = next(iter(groups_of(stacks)), None)
        self._schemes: dict[str, dict[str, Any]] = {}
        self._members: dict[str, list[Layer]] = {}

    def add(self, layer: Layer) -> dict[str, Any]:
        """Return the scheme of a layer, and record that the layer uses it.

        Raises:
            ExportError: If compressed-tensors does not support the layer's quantization.
        """
        scheme, size = _scheme(layer), None
        if scheme["weights"]["strategy"] == "channel" and layer.stack:
            size = self._of_experts  # transformers reads all experts with one scheme, so all need the same group size
        elif scheme["weights"]["strategy"] == "channel" and scheme["format"] == "pack-quantized":
            size = row_or_group(layer.weight, self._sizes)
        if size is not None and size > 0:
            scheme["weights"] |= {"strategy": "group", "group_size": size}
        key = repr(scheme)
        self._members.setdefault(key, []).append(layer)
        return self._schemes.setdefault(key, scheme)

    def configuration(
        self, ignore: Sequence[str], head: str = "", left_experts: Collection[str] = (), **others: Any
    ) -> dict[str, Any]:
        """Return the `quantization_config`.

        Args:
            ignore: Names and patterns of the modules that stay in float.
            head: Name of the module that projects to the vocabulary; empty if there is none.
            left_experts: Names of the modules of experts that stay in float.
            others: Additional entries.
        """
        schemes, members = self._schemes, self._members
        experts = {layer.name for layers in members.values() for layer in layers if layer.stack}
        groups = {}
        common = Counter(
            key for key, layers in members.items() for layer in layers if isinstance(layer.module, nn.Linear)
        )
        # Readers that fuse layers need the class name as a target; transformers uses the first group with this target
        # for all layers but experts (`get_dense_scheme`).
        usual = [key for key, _ in common.most_common(1)]
        for index, key in enumerate([*usual, *(key for key in members if key not in usual)]):
            # In vLLM, the head is not a linear layer, so the target "Linear" misses it.
            rest = [x for x in members[key] if key not in usual or not x.is_linear or x.name == head]
            targets = ["Linear"] * (key in usual) + [layer.name for layer in rest if not layer.stack]
            mine = [layer.name for layer in rest if layer.stack]
            targets += _patterns(mine, {*experts, *left_experts} - set(mine))
            groups[f"group_{index}"] = {"targets": targets, "output_activations": None, **schemes[key]}
        formats = {scheme["format"] for scheme in schemes.values()}
        # Transformers 5.23 does not support packed zero points with packed codes.
        dequantized = {"dequantize": True} if _has_zero_points(schemes) else {}
        return {
            "quant_method": "compressed-tensors",
            "version": _needs(schemes.values()),
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            **others,
            **dequantized,
        }

    def require_readable(self) -> None:
        """Raise `ExportError` if transformers would misread some codes.

        It reads all experts with one scheme. If it dequantizes the other layers, it reads them with one scheme, too.
        """
        shown = ("num_bits", "strategy", "group_size")
        kinds = {
            key: f"{s['format']} {[s['weights'][what] for what in shown]}"
            + " with zero points" * (not s["weights"]["symmetric"])
            for key, s in self._schemes.items()
        }
        layers = [(layer, key) for key, members in self._members.items() for layer in members]
        experts = {layer.stack: kinds[key] for layer, key in layers if layer.stack}
        if len(set(experts.values())) > 1:
            rule = "all experts of a checkpoint must use the same scheme"
            raise unholdable([f"{name}: {kind}; {rule}" for name, kind in experts.items()])
        key_by_layer = {layer.name: key for layer, key in layers if not layer.stack}
        if _has_zero_points(self._schemes) and len(set(key_by_layer.values())) > 1:
            rule = "if any layer has zero points, transformers needs one scheme for all layers except experts"
            raise unholdable([f"{name}: {kinds[key]}; {rule}" for name, key in key_by_layer.items()])


def compressed_tensors(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Return tensors and configuration in the format compressed-tensors, with one config group per scheme.

    Source:
        https://github.com/vllm-project/compressed-tensors
    """
    schemes = Schemes(checkpoint.layers)
    tensors = each_layer(checkpoint.layers, lambda layer: parts(layer, schemes.add(layer)), shelf)
    for message in dict.fromkeys(filter(None, map(_measured_otherwise, checkpoint.layers))):
        warn(message)
    if several := [layer.name for layer in checkpoint.layers if _shares_scales(layer.input)]:
        warn(
            "transformers computes one scale for several tokens in layers whose input has 2 or 4 dimensions: "
            f"{some_of(several)}. This model, servers, and verify() compute one for each token. To run this checkpoint "
            "in transformers, keep these inputs in float with Override(pattern=..., input=None)"
        )
    share_global_scales(tensors)
    schemes.require_readable()
    scales, cache = cache_of(checkpoint)
    if cache.startswith(str(INT8)):
        warn(f"vLLM does not support {INT8} caches; compressed-tensors does read this checkpoint's cache scales")
    matrices, transforms = _transforms(checkpoint)
    ignore = [
        *checkpoint.left,
        *_patterns(checkpoint.left_experts, checkpoint.experts),
        *(f"re:^{literal(path)}[.]" for path in checkpoint.left_stacks),
    ]
    entries = {"kv_cache_scheme": cache_scheme(cache), **transforms}
    config = schemes.configuration(ignore, checkpoint.head, checkpoint.left_experts, **entries)
    return _divisors(tensors) | scales | matrices, config


def _transforms(checkpoint: Checkpoint) -> Written:
    """Return the matrices that rotate activations at run time, and the configuration of the transforms.

    In vLLM, all layers of a transform share one matrix. vLLM treats the matrix as an unnormalized Hadamard matrix: it
    divides by the square root of the size, so a stored matrix is the orthogonal matrix times this square root.
    """
    saved = as_saved(checkpoint.shell, {f"{path}.weight": m for path, m in checkpoint.rotations.items()})
    if other := [path for path in checkpoint.rotations if f"{path}.weight" not in saved]:
        why = f"its input is rotated, but transformers saves this layer under another name; {UNROTATED}"
        raise unholdable([f"{path}: {why}" for path in other])
    alike: list[tuple[Tensor, list[str]]] = []
    for path, matrix in checkpoint.rotations.items():
        same = next((paths for stored, paths in alike if torch.equal(stored, matrix)), None)
        if same is None:
            alike.append((matrix, [path]))
        else:
            same.append(path)
    tensors, groups = dict[str, Tensor](), dict[str, Any]()
    for index, (matrix, paths) in enumerate(alike):
        size, name = len(matrix), f"R{index}"
        where = {"targets": paths, "location": "input", "inverse": False, "ignore": []}
        groups[name] = {"type": "random-hadamard", "head_dim": size, "apply": [where]}
        tensors |= {f"{path}.{name}_input.weight": matrix * size**0.5 for path in paths}
    if groups:
        warn(
            "only vLLM applies the rotations of this checkpoint; transformers ignores the rotation matrices and "
            "computes wrong results"
        )
    return tensors, {"transform_config": {"config_groups": groups}} if groups else {}


_CACHES = tuple(f"{fmt} per {shared}" for fmt in (FP8_E4M3, INT8) for shared in ("tensor", "head"))
"""Kinds of caches (results of `_kind_of_cache`) that `kv_cache_scheme` can describe."""

NVFP4_CACHE = "fp4_e2m1 in groups of 16 under a calibrated scale"
"""Result of `_kind_of_cache` for keys and values in NVFP4."""


def cache_of(checkpoint: Checkpoint, kinds: Sequence[str] = _CACHES) -> tuple[dict[str, Tensor], str]:
    """Return the scales of keys and values, named as in vLLM and compressed-tensors, and the kind of all caches.

    A scale per tensor has the shape (1,), scales per head (heads, 1, 1); the scale of an NVFP4 cache multiplies its
    E4M3 scales. Without quantized caches, the kind is empty.

    Args:
        checkpoint: Contents of the checkpoint.
        kinds: Kinds of caches that the format supports.

    Raises:
        ExportError: If the format does not support a cache; every such attention is listed.
    """
    if not checkpoint.caches:
        return {}, ""
    tensors, common, errors = dict[str, Tensor](), dict[str, None](), []
    config = checkpoint.shell.config.get_text_config(decoder=True).to_dict()
    for path, attention in checkpoint.caches.items():
        if attention.entering is None:
            errors.append(f"{path}: the module has several attentions, and a checkpoint cannot tell their caches apart")
        for name, activation, size in zip("kv", attention.entering or (), attention.sizes, strict=False):
            kind, unit = _kind_of_cache(activation), scale_format(activation.scale_type).unit
            if why := _unheld(activation, size, kind, kinds, config):
                errors.append(f"{path}: {why}")
                continue
            common[kind] = None
            scale = torch.tensor(unit, dtype=torch.float32) if activation.scale is None else activation.scale
            tensors[f"{path}.{name}_scale"] = scale.reshape(-1, 1, 1) if scale.dim() else scale.reshape(1)
    errors += [
        f"{path}: its keys and values stay in float, but all layers must use the same cache format"
        for path in checkpoint.float_caches
    ]
    if len(common) > 1:
        errors.append(f"keys and values in {' and '.join(common)}; all layers must use the same cache format")
    if errors:
        raise unholdable(list(dict.fromkeys(errors)))
    (kind,) = common
    return tensors, kind


def _unheld(activation: Activation, size: Size, kind: str, kinds: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return the reason why a checkpoint cannot hold the scales of keys or values; empty if it can.

    Args:
        activation: Rounding of the keys or values.
        size: Numbers of heads and of channels per head.
        kind: Result of `_kind_of_cache` for `activation`.
        kinds: Kinds of caches that the format supports.
        config: Configuration of the text model.
    """
    heads, channels = size
    stated = config.get("num_key_value_heads") or heads
    if activation.factors:
        return "a pass rotates its keys; quantize with Rotate(keys=False)"
    if kind not in kinds:
        other = "modelopt" if kind == NVFP4_CACHE else "compressed-tensors" if kind in _CACHES else ""
        return (
            f"keys or values in {kind}; this format supports caches in {', '.join(kinds)}: "
            f"{other and f'export with format={other!r}, or '}set kv_cache=TensorSpec(format='fp8_e4m3')"
        )
    if config.get("kv_lora_rank") is not None:
        # vLLM caches keys and values only of MiniCPM3 (`ModelConfig.use_mla`), and SGLang of none of them.
        return "servers cache latents (kv_lora_rank) instead of its keys and values; set kv_cache=None"
    if kind == NVFP4_CACHE and channels is not None and channels % 16:
        return f"heads of {channels} channels, which are not a multiple of 16; set format='fp8_e4m3' in kv_cache"
    if kind.endswith(" per head") and heads != stated:
        return (
            f"{heads} heads, but readers expect num_key_value_heads={stated} from the model's configuration; set "
            "granularity='tensor' in kv_cache"
        )
    return ""


def cache_scheme(kind: str) -> dict[str, Any] | None:
    """Return the `kv_cache_scheme` of a kind of 8-bit cache; `None` if `kind` is empty."""
    fmt, _, shared = kind.partition(" per ")
    return _arguments(parse_format(fmt), True, "attn_head" if shared == "head" else shared) if kind else None


def _kind_of_cache(activation: Activation) -> str:
    """Describe the format and the granularity of keys or values."""
    name, scale = activation.format or str(activation.cast), activation.scale
    if scale is None:
        in_groups = activation.format == str(FP4_E2M1) and activation.block_size == 16
        return NVFP4_CACHE if in_groups and scale_format(activation.scale_type).unit is not None else name
    if activation.zero_point is not None and bool(activation.zero_point.any()):
        return f"{name} with zero points"
    by_head = scale.dim() > 2 and scale.numel() == scale.shape[-3]
    return f"{name} per {'tensor' if not scale.dim() else 'head' if by_head else 'channel'}"


_VERSIONS = {
    ("mxfp4-pack-quantized", 4): "0.16.0",
    ("mxfp6-pack-quantized", 6): "0.20.0",
    ("mxfp8-quantized", 8): "0.15.0",
    ("nvfp4-pack-quantized", 4): "0.14.0",
    **{("pack-quantized", bits): "0.18.0" for bits in (3, 5, 6, 7)},
}
"""First version of compressed-tensors that reads a layout, if it is later than `_OLDEST`; keys are layout and bits."""

_OLDEST = "0.13.0"


def _needs(schemes: Iterable[dict[str, Any]]) -> str:
    """Return the oldest version of compressed-tensors that reads all schemes."""
    needed = [_VERSIONS.get((scheme["format"], scheme["weights"]["num_bits"]), _OLDEST) for scheme in schemes]
    return max(needed)


def _patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    return [f"re:{pattern}" for pattern in name_patterns(names, others)]


def _has_zero_points(schemes: Mapping[str, dict[str, Any]]) -> bool:
    return not all(scheme["weights"]["symmetric"] for scheme in schemes.values())


def _measured_otherwise(layer: Layer) -> str:
    """Describe the difference between how transformers and this model measure the scales of a layer's activations.

    The text is empty if they measure them the same way.
    """
    activation = layer.input
    if activation is None or activation.scale is not None or activation.cast is not None:
        return ""
    fmt, kind = parse_format(activation.format), scale_format(activation.scale_type)
    if fmt.is_integer and activation.symmetry == Symmetry.SYMMETRIC:
        most = 2 ** (fmt.bits - 1) - 1
        return (
            f"transformers divides the largest magnitude of a token by {most}.5, but this model and other readers "
            f"divide by {most}, so transformers rounds its {fmt} activations differently; for equal results, set "
            "symmetry='symmetric_full' on `input`"
        )
    rule = E8M0_CEIL if fmt == FP8_E4M3 else E8M0_EVEN
    if kind.rule is None or kind == rule:
        return ""
    return (
        f"readers compute scales of {fmt} activations by the rule {rule}, but this model by {kind}, so they round some "
        f"blocks differently; for equal results, set scale='{rule}' on `input`"
    )


def _shares_scales(activation: Activation | None) -> bool:
    """Tell whether several tokens share a scale in compressed-tensors, which has one per index of two dimensions."""
    return activation is not None and activation.per_token and activation.rank not in (None, 1, 3)


def _scheme(layer: Layer) -> dict[str, Any]:
    weight, activation = layer.weight, layer.input
    if weight.has_offsets:
        raise ExportError(NO_OFFSETS)
    size, integer = group_size(weight), weight.format.is_integer
    strategy = "group" if size else "tensor" if weight.scale.numel() == 1 else "channel"
    dense = layer.is_linear and not layer.stack
    if not weight.is_symmetric and (activation is not None or not dense or strategy == "tensor"):
        raise ExportError(
            "compressed-tensors supports zero points only for linear layers (not experts) with float activations and "
            "scales per channel or group; use symmetry='symmetric'"
        )
    weights = _arguments(weight.format, weight.is_symmetric, strategy)
    weights["group_size"] = size
    inputs = None if activation is None else _inputs(activation, weight.codes.shape[1])
    grouped = inputs is not None and inputs["group_size"] == weight.layout.block
    # One scale per output and one per block of all inputs look the same; grouped activations imply blocks.
    blocks = (
        (size or grouped) and weight.format == FP8_E4M3 and dense and not (size == 32 and are_exponents(weight.scale))
    )
    square = weight.layout.block if blocks and block_scales(weight) is not None else None
    if square:
        weights |= {"strategy": "block", "group_size": None, "block_structure": [square, square]}
        if inputs is not None and inputs["group_size"] != square:
            raise ExportError(
                f"with weights in blocks of {square}x{square}, compressed-tensors supports only activations in float, "
                f"or with a float32 scale per group of {square} channels; set group_size={square} in input"
            )
    elif not integer and (size or weight.format.bits < 8):
        weights, kind = _block_weights(layer, weights)
        return {"weights": weights, "input_activations": inputs, "format": kind}
    if not integer and weight.format != FP8_E4M3:
        raise ExportError(f"weights in {weight.format}; compressed-tensors supports only {FP8_E4M3} as 8-bit floats")
    if not integer and activation is not None:
        kind = "float-quantized"
    elif not integer or not layer.is_linear:
        kind = "naive-quantized"  # transformers fails to find the `weight` of an embedding with packed codes
    else:
        # Servers read integers with activations packed, except 8 bits per channel.
        kind = "pack-quantized" if activation is None or size or weight.format.bits < 8 else "int-quantized"
    return {"weights": weights, "input_activations": inputs, "format": kind}


def _inputs(activation: Activation, channels: int) -> dict[str, Any]:
    """Return the compressed-tensors arguments of an activation with `channels` channels."""
    fmt = parse_format(activation.format) if activation.format else None
    if fmt is None or not (str(fmt) in _FLOATS or (fmt.is_integer and fmt.bits <= 8 and not fmt.sign_magnitude)):
        raise ExportError(
            f"activations in {fmt or activation.cast}; compressed-tensors supports integers of at most 8 bits, and "
            f"{', '.join(_FLOATS)}"
        )
    size, kind = max(activation.block_size, 0) or None, scale_format(activation.scale_type)
    if size and channels % size:
        raise ExportError(f"activations of {channels} channels, which are not a multiple of the group size {size}")
    local = kind.unit is not None and size == 16 and fmt == FP4_E2M1
    if kind.is_8_bit and not (local or (kind.rule and size == 32 and not fmt.is_integer)):
        raise ExportError(
            f"activations with scales in {kind}; compressed-tensors supports float32, fp8_e4m3_calibrated for "
            f"{FP4_E2M1} in groups of 16, or E8M0 for small floats in groups of 32"
        )
    if activation.ratio != 1:
        raise ExportError("activations that use part of the range measured at run time; drop the observer Adjusted")
    zero = activation.zero_point
    symmetric = activation.symmetry != Symmetry.ASYMMETRIC if zero is None else int(zero) == fmt.middle
    per = "group" if size else "token" if activation.per_token else "tensor"
    inputs = _arguments(fmt, symmetric or not fmt.is_integer, per, dynamic=activation.scale is None)
    inputs |= {"group_size": size} | ({"scale_dtype": str(torch.uint8)} if kind.is_8_bit else {})
    return inputs | (_LOCAL if local else {})


_LOCAL = {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": str(torch.float8_e4m3fn)}
"""Arguments of NVFP4 activations: the scale of each group is measured at run time, the global scale is calibrated."""


_MXFP8 = "mxfp8-quantized"

_FLOATS = (str(FP4_E2M1), str(FP6_E2M3), str(FP8_E4M3))

_MICROSCALING = {
    str(FP4_E2M1): "mxfp4-pack-quantized",
    str(FP6_E2M3): "mxfp6-pack-quantized",
    str(FP8_E4M3): _MXFP8,
}
"""Name of the layout of each format in groups of 32 with E8M0 scales."""

_NVFP4 = "nvfp4-pack-quantized"
_BLOCK_FORMS = {*_MICROSCALING.values(), _NVFP4}


def _block_weights(layer: Layer, weights: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the weight arguments and the name of the layout for 4-, 6-, or 8-bit floats in groups."""
    weight = layer.weight
    if not layer.is_linear:
        raise ExportError(
            f"compressed-tensors supports {weight.format} in groups only for linear layers; exclude this layer"
        )
    if group_size(weight) == 16 and weight.format == FP4_E2M1:
        form, strategy, scales = _NVFP4, "tensor_group", torch.float8_e4m3fn
    elif group_size(weight) == 32 and str(weight.format) in _MICROSCALING:
        form, strategy, scales = _MICROSCALING[str(weight.format)], "group", torch.uint8
    else:
        raise ExportError(
            f"{weight.format} in groups of {group_size(weight)}; compressed-tensors supports fp4_e2m1 in groups of 16 "
            "or 32, fp6_e2m3 and fp8_e4m3 in groups of 32, and fp8_e4m3 in square blocks (group_rows=) of linear "
            "layers except experts"
        )
    if layer.stack and form in (_NVFP4, _MXFP8):
        raise ExportError(f"transformers reads experts in {form} incorrectly; leave them in float, or use MXFP4")
    return weights | {"strategy": strategy, "scale_dtype": str(scales)}, form


def _blocks(weight: QuantizedTensor, form: str, unit: float | None) -> dict[str, Tensor]:
    """Return the tensors of a weight in grouped 4-, 6-, or 8-bit floats.

    Args:
        weight: Quantized weight.
        form: Name of its layout.
        unit: Global scale of an NVFP4 weight; `None` to compute it from the scales.
    """
    if form == _MXFP8:
        return {"weight": weight.codes, "weight_scale": exponents(weight)}
    bits = weight.format.bits
    packed = torch.cat([pack(part.format.patterns(part.codes), bits) for _, part in weight.pieces()]).view(torch.uint8)
    if form != _NVFP4:
        return {"weight_packed": packed, "weight_scale": exponents(weight)}
    try:
        scale = replace(E4M3_SCALES, unit=unit).quantized(weight.scale)
    except ValueError as error:
        raise ExportError(f"{error}; use scale='fp8_e4m3'") from error
    return {"weight_packed": packed, "weight_scale": scale.codes, "weight_global_scale": scale.scale.reshape(1)}


def share_global_scales(tensors: dict[str, Tensor]) -> None:
    """Replace global scales that differ by a power of two by the largest one, where this keeps all products exact.

    Servers fuse layers with the same input, so these layers need a common global scale. Factoring the scales of each
    layer again may return global scales that differ by a power of two.

    Args:
        tensors: Results of `parts` by full name, changed in place.
    """
    largest: dict[float, Tensor] = {}
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight_global_scale")}
    for unit in scales.values():
        mantissa = float(torch.frexp(unit)[0])
        largest[mantissa] = max(largest.get(mantissa, unit), unit)
    for name, unit in scales.items():
        shared, scale = largest[float(torch.frexp(unit)[0])], name.replace("_global_scale", "_scale")
        rescaled = tensors[scale].float() * (unit / shared)
        if bool((rescaled.to(torch.float8_e4m3fn).float() == rescaled).all()):
            tensors |= {name: shared.clone(), scale: rescaled.to(torch.float8_e4m3fn)}


def _arguments(fmt: Format, symmetric: bool, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    kind = "int" if fmt.is_integer else "float"
    return {"num_bits": fmt.bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}


def _divisors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with reciprocal global scales, because compressed-tensors divides by global scales."""
    return {name: x.reciprocal() if name.endswith("_global_scale") else x for name, x in tensors.items()}


def compressed(layer: Layer, scheme: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a layer as compressed-tensors stores them; keys are the last parts of their names."""
    return _divisors(parts(layer, scheme))


def parts(layer: Layer, scheme: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a layer in a scheme; keys are the last parts of their names, and all scales are factors."""
    weight, activation, kind = layer.weight, layer.input, scheme["format"]
    unit = None if activation is None else scale_format(activation.scale_type).unit
    whole = {} if unit is None else {"input_global_scale": torch.tensor([unit], dtype=torch.float32)}
    if kind in _BLOCK_FORMS:
        return _blocks(weight, kind, layer.unit) | whole
    blocks = block_scales(weight) if scheme["weights"]["strategy"] == "block" else None
    scale = weight.scale if blocks is None else blocks
    tensors = {"weight_scale": scale.reshape(-1) if weight.scale.numel() == 1 else scale} | whole
    if kind == "pack-quantized":
        pieces = [unsigned(part) for _, part in weight.pieces()]
        tensors["weight_packed"] = torch.cat([pack(codes, weight.format.bits) for codes, _ in pieces])
        if not scheme["weights"]["symmetric"]:
            zero_point = torch.cat([zero_point for _, zero_point in pieces])
            tensors["weight_zero_point"] = pack_columns(zero_point, weight.format.bits)
        tensors["weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    else:
        tensors["weight"] = weight.codes
    if activation is not None and activation.scale is not None and activation.zero_point is not None:
        zero_point = activation.zero_point - parse_format(activation.format).middle
        tensors["input_scale"] = activation.scale.reshape(1)
        if int(zero_point):
            tensors["input_zero_point"] = zero_point.reshape(1).to(torch.int8)
    return tensors


def groups_of(layers: Iterable[Layer]) -> set[int]:
    """Return the group sizes of all integer layers that have several groups per row."""
    return {size for weight in (x.weight for x in layers) if weight.format.is_integer and (size := group_size(weight))}


def row_or_group(weight: QuantizedTensor, groups: set[int]) -> int:
    """Return the group size of a weight; for one scale per row, the row length if it is in `groups`, or else -1."""
    inputs = weight.codes.shape[1]
    return group_size(weight) or (inputs if inputs in groups else -1)


__all__ = [
    *(
        "NVFP4_CACHE",
        "Schemes",
        "cache_of",
        "cache_scheme",
        "compressed",
        "compressed_tensors",
        "decompress_to_bfloat16",
        "groups_of",
        "parts",
    ),
    *("row_or_group", "share_global_scales"),
]
