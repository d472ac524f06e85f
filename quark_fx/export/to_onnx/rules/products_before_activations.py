"""Integer products stay apart from activation functions in float."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import made_by, only_reader, put_same_behind
from quark_fx.export.to_onnx.rules.rule import onnx_rule

_FUSED = frozenset(
    {"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "HardSigmoid", "Selu", "Softplus", "Softsign", "ThresholdedRelu"}
)


@onnx_rule("Gemm", runtime="onnxruntime")
def keep_product_from_activation(model: ir.Model, node: ir.Node) -> bool:
    """Keep ONNX Runtime from fusing an integer `Gemm` with an activation that it computes in float.

    It does so before it looks for integers, and the product then runs in float as well. A maximum of one value, which
    changes nothing, keeps the two apart. A relu that a quantizer follows is left: both go into the kernel.
    """
    reader = only_reader(node.outputs[0])
    if reader is None or reader.op_type not in _FUSED:
        return False
    if not all(_has_codes_of_a_byte(value) for value in node.inputs[:2]):
        return False
    after = [use.node.op_type for use in reader.outputs[0].uses()]
    if reader.op_type == "Relu" and after == ["QuantizeLinear"]:
        return False
    reader.replace_input_with(0, put_same_behind(node.outputs[0]))
    return True


def _has_codes_of_a_byte(value: ir.Value | None) -> bool:
    source = made_by(value, "DequantizeLinear")
    codes = source.inputs[0] if source is not None else None
    return codes is not None and codes.dtype in (ir.DataType.UINT8, ir.DataType.INT8)
