"""ONNX nodes for quantization in blocks: custom nodes during translation, then standard operators that replace them.

`torch.onnx` translates one operator at a time, to `BlockScale`, `QuantizeBlocks`, and `DequantizeBlocks`. For an
activation, the three are then fused into one `RoundBlocks`; a weight has only a `DequantizeBlocks`.

A weight is stored as codes and scales of different widths. The nodes that convert it to float32 read only constants,
so a runtime computes the float32 weight once, when it loads the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxscript import values
from torch import Tensor

from quark_fx.checkpoints.words import pack
from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.block_functions import (
    DOMAIN,
    exponents_function,
    float_type,
    halves_function,
    round_function,
    values_function,
)
from quark_fx.export.to_onnx.edit import (
    add_array,
    array_of,
    drop_unused_initializers,
    erase_unread,
    made_by,
    operand,
    put_node,
    replace_node,
    shape_of,
)
from quark_fx.export.to_onnx.stored_codes import StoredCodes, dequantized
from quark_fx.numbers.formats import FP8_E4M3, FP8_E5M2, INT8, parse_format
from quark_fx.numbers.ops import dequantize, dynamic_qparams, quantize
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import E4M3_SCALES, scale_format


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
        scheme: Format of the codes, symmetry, and format of the scales.
        axis: Dimension that is cut into blocks.
        block_size: Number of values per scale.
    """

    scheme: Scheme
    axis: int
    block_size: int

    @property
    def group_size(self) -> int:
        """Number of values in blocks that share an exponent, which each block may lower by one; 0 without sharing."""
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
        """Number of values that are rounded together: a group if blocks share an exponent, or else a block."""
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
        """Round a float32 tensor in PyTorch."""
        fmt, scheme = str(self.scheme.format), self.scheme
        layout = (self.axis, self.block_size)
        kind = (str(scheme.symmetry), *layout, str(scheme.scale), self.group_size)
        scale, zero_point = dynamic_qparams(x, fmt, *kind)
        value: Tensor = dequantize(quantize(x, scale, zero_point, fmt, *layout), scale, zero_point, fmt, *layout)
        return value


