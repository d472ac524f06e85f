"""Nodes of this package that represent blocks until a format replaces them by standard or vendor nodes.

`torch.onnx` translates one operator at a time: `BlockScale`, `QuantizeBlocks`, and `DequantizeBlocks`. For an
activation, the three are then fused into one `RoundBlocks`; a weight has a `DequantizeBlocks` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import values
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.edit import erase_unread, made_by, put_node, replace_node
from quark_fx.numbers.formats import parse_format
from quark_fx.numbers.ops import dequantize, dynamic_qparams, quantize
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import scale_format

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
    """The attributes of a `RoundBlocks`.

    Attributes:
        scheme: Format, symmetry, and format of the scales.
        axis: Dimension of the blocks.
        block_size: Number of values per scale.
    """

    scheme: Scheme
    axis: int
    block_size: int

    @property
    def group_size(self) -> int:
        """Number of values that share an exponent, up to one bit per block; 0 if blocks share nothing."""
        return self.block_size * (self.scheme.scale.group_size or 0)

    @classmethod
    def of(cls, node: ir.Node) -> Rounding:
        """Read the attributes of a `RoundBlocks` or `BlockScale`."""
        text, number = node.attributes.get_string, node.attributes.get_int
        axis, block, group = (int(number(key) or 0) for key in ("axis", "block_size", "group_size"))
        scheme = Scheme(
            format=parse_format(str(text("format"))),
            symmetry=Symmetry(str(text("symmetry"))),
            scale=scale_format(str(text("scale_type")), group // block if group else None),
        )
        return cls(scheme, axis, block)

    @property
    def alone(self) -> int:
        """Number of values that are rounded independently of others."""
        return self.group_size or self.block_size

    def node(self, x: ir.Value | None) -> ir.Node:
        """Return a `RoundBlocks` with these attributes that rounds `x`."""
        scheme = self.scheme
        attributes = {
            "format": str(scheme.format),
            "symmetry": str(scheme.symmetry),
            "scale_type": str(scheme.scale),
            "axis": self.axis,
            "block_size": self.block_size,
            "group_size": self.group_size,
        }
        return ir.node("RoundBlocks", [x], attributes, domain=DOMAIN)

    def of_tensor(self, x: Tensor) -> Tensor:
        """Return `x`, float32, rounded by PyTorch."""
        fmt, scheme = str(self.scheme.format), self.scheme
        layout = (self.axis, self.block_size)
        kind = (str(scheme.symmetry), *layout, str(scheme.scale), self.group_size)
        scale, zero_point = dynamic_qparams(x, fmt, *kind)
        value: Tensor = dequantize(quantize(x, scale, zero_point, fmt, *layout), scale, zero_point, fmt, *layout)
        return value


def fuse_block_rounding(model: ir.Model) -> int:
    """Fuse the scale, the codes, and the values of a tensor into one `RoundBlocks`.

    Raises:
        ExportError: If an operator reads the codes without dequantizing them.
    """
    done = 0
    rounded: dict[ir.Node, ir.Value] = {}  # codes may be dequantized more than once
    for node in list(model.graph):
        quantizer = made_by(node.inputs[0], "QuantizeBlocks") if node.op_type == "DequantizeBlocks" else None
        if quantizer is None or quantizer.inputs[1] is not node.inputs[1]:
            continue
        measured = made_by(node.inputs[1], "BlockScale")
        if measured is None or _before_cast(measured.inputs[0]) is not _before_cast(quantizer.inputs[0]):
            continue
        if quantizer in rounded:
            put_node(node, ir.node("Identity", [rounded[quantizer]]))
        else:
            rounded[quantizer] = _fuse(model, node, quantizer, measured)
        done += 1
    if done:
        erase_unread(model)  # quantizers, scales, and their casts
    _require_fused(model)
    return done


def _fuse(model: ir.Model, node: ir.Node, quantizer: ir.Node, measured: ir.Node) -> ir.Value:
    """Replace a `DequantizeBlocks` by a `RoundBlocks`; return its output."""
    fused = ir.Node(DOMAIN, "RoundBlocks", [quantizer.inputs[0]], measured.attributes.values(), name=node.name)
    real, made = _before_cast(quantizer.inputs[0]), fused.outputs[0]
    # `verify` finds a quantized value by the name of its codes, which no longer exist.
    made.name, quantizer.outputs[0].name = quantizer.outputs[0].name, None
    made.dtype, made.shape = ir.DataType.FLOAT, real.shape if real is not None else None
    model.graph.insert_before(node, [fused])
    replace_node(node, made)
    return made


def _require_fused(model: ir.Model) -> None:
    left = [str(node.name) for node in model.graph.all_nodes() if node.op_type in ("QuantizeBlocks", "BlockScale")]
    if left:
        raise ExportError(
            f"codes in blocks are read by other operators than dequantize: {', '.join(left)}\n"
            "ONNX has no type for them: dequantize them first, or leave those operators in float with "
            "QuantConfig(exclude=...)."
        )


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    return cast.inputs[0] if cast is not None else value
