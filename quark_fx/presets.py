"""Presets: predefined configurations, which are plain values; `.replace(...)` returns a changed copy."""

from __future__ import annotations

from dataclasses import replace

from quark_fx.config import block_formats
from quark_fx.config.named import PRESETS as PRESETS
from quark_fx.config.named import SCHEMES as SCHEMES
from quark_fx.config.named import preset as preset
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.numbers.formats import BF16 as BFLOAT16
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, INT32, UINT8
from quark_fx.numbers.formats import FP16 as FLOAT16
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import CALIBRATED_E4M3_SCALES
from quark_fx.observers import Adjusted, Mse
from quark_fx.passes.awq import AWQ
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.passes.gptq import GPTQ
from quark_fx.passes.rotate import Rotate
from quark_fx.passes.smooth_quant import SmoothQuant

_FUSE = (fold_constants, fold_batch_norm)
_WEIGHT = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
_ACTIVATION = TensorSpec(format=UINT8)

INT8_STATIC = QuantConfig(
    weight=_WEIGHT, input=_ACTIVATION, output=_ACTIVATION, bias=TensorSpec(format=INT32), passes=_FUSE
)
"""int8 weights per channel and calibrated uint8 activations: the fastest preset on x64 processors."""

_CLIPPED = _ACTIVATION.replace(observer=Mse())

INT8_STATIC_MSE = INT8_STATIC.replace(input=_CLIPPED, output=_CLIPPED)
"""`INT8_STATIC` with activation ranges that minimize the squared error, for activations with outliers."""

INT8_DYNAMIC = QuantConfig(weight=_WEIGHT, input=_ACTIVATION.replace(dynamic=True), passes=_FUSE)
"""int8 weights per channel, and uint8 activations whose range is measured at run time; needs no data."""

INT8_WEIGHT_ONLY = QuantConfig(weight=_WEIGHT, passes=_FUSE)
"""int8 weights per channel, float activations; needs no data."""

INT16_ACT_INT8_WEIGHT = INT8_STATIC.replace(input=TensorSpec(format=INT16), output=TensorSpec(format=INT16))
"""int8 weights per channel and int16 activations, for accuracy on hardware with such kernels; CPUs compute in float."""

INT4_WEIGHT_ONLY = QuantConfig(
    weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32),
    passes=_FUSE,
    overrides=(
        Override(pattern="op:embedding", weight=_WEIGHT),
        Override(pattern="op:conv*", weight=_WEIGHT),
    ),
)
"""int4 weights in groups of 32 for matrix products, int8 weights for embeddings and convolutions; needs no data."""

FP8_STATIC = QuantConfig(
    weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL),
    input=TensorSpec(format=FP8_E4M3),
    passes=_FUSE,
)
"""E4M3 weights per channel and activations per tensor."""

FP16 = QuantConfig(weight=TensorSpec(format=FLOAT16), input=TensorSpec(format=FLOAT16), passes=_FUSE)
"""Weights and inputs of weighted operators rounded to float16; needs no data."""

BF16 = QuantConfig(weight=TensorSpec(format=BFLOAT16), input=TensorSpec(format=BFLOAT16), passes=_FUSE)
"""Weights and inputs of weighted operators rounded to bfloat16; needs no data."""

_IN_FLOAT = ("op:embedding", "op:head", "op:router", "op:depthwise")
"""Kinds of operators that stay in float in language models, by the conventions of inference servers."""

_GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=128, symmetry=Symmetry.SYMMETRIC_FULL)

W4A16_RTN = QuantConfig(weight=_GROUPS, passes=_FUSE, exclude=_IN_FLOAT)
"""For language models: int4 weights in groups of 128, rounded to nearest. Embeddings, the head, routers of experts, and
depthwise convolutions stay in float. Needs no data."""

W4A16_GPTQ = W4A16_RTN.replace(passes=(*_FUSE, GPTQ()))
"""`W4A16_RTN` with weights rounded by GPTQ."""

W4A16_AWQ = W4A16_RTN.replace(passes=(*_FUSE, AWQ()))
"""`W4A16_RTN` with channels that AWQ scales before rounding."""

_FEEDBACK = GPTQ(asymmetry=0.5, fit_scales=True, sweeps=4)

_GUIDED = replace(_FEEDBACK, guided=True, two_sided=True)

_SIGN_AWARE = _GROUPS.replace(symmetry=Symmetry.SIGN_AWARE)

W4A16_BEST = W4A16_RTN.replace(weight=_SIGN_AWARE, passes=(*_FUSE, AWQ(feedback=True), _GUIDED))
"""The most accurate preset with the bits of `W4A16_RTN`. Scales have either sign and are fitted to the data; AWQ scales
channels if this reduces GPTQ's error. GPTQ's target is half way between the quantized and the float model's
activations; it is guided by the model's predictions, and compensates errors between rows (for experts, it sweeps over
the weights instead). Takes four to eight times as long as `W4A16_GPTQ`."""

