"""ONNX lowerings for operators that torch's exporter lacks or lowers differently, such as the operators of `quark_fx`.

These functions, one per operator, form the translation table of `torch.onnx.export`. ONNX operators are specified in
https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset21
from onnxscript.function_libs.torch_lib.ops.core import aten_addmm
from onnxscript.function_libs.torch_lib.ops.nn import aten_linear

from quark_fx.export.to_onnx.blocks import block_scale, dequantize_blocks, quantize_blocks
from quark_fx.export.to_onnx.edit import made_by, permutation
from quark_fx.export.to_onnx.recurrent import MEASURED
from quark_fx.export.to_onnx.translation import lowers
from quark_fx.numbers.formats import parse_format
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import FLOAT32

op: Any = opset21
"""ONNX operators as functions; untyped, because onnxscript annotates them for scripts, not for tracing."""


def onnx_type(format: str) -> ir.DataType:
    """Return the ONNX element type for the codes of a format."""
    format = str(parse_format(format).onnx_container)
    names = {"fp8_e4m3": "FLOAT8E4M3FN", "fp8_e5m2": "FLOAT8E5M2", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
    return ir.DataType[names.get(format, format.upper())]


QUANTIZED = "quantized"
"""Metadata key that marks the result of `quantize`."""


@lowers("quark_fx.quantize.default")
def quantize(x: Any, scale: Any, zero_point: Any, format: str, axis: int | None = None, block_size: int = 0) -> Any:
    """Write `QuantizeLinear` of the float32 value, and mark its result with `QUANTIZED`."""
    codes = _codes(_float32(x), scale, zero_point, format, axis, block_size)
    codes.meta[QUANTIZED] = True
    return codes


def _codes(x: Any, scale: Any, zero_point: Any, format: str, axis: int | None, block_size: int) -> Any:
    """Write the codes of a float32 value, in the type to which the zero point is cast.

    Codes narrower than a byte are stored in a byte and clipped: ONNX Runtime fuses 4-bit types into kernels that do
    not exist and rejects the file. The clip comes after the quantizer, not before it, so that the operator that
    computes the values can run in integers.
    """
    if made_by(scale, "BlockScale"):
        return quantize_blocks(x, scale)
    source = _measurement(scale)
    if source is not None and source.inputs[0] is x:
        return source.outputs[0]
    fmt = _activation_type(format)
    if block_size < 0:
        return _quantize_rows(x, scale, zero_point, format)
    attributes = {} if axis is None else {"axis": axis, "block_size": block_size}
    narrow = parse_format(format)
    if not narrow.is_integer:
        return op.QuantizeLinear(x, scale, output_dtype=fmt, saturate=1, **attributes)
    codes = op.QuantizeLinear(x, scale, op.Cast(zero_point, to=fmt), **attributes)
    if narrow == narrow.activation_container:
        return codes
    limits = (op.Constant(value=ir.Tensor(np.asarray(limit, fmt.numpy()))) for limit in (narrow.qmin, narrow.qmax))
    return op.Clip(codes, *limits)


def _measurement(scale: Any) -> Any:
    """Return the `DynamicQuantizeLinear` that computes a scale; `None` if another node does."""
    return made_by(scale, "DynamicQuantizeLinear")


def _quantize_rows(x: Any, scale: Any, zero_point: Any, format: str) -> Any:
    """Write `QuantizeLinear` with one scale per row as arithmetic: its `block_size` would fix the length of a row."""
    fmt, ideal = parse_format(format), op.Div(x, scale)
    if fmt.is_integer:
        ideal = op.Add(op.Round(ideal), op.Cast(zero_point, to=ir.DataType.FLOAT))
    bounds = (op.Constant(value_float=float(bound)) for bound in fmt.limits)
    return op.Cast(op.Clip(ideal, *bounds), to=_activation_type(format))


def _activation_type(format: str) -> ir.DataType:
    return onnx_type(str(parse_format(format).activation_container))


def _float32(x: Any) -> Any:
    return x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)


@lowers("quark_fx.dequantize.default")
def dequantize(
    codes: Any,
    scale: Any,
    zero_point: Any,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    dtype: int = int(ir.DataType.FLOAT),
) -> Any:
    """Write `DequantizeLinear`, and a cast unless the result is float32; stored codes are cast to their narrow type."""
    attributes = {} if axis is None else {"axis": axis, "block_size": block_size}
    fmt = parse_format(format)
    whole = fmt.is_integer
    if made_by(codes, "QuantizeBlocks") or not fmt.onnx_container.has_onnx_type:
        y = dequantize_blocks(codes, scale, format=format, axis=axis or 0, block_size=block_size)
    elif block_size < 0:
        # Arithmetic, as in `_quantize_rows`. Also, ONNX Runtime would fuse a blocked `DequantizeLinear` into an integer
        # product that supports only one scale, and fail.
        y = op.Cast(codes, to=ir.DataType.FLOAT)
        y = op.Mul(op.Sub(y, op.Cast(zero_point, to=ir.DataType.FLOAT)) if whole else y, scale)
    elif not whole:
        y = op.DequantizeLinear(codes, scale, **attributes)
    else:
        container = onnx_type(format)
        if codes.producer() is not None:
            container = _activation_type(format)
        elif fmt.onnx_container.bits < 8 and codes.const_value is None:
            codes = op.Cast(codes, to=container)
        source = _measurement(scale)
        zero = _zero_point(zero_point, scale, container, block_size) if source is None else [source.outputs[2]]
        y = op.DequantizeLinear(codes, scale, *zero, **attributes)
    return y if dtype == ir.DataType.FLOAT else op.Cast(y, to=dtype)


def _zero_point(zero_point: Any, scale: Any, dtype: ir.DataType, block_size: int) -> list[Any]:
    """Return the zero point in the type of the codes as a list of inputs, which is empty if the input can be omitted.

    A zero point of 0 for several scales is written in their shape: ONNX Runtime's fusion of `Gemm` requires that, and
    so does `session.x64quantprecision`, which changes the zero points of int8 weights.
    """
    if len(zero_point.shape) or not len(scale.shape):
        return [op.Cast(zero_point, to=dtype)]
    if block_size or dtype == ir.DataType.INT32:
        return []
    zeros = op.Constant(value=ir.Tensor(np.zeros(scale.shape.numpy(), dtype.numpy()), dtype=dtype))
    zeros.shape, zeros.dtype = scale.shape, dtype
    return [zeros]


@lowers("quark_fx.dynamic_qparams.default")
def dynamic_qparams(
    x: Any,
    format: str,
    symmetry: str,
    axis: int | None = None,
    block_size: int = 0,
    scale_type: str = "float32",
    group_size: int = 0,
    ratio: float = 1.0,
) -> Any:
    """Write `DynamicQuantizeLinear` if it computes the same scale, or else the arithmetic, per tensor or per row."""
    x = _float32(x)
    if block_size > 0:
        layout = {"axis": axis, "block_size": block_size, "group_size": group_size}
        scale = block_scale(x, format=format, symmetry=symmetry, scale_type=scale_type, **layout)
        return scale, op.Constant(value=ir.Tensor(np.zeros((), np.int32)))
    assert scale_type == str(FLOAT32), "the export refuses others beforehand"
    scheme = Scheme(format=parse_format(format), symmetry=Symmetry(symmetry))
    if format == "uint8" and not scheme.symmetric and axis is None and ratio == 1:
        _, scale, zero_point = op.DynamicQuantizeLinear(x)
        return scale, op.Cast(zero_point, to=ir.DataType.INT32)
    zero, tiny = (op.Constant(value_float=v) for v in (0.0, torch.finfo(torch.float32).tiny))
    axes = {"keepdims": 0 if axis is None else 1}
    last = () if axis is None else (op.Constant(value_ints=[axis]),)
    low, high = op.Min(op.ReduceMin(x, *last, **axes), zero), op.Max(op.ReduceMax(x, *last, **axes), zero)
    if ratio != 1:
        low, high = (op.Mul(end, op.Constant(value_float=ratio)) for end in (low, high))
    if scheme.symmetric:
        ideal = op.Div(op.Max(op.Neg(low), high), op.Constant(value_float=float(scheme.largest)))
    else:
        ideal = op.Div(op.Sub(high, low), op.Constant(value_float=float(scheme.qmax - scheme.qmin)))
    scale = op.Where(op.Less(ideal, tiny), op.Constant(value_float=1.0), ideal)
    if scheme.symmetric:
        zero_point = op.Add(op.Mul(scale, zero), op.Constant(value_float=float(scheme.middle)))
    else:
        bounds = (op.Constant(value_float=float(v)) for v in (scheme.qmin, scheme.qmax))
        zero_point = op.Round(op.Clip(op.Sub(op.Constant(value_float=float(scheme.qmin)), op.Div(low, scale)), *bounds))
    return scale, op.Cast(zero_point, to=ir.DataType.INT32)


@lowers("aten.linear.default")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Write an integer product if `x` is quantized at run time, and torch's lowering otherwise."""
    product = _integer_product(x, weight, bias, output_axis=0)
    return aten_linear(x, weight, bias) if product is None else product


