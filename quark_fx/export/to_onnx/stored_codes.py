"""Constant codes in an ONNX graph: the nodes that dequantize them, their values, and scales stored in float16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from quark_fx.export.to_onnx.edit import add_initializer, array_of
from quark_fx.numbers.formats import FP8_E4M3, FP8_E5M2, Format, IntFormat, parse_format
from quark_fx.numbers.quantized_tensor import QuantizedTensor

FORMATS: Mapping[ir.DataType, Format] = {
    ir.DataType[f"{'' if signed else 'U'}INT{bits}"]: IntFormat(bits, signed)
    for bits in (2, 4, 8, 16, 32)
    for signed in (True, False)
} | {ir.DataType.FLOAT8E4M3FN: FP8_E4M3, ir.DataType.FLOAT8E5M2: FP8_E5M2}
"""Number format of codes, by ONNX element type."""


@dataclass(frozen=True)
class StoredCodes:
    """Constant codes and their parameters, as a `DequantizeLinear`, or a lookup of rows, reads them.

    Attributes:
        codes: Constant that holds the codes.
        scale: Scales, one for the tensor or several along `axis`.
        zero_point: Zero points; `None` for zero.
        axis: Dimension of `codes` along which the scales vary or, with `block_size`, which is cut into blocks.
        block_size: Number of values that share a scale; 0 for one scale per index of `axis`.
        format: Format of the codes.
        turned: Whether the weight is transposed before the operator that reads it.
        cast: Whether the weight is cast before the operator that reads it.
    """

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int
    block_size: int
    format: Format
    turned: bool = False
    cast: bool = False

    @property
    def name(self) -> str:
        """Name of the codes in the file, without the suffixes that the export appends."""
        return stem(self.codes)

    def read(self) -> QuantizedTensor | None:
        """Return the codes with their parameters; `None` if one of them is not constant."""
        codes, scale, zero_point = (array_of(value) for value in (self.codes, self.scale, self.zero_point))
        if codes is None or scale is None or (self.zero_point is not None and zero_point is None):
            return None
        points = None if zero_point is None else torch.from_numpy(zero_point.astype(np.int32))
        axis = self.axis if scale.ndim else None
        scales = torch.from_numpy(scale.astype(np.float32, copy=False))
        return QuantizedTensor.of(_tensor(codes, self.format), scales, points, self.format, axis, self.block_size)


def _tensor(codes: np.ndarray[Any, Any], fmt: Format) -> torch.Tensor:
    if fmt.is_integer:
        # numpy has types of 8, 16, and 32 bits only; onnx_ir stores narrower codes in custom dtypes.
        return torch.from_numpy(codes.astype(str(fmt.dtype).removeprefix("torch."), copy=False))
    return torch.from_numpy(codes.astype(np.float32)).to(fmt.dtype)


def dequantized(node: ir.Node | None) -> StoredCodes | None:
    """Return the codes that a `DequantizeLinear` or `DequantizeBlocks` reads; `None` for other nodes."""
    if node is None or node.op_type not in ("DequantizeLinear", "DequantizeBlocks"):
        return None
    codes, scale = node.inputs[:2]
    if codes is None or scale is None:
        return None
    name = node.attributes.get_string("format")
    fmt = parse_format(name) if name else FORMATS.get(codes.dtype) if codes.dtype is not None else None
    if fmt is None:
        return None
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    return StoredCodes(codes, scale, zero_point, int(axis or 0), int(block or 0), fmt)


def stem(codes: ir.Value) -> str:
    """Return the name of a weight, derived from the name of its codes."""
    return (codes.name or "weight").removesuffix("_int4").removesuffix("_uint4").removesuffix("_codes")


_SCALES = {"DequantizeLinear": 1, "MatMulNBits": 2, "GatherBlockQuantized": 2}
"""Position of the scales among the inputs of each operator that reads weights in groups."""


def halve_scales(model: ir.Model) -> int:
    """Store scales of groups in float16, followed by a `Cast` to float32, if float16 represents them exactly.

    ONNX Runtime's quantizers and `MatMulNBits` do not support float16 scales for float32 data, hence the cast. ONNX
    Runtime folds the cast at load time, before its fusions: kernels and speed are the same as with float32 scales.

    Returns:
        Number of scale tensors that were converted.
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
    """Tell whether all readers of a value are nodes of the main graph that use it as scales of groups."""
    uses = list(value.uses())
    return bool(uses) and all(
        use.node.graph is value.graph and _SCALES.get(use.node.op_type) == use.idx for use in uses
    )


__all__ = ["FORMATS", "StoredCodes", "dequantized", "halve_scales", "stem"]
