"""Ready configurations, as plain values: change one with `.replace(...)`."""

from __future__ import annotations

from dataclasses import replace

from quark_fx.config import block_formats
from quark_fx.config.named import PRESETS as PRESETS
from quark_fx.config.named import preset as preset
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.numbers.formats import BF16 as BFLOAT16
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, INT32, UINT8
from quark_fx.numbers.formats import FP16 as FLOAT16
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.observers import Adjusted, Mse, PowerOfTwoMinMse
from quark_fx.passes.awq import AWQ
from quark_fx.passes.dpu.align_shifts import AlignShifts
from quark_fx.passes.dpu.average import use_dpu_averages
from quark_fx.passes.dpu.hard_sigmoid import use_dpu_hard_sigmoids
from quark_fx.passes.dpu.leaky_relu import use_dpu_slopes
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.passes.global_mean import pool_means
from quark_fx.passes.gptq import GPTQ
from quark_fx.passes.large_pool import SplitLargePools
from quark_fx.passes.rotate import Rotate
from quark_fx.passes.smooth_quant import SmoothQuant
from quark_fx.passes.split_to_slice import slice_splits
from quark_fx.passes.swish import spell_out_swish
from quark_fx.targets import DPU

_FUSE = (fold_constants, fold_batch_norm)
_WEIGHT = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
_ACTIVATION = TensorSpec(format=UINT8)

INT8_STATIC = QuantConfig(
    weight=_WEIGHT, input=_ACTIVATION, output=_ACTIVATION, bias=TensorSpec(format=INT32), passes=_FUSE
)
"""int8 weights per channel, uint8 activations calibrated beforehand: what runs fastest on x64 processors."""

_CLIPPED = _ACTIVATION.replace(observer=Mse())

INT8_STATIC_MSE = INT8_STATIC.replace(input=_CLIPPED, output=_CLIPPED)
"""`INT8_STATIC` with the activation ranges of smallest squared error: more accurate where there are outliers."""

INT8_DYNAMIC = QuantConfig(weight=_WEIGHT, input=_ACTIVATION.replace(dynamic=True), passes=_FUSE)
"""int8 weights per channel, uint8 activations whose range is measured at run time; needs no data."""

INT8_WEIGHT_ONLY = QuantConfig(weight=_WEIGHT, passes=_FUSE)
"""int8 weights per channel, float activations; needs no data."""

INT16_ACT_INT8_WEIGHT = INT8_STATIC.replace(input=TensorSpec(format=INT16), output=TensorSpec(format=INT16))
"""int8 weights per channel, int16 activations: for accuracy where kernels exist (processors run it in float)."""

INT4_WEIGHT_ONLY = QuantConfig(
    weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32),
    passes=_FUSE,
    overrides=(
        Override(pattern="op:embedding", weight=_WEIGHT),
        Override(pattern="op:conv*", weight=_WEIGHT),
    ),
)
"""int4 weights in groups of 32 for matrix products, int8 for embeddings and convolutions; needs no data."""

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

_POWER_OF_TWO = TensorSpec(format=INT8, scale=POWER_OF_TWO, observer=PowerOfTwoMinMse())

XINT8 = QuantConfig(
    weight=_POWER_OF_TWO,
    input=_POWER_OF_TWO,
    output=_POWER_OF_TWO,
    bias=_POWER_OF_TWO,
    passes=(
        *_FUSE,
        pool_means,
        SplitLargePools(),
        slice_splits,
        spell_out_swish,
        use_dpu_averages,
        use_dpu_slopes,
        use_dpu_hard_sigmoids,
        AlignShifts(),
    ),
    target=DPU,
)
"""int8 everywhere, per tensor, with the power-of-two scales of smallest squared error: for accelerators that shift
instead of multiply. Where values are rounded, and which scales go together, is what a DPU can do (`docs/dpu.md`)."""

_IN_FLOAT = ("op:embedding", "op:head", "op:router", "op:depthwise")
"""What language models keep, as a server expects."""

_GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=128, symmetry=Symmetry.SYMMETRIC_FULL)

W4A16_RTN = QuantConfig(weight=_GROUPS, passes=_FUSE, exclude=_IN_FLOAT)
"""Language models: int4 weights in groups of 128, rounded to nearest; embedding, head, routers of experts and depthwise
convolutions in float; needs no data."""

W4A16_GPTQ = W4A16_RTN.replace(passes=(*_FUSE, GPTQ()))
"""`W4A16_RTN`, rounded by GPTQ."""

W4A16_AWQ = W4A16_RTN.replace(passes=(*_FUSE, AWQ()))
"""`W4A16_RTN` after AWQ's scales."""

_FEEDBACK = GPTQ(asymmetry=0.5, fit_scales=True, sweeps=4)

_GUIDED = replace(_FEEDBACK, guided=True, two_sided=True)

_SIGN_AWARE = _GROUPS.replace(symmetry=Symmetry.SIGN_AWARE)

W4A16_BEST = W4A16_RTN.replace(weight=_SIGN_AWARE, passes=(*_FUSE, AWQ(feedback=True), _GUIDED))
"""What is most accurate at the bits of `W4A16_RTN`: scales of either sign that fit the data, AWQ's scales where GPTQ
loses less with them, and GPTQ half way towards the float model's own activations, guided by the model's predictions,
where rows make up for each other's errors; experts are swept instead; four to eight times the time of `W4A16_GPTQ`."""

