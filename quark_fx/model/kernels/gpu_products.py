"""torch's product kernels for NVIDIA GPUs: a table of weights and activations they multiply, and GPUs they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from quark_fx.errors import Declined
from quark_fx.model.kernels.integer_products import plain_linear
from quark_fx.model.kernels.integers import at_least
from quark_fx.model.kernels.product import Activation, Product
from quark_fx.model.kernels.weight_only import groups_of, int4_product, int4_table
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, Format
from quark_fx.numbers.scales import E4M3_SCALES, FLOAT20, like, scale_format
from quark_fx.system import accelerator

aten = torch.ops.aten

_TENSOR, _BLOCKS_OF_16, _BLOCKS_OF_32 = (
    kind.value for kind in (ScalingType.TensorWise, ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)
)
_PLAIN, _TILED = SwizzleType.NO_SWIZZLE.value, SwizzleType.SWIZZLE_32_4_4.value


def scaled_linear(product: Product) -> None:
    """Multiply E4M3 codes that have one scale per tensor, or one per token and one per output."""
    weight, rounded = product.matrix(), product.read
    if weight.axis not in (None, 0) or weight.block_size:
        raise Declined("its weight has a scale for each group, and its activation one for each token or for all")
    scale = weight.scale.float().reshape(-1 if weight.axis == 0 else ())
    if weight.axis == 0 or rounded.kind is Activation.TOKEN:
        scale = scale.reshape(1, -1).expand(1, len(weight.codes)).contiguous()
    bias = product.bias()
    bias = None if bias is None else bias.to(torch.bfloat16)
    codes = weight.codes.contiguous()
    call = product.insert(scaled_product, rounded.codes, rounded.scale, codes, scale, bias)
    product.node.replace_all_uses_with(call)


def scaled_product(x: Tensor, scale: Tensor, codes: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `(x * scale) @ (codes * weight_scale).T + bias`, bfloat16, with sums in float32.

    Args:
        x: Codes of the activation, float8_e4m3fn, `(..., inputs)`.
        scale: Scales of the activation, float32: one number, or one per row, `(..., 1)`.
        codes: Codes of the weight, float8_e4m3fn, `(outputs, inputs)`.
        weight_scale: Scales of the weight, float32: `()` if `scale` is one number, otherwise `(1, outputs)`.
        bias: Bias, bfloat16, `(outputs,)`.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    row_count, rows = rows.shape[0], at_least(rows, 1)
    if weight_scale.dim():
        scale = at_least(scale.reshape(-1, 1).expand(row_count, 1), 1).contiguous()
    y: Tensor = aten._scaled_mm.default(rows, codes.t(), scale, weight_scale, bias, None, torch.bfloat16)
    return y[:row_count].reshape(*x.shape[:-1], codes.shape[0])


def block_linear(product: Product) -> None:
    """Multiply E4M3 codes that have a scale per 128 inputs of a token, and per 128 inputs of 1 or 128 outputs."""
    weight, rounded = product.matrix(), product.read
    outputs, inputs = weight.codes.shape
    if (weight.axis, weight.block_size, rounded.block_size) != (1, 128, 128):
        raise Declined(
            f"its scales cover {weight.block_size} inputs of its weight and {rounded.block_size} of its activation; "
            "the block kernel needs 128 for both"
        )
    bias, scale = product.bias(), weight.scale.float()
    # For scales of 128x128 blocks, the strides must be multiples of 16 bytes.
    rows = scale.reshape(-1, 128, scale.shape[1]) if outputs % 128 == inputs % 512 == 0 else None
    if rows is not None and bool((rows == rows[:, :1]).all()):
        scale = rows[:, 0].contiguous().t()
    else:
        scale = scale.t().contiguous()
    codes = weight.codes.contiguous()
    _replace(product, product.insert(block_product, rounded.codes, rounded.scale, codes, scale), bias)


def block_product(x: Tensor, scale: Tensor, codes: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the product of activation and weight, bfloat16, with sums in float32.

    Args:
        x: Codes of the activation, float8_e4m3fn, `(..., inputs)`.
        scale: Scales of the activation, float32, `(..., inputs / 128)`.
        codes: Codes of the weight, float8_e4m3fn, `(outputs, inputs)`.
        weight_scale: Scales of the weight, float32, `(inputs / 128, outputs)`, contiguous, or
            `(inputs / 128, outputs / 128)`, transposed.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    row_count = rows.shape[0]
    count = max(-(-row_count // 16), 1) * 16  # the kernel takes multiples of 16 scales
    step = at_least(scale.reshape(-1, scale.shape[-1]).contiguous(), count).t().contiguous().t()
    rows = at_least(rows, count)
    y: Tensor = aten._scaled_mm.default(rows, codes.t(), step, weight_scale, None, None, torch.bfloat16)
    return y[:row_count].reshape(*x.shape[:-1], codes.shape[0])


def small_block_linear(product: Product, *, packs: bool = False) -> None:
    """Multiply E4M3 codes, or E2M1 codes packed in 4 bits, that have an 8-bit scale per 16 or 32 inputs."""
    weight, rounded, bias = product.matrix(), product.read, product.bias()
    if weight.axis != 1:
        raise Declined("its weight does not have a scale for each group of inputs")
    kind, of_16 = scale_format(rounded.scale_type), weight.block_size == 16
    codes, scale, whole = weight.codes.contiguous(), weight.scale, None
    if of_16:
        try:
            stored = E4M3_SCALES.quantized(scale)
        except ValueError as error:
            raise Declined(f"scales of its weight: {error}") from error
        scale, whole = stored.codes.view(torch.uint8), stored.scale
    elif bool((torch.frexp(scale)[0] == 0.5).all()):
        scale = _exponents(scale)
    else:
        raise Declined("scales of its weight are not powers of two")
    if not (kind.has_unit if of_16 else kind.rule):
        needs = "E4M3 floats times one number" if of_16 else "powers of two"
        raise Declined(f"scales of its activation are not {needs}, measured at run time")
    unit = None if kind.unit is None else torch.tensor(kind.unit, dtype=torch.float32, device=codes.device)
    constants = (_pairs(codes) if packs else codes, _tiled(scale), whole, unit)
    try:  # a build of torch may lack a kernel that other builds of its version have
        small_block_product(codes[:1], weight.scale[:1], *constants)
    except RuntimeError as error:
        raise Declined(f"torch rejects this product: {str(error).splitlines()[0]}") from error
    _replace(product, product.insert(small_block_product, rounded.codes, rounded.scale, *constants), bias)


def small_block_product(
    x: Tensor, scale: Tensor, codes: Tensor, weight_scale: Tensor, whole: Tensor | None, unit: Tensor | None
) -> Tensor:
    """Return the product of activation and weight, bfloat16, with sums in float32.

    Args:
        x: Codes of the activation, float8_e4m3fn, `(..., inputs)`.
        scale: Scales of the activation, float32, `(..., groups)`; powers of two, or E4M3 floats times a number.
        codes: Codes of the weight, float8_e4m3fn, `(outputs, inputs)`, or uint8, `(outputs, inputs / 2)`, with two
            E2M1 floats per byte.
        weight_scale: Scales of the weight, uint8, in the layout of `_tiled`: exponents, or bits of E4M3 floats.
        whole: Factor of the weight's E4M3 scales, float32, `()`; `None` for exponents.
        unit: Factor of the activation's E4M3 scales, float32, `()`; `None` for exponents, or if the largest scale is
            448 times the factor.
    """
    rows, step = (part.reshape(-1, part.shape[-1]).contiguous() for part in (x, scale))
    row_count = rows.shape[0]
    rows, step = at_least(rows, 1), at_least(step, 1)
    scales, weight_scales, recipe, kind = [_exponents(step)], [weight_scale], [_BLOCKS_OF_32], torch.float8_e8m0fnu
    if whole is not None:
        if unit is None:
            unit = FLOAT20.nearest(step.amax() / like(step, FP8_E4M3.max))  # scales are E4M3 floats times this number
        scales = [(step / unit).to(torch.float8_e4m3fn).view(torch.uint8), unit]
        weight_scales, recipe, kind = [weight_scale, whole], [_BLOCKS_OF_16, _TENSOR], torch.float8_e4m3fn
    scales[0], weight_scales[0] = _tiled(scales[0]).view(kind), weight_scale.view(kind)
    if codes.dtype is torch.uint8:
        rows, codes = _pairs(rows).view(torch.float4_e2m1fn_x2), codes.view(torch.float4_e2m1fn_x2)
    order = [_TILED, _PLAIN][: len(scales)]
    y: Tensor = aten._scaled_mm_v2.default(
        *(rows, codes.t(), scales, recipe, order, weight_scales, recipe, order, None, torch.bfloat16)
    )
    return y[:row_count].reshape(*x.shape[:-1], codes.shape[0])


def _pairs(codes: Tensor) -> Tensor:
    """Pack E2M1 floats stored as E4M3, `(rows, inputs)`, into 4 bits each, the first of each pair in the low bits."""
    # The exponent bias of E4M3 is larger by 6: without it, the bits equal the bits of E2M1, at other positions.
    bits = (codes.float() * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = ((bits >> 2) & 7) | ((bits >> 4) & 8)
    return bits[:, ::2] | (bits[:, 1::2] << 4)


def _exponents(scale: Tensor) -> Tensor:
    """Return the E8M0 bits, uint8, of powers of two or NaN, float32."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def _tiled(scale: Tensor) -> Tensor:
    """Rearrange scales, uint8, `(rows, groups)`, into tiles of 128 rows and 4 groups, padded with zeros.

    A tile has 32 rows of 16 bytes: 4 groups of one row, then 4 groups each of the rows 32, 64, and 96 below it.

    Source:
        https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    rows, groups = scale.shape
    whole = F.pad(scale, (0, -groups % 4, 0, -rows % 128))
    return whole.view(-1, 4, 32, whole.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def int4_linear(product: Product) -> None:
    """Multiply a bfloat16 activation by codes of at most 4 bits, with a scale per up to 256 inputs (tinygemm)."""
    if not product.weight.format.is_integer or product.weight.format.bits > 4:
        raise Declined(
            f"its weight is {product.weight.format}; torch multiplies floats only by integers of at most 4 bits on GPUs"
        )
    bias, (codes, scale, zero_point) = product.bias(), groups_of(product.matrix())
    outputs, _, inputs = codes.shape
    size = gcd(inputs, 256)
    if size < 32:
        raise Declined(f"its groups of {inputs} inputs are not a multiple of 32")
    scale, zero_point = (p.repeat_interleave(inputs // size, 1) for p in (scale, zero_point))
    codes = codes.reshape(outputs, -1)
    tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
    packed = aten._convert_weight_to_int4pack.default((codes[:, ::2] << 4) | codes[:, 1::2], tiles)
    table = int4_table(scale, zero_point)
    _replace(product, product.insert(int4_product, product.activation, packed, size, table), bias)


def _replace(product: Product, call: Node, bias: Tensor | None) -> None:
    """Replace a product with `call`, which computes it without its bias, and add the bias."""
    call = call if bias is None else product.insert(aten.add.Tensor, call, bias.to(product.dtype))
    product.node.replace_all_uses_with(call)


@dataclass(frozen=True)
class GPUKernel:
    """A product kernel of torch for GPUs.

    Attributes:
        name: Name in the report.
        codes: Dtypes that store codes of the weight, and of a rounded activation.
        roundings: Supported roundings of the activation.
        build: Function that replaces a product; it rejects unsupported scales.
        since: Lowest compute capability with the kernel.
        before: First higher compute capability without the kernel.
        multiples: Numbers that must divide the number of inputs and the number of outputs.
        dtypes: Supported dtypes of the result.
        cuda: Lowest version of CUDA with the kernel.
        group: Number of inputs that share a scale, in weight and activation; 0 for any number that `build` supports.
        format: Format of weight and activation; `None` for any format that is stored in `codes`.
    """

    name: str
    codes: tuple[torch.dtype, ...]
    roundings: tuple[Activation, ...]
    build: Callable[[Product], object]
    since: tuple[int, int]
    multiples: tuple[int, int]
    before: tuple[int, int] = (100, 0)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    cuda: tuple[int, int] = (0, 0)
    group: int = 0
    format: Format | None = None

    def takes(self, product: Product) -> bool:
        """Return whether the kernel supports the codes and the rounding of a product."""
        rounded, weight = product.rounded, product.weight
        codes = [weight.codes] if rounded is None else [weight.codes, rounded.codes.meta["val"]]
        formats = [(one.format, one.block_size) for one in (weight, rounded) if one is not None]
        return (
            product.rounding in self.roundings
            and all(c.dtype in self.codes for c in codes)
            and all(self.group in (0, size) and self.format in (None, fmt) for fmt, size in formats)
        )

    def require(self, product: Product) -> None:
        """Reject a product that the kernel does not support, or a GPU without the kernel.

        Raises:
            Declined: If the kernel cannot be used; the message is the reason.
        """
        codes = product.matrix().codes
        capability, (outputs, inputs) = accelerator.capability(codes.device), codes.shape
        assert capability is not None
        if not self.since <= capability < self.before:
            below = "" if self.before[0] == 100 else f" and below {_version(self.before)}"
            needed = f"compute capability {_version(self.since)} or above{below}"
            raise Declined(f"{self.name} needs {needed}, and this GPU has {_version(capability)}")
        if accelerator.cuda_version() < self.cuda:
            raise Declined(f"{self.name} needs torch built for CUDA {_version(self.cuda)} or above")
        if product.dtype not in self.dtypes:
            product_dtype, kernel_dtype = (
                str(dtype).removeprefix("torch.") for dtype in (product.dtype, self.dtypes[0])
            )
            raise Declined(f"it computes in {product_dtype}; {self.name} computes in {kernel_dtype}")
        if inputs % self.multiples[0] or outputs % self.multiples[1]:
            raise Declined(
                f"it has {inputs} inputs and {outputs} outputs; {self.name} takes multiples of {self.multiples[0]} and "
                f"{self.multiples[1]}"
            )


_BYTES, _E4M3 = (torch.int8, torch.uint8), (torch.float8_e4m3fn,)
_ONE_OR_TOKENS = (Activation.STATIC, Activation.DYNAMIC, Activation.TOKEN)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

KERNELS = (
    GPUKernel("aten._int_mm", _BYTES, _ONE_OR_TOKENS, plain_linear, (7, 5), (8, 8), dtypes=_FLOATS),
    GPUKernel("aten._scaled_mm", _E4M3, _ONE_OR_TOKENS, scaled_linear, (8, 9), (16, 16)),
    GPUKernel(
        *("aten._scaled_mm_v2 of NVFP4", _E4M3, (Activation.OTHER,), partial(small_block_linear, packs=True)),
        *((10, 0), (32, 16)),
        cuda=(12, 8),
        group=16,
        format=FP4_E2M1,
    ),
    GPUKernel(
        *("aten._scaled_mm_v2 of MXFP4", _E4M3, (Activation.OTHER,), partial(small_block_linear, packs=True)),
        *((10, 0), (32, 16)),
        before=(11, 0),
        cuda=(12, 8),
        group=32,
        format=FP4_E2M1,
    ),
    GPUKernel(
        *("aten._scaled_mm_v2 of MXFP8", _E4M3, (Activation.OTHER,), small_block_linear, (10, 0), (32, 16)),
        cuda=(12, 8),
        group=32,
    ),
    GPUKernel(
        *("aten._scaled_mm of blocks", _E4M3, (Activation.OTHER,), block_linear, (9, 0), (128, 16)),
        before=(10, 0),
        cuda=(12, 9),
    ),
    GPUKernel("aten._weight_int4pack_mm", _BYTES, (Activation.FLOAT,), int4_linear, (8, 0), (32, 8)),
)
"""GPU kernels; the first match is used. Source: the checks of `_int_mm_out_cuda`, `_scaled_mm_out_cuda`,
`_scaled_mm_cuda_v2_out`, and `int4mm.cu` in ATen's `native/cuda`, and torch's `test_scaled_matmul_cuda.py`."""


def gpu_linear(product: Product) -> str:
    """Replace a product with the first matching kernel for GPUs.

    Int8 sums are exact; other sums are float32, rounded to bfloat16 once, or twice if a bias is added.
    """
    kernel = next((kernel for kernel in KERNELS if kernel.takes(product)), None)
    rounded = product.rounded
    if kernel is None:
        activation = "floats" if rounded is None else str(rounded.format)
        raise Declined(f"torch does not multiply {activation} and {product.weight.format}")
    kernel.require(product)
    kernel.build(product)
    return kernel.name


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


__all__ = ["KERNELS", "GPUKernel", "gpu_linear"]
