"""Nodes of our own that stand for blocks until a format of the file spells them out or names a vendor's.

`torch.onnx` translates one operator at a time: `BlockScale`, `QuantizeBlocks` and `DequantizeBlocks`. Of activations
the three are one rounding of a value, `RoundBlocks`; of a weight only the last is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import values

from quark_fx.errors import ExportError
from quark_fx.export.onnx_edit import erase_unread, made_by, replace_node
from quark_fx.formats import parse_format
from quark_fx.qparams import ScaleType, Scheme, Symmetry

DOMAIN = "quark_fx"


def _operator(name: str, inputs: tuple[str, ...], **attributes: type) -> Any:
    kinds = {int: onnx.defs.OpSchema.AttrType.INT, str: onnx.defs.OpSchema.AttrType.STRING}
    formal = onnx.defs.OpSchema.FormalParameter
    types = ["tensor(float)", "tensor(int8)", "tensor(float8e4m3fn)", "tensor(float8e5m2)"]
    schema = onnx.defs.OpSchema(
        name,
        DOMAIN,
        1,
        inputs=[formal(i, f"T_{i}") for i in inputs],
        outputs=[formal("y", "Y")],
        type_constraints=[*((f"T_{i}", types, "") for i in inputs), ("Y", ["tensor(float)"], "")],
        attributes=[onnx.defs.OpSchema.Attribute(key, kinds[kind], "") for key, kind in attributes.items()],
    )
    return values.Op(values.Opset(DOMAIN, 1), name, schema)


_LAYOUT: dict[str, type] = {"axis": int, "block_size": int}
block_scale = _operator("BlockScale", ("x",), format=str, symmetry=str, scale_type=str, group_size=int, **_LAYOUT)
quantize_blocks = _operator("QuantizeBlocks", ("x", "scale"))
dequantize_blocks = _operator("DequantizeBlocks", ("codes", "scale"), format=str, **_LAYOUT)


@dataclass(frozen=True)
class Rounding:
    """How `RoundBlocks` rounds.

    Attributes:
        scheme: format, symmetry and kind of scale.
        axis: dimension the blocks lie along.
        block_size: values with one scale.
        group_size: values that share an exponent but for one bit of each block; 0 for none.
    """

    scheme: Scheme
    axis: int
    block_size: int
    group_size: int

    @classmethod
    def of(cls, node: ir.Node) -> Rounding:
        """Read the attributes of a `RoundBlocks` or `BlockScale`."""
        text, number = node.attributes.get_string, node.attributes.get_int
        scheme = Scheme(
            format=parse_format(str(text("format"))),
            symmetry=Symmetry(str(text("symmetry"))),
            scale_type=ScaleType(str(text("scale_type"))),
        )
        return cls(scheme, *(int(number(key) or 0) for key in ("axis", "block_size", "group_size")))

    @property
    def alone(self) -> int:
        """Values that are rounded without regard to others."""
        return self.group_size or self.block_size


def fuse_block_rounding(model: ir.Model) -> int:
    """Make one `RoundBlocks` of the scale, the codes and the values of a tensor.

    Raises:
        ExportError: if the codes go elsewhere than to where they are turned into values.
    """
    done = 0
    for node in list(model.graph):
        quantizer = made_by(node.inputs[0], "QuantizeBlocks") if node.op_type == "DequantizeBlocks" else None
        if quantizer is None:
            continue
        measured = made_by(node.inputs[1], "BlockScale")
        if measured is None or _before_cast(measured.inputs[0]) is not _before_cast(quantizer.inputs[0]):
            continue
        fused = ir.Node(DOMAIN, "RoundBlocks", [quantizer.inputs[0]], measured.attributes.values(), name=node.name)
        real, made = _before_cast(quantizer.inputs[0]), fused.outputs[0]
        # `verify` looks for a quantized value by the name of its codes.
        made.name, made.dtype = quantizer.outputs[0].name, ir.DataType.FLOAT
        made.shape = real.shape if real is not None else None
        model.graph.insert_before(node, [fused])
        replace_node(node, made)
        for unread in (quantizer, measured):
            if not unread.outputs[0].uses():
                model.graph.remove(unread, safe=True)
        done += 1
    left = [str(node.name) for node in model.graph.all_nodes() if node.op_type in ("QuantizeBlocks", "BlockScale")]
    if left:
        raise ExportError(f"codes in blocks are read by other operators than dequantize: {', '.join(left)}")
    if done:
        erase_unread(model)  # a cast for each
    return done


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    return cast.inputs[0] if cast is not None else value