W4A16_BEST_ASYM = W4A16_BEST.replace(weight=_GROUPS.replace(symmetry=Symmetry.ASYMMETRIC))
"""`W4A16_BEST` with zero points, at 0.03 more bits per weight. Checkpoints cannot store zero points of experts."""

W4A16_ROTATED = W4A16_BEST.replace(passes=(*_FUSE, Rotate(streams=False, block=64), _GUIDED))
"""`W4A16_BEST` with inputs of operators rotated in blocks of 64 at run time instead of scaled by AWQ, which spreads
outliers of weights at the cost of a few percent more multiplications. PyTorch, ONNX, and vLLM support the rotations;
other servers do not. `Rotate` skips operators whose inputs the target cannot rotate, such as experts and layers with
biases in vLLM."""

_NO_TOKENS = Override(pattern="op:conv*", input=None)
"""Override that keeps inputs of convolutions in float, because a row of an image is not a token."""

W8A8_DYNAMIC = QuantConfig(
    weight=_WEIGHT,
    input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True),
    passes=(*_FUSE, SmoothQuant(rms=True)),
    overrides=(_NO_TOKENS,),
    exclude=_IN_FLOAT,
)
"""int8 weights per channel, and int8 activations whose range is measured per token at run time, with SmoothQuant."""

_THREE_QUARTERS = Adjusted(ratio=0.75)
"""Observer that clips ranges to three quarters. Rotated values are nearly normal. With 16 codes, the squared error of
normal values is smallest if the range ends at 0.85 of the largest of 256 values, 0.78 of 576, or 0.68 of 4096."""

W4A4_DYNAMIC = W4A16_RTN.replace(
    weight=_SIGN_AWARE,
    input=TensorSpec(
        format=INT4,
        granularity=Granularity.TOKEN,
        dynamic=True,
        symmetry=Symmetry.SYMMETRIC_FULL,
        observer=_THREE_QUARTERS,
    ),
    passes=(*_FUSE, SmoothQuant(rms=True), Rotate(streams=False), _FEEDBACK),
    overrides=(_NO_TOKENS,),
)
"""int4 weights in groups of 128, rounded by GPTQ, with scales of either sign that are fitted to the data, and int4
activations per token at run time, clipped to three quarters of their range. SmoothQuant and rotations at run time
spread outliers, which 4 bits cannot represent."""

FP8_DYNAMIC = QuantConfig(
    weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL),
    input=TensorSpec(format=FP8_E4M3, granularity=Granularity.TOKEN, dynamic=True),
    passes=_FUSE,
    overrides=(_NO_TOKENS,),
    exclude=_IN_FLOAT,
)
"""E4M3 weights per channel and activations per token at run time; needs no data."""

FP8_BLOCK = FP8_DYNAMIC.replace(
    weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=128, group_rows=128),
    input=TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=128, dynamic=True),
    overrides=(),
)
"""E4M3 weights in blocks of 128x128, and E4M3 activations in groups of 128 channels at run time, like DeepSeek-V3;
needs no data."""


def _integers(bits: int, read: TensorSpec | None) -> QuantConfig:
    """Return a configuration with integer weights in groups of 128, rounded to nearest.

    Args:
        bits: Number of bits of the weights.
        read: Spec of the inputs; `None` for float.
    """
    return W4A16_RTN.replace(weight=_GROUPS.replace(format=f"int{bits}"), input=read, overrides=(_NO_TOKENS,))


W4A8 = _integers(4, W8A8_DYNAMIC.input)
"""int4 weights in groups of 128, and int8 activations per token at run time, rounded to nearest; needs no data. For
more accuracy, add the passes of `W4A16_GPTQ` or `W4A16_BEST`."""

W4AFP8 = _integers(4, FP8_DYNAMIC.input)
"""int4 weights in groups of 128, and E4M3 activations per token at run time, otherwise like `W4A8`."""


def _block(weight: TensorSpec, *, weight_only: bool = False) -> QuantConfig:
    """Return a configuration of a block format, with scales of float weights that minimize the squared error.

    Args:
        weight: Spec of the weights, which activations share.
        weight_only: Whether activations stay in float.
    """
    scale = CALIBRATED_E4M3_SCALES if weight.scale.has_unit else weight.scale
    return QuantConfig(
        weight=weight if weight.format.is_integer else weight.replace(observer=Mse()),
        input=None if weight_only else weight.replace(dynamic=True, scale=scale),
        passes=_FUSE,
        exclude=_IN_FLOAT,
    )


MXFP8_E4M3 = _block(block_formats.MXFP8_E4M3)
"""Microscaling E4M3: weights and activations in blocks of 32. Embeddings, the head, routers of experts, and depthwise
convolutions stay in float. Needs no data."""

