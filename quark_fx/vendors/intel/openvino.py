"""The target `openvino`: OpenVINO on a CPU, which runs ONNX files with `QuantizeLinear` / `DequantizeLinear` pairs.

Like ONNX Runtime, OpenVINO adds pairs of 8-bit products in 16 bits on processors without VNNI. Outputs of convolutions
need not be quantized: the sums are integers either way. Additions stay in float: with quantizers before them,
OpenVINO's results differ more from the graph, at the same speed (`benchmarks.in_openvino` measures both).

Source: https://docs.openvino.ai, "Low Precision Transformations".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target, register_target, undivided_groups
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
    """Raise `ExportError` for groups that do not divide their dimension, which OpenVINO cannot load."""
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
            "OpenVINO does not support groups that do not divide their dimension:\n"
            + "\n".join(bad)
            + "\nGive these operators another group_size or granularity='channel' by an override."
        )


def _refuses(kind: str, weight: TensorSpec, read: TensorSpec | None, linear: Linear | None) -> str:
    """Return the reason why OpenVINO does not support the groups of a weight; empty if it supports them."""
    return undivided_groups(weight, linear, (128, 64, 32, 16), "set granularity='channel' for it")


OPENVINO = Target(
    name="openvino",
    refuses=(
        *ONNX_TYPES,
        Refusal(
            _is_small_float_or_block,
            "OpenVINO does not support block formats, and its 8-bit floats differ from the graph ({spec.format}); use "
            "integers with float32 scales",
        ),
        Refusal(
            _is_measured,
            "OpenVINO multiplies dynamic {spec.format} activations in float; calibrate them (drop dynamic=True), or "
            "quantize only weights",
        ),
    ),
    placement=Placement(
        arithmetic=ARITHMETIC - {"aten.add.Tensor", "aten.mul.Tensor"},
        in_float=RECURRENT,  # OpenVINO requires constant weights for recurrent layers
        refuses=_refuses,
    ),
    limits_pairs=True,
    onnx=OnnxFiles(formats=("qdq",), runtime="openvino", check=_check),
)
register_target(OPENVINO)
