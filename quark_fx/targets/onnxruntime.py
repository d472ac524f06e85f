"""ONNX Runtime's CPU provider: files whose int8 sums saturate on no processor, and files for those with VNNI."""

from __future__ import annotations

from dataclasses import replace

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target
from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import RECURRENT
from quark_fx.numbers.formats import UINT8
from quark_fx.numbers.qparams import Symmetry

MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice"})
"""Operators of ONNX that runtimes move quantizers past: their output values are input values."""


def _has_no_type(spec: TensorSpec, operand: Operand) -> bool:
    """Tell whether ONNX has no type for the format, and the export builds none, as it does for weights and groups."""
    fmt, constant = spec.format, operand is Operand.WEIGHT
    if operand is Operand.BIAS:
        return False
    if fmt.has_onnx_type:
        # A dequantizer takes no zero points of 32 bits.
        return fmt.bits >= 32 and spec.symmetry is Symmetry.ASYMMETRIC
    if fmt.onnx_container != fmt:
        # Codes of an activation are clipped, for which runtimes have kernels of whole bytes.
        return fmt.bits > 16 or (not constant and fmt.activation_container.bits != 8)
    if fmt.vector > 1 or fmt.bits > 8:
        return True
    return not constant and (spec.group_size is None or not (fmt.is_float or fmt.sign_magnitude))


def _measures_lone_8_bit_scales(spec: TensorSpec, operand: Operand) -> bool:
    return spec.scale.is_8_bit and spec.dynamic and spec.group_size is None


def _groups_with_zero_points(spec: TensorSpec, operand: Operand) -> bool:
    return operand is not Operand.WEIGHT and spec.group_size is not None and not spec.scheme.symmetric


def _measures_a_share_of_groups(spec: TensorSpec, operand: Operand) -> bool:
    return spec.measures_a_share and spec.group_size is not None


def _has_offsets(spec: TensorSpec, operand: Operand) -> bool:
    return spec.symmetry is Symmetry.OFFSET


ONNX_TYPES = (
    Refusal(_has_offsets, "offsets between codes have no place in ONNX; set symmetry='asymmetric', or target='torch'"),
    Refusal(_has_no_type, "{spec.format} has no ONNX type; use 2 to 8 or 16 bits, or target='torch'"),
    Refusal(
        _measures_lone_8_bit_scales,
        "scales of 8 bits are measured per group in ONNX; set granularity='group', or target='torch'",
    ),
    Refusal(
        _groups_with_zero_points,
        "activations in groups have no zero points in ONNX; set symmetry='symmetric', or target='torch'",
    ),
    Refusal(
        _measures_a_share_of_groups,
        "activations in groups are measured in their whole range in ONNX; drop the observer, or use target='torch'",
    ),
)
"""What no ONNX file holds."""

ARITHMETIC = frozenset(
    {
        *("aten.add.Tensor", "aten.mul.Tensor"),
        *("aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default", "aten.avg_pool1d.default"),
    }
)
"""Operators with integer kernels that are worth it only between quantized operators: a residual add of a
convolutional network qualifies, that of a transformer (whose output is normalized in float) does not."""


def _is_convolution(linear: Linear) -> bool:
    """Tell whether the integer kernels of an operator exist only with a quantized output, as measured."""
    return linear.kind == "conv"


def _is_read_in_integers(kind: str, spec: TensorSpec) -> bool:
    """Tell whether an operator of a kind reads codes: of recurrent layers, an LSTM alone, which measures its input."""
    if kind not in RECURRENT:
        return True
    return kind == "lstm" and spec.ratio == 1 and spec.replace(observer=None) == TensorSpec(format=UINT8, dynamic=True)


PLACEMENT = Placement(arithmetic=ARITHMETIC, rounds_output=_is_convolution, rounds_input=_is_read_in_integers)

ONNX = Target(
    name="onnx",
    refuses=ONNX_TYPES,
    placement=PLACEMENT,
    limits_pairs=True,
    onnx=OnnxFiles(runtime="onnxruntime"),
    latency_runtime="onnxruntime",
)

ONNX_VNNI = replace(ONNX, name="onnx_vnni", limits_pairs=False)
