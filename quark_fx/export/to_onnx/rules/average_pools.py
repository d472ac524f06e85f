"""Count the values of windows that reach beyond the padding like torch."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, put_same_behind
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("AveragePool", runtime="onnxruntime")
def settle_average_pool(model: ir.Model, node: ir.Node) -> bool:
    """Avoid ONNX Runtime's integer kernel if windows reach beyond the rim and padding counts: its counts are incorrect.

    Without padding, counting it or not is the same. With padding, a `Max` of one value between the pool and its
    quantizer, which changes nothing, prevents their fusion.
    """
    if not node.attributes.get_int("ceil_mode", 0) or not node.attributes.get_int("count_include_pad", 0):
        return False
    if not any(node.attributes.get_ints("pads", [0])):
        node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 0)
        return True
    if node.outputs[0].is_graph_output():
        raise DeclinedError("nothing reads the averages, so that they are not fused with a quantizer")
    uses = list(node.outputs[0].uses())
    if [use.node.op_type for use in uses] == ["Max"]:
        return False
    same = put_same_behind(node.outputs[0])
    for use in uses:
        use.node.replace_input_with(use.idx, same)
    return True
