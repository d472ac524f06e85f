"""Write a quantized model as a checkpoint for Hugging Face transformers and LLM servers."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.checkpoints.open_checkpoint import require_no_weights
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.errors import CheckpointError, ExportError
from quark_fx.export.checkpoints.experts import as_saved, common_paths, literal, name_patterns
from quark_fx.export.checkpoints.model_card import CARD, is_own, model_card
from quark_fx.export.checkpoints.values import (
    Checkpoint,
    Layer,
    each_layer,
    require_tokenizer,
    require_weights_alone,
    take_apart,
    unholdable,
)
from quark_fx.export.packing import (
    NO_OFFSETS,
    are_exponents,
    block_scales,
    exponents,
    group_size,
    half_scales,
    pack,
    pack_awq,
    pack_columns,
    unsigned,
)
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.rounded_modules import UNROTATED, Activation
from quark_fx.model.stored_weights import computed_leaves
from quark_fx.numbers.formats import FP4_E2M1, FP6_E2M3, FP8_E4M3, INT8, Format, parse_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import E4M3_SCALES, E8M0_CEIL, E8M0_EVEN, scale_format
from quark_fx.system.isolation import isolated, quiet, warn
from quark_fx.system.names import unknown
from quark_fx.system.options import checked_call
from quark_fx.system.writable import new_directory, require_possible, writing

_DEFAULT = "compressed-tensors"


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

    Scales stay float32 in compressed-tensors; GPTQ and AWQ store float16. For an activation whose range is measured at
    run time, the checkpoint records only this fact: transformers divides the largest magnitude by 127.5
    (`symmetry="symmetric_full"`), other readers by 127, and readers choose exponents of MXFP8 by `"e8m0_ceil"`. Small
    floats in groups are read in bfloat16.

    Weights of experts are stored separately, one matrix per projection of each; transformers 5.23 dequantizes them at
    load time. Experts that stay in float are stored in their stacks, because transformers would not find them next to
    quantized layers otherwise; with `target="vllm"` or `"sglang"`, they are stored separately, where servers find them.

    A model card (`README.md`) lists recipe, data, and measured errors; a card that somebody else wrote stays.

    GPTQModel reads zero points from `"gptq_v2"`; from `"gptq"`, only if it wrote the file. Rotations at run time are
    supported in compressed-tensors for `target="vllm"` only.

    Args:
        qmodel: Result of `quantize`.
        directory: Directory to write, created if needed; an earlier quantized checkpoint in it is replaced.
        format: `"compressed-tensors"` (integers up to 8 bits, FP8 E4M3 also in square blocks, NVFP4, MXFP4, MXFP6 E2M3,
            and MXFP8 E4M3; activations in all of these), `"gptq"`, `"gptq_v2"`, or `"awq"`
            (integers, weights only, all with one group size).
        tokenizer: Tokenizer to save in the same directory.
        model: Float model of the same architecture, if `qmodel` was loaded.

    Returns:
        Path of the directory.

    Raises:
        ExportError: If the format does not support the quantization of an operator (all are listed), the target does
            not read it, the model is not from transformers, the directory cannot be written or contains float weights,
            or transformers does not load the checkpoint.
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
        raise ExportError(f"{directory} holds a model that qmodel.save wrote, under the same names; choose another one")
    try:
        require_no_weights(directory)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    checkpoint = take_apart(qmodel, model)
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
        raise ExportError(f"target={str(target)!r} reads no {refused}")
    apart = {layer.name for layer in checkpoint.layers if layer.stack}  # already named as in the checkpoint
    whole = set(checkpoint.stacks) if format == _DEFAULT and target.checkpoints.stacks else set()
    every = checkpoint.tensors | stored
    final = {name for name in every if name in whole or name.rpartition(".")[0] in apart}
    rest = {name: tensor for name, tensor in every.items() if name not in final}
    tensors = as_saved(shell, rest) | {name: every[name] for name in final}
    if decompress_to_bfloat16(shell.config.quantization_config):
        shell.to(torch.bfloat16)
    vars(shell).pop("hf_quantizer", None)  # set by the reader of a float GGUF model; it would refuse to save
    generation = _without_invalid_generation(shell)
    try:
        tensors |= {name: read() for name, read in checkpoint.unread.items() if name not in tensors}
    except CheckpointError as error:
        raise ExportError(f"{error}; the export copies tensors of the checkpoint that the model came from") from error
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    shell.save_pretrained(directory, state_dict=tensors, save_original_format=False)
    if generation is not None:
        generation.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if format == _DEFAULT and (whole or not checkpoint.stacks):
        _require_found(shell, directory, checkpoint.computed)


def _without_invalid_generation(shell: Any) -> Any:
    """Remove and return a generation configuration that transformers reads but refuses to save; otherwise `None`."""
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


def _require_found(shell: Any, directory: Path, computed: Collection[str]) -> None:
    """Let transformers load a checkpoint without its data.

    Raises:
        ExportError: If transformers does not find a weight, or fails.
    """
    with quiet(), redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            found = type(shell).from_pretrained(directory, device_map="meta", output_loading_info=True)[1]
        except ImportError:
            return  # compressed-tensors or accelerate is missing, so transformers cannot load the checkpoint here
        except Exception as error:  # any error of the reader's code
            why = f"{type(error).__name__}: {error}{_reader(error)}"
        else:
            missing = sorted(found["missing_keys"])
            why = f"it does not find {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}" * bool(missing)
    left = [f"{path}.{leaf}" for path, module in shell.named_modules() for leaf in sorted(computed_leaves(module))]
    remedy = f"the class has to construct {', '.join([*computed][:3])} without parametrizations; or " * bool(computed)
    remedy += f"remove the parametrizations of {', '.join(left[:3])} before quantizing; or " * bool(left)
    if why:
        raise ExportError(
            f"transformers does not load what {type(shell).__name__} becomes in {_DEFAULT}: {why}; {remedy}leave these "
            "layers in float (exclude=), of experts all, choose another format, or use qmodel.save(directory)"
        )


def _reader(error: Exception) -> str:
    """Name the modules whose code reads a weight that a quantized layer lacks, if the traceback shows it."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [
        v for found in frames for v in found.values() if hasattr(v, "save_pretrained") and isinstance(v, nn.Module)
    ]
    reader = next((m for found in reversed(frames) if isinstance(m := found.get("module"), nn.Module)), None)
    if not models or reader is None:
        return ""
    names = [name for name, module in models[0].named_modules() if type(module) is type(reader)]
    shown = ", ".join(f"{name}.*" for name in names[:3]) + ", ..." * (len(names) > 3)
    return f" (the code of {type(reader).__name__} reads weights of {shown})" if names else ""


