"""The target `dpu`: on AMD's DPU, all scales are powers of two, and every operator reads and writes codes.

`docs/dpu.md` describes the rules.
"""

from __future__ import annotations

from torch.fx import Node

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target, register_target
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import PADS, RECURRENT, is_average, operator_row
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.targets.onnxruntime import ARITHMETIC, ONNX_TYPES


def _needs_multiplication(spec: TensorSpec, operand: Operand) -> bool:
    """Tell whether a DPU would have to multiply by the scales of a spec, because a shift cannot apply them."""
    return not (
        spec.scale == POWER_OF_TWO
        and spec.symmetry in (Symmetry.SYMMETRIC, Symmetry.SYMMETRIC_FULL)
        and spec.format.is_integer
        and spec.format.has_onnx_type
        and spec.granularity is Granularity.TENSOR
        and not spec.dynamic
    )


def _is_computed(linear: Linear) -> bool:
    """Tell whether a DPU computes an operator: it must be a convolution, or a linear layer with a 2-D result."""
    return bool(linear.kernel) or (linear.kind == "linear" and linear.node.meta["val"].dim() == 2)


def continues(node: Node, user: Node) -> bool:
    """Tell whether a DPU applies `user` to the result of `node` before it rounds that result.

    It does so for a leaky ReLU, and for the factor that the passes insert after an average or a hard sigmoid to match
    the DPU's arithmetic.
    """
    if len(node.users) != 1 or user.args[:1] != (node,):
        return False
    name = target_name(node)
    if target_name(user) == "aten.mul.Scalar":
        return is_average(node) or name == "aten.hardsigmoid.default"
    return target_name(user) == "aten.leaky_relu.default" and (
        operator_row(node) is not None or is_average(node) or name in ("aten.add.Tensor", "aten.mul.Scalar")
    )


_ARITHMETIC = ARITHMETIC | {
    *("aten.sub.Tensor", "aten.leaky_relu.default", "aten.hardsigmoid.default", "aten.mean.dim", *PADS),
}

DPU = register_target(
    Target(
        name="dpu",
        refuses=(
            *ONNX_TYPES,
            Refusal(
                _needs_multiplication,
                "a DPU scales by bit shifts: use symmetric integers with scale='power_of_two' and one static scale per "
                "tensor, like the preset 'xint8', or another target",
            ),
        ),
        placement=Placement(
            arithmetic=_ARITHMETIC,
            anywhere=True,
            rounds_output=_is_computed,
            in_float=RECURRENT,
            continues=continues,
            branches=False,
        ),
        onnx=OnnxFiles(runtime="onnxruntime"),
    )
)