def fuse_block_rounding(model: ir.Model) -> int:
    """Fuse the nodes that compute a tensor's scales, codes, and dequantized values into one `RoundBlocks`.

    Returns:
        Number of `DequantizeBlocks` nodes that were replaced.

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
    real, output = _before_cast(quantizer.inputs[0]), fused.outputs[0]
    # `verify` finds a quantized value by the name of its codes, which no longer exist.
    output.name, quantizer.outputs[0].name = quantizer.outputs[0].name, None
    output.dtype, output.shape = ir.DataType.FLOAT, real.shape if real is not None else None
    model.graph.insert_before(node, [fused])
    replace_node(node, output)
    return output


def _require_fused(model: ir.Model) -> None:
    unfused = [str(node.name) for node in model.graph.all_nodes() if node.op_type in ("QuantizeBlocks", "BlockScale")]
    if unfused:
        raise ExportError(
            f"codes in blocks are read by operators other than dequantize: {', '.join(unfused)}\n"
            "ONNX has no type for these codes: dequantize them first, or leave the operators in float with "
            "QuantConfig(exclude=...)."
        )


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    return cast.inputs[0] if cast is not None else value


_SHARING = (16, 8, 4, 2)
"""Numbers of blocks per group, largest first, that `_sharing` tries."""


def spell_out_blocks(model: ir.Model) -> int:
    """Replace the nodes that round to blocks or dequantize weights in blocks by functions of standard operators.

    Returns:
        Number of nodes that were replaced.

    Raises:
        ExportError: If codes without an ONNX type are not constant.
    """
    done = 0
    look_up_values(model, _is_better_dequantized)
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "RoundBlocks":
            spell_out_rounding(model, node)
        elif weight := stored_weight(node):
            _spell_out_weight(model, node, *weight)
        else:
            continue
        done += 1
    if done:
        drop_unused_initializers(model)
    return done


def look_up_values(model: ir.Model, wanted: Callable[[ir.Node, ir.Value], bool]) -> int:
    """Dequantize a whole embedding table in blocks and gather rows from the result, instead of gathering codes first.

    Args:
        model: Graph to edit.
        wanted: Function of a node that dequantizes gathered rows and of its table of codes; returns whether to rewrite
            the node.

    Returns:
        Number of nodes that were rewritten.
    """
    done = 0
    for node in list(model.graph):
        gathers = [gather for value in node.inputs if (gather := made_by(value, "Gather")) is not None]
        if node.op_type not in ("DequantizeBlocks", "DequantizeLinear") or not node.attributes.get_int("block_size", 0):
            continue
        if len(gathers) < len(node.inputs) or len({gather.inputs[1] for gather in gathers}) > 1:
            continue
        table = gathers[0].inputs[0]
        constant = all(array_of(g.inputs[0]) is not None and not g.attributes.get_int("axis", 0) for g in gathers)
        if constant and table is not None and wanted(node, table):
            _dequantize_before(model, node, gathers)
            done += 1
    return done


def _is_better_dequantized(node: ir.Node, table: ir.Value) -> bool:
    """Tell whether `Gather` does not support the type of the codes, or another reader stores them differently."""
    readers = [use.node for use in table.uses() if use.node.op_type != "Gather"]
    return node.domain == DOMAIN or any(stored_weight(reader) is not None for reader in readers)


def _dequantize_before(model: ir.Model, node: ir.Node, gathers: list[ir.Node]) -> None:
    """Swap a node that dequantizes rows with the nodes that gather those rows from the codes and scales."""
    table, rank = operand(gathers[0]), len(shape_of(node.outputs[0]))
    axis = int(node.attributes.get_int("axis", 1) or 0) % rank - (rank - len(shape_of(table)))
    attributes = [*(a for a in node.attributes.values() if a.name != "axis"), ir.AttrInt64("axis", axis)]
    values = ir.Node(node.domain, node.op_type, [gather.inputs[0] for gather in gathers], attributes, name=node.name)
    values.outputs[0].shape, values.outputs[0].type = table.shape, node.outputs[0].type
    model.graph.insert_before(node, [values])
    put_node(node, ir.node("Gather", [values.outputs[0], gathers[0].inputs[1]], {"axis": 0}))
    erase_unread(model)


class _Before:
    """Builder that inserts nodes before a given node of the graph."""

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.node = model, node

    def __call__(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        added = ir.node(operator, list(inputs), attributes, domain=domain)
        self.model.graph.insert_before(self.node, [added])
        return added.outputs[0]

    def integers(self, *numbers: int) -> ir.Value:
        return add_array(self.model, "_".join(["integers", *map(str, numbers)]), np.array(numbers, np.int64))

    def length(self, x: ir.Value, axis: int) -> ir.Value:
        return self("Shape", x, start=axis, end=axis + 1)

    def function(self, function: ir.Function, *inputs: ir.Value) -> ir.Value:
        """Insert a call of `function`, and add the function to the model if it lacks it."""
        self.model.functions.setdefault(function.identifier(), function)
        self.model.opset_imports[DOMAIN] = 1
        return self(function.name, *inputs, domain=DOMAIN)

    @property
    def opset(self) -> int:
        return int(self.model.opset_imports[""])


# Activations ---------------------------------------------------------------------------------------------------------


def spell_out_rounding(model: ir.Model, node: ir.Node) -> None:
    """Replace a `RoundBlocks` by standard operators that cut the tensor into blocks, round them, and join them."""
    rounding, do, x, dims = Rounding.of(node), _Before(model, node), operand(node), shape_of(node.outputs[0])
    axis, each, shared = rounding.axis % len(dims), rounding.alone, bool(rounding.group_size)
    size, inner = dims[axis], axis < len(dims) - 1
    fixed = size if isinstance(size, int) else None
    whole = fixed is not None and fixed % each == 0
    length = do.length(x, axis) if fixed is None else do.integers(fixed)
    padded = x if whole else do("Pad", x, _pads(do, length, fixed, each), None, do.integers(axis))
    before, within = [0] * axis, (each // rounding.block_size, rounding.block_size) if shared else (each,)
    behind = (*within, -1) if inner else within
    if fixed is not None:
        shape = do.integers(*before, -(-fixed // each), *behind)
    else:
        count = do("Div", do.length(padded, axis), do.integers(each))
        shape = do("Concat", do.integers(*before), count, do.integers(*behind), axis=0)
    function = round_function(rounding.scheme, shared=shared, inner=inner, opset=do.opset)
    rounded = do.function(function, do("Reshape", padded, shape))
    together = [rounded, do("Shape", padded)]
    if whole:
        put_node(node, ir.node("Reshape", together))
    else:
        put_node(node, ir.node("Slice", [do("Reshape", *together), do.integers(0), length, do.integers(axis)]))


def _pads(do: _Before, length: ir.Value, fixed: int | None, each: int) -> ir.Value:
    """Return the padding before and after the values: 0, and the `-length mod each` values that fill the last block."""
    if fixed is not None:
        return do.integers(0, -fixed % each)
    return do("Concat", do.integers(0), do("Mod", do("Neg", length), do.integers(each)), axis=0)


# Weights -------------------------------------------------------------------------------------------------------------


_PLAIN = (INT8, FP8_E4M3, FP8_E5M2)


def stored_weight(node: ir.Node) -> tuple[StoredCodes, QuantizedTensor] | None:
    """Return the weight that a node dequantizes, and its stored tensor.

    Returns:
        Weight and tensor; `None` for nodes that this module does not rewrite.

    Raises:
        ExportError: If codes without an ONNX type are not constant.
    """
    in_domain = node.domain == DOMAIN and node.op_type == "DequantizeBlocks"
    if not in_domain and (node.domain or node.op_type != "DequantizeLinear" or len(node.inputs) > 2):
        return None
    weight = dequantized(node)
    stored = weight.read() if weight is not None else None
    if in_domain and stored is None:
        raise ExportError(
            f"{node.name} reads codes without an ONNX type that are not constant; quantize that weight to 2, 4, 8 or "
            "16 bits, or leave its operator in float with QuantConfig(exclude=...)"
        )
    if weight is None or stored is None:
        return None
    in_blocks = stored.block_size and stored.format in _PLAIN and _are_exponents(stored.scale)
    return (weight, stored) if in_domain or in_blocks else None


def _spell_out_weight(model: ir.Model, node: ir.Node, weight: StoredCodes, stored: QuantizedTensor) -> None:
    do, axis, size = _Before(model, node), stored.axis, stored.block_size
    codes = stored.codes.float() if stored.format.is_float else stored.codes
    if axis is None or not size:
        scale = stored.layout.spread(stored.scale)
        put_node(node, ir.node("Mul", [_values(do, weight, codes), _scales(do, weight, scale)]))
        return
    shared = _sharing(stored.scale, axis, size)
    blocks = _cut(_cut(codes, axis, size, 0), axis, shared, 0) if shared > 1 else _cut(codes, axis, size, 0)
    scale = _cut(stored.scale, axis, shared, None) if shared > 1 else stored.scale
    scale = scale.unsqueeze(axis + 1 + (shared > 1))
    values = do("Mul", _values(do, weight, blocks), _scales(do, weight, scale, axis if shared > 1 else None))
    length = codes.shape[axis]
    padded = list(codes.shape)
    padded[axis] = -(-length // (size * shared)) * size * shared
    if padded[axis] == length:
        put_node(node, ir.node("Reshape", [values, do.integers(*padded)]))
    else:
        together = do("Reshape", values, do.integers(*padded))
        put_node(node, ir.node("Slice", [together, do.integers(0), do.integers(length), do.integers(axis)]))


def _cut(x: Tensor, axis: int, size: int, fill: int | None) -> Tensor:
    """Cut dimension `axis` of `x` into pieces of `size`, and pad the last piece.

    Args:
        x: Tensor.
        axis: Dimension to cut.
        size: Length of each piece.
        fill: Padding value; `None` repeats the last index of the dimension.
    """
    missing = -x.shape[axis] % size
    if missing:
        last = x.narrow(axis, x.shape[axis] - 1, 1)
        more = last if fill is None else torch.full_like(last, fill)
        x = torch.cat((x, *[more] * missing), axis)
    pieces: Tensor = x.unflatten(axis, (-1, size))
    return pieces


def _values(do: _Before, weight: StoredCodes, codes: Tensor) -> ir.Value:
    """Store codes and return their float32 values."""
    fmt, name, model = weight.format, f"{weight.name}_{weight.format}", do.model
    if fmt.bits == 8 and (fmt.is_integer or fmt.is_float):
        dtype = ir.DataType.INT8 if fmt.is_integer else float_type(fmt)
        return do("Cast", add_array(model, name, codes.numpy().astype(dtype.numpy())), to=ir.DataType.FLOAT)
    function, patterns = values_function(fmt, do.opset), fmt.patterns(codes)
    if fmt.bits == 4:
        return do.function(function, add_array(model, name, patterns.numpy().astype(ir.DataType.UINT4.numpy())))
    return do.function(function, _packed(model, name, patterns, fmt.bits), do.integers(*codes.shape))


def _scales(do: _Before, weight: StoredCodes, scale: Tensor, groups: int | None = None) -> ir.Value:
    """Store scales in the fewest bits that represent them exactly, and return their float32 values.

    Args:
        do: Builder that inserts the nodes.
        weight: Weight with these scales.
        scale: Scales that broadcast over the codes.
        groups: Dimension that indexes groups. Each scale of a group, along the next dimension, is the group's largest
            scale or half of it. `None` stores every scale separately.
    """
    name, model = str(weight.scale.name), do.model
    if groups is not None:
        largest = scale.amax(groups + 1, keepdim=True)
        bits = _packed(model, f"{name}_halved", (scale < largest).long(), 1)
        halves = do.function(halves_function(do.opset), bits, do.integers(*scale.shape))
        return do("Mul", _scales(do, weight, largest), halves)
    if _are_exponents(scale):
        exponents = (torch.frexp(scale)[1] + 126).numpy().astype(np.uint8)
        return do.function(exponents_function(do.opset), add_array(model, f"{name}_e8m0", exponents))
    try:
        stored = E4M3_SCALES.quantized(scale)
    except ValueError:
        return add_array(model, f"{name}_broadcast", scale.numpy())
    multiples = stored.codes.float().numpy().astype(ir.DataType.FLOAT8E4M3FN.numpy())
    real = do("Cast", add_array(model, f"{name}_e4m3", multiples), to=ir.DataType.FLOAT)
    return do("Mul", real, add_array(model, f"{name}_global", stored.scale.numpy()))


def _are_exponents(scale: Tensor) -> bool:
    """Tell whether all scales are powers of two from 2**-127 to 2**127."""
    mantissa, exponent = torch.frexp(scale)
    return bool(((mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)).all())


def _sharing(scale: Tensor, axis: int, block_size: int) -> int:
    """Return the blocks per group so that each scale is its group's largest or half of it; 1 if no number works."""
    if block_size > 4 or not _are_exponents(scale):
        return 1
    for count in _SHARING:
        if count > scale.shape[axis]:
            continue  # padding the group would take more space than sharing saves
        groups = _cut(scale, axis, count, None)
        if bool((groups >= groups.amax(axis + 1, keepdim=True) / 2).all()):
            return count
    return 1


def _packed(model: ir.Model, name: str, codes: Tensor, bits: int) -> ir.Value:
    packed = pack(codes.flatten(), bits).reshape(-1).view(torch.uint8)
    return add_array(model, name, packed[: -(-codes.numel() * bits // 8)].numpy())