def decompress_to_bfloat16(config: Mapping[str, Any]) -> bool:
    """Tell whether readers of a `quantization_config` decompress to bfloat16, the dtype of the whole model then."""
    return any(group.get("format", "") in _BLOCK_FORMS for group in config.get("config_groups", {}).values())


Written = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors of the quantized layers, and the configuration."""


class Schemes:
    """Schemes of compressed-tensors, and the layers of each.

    Args:
        layers: All layers that will be added.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        layers = list(layers)
        stacks = {layer.stack: layer for layer in layers if layer.stack}.values()
        self._sizes = _groups_of(x for x in layers if not x.stack)
        self._of_experts = next(iter(_groups_of(stacks)), None)
        self._schemes: dict[str, dict[str, Any]] = {}
        self._members: dict[str, list[Layer]] = {}

    def add(self, layer: Layer) -> dict[str, Any]:
        """Return the scheme of a layer, and list the layer.

        Raises:
            ExportError: If compressed-tensors has no scheme for it.
        """
        scheme, size = _scheme(layer), None
        if scheme["weights"]["strategy"] == "channel" and layer.stack:
            size = self._of_experts  # transformers reads all experts with one scheme; a row of one group fits any
        elif scheme["weights"]["strategy"] == "channel" and scheme["format"] == "pack-quantized":
            size = _row_or_group(layer.weight, self._sizes)
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
            head: Module that projects to the vocabulary; empty if the model has none.
            left_experts: Modules of experts that stay in float.
            others: Further entries.
        """
        schemes, members = self._schemes, self._members
        experts = {layer.name for some in members.values() for layer in some if layer.stack}
        groups = {}
        common = Counter(key for key, some in members.items() for layer in some if isinstance(layer.module, nn.Linear))
        # Readers that fuse layers need the class name; transformers uses the first group with it for all layers but
        # experts (`get_dense_scheme`).
        usual = [key for key, _ in common.most_common(1)]
        for index, key in enumerate([*usual, *(key for key in members if key not in usual)]):
            # In vLLM, a head is not a linear layer, so it needs its name.
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
        """Raise if transformers would misread some codes.

        It reads all experts with one scheme, and all other layers with one if it dequantizes them.
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
            rule = "all experts of a checkpoint have the same"
            raise unholdable([f"{name}: {kind}; {rule}" for name, kind in experts.items()])
        others = {layer.name: key for layer, key in layers if not layer.stack}
        if _has_zero_points(self._schemes) and len(set(others.values())) > 1:
            rule = "transformers needs the same of all layers but experts, if one has zero points"
            raise unholdable([f"{name}: {kinds[key]}; {rule}" for name, key in others.items()])


