"""OpenVINO on a CPU, which reads the standard pairs of an ONNX file (https://docs.openvino.ai, "Low Precision
Transformations").

Its kernels add products of 8 bits in pairs in 16 bits on processors without VNNI, as ONNX Runtime's do. A convolution
is summed in integers whatever reads its result, so its result needs no codes. Additions stay in float: with codes in
front of them, OpenVINO's results are further from the graph's, at the same speed (`benchmarks.in_openvino` has both).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target, undivided_groups
from quark_fx.errors import ExportError
from quark_fx.graph.operators import RECURRENT
from quark_fx.targets.onnxruntime import ARITHMETIC, ONNX_TYPES

if TYPE_CHECKING:
    import onnx_ir as ir

    from quark_fx.graph.linear import Linear


def _is_small_float_or_block(spec: TensorSpec, operand: Operand) -> bool:
    return spec.scale.is_8_bit or (not spec.format.is_integer and spec.format.needs_scale)


def _is_measured(spec: TensorSpec, operand: Operand) -> bool:
    return spec.dynamic


def _check(model: ir.Model) -> None:
    """Refuse groups of which the last one is shorter: its reader takes none."""
    bad = []
    for node in model.graph.all_nodes():
        block, codes = node.attributes.get_int("block_size", 0), node.inputs[0] if node.inputs else None
        if not block or codes is None or codes.shape is None:
            continue
        size = codes.shape[node.attributes.get_int("axis", 1)]
        if isinstance(size, int) and size % block:
            bad.append(f"  {node.name}: {size} values in groups of {block}")
    if bad:
        raise ExportError(
            "OpenVINO reads no groups that do not divide the dimension they lie along:\n"
            + "\n".join(bad)
            + "\nGive these operators another group_size or granularity='channel' by an override."
        )


def _refuses(kind: str, weight: TensorSpec, read: TensorSpec | None, linear: Linear | None) -> str:
    """Return why OpenVINO cannot read the groups of a weight; empty if it can."""
    return undivided_groups(weight, linear, (128, 64, 32, 16), "set granularity='channel' for it")


OPENVINO = Target(
    name="openvino",
    refuses=(
        *ONNX_TYPES,
        Refusal(
            _is_small_float_or_block,
            "OpenVINO reads no blocks, and computes floats of 8 bits otherwise than the graph ({spec.format}); use "
            "integers with scales in float32",
        ),
        Refusal(
            _is_measured,
            "OpenVINO multiplies {spec.format} codes measured at run time in float; calibrate them (drop "
            "dynamic=True), or quantize weights alone",
        ),
    ),
    placement=Placement(
        arithmetic=ARITHMETIC - {"aten.add.Tensor", "aten.mul.Tensor"},
        in_float=RECURRENT,  # OpenVINO reads their weights as constants alone
        refuses=_refuses,
    ),
    limits_pairs=True,
    onnx=OnnxFiles(formats=("qdq",), runtime="openvino", check=_check),
)