@lowers("aten.addmm.default")
def addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Write an integer product if `x` is quantized at run time, and torch's lowering otherwise."""
    product = _integer_product(x, weight, bias, output_axis=1) if alpha == beta == 1 else None
    return aten_addmm(bias, x, weight, beta=beta, alpha=alpha) if product is None else product


@lowers("aten.mm.default")
@lowers("aten.bmm.default")
@lowers("aten.matmul.default")
def matmul(x: Any, weight: Any) -> Any:
    """Write an integer product if `x` is quantized at run time, and `MatMul` otherwise."""
    product = _integer_product(x, weight, None, output_axis=1)
    return op.MatMul(x, weight) if product is None else product


def _integer_product(x: Any, weight: Any, bias: Any, *, output_axis: int) -> Any:
    """Write `MatMulInteger(x, w) * (s_x * s_w)`, which ONNX Runtime runs as one kernel; it lacks such a `Gemm`.

    Returns:
        Product; `None` unless `x` is quantized at run time, and `weight` has stored 8-bit codes with one scale per
        tensor or per output channel.
    """
    transpose = made_by(weight, "Transpose")
    if transpose is not None and permutation(transpose, weight.shape.rank()) == (1, 0):
        weight, output_axis = transpose.inputs[0], 1 - output_axis
    a, b = made_by(x, "DequantizeLinear"), made_by(weight, "DequantizeLinear")
    if a is None or b is None or _measurement(a.inputs[1]) is None:
        return None
    stored: Any = b.inputs
    codes, scale, *zero_point = stored
    if codes.producer() is not None or codes.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return None
    if codes.shape.rank() != 2 and (scale.shape.rank() or output_axis == 0):
        return None
    if scale.shape.rank() and b.attributes["axis"].as_int() % 2 != output_axis:
        return None
    if output_axis == 0:
        if any(len(read.meta["node"].users) > 1 for read in (b, codes)):
            return None  # another node reads the codes untransposed, and the file stores them once
        codes = op.Transpose(codes, perm=[1, 0])
    zeros = [zero for zero in zero_point if not made_by(zero, "Constant")]
    product = op.Cast(op.MatMulInteger(a.inputs[0], codes, a.inputs[2], *zeros), to=ir.DataType.FLOAT)
    product = op.Mul(product, op.Mul(a.inputs[1], scale))
    return product if bias is None else op.Add(product, bias)


