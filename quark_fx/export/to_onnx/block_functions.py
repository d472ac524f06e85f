"""ONNX functions, composed of standard operators, that round to blocks at run time and that decode stored codes.

Their results equal the results of `numbers.ops` bit for bit. Before opset 24, no ONNX operator extracts an exponent, so
powers of two come from tables: a logarithm finds the index of the entry or the index before it, and a comparison
decides between the two.
"""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.tape

from quark_fx.numbers.formats import FP8_E4M3, Format
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import FLOAT32

DOMAIN = "quark_fx"
"""Domain of these functions, and of the nodes that `blocks` defines."""

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class _Body:
    """Builder of a function's body. Operands that are not ONNX values become constants."""

    def __init__(self, *inputs: str) -> None:
        self.tape = ir.tape.Tape()
        self.inputs = [ir.Value(name=name) for name in inputs]

    def __call__(self, operator: str, *inputs: Any, **attributes: Any) -> ir.Value:
        values = [self.constant(i) if i is not None and not isinstance(i, ir.Value) else i for i in inputs]
        return self.tape.op(operator, values, attributes)

    def constant(self, value: Any) -> ir.Value:
        array = np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)
        return self.tape.op("Constant", [], {"value": ir.Tensor(array)})

    def function(self, name: str, output: ir.Value, opset: int) -> ir.Function:
        graph = ir.Graph(self.inputs, [output], nodes=self.tape.nodes, opset_imports={"": opset})
        return ir.Function(DOMAIN, name, graph=graph, attributes=[])


# Rounding to blocks at run time ------------------------------------------------------------------------------------


def round_name(scheme: Scheme, *, shared: bool, inner: bool) -> str:
    """Return the name of `round_function`."""
    words = ["Round", str(scheme.format), re.sub(r"\W", "_", str(scheme.scale))]
    words += ["full"] if scheme.symmetry is Symmetry.SYMMETRIC_FULL else []
    words += ["shared"] if shared else []
    return "_".join([*words, "inner"] if inner else words)


def round_function(scheme: Scheme, *, shared: bool, inner: bool, opset: int) -> ir.Function:
    """Return the function that rounds blocks to the nearest values that `scheme` represents.

    Its input and output are float32 of shape `(..., blocks, block)`, or `(..., groups, blocks, block)` if `shared`: the
    blocks of a group share an exponent, which each block may lower by one. With `inner`, the shape has one more
    dimension at the end, whose indices belong to different blocks.
    """
    do = _Body("x")
    (x,) = do.inputs
    scale = _scale(do, x, scheme, shared, -2 if inner else -1)
    codes = _round(do, do("Div", x, scale), scheme)
    return do.function(round_name(scheme, shared=shared, inner=inner), do("Mul", codes, scale), opset)


def _scale(do: _Body, x: ir.Value, scheme: Scheme, shared: bool, axis: int) -> ir.Value:
    # ReduceMax may drop NaN. The sum of `0 * x` does not: it is NaN for NaN and infinity, and zero otherwise.
    largest = do("ReduceMax", do("Abs", x), np.array([axis]), keepdims=1)
    amax = do("Add", largest, do("ReduceSum", do("Mul", x, 0.0), np.array([axis]), keepdims=1))
    if scheme.scale.has_unit:
        return _two_level_scale(do, amax, scheme)
    if scheme.scale == FLOAT32:
        ideal = do("Div", amax, float(scheme.largest))
        return do("Where", do("Less", ideal, _TINY), 1.0, ideal)
    high = do("ReduceMax", x, np.array([axis]), keepdims=1)
    scale = _e8m0_scale(do, amax, high, scheme)
    if not shared:
        return scale
    # Only groups of finite values have a scale. The scale of a block is its group's scale or half of that.
    bad = do("ReduceSum", do("Mul", amax, 0.0), np.array([axis - 1]), keepdims=1)
    group_amax, group_high = (do("ReduceMax", size, np.array([axis - 1]), keepdims=1) for size in (amax, high))
    group = do("Add", _e8m0_scale(do, group_amax, group_high, scheme), bad)
    return do("Where", do("Less", scale, group), do("Mul", group, 0.5), group)