def _compressed_tensors(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Write https://github.com/vllm-project/compressed-tensors: one group of modules for each scheme."""
    schemes = Schemes(checkpoint.layers)
    tensors = each_layer(checkpoint.layers, lambda layer: compressed(layer, schemes.add(layer)), shelf)
    for message in dict.fromkeys(filter(None, map(_measured_otherwise, checkpoint.layers))):
        warn(message)
    _share_global_scales(tensors)
    schemes.require_readable()
    scales, cache = _cache(checkpoint)
    matrices, transforms = _transforms(checkpoint)
    ignore = [
        *checkpoint.left,
        *_patterns(checkpoint.left_experts, checkpoint.experts),
        *(f"re:^{literal(path)}[.]" for path in checkpoint.left_stacks),
    ]
    others = {"kv_cache_scheme": cache, **transforms}
    config = schemes.configuration(ignore, checkpoint.head, checkpoint.left_experts, **others)
    return tensors | scales | matrices, config


def _transforms(checkpoint: Checkpoint) -> Written:
    """Return the matrices that rotate activations at run time, and the configuration of their transforms.

    All layers of a transform share a matrix in vLLM. It treats orthogonal matrices as Hadamard matrices and divides by
    the square root of their size, so they are stored multiplied by it.
    """
    saved = as_saved(checkpoint.shell, {f"{path}.weight": m for path, m in checkpoint.rotations.items()})
    if other := [path for path in checkpoint.rotations if f"{path}.weight" not in saved]:
        why = f"it is rotated, and transformers saves it under another name; {UNROTATED}"
        raise unholdable([f"{path}: {why}" for path in other])
    alike: list[tuple[Tensor, list[str]]] = []
    for path, matrix in checkpoint.rotations.items():
        found = next((paths for known, paths in alike if torch.equal(known, matrix)), None)
        if found is None:
            alike.append((matrix, [path]))
        else:
            found.append(path)
    tensors, groups = dict[str, Tensor](), dict[str, Any]()
    for index, (matrix, paths) in enumerate(alike):
        size, name = len(matrix), f"R{index}"
        where = {"targets": paths, "location": "input", "inverse": False, "ignore": []}
        groups[name] = {"type": "random-hadamard", "head_dim": size, "apply": [where]}
        tensors |= {f"{path}.{name}_input.weight": matrix * size**0.5 for path in paths}
    if groups:
        warn(
            "only vLLM applies the rotations of this checkpoint; transformers leaves out the matrices, and computes "
            "something else"
        )
    return tensors, {"transform_config": {"config_groups": groups}} if groups else {}


def _cache(checkpoint: Checkpoint) -> Written | tuple[dict[str, Tensor], None]:
    """Return the scales of keys and values, with their names in vLLM and compressed-tensors, and the common scheme."""
    if not checkpoint.caches:
        return {}, None
    tensors, formats, errors = dict[str, Tensor](), dict[str, None](), []
    for path, attention in checkpoint.caches.items():
        for name, activation in zip("kv", attention.entering or (), strict=False):
            zero, scale = activation.zero_point, activation.scale
            if activation.factors:
                errors.append(f"{path}: a pass rotates its keys; quantize with Rotate(keys=False)")
            elif scale is None or zero is None or scale.dim() or activation.format not in _CACHES or int(zero):
                what = activation.format or activation.cast
                errors.append(
                    f"{path}: keys or values in {what}; a server's cache is {' or '.join(_CACHES)} with one static "
                    "scale for keys and one for values: kv_cache=TensorSpec(format=FP8_E4M3)"
                )
            else:
                formats[activation.format] = None
                tensors[f"{path}.{name}_scale"] = scale.reshape(1)
        if attention.entering is None:
            errors.append(f"{path}: several attentions in one module, whose caches a checkpoint does not tell apart")
    errors += [
        f"{path}: its keys and values stay in float; a checkpoint has one cache for all"
        for path in checkpoint.float_caches
    ]
    if len(formats) > 1:
        errors.append(f"keys and values in {' and '.join(formats)}; a checkpoint has one format for all")
    if errors:
        raise unholdable(list(dict.fromkeys(errors)))
    (fmt,) = formats
    if fmt != str(FP8_E4M3):
        warn(f"vLLM has caches in {FP8_E4M3} alone; this checkpoint's is in {fmt}, as compressed-tensors reads it")
    return tensors, _arguments(parse_format(fmt), True, "tensor")


_CACHES = (str(FP8_E4M3), str(INT8))
"""Formats of keys and values that `kv_cache_scheme` supports."""


_VERSIONS = {
    ("mxfp4-pack-quantized", 4): "0.16.0",
    ("mxfp6-pack-quantized", 6): "0.20.0",
    ("mxfp8-quantized", 8): "0.15.0",
    ("nvfp4-pack-quantized", 4): "0.14.0",
    **{("pack-quantized", bits): "0.18.0" for bits in (3, 5, 6, 7)},
}
"""Oldest versions of compressed-tensors that decompress a form with so many bits, if later than `_OLDEST`."""

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
    """Return how transformers measures the scales of a layer's activations, if it does so differently."""
    activation = layer.input
    if activation is None or activation.scale is not None or activation.cast is not None:
        return ""
    fmt, kind = parse_format(activation.format), scale_format(activation.scale_type)
    if fmt.is_integer and activation.symmetry == Symmetry.SYMMETRIC:
        most = 2 ** (fmt.bits - 1) - 1
        return (
            f"transformers divides the largest magnitude of a token by {most}.5, this model by {most} as other readers "
            f"do: there its {fmt} activations are rounded differently; for equal results in transformers set "
            "symmetry='symmetric_full' on `input`"
        )
    rule = E8M0_CEIL if fmt == FP8_E4M3 else E8M0_EVEN
    if kind.rule is None or kind == rule:
        return ""
    return (
        f"readers measure scales of {fmt} activations by the rule {rule}, this model by {kind}: they round some blocks "
        f"differently; for equal results set scale='{rule}' on `input`"
    )


def _scheme(layer: Layer) -> dict[str, Any]:
    weight, activation = layer.weight, layer.input
    if weight.has_offsets:
        raise ExportError(NO_OFFSETS)
    size, integer = group_size(weight), weight.format.is_integer
    strategy = "group" if size else "tensor" if weight.scale.numel() == 1 else "channel"
    dense = layer.is_linear and not layer.stack
    if not weight.is_symmetric and (activation is not None or not dense or strategy == "tensor"):
        raise ExportError(
            "zero points, which it holds for weights of linear layers per channel or group, beside float activations "
            "and of no experts; use symmetry='symmetric'"
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
                f"activations in other groups than weights in blocks of {square}x{square}; it holds fp8_e4m3 in square "
                "blocks beside float32 scales per group of as many channels"
            )
    elif not integer and (size or weight.format.bits < 8):
        weights, kind = _block_weights(layer, weights)
        return {"weights": weights, "input_activations": inputs, "format": kind}
    if not integer and weight.format != FP8_E4M3:
        raise ExportError(f"{weight.format}; it holds 8-bit floats as {FP8_E4M3} only")
    if not integer and activation is not None:
        kind = "float-quantized"
    elif not integer or not layer.is_linear:
        kind = "naive-quantized"  # transformers fails to find the `weight` of an embedding with packed codes
    else:
        # Servers read integers beside activations packed, except 8 bits per channel.
        kind = "pack-quantized" if activation is None or size or weight.format.bits < 8 else "int-quantized"
    return {"weights": weights, "input_activations": inputs, "format": kind}


def _inputs(activation: Activation, channels: int) -> dict[str, Any]:
    """Return the arguments of an activation with so many channels."""
    fmt = parse_format(activation.format) if activation.format else None
    if fmt is None or not (str(fmt) in _FLOATS or (fmt.is_integer and fmt.bits <= 8 and not fmt.sign_magnitude)):
        raise ExportError(
            f"activations in {fmt or activation.cast}; it holds integers of at most 8 bits, and {', '.join(_FLOATS)}"
        )
    size, kind = max(activation.block_size, 0) or None, scale_format(activation.scale_type)
    if size and channels % size:
        raise ExportError(f"activations of {channels} channels, which are not a multiple of their groups of {size}")
    local = kind.unit is not None and size == 16 and fmt == FP4_E2M1
    if kind.is_8_bit and not (local or (kind.rule and size == 32 and not fmt.is_integer)):
        raise ExportError(
            f"activations with scales in {kind}; it holds float32, fp8_e4m3_calibrated for {FP4_E2M1} in groups of 16, "
            "or E8M0 for small floats in groups of 32"
        )
    if activation.ratio != 1:
        raise ExportError("activations in a share of the range at run time; drop the observer Adjusted")
    zero = activation.zero_point
    symmetric = activation.symmetry != Symmetry.ASYMMETRIC if zero is None else int(zero) == fmt.middle
    per = "group" if size else "token" if activation.per_token else "tensor"
    inputs = _arguments(fmt, symmetric or not fmt.is_integer, per, dynamic=activation.scale is None)
    inputs |= {"group_size": size} | ({"scale_dtype": str(torch.uint8)} if kind.is_8_bit else {})
    return inputs | (_LOCAL if local else {})


_LOCAL = {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": str(torch.float8_e4m3fn)}
"""How the activations of NVFP4 are described: their scales are measured, the scale of these is calibrated."""


_MXFP8 = "mxfp8-quantized"

_FLOATS = (str(FP4_E2M1), str(FP6_E2M3), str(FP8_E4M3))

_MICROSCALING = {
    str(FP4_E2M1): "mxfp4-pack-quantized",
    str(FP6_E2M3): "mxfp6-pack-quantized",
    str(FP8_E4M3): _MXFP8,
}
"""The form of each format in groups of 32 with E8M0 scales."""

_NVFP4 = "nvfp4-pack-quantized"
_BLOCK_FORMS = {*_MICROSCALING.values(), _NVFP4}


def _block_weights(layer: Layer, weights: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the arguments and the form of small floats in groups."""
    weight = layer.weight
    if not layer.is_linear:
        raise ExportError(f"{weight.format} in groups, which it holds for linear layers; exclude it")
    if group_size(weight) == 16 and weight.format == FP4_E2M1:
        form, strategy, scales = _NVFP4, "tensor_group", torch.float8_e4m3fn
    elif group_size(weight) == 32 and str(weight.format) in _MICROSCALING:
        form, strategy, scales = _MICROSCALING[str(weight.format)], "group", torch.uint8
    else:
        raise ExportError(
            f"{weight.format} in groups of {group_size(weight)}; it holds fp4_e2m1 in groups of 16 or 32, fp6_e2m3 and "
            "fp8_e4m3 in groups of 32, and fp8_e4m3 in square blocks (group_rows=) of linear layers but experts"
        )
    if layer.stack and form in (_NVFP4, _MXFP8):
        raise ExportError(f"experts in {form}, which transformers reads wrongly; leave them in float, or use MXFP4")
    return weights | {"strategy": strategy, "scale_dtype": str(scales)}, form


def _blocks(weight: QuantizedTensor, form: str, unit: float | None) -> dict[str, Tensor]:
    """Return the tensors of small floats in groups; `unit` is the scale of all scales, if it is known."""
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
    # Readers divide by the global scale.
    whole = scale.scale.reshape(1).reciprocal()
    return {"weight_packed": packed, "weight_scale": scale.codes, "weight_global_scale": whole}


def _share_global_scales(tensors: dict[str, Tensor]) -> None:
    """Store layers whose global scales differ by a power of two with the smallest of these (readers divide by it).

    Layers with the same input have a common global scale, because servers fuse them. Factoring their scales again may
    return global scales that differ by a power of two.
    """
    smallest: dict[float, Tensor] = {}
    known = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight_global_scale")}
    for whole in known.values():
        mantissa = float(torch.frexp(whole)[0])
        smallest[mantissa] = min(smallest.get(mantissa, whole), whole)
    for name, whole in known.items():
        shared, scale = smallest[float(torch.frexp(whole)[0])], name.replace("_global_scale", "_scale")
        wanted = tensors[scale].float() * (shared / whole)
        if bool((wanted.to(torch.float8_e4m3fn).float() == wanted).all()):
            tensors |= {name: shared.clone(), scale: wanted.to(torch.float8_e4m3fn)}


def _arguments(fmt: Format, symmetric: bool, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    kind = "int" if fmt.is_integer else "float"
    return {"num_bits": fmt.bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}


def compressed(layer: Layer, scheme: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a layer in a scheme, by the ends of their names."""
    weight, activation, kind = layer.weight, layer.input, scheme["format"]
    unit = None if activation is None else scale_format(activation.scale_type).unit
    whole = (
        {} if unit is None else {"input_global_scale": torch.tensor([unit], dtype=torch.float32).reciprocal()}
    )  # readers divide by it
    if kind in _BLOCK_FORMS:
        return _blocks(weight, kind, layer.unit) | whole
    blocks = block_scales(weight) if scheme["weights"]["strategy"] == "block" else None
    scale = weight.scale if blocks is None else blocks
    tensors = {"weight_scale": scale.reshape(-1) if weight.scale.numel() == 1 else scale} | whole
    if kind == "pack-quantized":
        parts = [unsigned(part) for _, part in weight.pieces()]
        tensors["weight_packed"] = torch.cat([pack(codes, weight.format.bits) for codes, _ in parts])
        if not scheme["weights"]["symmetric"]:
            zero_point = torch.cat([zero_point for _, zero_point in parts])
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


def _uniform(layers: list[Layer], bits: tuple[int, ...], form: str, shelf: Shelf) -> tuple[int, int]:
    """Return the common bits and group size (-1: all inputs) of all layers."""
    groups = _groups_of(layers)
    weights = (layer.weight for layer in layers)
    found = Counter((weight.format.bits, _row_or_group(weight, groups)) for weight in weights)
    (common, _), *_ = found.most_common(1)

    def check(layer: Layer) -> dict[str, Tensor]:
        weight = layer.weight
        if not isinstance(layer.module, nn.Linear) or not weight.format.is_integer or weight.format.bits not in bits:
            raise ExportError(f"{form} holds linear layers of {' or '.join(map(str, bits))}-bit integers, no experts")
        if layer.input is not None:
            raise ExportError(f"{form} has no place for quantized activations")
        if (weight.format.bits, _row_or_group(weight, groups)) != common:
            size = "all inputs" if common[1] == -1 else common[1]
            raise ExportError(
                f"{form} holds one number of bits and one group size, here {common[0]} and {size}; set group_size= to "
                "a divisor of all layers' inputs"
            )
        return {}

    each_layer(layers, check, shelf)
    return common


def _groups_of(layers: Iterable[Layer]) -> set[int]:
    """Return the group sizes of integer layers with several groups in a row."""
    return {size for weight in (x.weight for x in layers) if weight.format.is_integer and (size := group_size(weight))}


def _row_or_group(weight: QuantizedTensor, groups: set[int]) -> int:
    """Return the group size; for one scale per row, the row length if other layers have such groups, or else -1."""
    inputs = weight.codes.shape[1]
    return group_size(weight) or (inputs if inputs in groups else -1)


def _gptq(checkpoint: Checkpoint, shelf: Shelf, version: int = 1) -> Written:
    """Write the layout of AutoGPTQ and GPTQModel; version 1 stores the zero point minus one."""
    layers = checkpoint.layers
    require_weights_alone(checkpoint, "GPTQ")
    bits, group = _uniform(layers, (2, 4, 8), "GPTQ", shelf)

    def write(layer: Layer) -> dict[str, Tensor]:
        weight = layer.weight
        codes, zeros = unsigned(weight)
        outputs, inputs = codes.shape
        if inputs * bits % 32 or outputs * bits % 32:
            raise ExportError(f"{outputs} outputs or {inputs} inputs of {bits} bits do not fill 32-bit words")
        if version == 1 and bool((zeros == 0).any()):
            raise ExportError("a zero point at the smallest code, which version 1 cannot hold; use format='gptq_v2'")
        size = group_size(weight) or inputs
        return {
            "qweight": pack_columns(codes.t(), bits),
            "qzeros": pack((zeros - int(version == 1)).t().contiguous(), bits),
            "scales": half_scales(weight).t().contiguous(),
            "g_idx": (torch.arange(inputs) // size).to(torch.int32),
        }

    head = checkpoint.head
    left = [f"^{re.escape(name)}$" for name in checkpoint.left if name != head]
    # vLLM has one module for all experts of a layer, GPTQModel one per projection of each; the patterns match both.
    experts = [rf"^{literal(path)}\b" for path in common_paths(checkpoint.left_experts)]
    return each_layer(layers, write, shelf), {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": all(layer.weight.is_symmetric for layer in layers),
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": any(layer.name == head for layer in layers),
        "dynamic": {f"-:{pattern}": {} for pattern in [*left, *experts]},
        "meta": {"quantizer": ["quark_fx"]},
    }


def _gptq_v2(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    return _gptq(checkpoint, shelf, 2)


def _awq(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Write the GEMM layout of AutoAWQ."""
    require_weights_alone(checkpoint, "AWQ")
    bits, group = _uniform(checkpoint.layers, (4,), "AWQ", shelf)

    def write(layer: Layer) -> dict[str, Tensor]:
        codes, zeros = unsigned(layer.weight)
        if len(codes) % 8:
            raise ExportError(f"{len(codes)} outputs are not a multiple of 8")
        return {
            "qweight": pack_awq(codes.t()),
            "qzeros": pack_awq(zeros.t()),
            "scales": half_scales(layer.weight).t().contiguous(),
        }

    return each_layer(checkpoint.layers, write, shelf), {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "lm_head": checkpoint.head in {layer.name for layer in checkpoint.layers},
        "modules_to_not_convert": checkpoint.left + common_paths(checkpoint.left_experts) or None,
    }


_WRITERS: Mapping[str, Callable[[Checkpoint, Shelf], Written]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "gptq_v2": _gptq_v2,
    "awq": _awq,
}
