"""Store integer constants in the type they are cast to."""

from __future__ import annotations

import onnx_ir as ir

from quark_fx.export.to_onnx.edit import DeclinedError, add_array, add_initializer, replace_node
from quark_fx.export.to_onnx.rules.rule import onnx_rule


@onnx_rule("Cast")
def fold_initializer_cast(model: ir.Model, node: ir.Node) -> bool:
    """Store a constant in the type it is cast to, such as a zero point in the type of its codes, or packed int4."""
    source, dtype = node.inputs[0], ir.DataType(node.attributes["to"].as_int())
    if source is None or source.const_value is None or not source.is_initializer():
        return False
    if not dtype.is_integer():
        raise DeclinedError("a float16 weight would become a float32 one")
    name, own = str(source.name), f"{source.name}_{dtype.name.lower()}"
    values = source.const_value.numpy().astype(dtype.numpy())
    if len(source.uses()) > 1 or own in model.graph.initializers:
        stored = add_array(model, own, values)  # shared by several casts of one constant
    else:
        stored = add_initializer(model, name, ir.Tensor(values, dtype=dtype, name=name))
    replace_node(node, stored)
    return True
