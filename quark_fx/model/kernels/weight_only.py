"""Products of float activations and quantized weights; one row of activations is multiplied by the codes directly.

torch has kernels for bfloat16 activations (`_weight_int4pack_mm_for_cpu`, `_weight_int8pack_mm`); with float32 they are
twenty times slower than a float product. For float32, `torch.compile` compiles `code_product` to a loop.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from quark_fx.errors import Declined
from quark_fx.model.kernels.integers import at_least
from quark_fx.model.kernels.product import Product
from quark_fx.numbers.quantized_tensor import QuantizedTensor, decode

aten = torch.ops.aten


def weight_only_linear(product: Product) -> str:
    """Multiply floats by integer codes of at most 8 bits, with scales per channel or per group of inputs.

    Results differ from simulated ones in the order of sums and, in bfloat16, in rounding.
    """
    if product.dtype not in (torch.float32, torch.bfloat16):
        raise Declined(f"it computes in {str(product.dtype).removeprefix('torch.')}")
    weight = product.matrix()
    if not weight.format.is_integer or weight.format.bits > 8:
        raise Declined(f"its weight is {weight.format}; there are kernels for integers of at most 8 bits")
    bias = product.bias()
    codes, scale, zero_point = groups_of(weight)
    call = None
    if product.dtype is torch.bfloat16:
        call = _bfloat16_kernel(product, weight, codes, scale, zero_point)
    if call is None:
        packed = weight.format.bits <= 4 and codes.shape[-1] % 2 == 0
        if packed:
            low, high = codes.chunk(2, -1)
            codes = low | (high << 4)
        call = product.insert(code_product, product.activation, codes.contiguous(), scale, zero_point, packed)
    name = _KERNELS[cast(Any, call.target)]
    if bias is not None:
        call = product.insert(aten.add.Tensor, call, bias.to(product.dtype))
    product.node.replace_all_uses_with(call)
    return name


def groups_of(weight: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes, `(outputs, groups, inputs of a group)`, and scales and zero points, `(outputs, groups)`.

    Raises:
        Declined: If groups are along outputs, or the last group is shorter.
    """
    outputs, inputs = weight.codes.shape
    shift = -weight.format.qmin
    codes = (weight.codes.to(torch.int16) + shift).to(torch.uint8)
    if weight.axis == 1 and weight.block_size:
        if inputs % weight.block_size:
            raise Declined(f"its groups of {weight.block_size} do not divide {inputs} inputs")
        groups = inputs // weight.block_size
    elif weight.axis in (None, 0) and not weight.block_size:
        groups = 1
    else:
        raise Declined("its scales are not per output or per group of inputs")
    scale, zero_point = (
        p.float().reshape(-1, groups if p.numel() > 1 else 1).expand(outputs, groups).contiguous()
        for p in (weight.scale, weight.points + shift)
    )
    return codes.reshape(outputs, groups, -1).contiguous(), scale, zero_point


def code_product(x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor, packed: bool) -> Tensor:
    """Return `x @ ((codes - zero_point) * scale).T`, in the dtype of `x`; `torch.compile` compiles it to one loop.

    One row is multiplied by the codes while they are read from memory, which takes most of the time. For several rows,
    the weight is dequantized once per call for a product in floats.

    Args:
        x: Activations, `(..., groups * inputs of a group)`.
        codes: Codes, uint8, `(outputs, groups, inputs of a group)`; if `packed`, half as many bytes with two
            4-bit codes each, the first half of a group in the low bits.
        scale: Scales, float32, `(outputs, groups)`.
        zero_point: Zero points, float32, `(outputs, groups)`.
        packed: Whether a byte holds two codes.
    """
    if x.numel() != x.shape[-1]:
        return F.linear(x, code_values(codes, scale, zero_point, packed).to(x.dtype))
    outputs, groups = scale.shape
    parts = (codes & 15, codes >> 4) if packed else (codes,)
    row = x.float().reshape(groups, len(parts), -1)
    values = (part.float() - zero_point.unsqueeze(-1) for part in parts)
    total = sum(value * row[:, i] for i, value in enumerate(values)) * scale.unsqueeze(-1)
    return total.sum((1, 2)).to(x.dtype).reshape(*x.shape[:-1], outputs)


def code_values(codes: Tensor, scale: Tensor, zero_point: Tensor, packed: bool) -> Tensor:
    """Return the weight, float32, `(outputs, inputs)`, for arguments of `code_product`."""
    if packed:  # a shift by the numbers of a tensor compiles to one loop, a third as long as the loop for `cat`
        codes = (codes.unsqueeze(2) >> codes.new_tensor((0, 4)).unsqueeze(-1)) & 15
        codes = codes.flatten(2)
    values = decode(codes.float(), scale.unsqueeze(-1), zero_point.unsqueeze(-1))
    return values.reshape(len(scale), -1)


def _bfloat16_kernel(
    product: Product, weight: QuantizedTensor, codes: Tensor, scale: Tensor, zero_point: Tensor
) -> Node | None:
    """Insert torch's kernel for bfloat16 activations, or return `None` if this weight is not supported."""
    outputs, groups, size = codes.shape
    if weight.format.bits == 8 and groups == 1 and bool((zero_point == 128).all()):
        signed = weight.signed().codes
        return product.insert(int8_product, product.activation, signed, scale.flatten().bfloat16())
    if weight.format.bits <= 4 and size in (32, 64, 128, 256) and outputs % 16 == 0:
        packed = aten._convert_weight_to_int4pack_for_cpu.default(codes.reshape(outputs, -1).int(), 1)
        return product.insert(int4_product, product.activation, packed, size, int4_table(scale, zero_point))
    return None


def int4_table(scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the table for `int4_product`; its kernels compute `(code - 8) * scale + zero`."""
    return torch.stack((scale, (8 - zero_point) * scale), -1).transpose(0, 1).bfloat16().contiguous()


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return `x @ (codes * scale).T` with torch's kernel; codes int8 `(outputs, inputs)`, scale `(outputs,)`."""
    y: Tensor = aten._weight_int8pack_mm.default(x.reshape(-1, x.shape[-1]), codes, scale)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def int4_product(x: Tensor, packed: Tensor, size: int, table: Tensor) -> Tensor:
    """Multiply by 4-bit codes with torch's kernel.

    Args:
        x: Activations, bfloat16, `(..., inputs)`.
        packed: Codes packed by `_convert_weight_to_int4pack`, or by its variant for CPUs.
        size: Number of inputs in a group.
        table: Result of `int4_table`, bfloat16, `(groups, outputs, 2)`.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if x.is_cpu:
        y: Tensor = aten._weight_int4pack_mm_for_cpu.default(rows, packed, size, table)
    else:  # CUDA does not launch a grid without rows
        y = aten._weight_int4pack_mm.default(at_least(rows, 1), packed, size, table)[: rows.shape[0]]
    return y.reshape(*x.shape[:-1], y.shape[-1])


_KERNELS = {
    code_product: "loop over codes",
    int8_product: "aten._weight_int8pack_mm",
    int4_product: "aten._weight_int4pack_mm_for_cpu",
}

__all__ = ["code_product", "code_values", "groups_of", "int4_product", "int4_table", "weight_only_linear"]