@lowers("quark_fx.rotate.default")
def rotate(x: Any, left: Any, right: Any) -> Any:
    """Write a `MatMul` with each side of the blocks: `left.T @ block @ right`. Blocks of one row need only `right`."""
    (a, _), (b, _) = left.shape, right.shape
    if a == 1 and x.shape[-1] == b:
        return op.MatMul(x, right)
    rows = op.MatMul(op.Reshape(x, op.Constant(value_ints=[-1, a, b])), right)
    if a > 1:
        rows = op.MatMul(op.Transpose(left, perm=[1, 0]), rows)
    return op.Reshape(rows, op.Shape(x))


@lowers("aten._grouped_mm.default")
@lowers("quark_fx.grouped_mm.default")
@lowers("transformers.grouped_mm_fallback.default")
def grouped_mm(x: Any, weight: Any, offsets: Any, *unused: Any, **also_unused: Any) -> Any:
    """Write one `MatMul` per expert on its slice of the rows of `x`; `offsets` are the exclusive ends of the slices."""
    axis = op.Constant(value_ints=[0])
    start, parts = op.Constant(value_ints=[0]), []
    ends = op.Cast(offsets, to=ir.DataType.INT64)
    for expert in range(weight.shape[0]):
        index = op.Constant(value_ints=[expert])
        end = op.Gather(ends, index, axis=0)
        matrix = op.Squeeze(op.Gather(weight, index, axis=0), axis)
        parts.append(op.MatMul(op.Slice(x, start, end, axis), matrix))
        start = end
    return op.Concat(*parts, axis=0)


