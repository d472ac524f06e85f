"""Checkpoints in the layout of GPT-OSS: stacks of experts in MXFP4, everything else in float."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_fx.checkpoints.shelf import Shelf
from quark_fx.checkpoints.words import pack
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.values import (
    STACKED,
    Checkpoint,
    Layer,
    Written,
    each_layer,
    is_stacked,
    require_weights_alone,
)
from quark_fx.export.packing import exponents
from quark_fx.numbers.formats import FP4_E2M1
from quark_fx.numbers.quantized_tensor import QuantizedTensor

_GROUP = 32
"""Inputs that share a scale."""


def mxfp4(checkpoint: Checkpoint, shelf: Shelf) -> Written:
    """Return tensors and configuration in the layout of GPT-OSS.

    A stack of shape (experts, inputs, outputs) becomes `*_blocks`, uint8 (experts, outputs, inputs / 32, 16) with the
    first of two codes in the low bits, and `*_scales`, uint8 (experts, outputs, inputs / 32), exponents plus 127.

    Source:
        `Mxfp4HfQuantizer` of transformers; "Open Compute Project: Microscaling Formats (MX)" (2023).
    """
    if not is_stacked(checkpoint.shell):
        raise ExportError(
            f"format='mxfp4' is for models of type {', '.join(STACKED)}, whose readers load stacks of experts, not for "
            f"{checkpoint.shell.config.model_type}; use format='compressed-tensors'"
        )
    require_weights_alone(checkpoint, "MXFP4")
    floats = [name for name, tensor in checkpoint.tensors.items() if tensor.dim() == 3]

    def write(layer: Layer) -> dict[str, Tensor]:
        tensors, path = _stack(layer), layer.stack.rpartition(".")[0]
        if beside := [name for name in floats if name.rpartition(".")[0] == path]:
            raise ExportError(
                f"{beside[0]} stays in float, but readers expect MXFP4 in all stacks of a module, or in none; "
                "quantize both or exclude both"
            )
        return tensors

    tensors = each_layer(checkpoint.layers, write, shelf)
    return {f"{name}_{part}": tensor for full, tensor in tensors.items() for name, _, part in [full.rpartition(".")]}, {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*checkpoint.left, *checkpoint.left_stacks],
    }


def _stack(layer: Layer) -> dict[str, Tensor]:
    weight = layer.weight
    if not layer.stack:
        raise ExportError("this layout stores only experts quantized; exclude this layer")
    if weight.format != FP4_E2M1 or weight.axis != 1:
        raise ExportError(f"experts in {weight.format}; this layout needs the weights of the preset mxfp4_weight_only")
    if weight.block_size != _GROUP:
        raise ExportError(f"groups of {weight.block_size}; this layout needs group_size={_GROUP}")
    experts, inputs, outputs = weight.codes.shape
    if inputs % _GROUP:
        raise ExportError(f"{inputs} inputs are not a multiple of {_GROUP}; leave this stack in float")
    codes, scale = (part.mT.reshape(experts * outputs, -1) for part in (weight.codes, weight.scale))
    rows = QuantizedTensor.of(codes.contiguous(), scale.float(), None, weight.format, 1, _GROUP)
    packed = [pack(part.format.patterns(part.codes), part.format.bits).view(torch.uint8) for _, part in rows.pieces()]
    groups = (experts, outputs, inputs // _GROUP)
    return {"blocks": torch.cat(packed).reshape(*groups, _GROUP // 2), "scales": exponents(rows).reshape(groups)}


__all__ = ["mxfp4"]
