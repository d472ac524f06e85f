"""ONNX Runtime on CPUs: one target whose int8 sums never saturate, and one for processors with VNNI."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target
from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import RECURRENT
from quark_fx.numbers.formats import UINT8
from quark_fx.numbers.qparams import Symmetry


class Mover(NamedTuple):
    """An ONNX operator that only moves the values of its first input, or of all inputs.

    Attributes:
        crossed: Whether runtimes move quantizers across the operator.
        on_codes: Whether ONNX Runtime runs the operator on 8-bit codes; `format="qoperator"` requires it.
    """

    crossed: bool = False
    on_codes: bool = False


_BOTH = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice")

MOVERS: dict[str, Mover] = {
    **dict.fromkeys(_BOTH, Mover(crossed=True, on_codes=True)),
    **dict.fromkeys(("Expand", "Gather"), Mover(on_codes=True)),
    **dict.fromkeys(("Identity", "Concat", "Pad", "Tile", "Split", "DepthToSpace", "SpaceToDepth"), Mover()),
    **dict.fromkeys(("GatherElements", "GatherND"), Mover()),
}
"""ONNX operators that only move values; constant padding adds zeros, which every format can represent."""

MOVES = frozenset(name for name, row in MOVERS.items() if row.crossed)
"""ONNX operators across which runtimes move quantizers."""


def _has_no_type(spec: TensorSpec, operand: Operand) -> bool:
    """Return True if ONNX lacks a type for the format, and the export cannot express it with other operators."""
    fmt, constant = spec.format, operand is Operand.WEIGHT
    if operand is Operand.BIAS:
        return False
    if fmt.has_onnx_type:
        # DequantizeLinear does not support 32-bit zero points.
        return fmt.bits >= 32 and spec.symmetry is Symmetry.ASYMMETRIC
    if fmt.onnx_container != fmt:
        # Codes of an activation are clipped, and runtimes only have clip kernels for whole bytes.
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
    Refusal(_has_offsets, "ONNX cannot store offsets; set symmetry='asymmetric', or target='torch'"),
    Refusal(
        _has_no_type,
        "{spec.format} has no ONNX type; use an integer or float format with 2 to 8 or 16 bits, or target='torch'",
    ),
    Refusal(
        _measures_lone_8_bit_scales,
        "ONNX computes 8-bit scales at run time only per group; set granularity='group', or target='torch'",
    ),
    Refusal(
        _groups_with_zero_points,
        "ONNX does not support zero points for activations in groups; set symmetry='symmetric', or target='torch'",
    ),
    Refusal(
        _measures_a_share_of_groups,
        "ONNX always uses the whole range of activations in groups; drop the observer, or use target='torch'",
    ),
)
"""Rules for specs that ONNX files cannot store."""

ARITHMETIC = frozenset(
    {
        *("aten.add.Tensor", "aten.mul.Tensor"),
        *("aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default", "aten.avg_pool1d.default"),
    }
)
"""Operators whose integer kernels only pay off between quantized operators. The residual add of a convolutional network
qualifies; the residual add of a transformer, whose output is normalized in float, does not."""


def _is_convolution(linear: Linear) -> bool:
    """Return True for a convolution, whose integer kernels need a quantized output; measured in ONNX Runtime."""
    return linear.kind == "conv"


def _is_read_in_integers(kind: str, spec: TensorSpec) -> bool:
    """Return True if an operator reads codes; of the recurrent layers, only an LSTM with a dynamic uint8 input does."""
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
