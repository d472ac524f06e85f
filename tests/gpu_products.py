"""torch's products of codes on NVIDIA GPUs, on tensors of the CPU: what CUDA requires of arguments, and its arithmetic.

Source:
    `_int_mm_out_cuda`, `_scaled_mm_out_cuda`, `_scaled_mm_cuda_v2_out`, and `int4mm.cu` in ATen's `native/cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply int8 matrices exactly."""
    require(a.dtype == b.dtype == torch.int8, "expected int8")
    require(a.shape[0] > 16, f"self.size(0) needs to be greater than 16, but got {a.shape[0]}")
    require(a.shape[1] > 0 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0, "sizes need to be multiples of 8")
    require(a.is_contiguous() and b.t().is_contiguous(), "cuBLAS multiplies rows by columns")
    return (a.double() @ b.double()).to(torch.int32)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply codes in E4M3 by their scales: one, of rows, or of blocks of 128."""
    (rows, inputs), outputs, blocks = a.shape, b.shape[1], -(-a.shape[1] // 128)
    require(a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == scale_b.dtype == torch.float32, "dtypes")
    require(a.is_contiguous() and b.t().is_contiguous(), "cuBLASLt multiplies rows by columns")
    require(inputs % 16 == outputs % 16 == 0, "sizes must be divisible by 16")
    require(out_dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16), "bfloat16 results")
    require(not use_fast_accum, "sums that keep 14 bits")
    one = scale_a.numel() == scale_b.numel() == 1
    by_row = scale_a.shape == (rows, 1) and scale_b.shape == (1, outputs)
    if one or by_row:
        require(one or (scale_a.is_contiguous() and scale_b.is_contiguous()), "scales of rows must be contiguous")
        y = (a.float() * scale_a) @ (b.float() * scale_b)
    else:
        strides = scale_a.stride() == (1, rows) or (blocks == 1 and scale_a.stride(0) == 1)
        require(scale_a.shape == (rows, blocks) and strides and rows % 4 == 0, "scale_a of 1x128 is outer-dim-major")
        square = scale_b.shape == (blocks, outputs // 128)
        require(square or scale_b.shape == (blocks, outputs), f"Invalid scaling configuration: {scale_b.shape}")
        if square:
            require(scale_b.t().is_contiguous() and blocks % 4 == 0, "scale_b of 128x128 is inner-dim-major, aligned")
            scale_b = scale_b.repeat_interleave(128, 1)
        require(square or scale_b.is_contiguous(), "scale_b of 1x128 is outer-dim-major")
        spread_a, spread_b = (s.repeat_interleave(128, d) for s, d in ((scale_a, 1), (scale_b, 0)))
        y = (a.float() * spread_a[:, :inputs]) @ (b.float() * spread_b[:inputs])
    return (y if bias is None else y + bias.float()).bfloat16()


def scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply blocks of 16 in E2M1 with scales in E4M3, and of 32 in E2M1 or E4M3 with exponents."""
    fp4, size = a.dtype is torch.float4_e2m1fn_x2, 16 if recipe_a[0] == ScalingType.BlockWise1x16.value else 32
    require(a.dtype == b.dtype and (fp4 or a.dtype is torch.float8_e4m3fn), "dtypes")
    require(a.is_contiguous() and b.t().is_contiguous(), "cuBLASLt multiplies rows by columns")
    require(a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0, "sizes must be divisible by 16")
    require(out_dtype is torch.bfloat16 and bias is None, "MXFP4 adds no bias")
    plain, tiled = SwizzleType.NO_SWIZZLE.value, SwizzleType.SWIZZLE_32_4_4.value
    of_16, of_32, tensor = (
        kind.value for kind in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32, ScalingType.TensorWise)
    )
    known = ([of_16, tensor], [tiled, plain]) if size == 16 else ([of_32], [tiled])
    require((recipe_a, swizzle_a) == (recipe_b, swizzle_b) == known, "Invalid scaling configuration")
    product = []
    for codes, scales in ((a, scale_a), (b.t(), scale_b)):
        values = e2m1_values(codes.view(torch.uint8)) if fp4 else codes.float()
        require(scales[0].dtype is (torch.float8_e4m3fn if size == 16 else torch.float8_e8m0fnu), "scales")
        require(size == 32 or (fp4 and scales[1].dtype is torch.float32 and scales[1].numel() == 1), "global scale")
        steps = untiled(scales[0], len(values), values.shape[1] // size).float()
        product.append(values * steps.repeat_interleave(size, 1) * (scales[1] if size == 16 else 1))
    y: Tensor = (product[0] @ product[1].t()).bfloat16()
    return y


def e2m1_values(stored: Tensor) -> Tensor:
    """Return the floats of 4 bits, the first of a byte in its low ones."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return values[torch.stack((stored & 15, stored >> 4), -1).long()].flatten(-2)


def untiled(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Return scales by row and group from tiles of 128 rows and 4 groups, which fill whole ones.

    Source:
        https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    across = -(-groups // 4)
    require(scale.is_contiguous() and scale.numel() == -(-rows // 128) * across * 512, "elements of blockwise scales")
    row, group = torch.arange(rows)[:, None], torch.arange(groups)
    tile = row // 128 * across + group // 4
    places = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
    return scale.view(torch.uint8).flatten()[places].view(scale.dtype)


def convert_weight_to_int4pack(codes: Tensor, tiles: int) -> Tensor:
    """Keep the order of the bytes, in the shape of packed ones; the first code is in the high bits of a byte."""
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    require(codes.dtype is torch.uint8 and codes.is_contiguous() and tiles in (2, 4, 8), "in.dtype() == at::kByte")
    require(inputs % (16 * tiles) == 0, "isEvenDivisor(in.size(1) * 2, innerKTiles * kKTileSize)")
    return codes.view(torch.int32).reshape(-(-outputs // 8), inputs // (16 * tiles), 32, tiles // 2)


def weight_int4pack_mm(x: Tensor, packed: Tensor, group: int, table: Tensor) -> Tensor:
    """Multiply bfloat16 by `(code - 8) * scale + zero`, rounded to bfloat16."""
    (rows, inputs), outputs = x.shape, 8 * packed.shape[0]
    require(x.dtype is torch.bfloat16 and x.is_contiguous() and rows > 0, "A.dtype() == at::kBFloat16")
    require(packed.shape[1] * packed.shape[3] * 32 == inputs and packed.shape[2] == 32, "B.size(1)")
    require(group in (32, 64, 128, 256) and table.dtype is torch.bfloat16, "qGroupSize == 32 || ...")
    require(table.shape == (inputs // group, outputs, 2) and table.is_contiguous(), "qScaleAndZeros.size(1) == n")
    stored = packed.flatten().view(torch.uint8).reshape(outputs, -1)
    codes = torch.stack((stored >> 4, stored & 15), -1).reshape(outputs, -1, group).float()
    scale, zero = table.float().permute(2, 1, 0).unsqueeze(-1)
    weight = ((codes - 8) * scale + zero).bfloat16().float().reshape(outputs, inputs)
    y: Tensor = (x.float() @ weight.t()).bfloat16()
    return y


PRODUCTS: dict[str, Callable[..., Any]] = {
    "_int_mm": int_mm,
    "_scaled_mm": scaled_mm,
    "_scaled_mm_v2": scaled_mm_v2,
    "_convert_weight_to_int4pack": convert_weight_to_int4pack,
    "_weight_int4pack_mm": weight_int4pack_mm,
}
"""By the operators' names in ATen."""
