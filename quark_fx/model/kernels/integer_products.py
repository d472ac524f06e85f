"""oneDNN's int8 products and convolutions: codes times codes, with codes as the result if a quantizer follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.errors import Declined
from quark_fx.model.kernels.integers import Unsigned, at_least, channel_codes, require_exact, signed_codes
from quark_fx.model.kernels.product import (
    RELU,
    RELU_OR_GELU,
    Activated,
    Product,
    Rounded,
    quantizers_of,
)
from quark_fx.model.kernels.residual import CONVOLVE_ONTO, Residual

aten, onednn = torch.ops.aten, torch.ops.onednn


def integer_linear(product: Product) -> str:
    """Multiply uint8 activations, with one calibrated or measured scale, by int8 weights.

    Sums are exact in 32 bits; a quantized result can differ by one step if it is halfway between two codes.
    """
    codes, scale = channel_codes(product.matrix())
    require_exact(product, codes)
    if not product.packs:
        _require_dtype(product)
        return plain_linear(product)
    bias, read = product.bias(), Unsigned.of(product)
    packed = onednn.qlinear_prepack.default(codes, None)
    _multiply(product, onednn.qlinear_pointwise, read, packed, scale, bias)
    return "onednn.qlinear_pointwise"


def integer_convolution(product: Product) -> str:
    """Convolve uint8 activations, with one calibrated or measured scale, with int8 weights.

    Sums are exact; the padding value is the zero point.
    """
    geometry = product.geometry()
    codes, scale = channel_codes(product.weight)
    require_exact(product, codes, geometry[-1])
    bias, read = product.bias(), Unsigned.of(product)
    # A weight that is packed without an input size, or for another zero point, is packed again in every call.
    point = read.zero_point if isinstance(read.zero_point, int) else 128
    packed = onednn.qconv_prepack.default(codes, scale, 1.0, point, *geometry, product.sizes_read())
    residual = Residual.of(product) if isinstance(read.scale, float) else None
    if residual is not None:
        return _convolve_onto(product, residual, read, packed, scale, bias, *geometry)
    if codes.dim() == 3:
        # With three dimensions, torch takes the length of the result from the packed weight's height, which is 1.
        stride, padding, dilation, groups = geometry
        read = replace(read, codes=product.insert(aten.unsqueeze.default, read.codes, 2))
        geometry = [1, *stride], [0, *padding], [1, *dilation], groups
    _multiply(product, onednn.qconv_pointwise, read, packed, scale, bias, *geometry)
    return "onednn.qconv_pointwise"


def _convolve_onto(
    product: Product,
    residual: Residual,
    read: Unsigned,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *geometry: Any,
) -> str:
    """Replace a convolution, the addition that reads its result, and the quantizers of the sum."""
    onto, (step, point, signed) = Unsigned.of(product, residual.onto), _output(product, residual.after)
    call = product.insert(
        CONVOLVE_ONTO,
        *(read.codes, read.scale, read.zero_point, packed, scale, torch.zeros_like(scale, dtype=torch.int32)),
        *(onto.codes, bias, *geometry, step, point, onto.scale, onto.zero_point, residual.sum.function),
    )
    _replace(product, residual.quantizers, call, signed)
    return "onednn.qconv2d_pointwise.binary"


def token_linear(product: Product) -> str:
    """Multiply int8 activations, with a scale per token, by int8 weights; the scales are applied after the product."""
    codes, scale = channel_codes(product.matrix())
    require_exact(product, codes)
    rounded = product.read
    if not rounded.is_symmetric:
        raise Declined("its activation has a zero point for each token")
    if not product.packs:
        _require_dtype(product)
        return plain_linear(product)
    bias, read = product.bias(), Unsigned.of(product)
    packed = onednn.qlinear_prepack.default(codes, None)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    result = product.insert(
        onednn.qlinear_pointwise.default,
        *(read.codes, 1.0, 1 << (rounded.format.bits - 1), packed, scale, zero, None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    result = product.insert(aten.mul.Tensor, result, rounded.scale)
    if bias is not None:
        result = product.insert(aten.add.Tensor, result, bias)
    product.node.replace_all_uses_with(product.insert(aten._to_copy.default, result, dtype=product.dtype))
    return "onednn.qlinear_pointwise"


def plain_linear(product: Product) -> str:
    """Multiply integer codes with `torch._int_mm`; the activation has one scale and zero point, or one per token."""
    codes, scale = channel_codes(product.matrix())
    rounded, bias = product.read, product.bias()
    if not rounded.format.is_integer or rounded.format.bits > 8:
        raise Declined(f"its activation is {rounded.format}; integer kernels read integers of at most 8 bits")
    activation = (rounded.codes, rounded.scale, rounded.zero_point)
    call = product.insert(integer_product, *activation, codes, scale, codes.sum(1, dtype=torch.int32))
    if bias is not None:
        call = product.insert(aten.add.Tensor, call, bias)
    product.node.replace_all_uses_with(product.insert(aten._to_copy.default, call, dtype=product.dtype))
    return "aten._int_mm"


def integer_product(
    x: Tensor, scale: Tensor, zero_point: Tensor, codes: Tensor, weight_scale: Tensor, sums: Tensor
) -> Tensor:
    """Return `((x - zero_point) * scale) @ (codes * weight_scale).T`, float32, with exact sums.

    Args:
        x: Codes of the activation, int8 or uint8, `(..., inputs)`.
        scale: Scales of the activation, float32, one or one per row.
        zero_point: Zero points of the activation, int32, one or one per row.
        codes: Codes of the weight, int8, `(outputs, inputs)`.
        weight_scale: Scales of the weight, float32, `(outputs,)`.
        sums: Sums of `codes` over inputs, int32, `(outputs,)`.
    """
    shift = 128 if x.dtype is torch.uint8 else 0
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if shift:
        rows = (rows.to(torch.int16) - shift).to(torch.int8)
    # cuBLAS requires more than 16 rows.
    total: Tensor = aten._int_mm(rows if x.is_cpu else at_least(rows, 17), codes.t())
    total = total[: rows.shape[0]].reshape(*x.shape[:-1], codes.shape[0])
    return (total - (zero_point - shift) * sums).float() * scale * weight_scale


def _require_dtype(product: Product) -> None:
    if product.dtype not in (torch.float32, torch.bfloat16):
        raise Declined(f"it computes in {str(product.dtype).removeprefix('torch.')}")


def _multiply(
    product: Product, kernel: Any, read: Unsigned, packed: Tensor, scale: Tensor, bias: Tensor | None, *geometry: Any
) -> None:
    """Replace a product, and the quantizers that are its only consumers, with a kernel."""
    _require_dtype(product)
    result = Activated.of(product.node, RELU if geometry else RELU_OR_GELU)
    quantizers = quantizers_of(result.node)
    after = Rounded.of(quantizers[0]) if quantizers else None
    step, point, signed = (1.0, 0, False) if after is None else _output(product, after)
    dtype = product.dtype if after is None else torch.uint8
    overload = kernel.default if isinstance(read.scale, float) else kernel.tensor
    call = product.insert(
        overload,
        *(read.codes, read.scale, read.zero_point, packed, scale, torch.zeros_like(scale, dtype=torch.int32), bias),
        *(*geometry, step, point, dtype, result.function, [], result.algorithm),
    )
    if geometry and len(geometry[0]) > product.weight.codes.dim() - 2:
        call = product.insert(aten.squeeze.dim, call, 2)  # the height added to a Conv1d
    _replace(product, quantizers or (result.node,), call, signed)


def _output(product: Product, after: Rounded) -> tuple[float, int, bool]:
    """Return the scale and zero point of a kernel's result, and true if the graph reads signed codes.

    `torch.compile` assumes that a kernel's codes are uint8.
    """
    signed = after.format.dtype is torch.int8
    return product.number(after.scale), int(product.number(after.zero_point)) + 128 * signed, signed


def _replace(product: Product, nodes: Sequence[Node], call: Node, signed: bool) -> None:
    """Replace nodes with a kernel's result, converted to signed codes if `signed` is true."""
    call = signed_codes(product, call) if signed else call
    for node in nodes:
        call.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(call)


__all__ = ["integer_convolution", "integer_linear", "plain_linear", "token_linear"]
