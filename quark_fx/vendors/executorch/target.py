"""The target `executorch`: ExecuTorch with XNNPACK, which runs the program of `quark_fx.export.pt2e`.

XNNPACK's integer kernels return quantized outputs: a convolution or product whose result is not quantized runs in
float. The kernels add 8-bit products in 32 bits on every processor.

Source: https://docs.pytorch.org/executorch, "XNNPACK Quantization".
"""

from __future__ import annotations

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import Operand, Placement, Refusal, Target, register_target
from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import RECURRENT
from quark_fx.numbers.formats import INT4, INT8, INT32, UINT8
from quark_fx.numbers.scales import FLOAT32, POWER_OF_TWO


def _is_no_weight(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.WEIGHT and (spec.format not in (INT4, INT8) or not spec.scheme.symmetric)


def _is_no_activation(spec: TensorSpec, operand: Operand) -> bool:
    return operand not in (Operand.WEIGHT, Operand.BIAS) and spec.format not in (INT8, UINT8)


def _is_no_bias(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.BIAS and spec.format != INT32


def _has_small_scales(spec: TensorSpec, operand: Operand) -> bool:
    return spec.scale not in (FLOAT32, POWER_OF_TWO)


def _is_measured_symmetric(spec: TensorSpec, operand: Operand) -> bool:
    return spec.dynamic and spec.scheme.symmetric


def _measures_a_share(spec: TensorSpec, operand: Operand) -> bool:
    return spec.measures_a_share


def _is_cache_by_head(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.KV_CACHE and spec.granularity in (Granularity.HEAD, Granularity.CHANNEL)


def _always(linear: Linear) -> bool:
    return True


EXECUTORCH = Target(
    name="executorch",
    refuses=(
        Refusal(
            _is_no_weight,
            "XNNPACK's kernels support int8 and int4 weights without zero points, not {spec.symmetry} {spec.format}; "
            "use those, or target='torch'",
        ),
        Refusal(
            _is_no_activation,
            "XNNPACK's kernels support activations in int8 or uint8, not {spec.format}; use those, or target='torch'",
        ),
        Refusal(
            _is_no_bias, "XNNPACK's kernels support biases in int32, not {spec.format}; set format='int32' or bias=None"
        ),
        Refusal(_has_small_scales, "XNNPACK needs scales in float32; drop scale, or use target='torch'"),
        Refusal(
            _is_measured_symmetric,
            "XNNPACK measures ranges at run time with zero points; set symmetry='asymmetric', or use target='torch'",
        ),
        Refusal(
            _measures_a_share,
            "XNNPACK always uses the whole range at run time; drop the observer, or use target='torch'",
        ),
        Refusal(
            _is_cache_by_head,
            "PT2E supports one scale per activation or per token; set granularity='tensor' of kv_cache, or use "
            "target='torch'",
        ),
    ),
    placement=Placement(
        arithmetic=frozenset(
            {
                *("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.mean.dim"),
                *("aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"),
            }
        ),
        rounds_output=_always,
        in_float=RECURRENT | {"embedding"},
    ),
)
register_target(EXECUTORCH)

__all__ = ["EXECUTORCH"]