MXFP8_E5M2 = _block(block_formats.MXFP8_E5M2)
"""Microscaling E5M2, otherwise like `MXFP8_E4M3`."""

MXFP6_E3M2 = _block(block_formats.MXFP6_E3M2)
"""Microscaling 6-bit floats E3M2, otherwise like `MXFP8_E4M3`."""

MXFP6_E2M3 = _block(block_formats.MXFP6_E2M3)
"""Microscaling 6-bit floats E2M3, otherwise like `MXFP8_E4M3`."""

MXFP4 = _block(block_formats.MXFP4)
"""Microscaling 4-bit floats, otherwise like `MXFP8_E4M3`."""

MXFP4_WEIGHT_ONLY = _block(block_formats.MXFP4, weight_only=True)
"""The weights of `MXFP4` with float activations."""

MXFP4_BEST = MXFP4.replace(passes=(*_FUSE, SmoothQuant(rms=True), Rotate(streams=False), GPTQ(asymmetry=0.5)))
"""The most accurate preset with the bits of `MXFP4`: SmoothQuant, rotations at run time, and GPTQ, whose target is half
way between the quantized and the float model's activations. Rotations spread outliers, which would increase the scale
of all 32 values of a block."""

MXINT8 = _block(block_formats.MXINT8)
"""Microscaling 8-bit integers, otherwise like `MXFP8_E4M3`."""

NVFP4 = _block(block_formats.NVFP4)
"""4-bit floats in blocks of 16 with E4M3 scales and one float32 scale per tensor, otherwise like `MXFP8_E4M3`. The
float32 scale of activations is calibrated, because checkpoints store it; with `input.replace(scale="fp8_e4m3")`, it is
measured at run time, which needs no data."""

NVFP4_WEIGHT_ONLY = _block(block_formats.NVFP4, weight_only=True)
"""The weights of `NVFP4` with float activations."""

NVFP4_BEST = NVFP4.replace(passes=(*_FUSE, SmoothQuant(rms=True), GPTQ(asymmetry=0.5, static_groups=False)))
"""The most accurate preset with the bits of `NVFP4`: SmoothQuant, and GPTQ, whose target is half way between the
quantized and the float model's activations. GPTQ chooses the scale of each group just before it rounds the group."""

BFP16 = _block(block_formats.BFP16)
"""8-bit mantissas in blocks of 8 that share an exponent, otherwise like `MXFP8_E4M3`."""

MX9 = _block(block_formats.MX9)
"""Shared microexponents, 9 bits per value, otherwise like `MXFP8_E4M3`."""

MX6 = _block(block_formats.MX6)
"""Shared microexponents, 6 bits per value, otherwise like `MXFP8_E4M3`."""

MX4 = _block(block_formats.MX4)
"""Shared microexponents, 4 bits per value, otherwise like `MXFP8_E4M3`."""

_TOKENS = {4: TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True), 8: W8A8_DYNAMIC.input, 16: None}

_CEIL = block_formats.MXFP8_E4M3.replace(dynamic=True, scale="e8m0_ceil")
"""Spec of MXFP8 activations with the scale rule of checkpoint readers."""

SCHEMES.update(
    {
        **{f"w{w}a{a}": _integers(w, read) for a, read in _TOKENS.items() for w in range(2, min(a + 1, 9))},
        "w8a8": W8A8_DYNAMIC.replace(passes=_FUSE),
        "int8": W8A8_DYNAMIC.replace(passes=_FUSE),
        "w4a16_asym": _integers(4, None).replace(weight=_GROUPS.replace(symmetry=Symmetry.ASYMMETRIC)),
        "w4afp8": W4AFP8,
        "fp8": FP8_STATIC.replace(weight=TensorSpec(format=FP8_E4M3), exclude=_IN_FLOAT),
        "fp8_dynamic": FP8_DYNAMIC,
        "fp8_block": FP8_BLOCK,
        "nvfp4": NVFP4,
        "nvfp4a16": NVFP4_WEIGHT_ONLY,
        "mxfp4": MXFP4,
        "mxfp4a16": MXFP4_WEIGHT_ONLY,
        "mxfp4xfp8": MXFP4.replace(input=FP8_BLOCK.input),
        "mxfp6a16": MXFP6_E2M3.replace(input=None),
        "mxfp6a8": MXFP6_E2M3.replace(input=_CEIL),
        "mxfp8": MXFP8_E4M3.replace(input=_CEIL),
        "mxfp8a16": MXFP8_E4M3.replace(input=None),
    }
)

for _name, _value in list(globals().items()):
    if isinstance(_value, QuantConfig):
        PRESETS.add(_value, _name.lower())


def __getattr__(name: str) -> QuantConfig:
    """Return a preset that another module has registered."""
    return PRESETS.attribute(name)
