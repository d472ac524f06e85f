"""Checkpoints in the layouts of GPTQ and AWQ: integers of one bit width and one group size, in 32-bit words."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.shelf import Shelf
from quark_fx.checkpoints.words import pack, pack_awq, pack_columns
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.compressed_tensors import groups_of, row_or_group
from quark_fx.export.checkpoints.experts import common_paths, literal
from quark_fx.export.checkpoints.values import (
    Checkpoint,
    Layer,
    Written,
    each_layer,
    require_weights_alone,
)
from quark_fx.export.packing import group_size, half_scales, unsigned


def _uniform(layers: list[Layer], bits: tuple[int, ...], form: str, shelf: Shelf) -> tuple[int, int]:
    """Return the bit width and the group size that all layers have in common; -1 is a group of all inputs.

    Raises:
        ExportError: If a layer has another width or size, or the layout does not support it (all are listed).
    """
    groups = groups_of(layers)
    weights = (layer.weight for layer in layers)
    counts = Counter((weight.format.bits, row_or_group(weight, groups)) for weight in weights)
    (common, _), *_ = counts.most_common(1)

    def check(layer: Layer) -> dict[str, Tensor]:
        weight = layer.weight
        if not isinstance(layer.module, nn.Linear) or not weight.format.is_integer or weight.format.bits not in bits:
            raise ExportError(
                f"{form} supports only {' or '.join(map(str, bits))}-bit integers in linear layers, and no experts"
            )
        if layer.input is not None:
            raise ExportError(f"{form} cannot store quantized activations; quantize with input=None")
        if (weight.format.bits, row_or_group(weight, groups)) != common:
            size = "all inputs" if common[1] == -1 else common[1]
            raise ExportError(
                f"{form} needs one bit width and one group size for all layers; most have {common[0]} bits "
                f"and a group size of {size}; give this layer the same bit width, and all layers a group_size that "
                "divides their number of inputs"
            )
        return {}

    each_layer(layers, check, shelf)
    return common


def gptq(checkpoint: Checkpoint, shelf: Shelf, version: int = 1) -> Written:
    """Return tensors and configuration in the layout of AutoGPTQ and GPTQModel.

    Version 1 stores zero points minus one.
    """
    layers = checkpoint.layers
    require_weights_alone(checkpoint, "GPTQ")
    bits, group = _uniform(layers, (2, 4, 8), "GPTQ", shelf)

    def write(layer: Layer) -> dict[str, Tensor]:
        weight = layer.weight
        codes, zeros = unsigned(weight)
        outputs, inputs = codes.shape
        if inputs * bits % 32 or outputs * bits % 32:
            raise ExportError(
                f"{outputs} outputs and {inputs} inputs; codes of {bits} bits fill 32-bit words only if both are "
                f"multiples of {32 // bits}; exclude this layer"
            )
        if version == 1 and bool((zeros == 0).any()):
            raise ExportError("a zero point is the smallest code, which version 1 cannot store; use format='gptq_v2'")
        size = group_size(weight) or inputs
        return {
            "qweight": pack_columns(codes.t(), bits),
            "qzeros": pack((zeros - int(version == 1)).t().contiguous(), bits),
            "scales": half_scales(weight).t().contiguous(),
            "g_idx": (torch.arange(inputs) // size).to(torch.int32),
        }

    head = checkpoint.head
    in_float = [f"^{re.escape(name)}$" for name in checkpoint.left if name != head]
    # vLLM has one module for all experts of a layer, GPTQModel one per expert and projection; the patterns match both.
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
        "dynamic": {f"-:{pattern}": {} for pattern in [*in_float, *experts]},
        "meta": {"quantizer": ["quark_fx"]},
    }


def gptq_v2(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    return gptq(checkpoint, shelf, 2)


def awq(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Return tensors and configuration in the GEMM layout of AutoAWQ."""
    require_weights_alone(checkpoint, "AWQ")
    bits, group = _uniform(checkpoint.layers, (4,), "AWQ", shelf)

    def write(layer: Layer) -> dict[str, Tensor]:
        codes, zeros = unsigned(layer.weight)
        if len(codes) % 8:
            raise ExportError(f"{len(codes)} outputs are not a multiple of 8, as AWQ needs; exclude this layer")
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


__all__ = ["awq", "gptq", "gptq_v2"]