@lowers("aten.adaptive_avg_pool1d.default")
@lowers("aten.adaptive_avg_pool2d.default")
@lowers("aten.adaptive_avg_pool3d.default")
@lowers("aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(x: Any, output_size: list[int]) -> Any:
    """Write `GlobalAveragePool`, `AveragePool` if all windows have the same size, or else matrix products."""
    rank = len(output_size)
    if all(out == 1 for out in output_size) and len(x.shape) == rank + 2:
        return op.GlobalAveragePool(x)
    sides = list(x.shape)[-rank:]
    even = all(isinstance(n, int) and n % out == 0 for n, out in zip(sides, output_size, strict=True))
    if even and len(x.shape) == rank + 2:
        kernel = [n // out for n, out in zip(sides, output_size, strict=True)]
        return op.AveragePool(x, kernel_shape=kernel, strides=kernel)
    # First sum over all dimensions, then divide by one count after the other, for the same rounding as in torch.
    y, dims, counts = x, len(x.shape), []
    for axis, side, out in zip(range(dims - rank, dims), sides, output_size, strict=True):
        if side == out:
            continue
        inside, count = _windows(x, axis, side, out)
        counts.append(op.Reshape(count, op.Constant(value_ints=[-1] + [1] * (dims - 1 - axis))))
        turned = [dim for dim in range(dims) if dim != axis] + [axis]
        if axis == dims - 1:
            y = op.MatMul(y, inside)
        else:
            back = [turned.index(dim) for dim in range(dims)]
            y = op.Transpose(op.MatMul(op.Transpose(y, perm=turned), inside), perm=back)
    for count in counts:
        y = op.Div(y, count)
    return y if counts else op.Identity(x)


def _windows(x: Any, axis: int, side: Any, out: int) -> tuple[Any, Any]:
    """Return a matrix of shape `(side, out)`, with ones where a value is in a window, and the sizes of the windows.

    Window `i` of `n` values begins at `i * n // out` and ends before `-(-(i + 1) * n // out)`.
    """
    if isinstance(side, int):
        matrix = np.zeros((side, out), x.dtype.numpy())
        for i in range(out):
            matrix[i * side // out : -(-(i + 1) * side // out), i] = 1
        return op.Constant(value=ir.Tensor(matrix)), op.Constant(value=ir.Tensor(matrix.sum(0)))
    zero, one, count = (op.Constant(value_int=number) for number in (0, 1, out))
    size = op.Gather(op.Shape(x), op.Constant(value_int=axis))
    window = op.Range(zero, count, one)
    start = op.Div(op.Mul(window, size), count)
    end = op.Div(op.Add(op.Mul(op.Add(window, one), size), op.Constant(value_int=out - 1)), count)
    place = op.Unsqueeze(op.Range(zero, size, one), op.Constant(value_ints=[1]))
    inside = op.And(op.GreaterOrEqual(place, start), op.Less(place, end))
    return op.Cast(inside, to=x.dtype), op.Cast(op.Sub(end, start), to=x.dtype)


@lowers("aten.amax.default")
def amax(x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Any:
    """Write `ReduceMax`, over all dimensions by default."""
    return op.ReduceMax(x, *([op.Constant(value_ints=dim)] if dim else []), keepdims=int(keepdim))


@lowers("aten.amin.default")
def amin(x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Any:
    """Write `ReduceMin`, over all dimensions by default."""
    return op.ReduceMin(x, *([op.Constant(value_ints=dim)] if dim else []), keepdims=int(keepdim))


@lowers("aten.squeeze.dim")
def squeeze(x: Any, dim: int) -> Any:
    """Write `Squeeze`, or `Identity` if the size is not 1; a varying size was not 1 at capture."""
    return op.Squeeze(x, op.Constant(value_ints=[dim])) if len(x.shape) and x.shape[dim] == 1 else op.Identity(x)


@lowers("aten.sort.stable")
def sort(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Write `TopK` of all values, which is a stable sort: among equal values, the lower index comes first."""
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim % x.shape.rank()]))
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


@lowers("aten._upsample_bilinear2d_aa.default")
@lowers("aten._upsample_bilinear2d_aa.vec")
def antialiased_linear(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
    """Write an antialiased `Resize` with linear weights."""
    return _antialiased(x, output_size, scales, mode="linear")


@lowers("aten._upsample_bicubic2d_aa.default")
@lowers("aten._upsample_bicubic2d_aa.vec")
def antialiased_cubic(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
    """Write an antialiased `Resize` with Keys' cubic kernel, `a = -0.5`, like torch."""
    return _antialiased(x, output_size, scales, mode="cubic", cubic_coeff_a=-0.5)


def _antialiased(x: Any, output_size: Any, scales: tuple[Any, ...], **kind: Any) -> Any:
    """Write `Resize` with the caller's scale factors, if any: ratios of the rounded sizes would shift pixels."""
    if scales and isinstance(scales[0], list | tuple):
        scales = tuple(scales[0])
    factors = [scale for scale in scales if scale is not None]
    if factors:
        by: tuple[Any, ...] = (op.Constant(value_floats=[1.0, 1.0, *factors]),)
    else:
        one = op.Constant(value_ints=[1])
        sizes = [op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, one) for n in output_size]
        by = (None, op.Concat(op.Shape(x, start=0, end=2), *sizes, axis=0))
    return op.Resize(
        x,
        None,
        *by,
        coordinate_transformation_mode="pytorch_half_pixel",
        antialias=1,
        exclude_outside=1,
        **kind,
    )


@lowers("quark_fx.onnx_lstm.default")
def lstm(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, directions: int, measured: bool) -> Any:
    """Write `LSTM` for one layer, and record in `MEASURED` whether its inputs are all quantized at run time."""
    outputs = op.LSTM(x, *_by_direction(w, r, directions), b, None, h, c, **_recurrent(r, directions))
    outputs[0].producer().meta[MEASURED] = measured
    return outputs


@lowers("quark_fx.onnx_gru.default")
def gru(x: Any, w: Any, r: Any, b: Any, h: Any, directions: int) -> Any:
    """Write `GRU` for one layer; the reset gate applies after the product with the state, as in torch."""
    matrices, attributes = _by_direction(w, r, directions), _recurrent(r, directions)
    return op.GRU(x, *matrices, b, None, h, linear_before_reset=1, **attributes)


@lowers("quark_fx.onnx_rnn.default")
def rnn(x: Any, w: Any, r: Any, b: Any, h: Any, directions: int, activation: str) -> Any:
    """Write `RNN` for one layer."""
    matrices, attributes = _by_direction(w, r, directions), _recurrent(r, directions)
    return op.RNN(x, *matrices, b, None, h, activations=[activation] * directions, **attributes)


def _by_direction(w: Any, r: Any, directions: int) -> tuple[Any, Any]:
    first, second = (op.Reshape(m, op.Constant(value_ints=[directions, -1, m.shape[1]])) for m in (w, r))
    return first, second


def _recurrent(r: Any, directions: int) -> dict[str, Any]:
    return {"hidden_size": r.shape[1], "direction": "bidirectional" if directions == 2 else "forward"}


@lowers("aten.index_put.default")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Write `ScatterND`, which stores values at indices or, with `accumulate`, adds a value per occurrence of an index.

    `ScatterND` indexes the first dimensions, so the indexed dimensions are transposed to the front and back again. A
    mask is replaced by the indices of its nonzero elements.
    """
    chosen = [place for place, index in enumerate(indices) if index is not None]
    parts = [indices[place] for place in chosen]
    masked = [part for part in parts if part.dtype == ir.DataType.BOOL]
    if masked:
        width, broadcast = len(masked[0].shape), 1
        where = op.Transpose(op.NonZero(masked[0]), perm=[1, 0])
    else:
        width, broadcast = len(parts), max(len(part.shape) for part in parts)
        parts = [op.Cast(part, to=ir.DataType.INT64) for part in parts]
        sizes = op.Shape(reduce(op.Add, parts))
        columns = [op.Unsqueeze(op.Expand(part, sizes), [-1]) for part in parts]
        where = columns[0] if width == 1 else op.Concat(*columns, axis=-1)
    first, rank = chosen[0], len(x.shape)
    dims = list(range(first, first + width)) if masked else chosen
    rest_dims = [dim for dim in range(rank) if dim not in dims]
    order = [*dims, *rest_dims]
    moved = x if order == sorted(order) else op.Transpose(x, perm=order)
    tail = op.Shape(moved, start=width)
    heads = op.Shape(where, start=0, end=-1)
    before = first if dims == list(range(first, first + width)) else 0  # torch puts separated dimensions first
    if before:
        sizes = op.Concat(
            op.Shape(moved, start=width, end=width + before), heads, op.Shape(moved, start=width + before), axis=0
        )
        values = op.Expand(values, sizes)
        rest = range(before + broadcast, broadcast + len(rest_dims))
        values = op.Transpose(values, perm=[*range(before, before + broadcast), *range(before), *rest])
    else:
        values = op.Expand(values, op.Concat(heads, tail, axis=0))
    result = op.ScatterND(moved, where, values, reduction="add" if accumulate else "none")
    return result if moved is x else op.Transpose(result, perm=[order.index(dim) for dim in range(rank)])