W4A16_BEST_ASYM = W4A16_BEST.replace(weight=_GROUPS.replace(symmetry=Symmetry.ASYMMETRIC))
"""`W4A16_BEST` with zero points, for 0.03 bits more; experts with zero points have no place in a checkpoint."""

W4A16_ROTATED = W4A16_BEST.replace(passes=(*_FUSE, Rotate(streams=False, block=64), _GUIDED))
"""The bits of `W4A16_BEST`. What operators read is rotated in blocks of 64 at run time, for a few percent more
multiplications, so that outliers of weights are spread. PyTorch, ONNX and vLLM run it. Other servers have no rotations;
`Rotate` skips what a target does not rotate, as experts and layers with biases in vLLM."""

_NO_TOKENS = Override(pattern="op:conv*", input=None)
"""Tokens are rows of the last dimension, which those of an image are not."""

W8A8_DYNAMIC = QuantConfig(
    weight=_WEIGHT,
    input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True),
    passes=(*_FUSE, SmoothQuant(rms=True)),
    overrides=(_NO_TOKENS,),
    exclude=_IN_FLOAT,
)
"""int8 weights per channel, int8 activations per token at run time, smoothed."""

_THREE_QUARTERS = Adjusted(ratio=0.75)
"""Rotated values are nearly normal. With 16 codes, the squared error of normal values is smallest where the range ends
at 0.85 of the largest of 256 values, 0.78 of 576, 0.68 of 4096."""

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
"""int4 weights in groups of 128 by GPTQ, with scales of either sign that fit the data, and int4 activations per token
at run time, in three quarters of the range; both smoothed, and rotated at run time, which spreads the outliers that 4
bits have no room for."""

FP8_DYNAMIC = QuantConfig(
    weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL),
    input=TensorSpec(format=FP8_E4M3, granularity=Granularity.TOKEN, dynamic=True),
    passes=_FUSE,
    overrides=(_NO_TOKENS,),
    exclude=_IN_FLOAT,
)
"""E4M3 weights per channel and activations per token at run time; needs no data."""


def _block(weight: TensorSpec, *, weight_only: bool = False) -> QuantConfig:
    """Return a configuration of a block format; the scales of weights in floats are those of smallest squared error."""
    return QuantConfig(
        weight=weight if weight.format.is_integer else weight.replace(observer=Mse()),
        input=None if weight_only else weight.replace(dynamic=True),
        passes=_FUSE,
        exclude=_IN_FLOAT,
    )


MXFP8_E4M3 = _block(block_formats.MXFP8_E4M3)
"""Microscaling E4M3, weights and activations in blocks of 32, embedding, head, routers of experts and depthwise
convolutions in float; needs no data."""

MXFP8_E5M2 = _block(block_formats.MXFP8_E5M2)
"""Microscaling E5M2, otherwise as `MXFP8_E4M3`."""

MXFP6_E3M2 = _block(block_formats.MXFP6_E3M2)
"""Microscaling 6-bit floats E3M2, otherwise as `MXFP8_E4M3`."""

MXFP6_E2M3 = _block(block_formats.MXFP6_E2M3)
"""Microscaling 6-bit floats E2M3, otherwise as `MXFP8_E4M3`."""

MXFP4 = _block(block_formats.MXFP4)
"""Microscaling 4-bit floats, otherwise as `MXFP8_E4M3`."""

MXFP4_WEIGHT_ONLY = _block(block_formats.MXFP4, weight_only=True)
"""The weights of `MXFP4`, float activations."""

MXFP4_BEST = MXFP4.replace(passes=(*_FUSE, SmoothQuant(rms=True), Rotate(streams=False), GPTQ(asymmetry=0.5)))
"""What is most accurate at `MXFP4`: smoothed, and rotated at run time, which spreads the outliers that make a power of
two for 32 values too large for the others, and GPTQ half way towards the float model's own activations."""

MXINT8 = _block(block_formats.MXINT8)
"""Microscaling 8-bit integers, otherwise as `MXFP8_E4M3`."""

NVFP4 = _block(block_formats.NVFP4)
"""4-bit floats in blocks of 16 with E4M3 scales below one scale per tensor, otherwise as `MXFP8_E4M3`."""

NVFP4_WEIGHT_ONLY = _block(block_formats.NVFP4, weight_only=True)
"""The weights of `NVFP4`, float activations."""

NVFP4_BEST = NVFP4.replace(passes=(*_FUSE, SmoothQuant(rms=True), GPTQ(asymmetry=0.5, static_groups=False)))
"""What is most accurate at `NVFP4`: smoothed, and GPTQ half way towards the float model's own activations, which
chooses each group's scale just before rounding it."""

BFP16 = _block(block_formats.BFP16)
"""8-bit mantissas in blocks of 8 that share an exponent, otherwise as `MXFP8_E4M3`."""

MX9 = _block(block_formats.MX9)
"""Shared microexponents, 9 bits a value, otherwise as `MXFP8_E4M3`."""

MX6 = _block(block_formats.MX6)
"""Shared microexponents, 6 bits a value, otherwise as `MXFP8_E4M3`."""

MX4 = _block(block_formats.MX4)
"""Shared microexponents, 4 bits a value, otherwise as `MXFP8_E4M3`."""

for _name, _value in list(globals().items()):
    if isinstance(_value, QuantConfig):
        PRESETS.add(_value, _name.lower())
