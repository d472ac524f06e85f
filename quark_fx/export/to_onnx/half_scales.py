"""Store the scales of groups in float16 where this is exact."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark_fx.export.to_onnx.edit import add_initializer, array_of

_SCALES = {"DequantizeLinear": 1, "MatMulNBits": 2, "GatherBlockQuantized": 2}
"""Position of the scales among the inputs of operators on weights in groups."""


def halve_scales(model: ir.Model) -> int:
    """Store scales of groups in float16, with a `Cast` to float32, if this changes no value; return their number.

    ONNX Runtime's quantizers and `MatMulNBits` do not support float16 scales for float32 data, hence the cast. ONNX
    Runtime folds it at load time, before it fuses: kernels and speed are the same as with float32 scales.
    """
    halved = 0
    for name, value in list(model.graph.initializers.items()):
        scale = array_of(value)
        if scale is None or scale.dtype != np.float32 or scale.ndim < 2 or not _is_read_as_scale(value):
            continue
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), scale):
            continue
        stored = add_initializer(model, f"{name}_float16", ir.Tensor(half, name=f"{name}_float16"))
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT})
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, value.type
        first = min((use.node for use in value.uses()), key=list(model.graph).index)
        model.graph.insert_before(first, [cast])
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        del model.graph.initializers[name]
        cast.outputs[0].name = name
        halved += 1
    return halved


def _is_read_as_scale(value: ir.Value) -> bool:
    """Tell whether all readers are nodes of the main graph and use the value as scales of groups."""
    uses = list(value.uses())
    return bool(uses) and all(
        use.node.graph is value.graph and _SCALES.get(use.node.op_type) == use.idx for use in uses
    )


__all__ = ["halve_scales"]
