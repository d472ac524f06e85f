"""Common parts of oneDNN's integer kernels: unsigned 8-bit codes times signed 8-bit codes, summed in 32 bits."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from quark_fx.errors import Declined
from quark_fx.model.kernels.product import Activation, Product, Rounded
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.pair_sums import LARGEST_SUM, PairBound

aten, onednn = torch.ops.aten, torch.ops.onednn
cast = aten._to_copy.default


def channel_codes(weight: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a weight, int8, and a scale for each output (the first dimension), float32, `(outputs,)`.

    Raises:
        Declined: If the format or layout is not supported.
    """
    if not weight.format.is_integer or weight.format.bits > 8:
        raise Declined(f"its weight is {weight.format}; integer kernels read integers of at most 8 bits")
    weight = weight.signed()
    if not weight.is_symmetric:
        raise Declined("its weight has zero points")
    if weight.axis not in (None, 0) or weight.block_size:
        raise Declined("its weight has a scale for each group; integer kernels support one for each output")
    outputs = weight.codes.shape[0]
    return weight.codes.to(torch.int8), weight.scale.float().reshape(-1).expand(outputs).contiguous()


@dataclass(frozen=True)
class Unsigned:
    """Codes from 0 to 255, the input of kernels, with scale and zero point.

    Attributes:
        codes: Codes, uint8.
        scale: Scale, a number if it is calibrated, otherwise a node.
        zero_point: Zero point, a number if it is calibrated, otherwise a node.
    """

    codes: Node
    scale: float | Node
    zero_point: int | Node

    @classmethod
    def of(cls, product: Product, rounded: Rounded | None = None) -> Unsigned:
        """Return codes for the kernel of a product, by default the codes it reads.

        Half the range is added to signed codes, for which kernels are slow or missing.

        Raises:
            Declined: If the format is not an integer of at most 8 bits.
        """
        rounded = rounded or product.read
        fmt = rounded.format
        if not fmt.is_integer or fmt.bits > 8:
            raise Declined(f"its activation is {fmt}; integer kernels read integers of at most 8 bits")
        shift = -fmt.qmin
        codes, scale, zero_point = rounded.codes, rounded.scale, rounded.zero_point
        if shift:
            codes = codes.meta.get(_UNSIGNED) or shifted_codes(product, codes, shift, torch.uint8)
        if rounded.kind is Activation.STATIC:
            return cls(codes, product.number(scale), int(product.number(zero_point)) + shift)
        return cls(codes, scale, product.insert(aten.add.Scalar, zero_point, shift) if shift else zero_point)


def signed_codes(product: Product, codes: Node) -> Node:
    """Convert a kernel's uint8 codes to int8 by subtracting 128; other kernels still read the uint8 codes."""
    signed = shifted_codes(product, codes, -128, torch.int8)
    signed.meta[_UNSIGNED] = codes
    return signed


def shifted_codes(product: Product, codes: Node, shift: int, dtype: torch.dtype) -> Node:
    """Insert nodes that add `shift` to codes and cast them to `dtype`."""
    wide = product.insert(cast, codes, dtype=torch.int32)
    return product.insert(cast, product.insert(aten.add.Scalar, wide, shift), dtype=dtype)


def at_least(rows: Tensor, count: int) -> Tensor:
    """Append rows of zeros to a contiguous tensor, `(rows, values)`, until it has `count` rows."""
    missing = count - rows.shape[0]
    return F.pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(rows.dtype) if missing > 0 else rows


_UNSIGNED = "unsigned_codes"


def has_kernels() -> bool:
    """Tell whether PyTorch's oneDNN int8 kernels are available on this CPU (tested on x64 only)."""
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()


@cache
def adds_pairs(packed: bool = True) -> bool:
    """Tell whether the kernels add pairs of products in 16 bits, which saturate, by running a kernel.

    They do on x64 processors without VNNI, and if `ONEDNN_MAX_CPU_ISA` requires it.

    Args:
        packed: Whether to test kernels of packed weights; otherwise `torch._int_mm`, which may use another kernel.
    """
    if not packed:
        codes = torch.full((64, 64), 127, dtype=torch.int8)
        return any(bool((torch.ops.aten._int_mm(codes[:rows], codes.t()) != 64 * 127 * 127).any()) for rows in (1, 32))
    x = torch.full((1, 64), 255, dtype=torch.uint8)
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    one, zero = torch.ones(16, dtype=torch.float32), torch.zeros(16, dtype=torch.int32)
    prepacked = onednn.qlinear_prepack(weight, None)
    y = onednn.qlinear_pointwise(x, 1.0, 0, prepacked, one, zero, None, 1.0, 0, torch.float32, "none", [], "")
    return bool((y != 64 * 255 * 127).any())


def require_exact(product: Product, codes: Tensor, groups: int = 1) -> None:
    """Reject a product with sums that may saturate on this processor.

    Args:
        product: Operator whose activation is rounded.
        codes: Codes of the operator's weight, int8, `(outputs, inputs, *kernel)`.
        groups: Number of channel groups.

    Raises:
        Declined: If a pair may saturate, the activation lacks a batch, or this CPU lacks the kernels.
    """
    if not has_kernels():
        raise Declined("torch provides oneDNN's integer kernels only on x64 processors")
    rank = product.activation.meta["val"].dim()
    if rank < 2 or (codes.dim() > 2 and rank != codes.dim()):
        raise Declined("its activation lacks a batch dimension")
    inputs, kernel = codes.shape[1], tuple(range(2, codes.dim()))
    if not adds_pairs(product.packs) or (kernel and inputs == 1 and groups == codes.shape[0]):
        return
    # oneDNN adds 128 to the signed codes of products that are not packed, independent of their bits.
    limit = LARGEST_SUM // ((1 << (min(product.read.format.bits, 8) if product.packs else 8)) - 1)
    if kernel and inputs % 2:
        # The order of codes differs from kernel to kernel.
        exact = 2 * int(codes.short().abs().max()) <= limit
    else:
        bound = PairBound.of_convolution(limit, kernel, 1) if kernel else PairBound.of_product(limit, 2, 1)
        exact = not bool(bound.exceeded(codes).any())
    if not exact:
        raise Declined(
            "this processor adds pairs of products in 16 bits, and some weights would saturate; quantize with "
            'reduce_range, or for target="onnx", which limits such pairs'
        )


__all__ = ["Unsigned", "adds_pairs", "at_least", "channel_codes", "require_exact", "signed_codes"]
