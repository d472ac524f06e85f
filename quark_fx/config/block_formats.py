"""Named block number formats as plain `TensorSpec` values: codes of a small format times a scale per block.

A block format consists of an element format, a block size, and a scale format. Blocks run along the reduction
dimension. Pass a spec to `QuantConfig(weight=...)`, and its `.replace(dynamic=True)` to `QuantConfig(input=...)`,
because scales of activations are computed at run time.

>>> str(MXFP4), str(NVFP4), str(MX6.replace(dynamic=True))
('fp4_e2m1 group 32 e8m0_even', 'fp4_e2m1 group 16 e4m3 scales', 'sm5 group 16/2 e8m0_floor dynamic')

Source:
    OCP Microscaling Formats (MX) Specification v1.0; NVIDIA's NVFP4; Rouhani et al. 2023, "With Shared
    Microexponents, A Little Shifting Goes a Long Way".
"""

from __future__ import annotations

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.numbers.formats import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, INT8, SM3, SM5, SM8
from quark_fx.numbers.scales import E4M3_SCALES, E8M0_EVEN, E8M0_FLOOR, HALVES, QuantizedScale

MXFP8_E4M3 = TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=32, scale=E8M0_EVEN)
"""8-bit floats, blocks of 32. The standard does not prescribe how to choose a block's exponent. The MX formats here use
the exponent of the largest magnitude, after it is rounded to the element's mantissa (E4M3 still saturates, above
464/448 of its largest value). `.replace(scale="e8m0_floor")` is the standard's example; `"e8m0_ceil"` never
saturates."""

MXFP8_E5M2 = MXFP8_E4M3.replace(format=FP8_E5M2)
"""8-bit floats with a larger range than E4M3, blocks of 32."""

MXFP6_E3M2 = MXFP8_E4M3.replace(format=FP6_E3M2)
"""6-bit floats with a larger range than E2M3, blocks of 32."""

MXFP6_E2M3 = MXFP8_E4M3.replace(format=FP6_E2M3)
"""6-bit floats with more precision than E3M2, blocks of 32."""

MXFP4 = MXFP8_E4M3.replace(format=FP4_E2M1)
"""4-bit floats, blocks of 32."""

MXINT8 = MXFP8_E4M3.replace(format=INT8)
"""8-bit integers, blocks of 32. The scale here is the step between codes, 1/64 of the E8M0 scale of the standard."""

NVFP4 = TensorSpec(format=FP4_E2M1, granularity=Granularity.GROUP, group_size=16, scale=E4M3_SCALES)
"""4-bit floats, blocks of 16, with an E4M3 scale per block and one float32 scale per tensor. `E4M3_SCALES.quantized`
recovers both."""

BFP16 = MXINT8.replace(group_size=8)
"""Block floating point: 8-bit mantissas, blocks of 8 that share an exponent. The exponent is one higher if a positive
value would round to more than 127 (-128 is a code); with `.replace(scale="e8m0_floor")`, such a value saturates."""

MX9 = TensorSpec(
    format=SM8,
    granularity=Granularity.GROUP,
    group_size=2,
    scale=QuantizedScale(HALVES, group_size=8, scale=E8M0_FLOOR),
)
"""Sign and 7 bits; 16 values share an exponent, and each pair shares a bit that halves its scale: 9 bits per value."""

MX6 = MX9.replace(format=SM5)
"""Sign and 4 bits, otherwise the same as `MX9`: 6 bits per value."""

MX4 = MX9.replace(format=SM3)
"""Sign and 2 bits, otherwise the same as `MX9`: 4 bits per value."""

BLOCK_FORMATS: dict[str, TensorSpec] = {
    name.lower(): value for name, value in list(globals().items()) if isinstance(value, TensorSpec)
}
"""Every spec above by its lowercase name."""

__all__ = [
    "BFP16",
    "BLOCK_FORMATS",
    "MX4",
    "MX6",
    "MX9",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "NVFP4",
]
