"""A target of one file: int8 as NVIDIA's documentation of TensorRT 10 has it.

"Working with Quantized Types": symmetric int8, one scale per tensor for activations, per tensor or channel for weights.
Its ONNX parser wants zero points of 0 and reads no `DequantizeLinear` of int32, so biases stay in float.
"""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.config.specs import Granularity
from quark_fx.errors import ExportError
from quark_fx.numbers.formats import INT8
from quark_fx.targets import OnnxFiles, Operand, Placement, Refusal, Target, register_target


def _check(model: ir.Model) -> None:
    bad = []
    for node in (n for n in model.graph.all_nodes() if n.op_type in ("QuantizeLinear", "DequantizeLinear")):
        codes = (node.outputs if node.op_type == "QuantizeLinear" else node.inputs)[0]
        points = node.inputs[2] if len(node.inputs) > 2 else None
        if codes is not None and codes.dtype != ir.DataType.INT8:
            bad.append(f"  codes of {codes.dtype} at {node.name}")
        if points is not None and (points.const_value is None or points.const_value.numpy().any()):
            bad.append(f"  a zero point at {node.name}")
    if bad:
        raise ExportError("TensorRT does not read\n" + "\n".join(bad) + "\nQuantize with target='tensorrt_like'.")


TENSORRT_LIKE = register_target(
    Target(
        name="tensorrt_like",
        refuses=(
            Refusal(lambda _, operand: operand is Operand.BIAS, "TensorRT adds biases in float; set bias=None"),
            Refusal(
                lambda spec, _: spec.format != INT8,
                "this target is TensorRT's int8, not {spec.format}; set format='int8'",
            ),
            Refusal(
                lambda spec, _: not spec.scheme.symmetric,
                "TensorRT takes no zero points; set symmetry='symmetric'",
            ),
            Refusal(
                lambda spec, _: spec.granularity not in (Granularity.TENSOR, Granularity.CHANNEL),
                "TensorRT has int8 scales per tensor or channel, not per {spec.granularity}; set granularity='channel'",
            ),
            Refusal(lambda spec, _: spec.dynamic, "TensorRT wants scales in the file; drop dynamic=True"),
        ),
        placement=Placement(arithmetic=frozenset({"aten.add.Tensor"})),
        onnx=OnnxFiles(formats=("qdq",), opset=21, opsets=(21, 21), check=_check),
    )
)