_LOWEST = -128
"""Exponent of the first entry of each table of powers."""
_EXPONENTS = np.arange(_LOWEST, 130)
_MARGIN = 2.0**-10
"""Bound on the absolute error of a base-2 logarithm."""


def _power_of(do: _Body, amax: ir.Value, threshold: float, powers: np.ndarray[Any, Any]) -> ir.Value:
    """Return the entry of `powers` for the exponent `floor(log2(amax / threshold))`, which is computed exactly.

    Args:
        do: Builder of the function.
        amax: Largest magnitudes, float32. Zero gives 1, NaN gives NaN. Subnormal numbers count as the smallest normal
            number.
        threshold: Factor from 1 to 2.
        powers: Table with one entry per exponent, from `_LOWEST` on.
    """
    positive = do("Greater", amax, 0.0)
    size = do("Max", do("Where", positive, amax, 1.0), _TINY)
    place = do("Mul", do("Log", size), float(np.float32(1 / math.log(2))))
    place = do("Cast", do("Add", place, float(-_LOWEST - math.log2(threshold) - _MARGIN)), to=ir.DataType.INT32)
    with np.errstate(over="ignore"):
        following = (threshold * 2.0 ** (_EXPONENTS + 1)).astype(np.float32)
    above = do("GreaterOrEqual", size, do("Gather", following, place))
    place = do("Add", place, do("Cast", above, to=ir.DataType.INT32))
    return do("Where", positive, do("Gather", powers.astype(np.float32), place), do("Add", amax, 1.0))


def _e8m0_scale(do: _Body, amax: ir.Value, high: ir.Value, scheme: Scheme) -> ir.Value:
    """Compute `ScaleFormat.of_range` for scales that are powers of two."""
    scale = _e8m0_scale_of(do, amax, scheme, below=True)
    if not scheme.one_more_below or scheme.scale.rule == "floor":
        return scale
    positive = do("Min", do("Where", do("Greater", high, 0.0), high, _TINY), _HUGE)
    above = _e8m0_scale_of(do, positive, scheme, below=False)
    return do("Where", do("Less", scale, above), above, scale)  # NaN stays


def _e8m0_scale_of(do: _Body, size: ir.Value, scheme: Scheme, *, below: bool) -> ir.Value:
    """Return the scale that covers a magnitude of `size`; the rule sets a threshold in the binade and an offset."""
    threshold, offset, more = 1.0, -scheme.format.max_exponent, below and scheme.one_more_below
    if scheme.scale.rule == "even" and not more:
        threshold, offset = 2 - 2.0 ** -(scheme.format.mantissa + 1), 1 - scheme.format.max_exponent
    elif scheme.scale.rule == "ceil":
        lowest, highest = (limit - scheme.middle for limit in scheme.limits)
        mantissa, exponent = math.frexp(-lowest if more else highest)
        threshold, offset = float(np.nextafter(np.float32(2 * mantissa), np.float32(2))), 2 - exponent
    power = np.clip(_EXPONENTS + offset, -127, 127 - scheme.format.max_exponent)
    return _power_of(do, size, threshold, 2.0**power)


def _two_level_scale(do: _Body, amax: ir.Value, scheme: Scheme) -> ir.Value:
    """Compute `ScaleFormat.of_range` for E4M3 scales that multiply one float32 scale, truncated to 20 bits."""
    if scheme.scale.unit is not None:
        return _times_unit(do, amax, do("Add", 0.0, scheme.scale.unit), scheme)
    bad = do("ReduceSum", do("Mul", amax, 0.0), keepdims=0)
    ideal = do("Div", do("Add", do("ReduceMax", amax, keepdims=0), bad), float(scheme.largest * FP8_E4M3.max))
    last = _power_of(do, ideal, 1.0, 2.0 ** np.clip(_EXPONENTS - 19.0, -149, 127))
    cut = do("Max", do("Mul", do("Floor", do("Div", ideal, last)), last), 2.0**-100)
    unit = do("Where", do("Greater", ideal, 0.0), cut, do("Add", ideal, 1.0))
    return _times_unit(do, amax, unit, scheme)


def _times_unit(do: _Body, amax: ir.Value, unit: ir.Value, scheme: Scheme) -> ir.Value:
    """Return the scales of ranges, each rounded to an E4M3 multiple of `unit`."""
    ratio = do("Div", amax, do("Mul", unit, float(scheme.largest)))
    clipped = do("Clip", ratio, 2.0**-9, FP8_E4M3.max)
    clipped = do("Cast", do("Cast", clipped, to=ir.DataType.FLOAT8E4M3FN), to=ir.DataType.FLOAT)
    return do("Mul", do("Where", do("Greater", amax, 0.0), clipped, do("Add", do("Mul", amax, 0.0), 1.0)), unit)


def _round(do: _Body, x: ir.Value, scheme: Scheme) -> ir.Value:
    """Return the nearest code as float32; NaN stays NaN."""
    fmt = scheme.format
    if fmt.is_integer:
        return do("Clip", do("Round", x), float(fmt.qmin - scheme.middle), float(fmt.qmax - scheme.middle))
    x = do("Clip", x, *fmt.limits)
    if fmt.bits == 8:
        return do("Cast", do("Cast", x, to=float_type(fmt)), to=ir.DataType.FLOAT)
    # The binade of a value determines the step between codes.
    magnitude, step = do("Abs", x), do.constant(2.0 ** (fmt.max_exponent - fmt.mantissa))
    for exponent in range(fmt.max_exponent - 1, fmt.min_exponent - 1, -1):
        below = do("Less", magnitude, 2.0 ** (exponent + 1))
        step = do("Where", below, 2.0 ** (exponent - fmt.mantissa), step)
    return do("Mul", do("Round", do("Div", x, step)), step)


def float_type(fmt: Format) -> ir.DataType:
    """Return the ONNX type of an 8-bit float."""
    return ir.DataType.FLOAT8E4M3FN if fmt == FP8_E4M3 else ir.DataType.FLOAT8E5M2


# Stored codes ------------------------------------------------------------------------------------------------------


def values_function(fmt: Format, opset: int) -> ir.Function:
    """Return the function that maps codes to float32 values.

    It reads 4-bit codes as they are; codes of any other width are packed, and come with their shape as a second input.
    """
    do = _Body("codes") if fmt.bits == 4 else _Body("codes", "shape")
    codes = do("Cast", do.inputs[0], to=ir.DataType.INT32) if fmt.bits == 4 else _unpacked(do, fmt.bits)
    values = do("Gather", fmt.pattern_values().numpy(), codes)
    return do.function(f"Values_{fmt}", values, opset)


def exponents_function(opset: int) -> ir.Function:
    """Return the function that maps E8M0 exponents, uint8, to powers of two, float32."""
    do = _Body("exponents")
    powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    value = do("Gather", powers, do("Cast", do.inputs[0], to=ir.DataType.INT32))
    return do.function("Exponents", value, opset)


def halves_function(opset: int) -> ir.Function:
    """Return the function that unpacks bits to a shape and maps a cleared bit to 1 and a set bit to 0.5."""
    do = _Body("bits", "shape")
    value = do("Gather", np.array([1, 0.5], np.float32), _unpacked(do, 1))
    return do.function("Halves", value, opset)


def _unpacked(do: _Body, bits: int) -> ir.Value:
    """Unpack the bytes of `quark_fx.checkpoints.words.pack`, the first input, to int32 of a shape, the second input."""
    packed, shape = do.inputs
    column = do("Unsqueeze", packed, np.array([-1]))
    planes = do("BitwiseAnd", do("BitShift", column, np.arange(8, dtype=np.uint8), direction="RIGHT"), np.uint8(1))
    used = do("Mul", do("ReduceProd", shape, keepdims=1), np.array([bits]))
    planes = do("Slice", do("Reshape", planes, np.array([-1])), np.array([0]), used)
    if bits == 1:
        return do("Reshape", do("Cast", planes, to=ir.DataType.INT32), shape)
    weights = (1 << np.arange(bits)).astype(np.uint8)[:, None]
    codes = do("MatMulInteger", do("Reshape", planes, np.array([-1, bits])), weights)
    return do("Reshape", codes, shape)
