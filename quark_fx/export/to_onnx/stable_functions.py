"""Numerically stable ONNX lowerings that match torch's accuracy far from zero, near zero, and around a large mean.

torch's own lowerings use textbook formulas, such as `log(sigmoid(x))`, which is `-inf` below -88 in float32. The
lowerings in this module use `log1p`, `expm1`, and centered values, and compute in the type of their operand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset21

from quark_fx.export.to_onnx.translation import lowers

op: Any = opset21


def _constant(x: Any, value: float) -> Any:
    """Return a scalar constant in the type of `x`."""
    return op.Constant(value=ir.Tensor(np.asarray(value, x.dtype.numpy())))


@lowers("aten.log1p.default")
def log1p(x: Any) -> Any:
    """Write `log(1 + x)`, corrected for the rounding of `1 + x`."""
    return _log1p(x, like=x)


def _log1p(x: Any, *, like: Any) -> Any:
    """Return `log1p(x)`, computed in the type of `like`.

    Source:
        Goldberg 1991, "What every computer scientist should know about floating-point arithmetic", theorem 4.
    """
    one = _constant(like, 1.0)
    above = op.Add(x, one)
    rounded = op.Sub(above, one)
    corrected = op.Mul(op.Log(above), op.Div(x, rounded))
    # The quotient is 0 / 0 where 1 + x rounds to 1, and inf / inf at infinity.
    usual = op.Where(op.Equal(rounded, _constant(like, 0.0)), x, corrected)
    return op.Where(op.Equal(x, _constant(like, math.inf)), x, usual)


@lowers("aten.expm1.default")
@lowers("aten.special_expm1.default")
def expm1(x: Any) -> Any:
    """Write `tanh(x / 2) * (exp(x) + 1)`, which needs no subtraction."""
    return _expm1(x, like=x)


def _expm1(x: Any, *, like: Any) -> Any:
    """Return `expm1(x)`, computed in the type of `like`."""
    half = op.Mul(x, _constant(like, 0.5))
    return op.Mul(op.Tanh(half), op.Add(op.Exp(x), _constant(like, 1.0)))


@lowers("aten.elu.default")
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Write `scale * (max(x, 0) + alpha * expm1(input_scale * min(x, 0)))`; ONNX Runtime's `Elu` uses `exp(x) - 1`."""
    zero = _constant(x, 0.0)
    below = _times(_expm1(_times(op.Min(x, zero), input_scale, like=x), like=x), alpha * scale, like=x)
    return op.Add(_times(op.Max(x, zero), scale, like=x), below)


def _times(x: Any, factor: float, *, like: Any) -> Any:
    """Return `x * factor` in the type of `like`, without a node for a factor of 1."""
    return x if factor == 1 else op.Mul(x, _constant(like, factor))


@lowers("aten.celu.default")
def celu(x: Any, alpha: float = 1.0) -> Any:
    """Write `max(x, 0) + alpha * expm1(min(x, 0) / alpha)`; see `elu`."""
    return elu(x, alpha, 1.0, 1 / alpha)


@lowers("aten.selu.default")
def selu(x: Any) -> Any:
    """Write `elu` with the two constants of SELU.

    Source:
        Klambauer et al. 2017, "Self-normalizing neural networks", section 2.
    """
    return elu(x, 1.6732632423543772, 1.0507009873554805)


_ERFCX = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


@lowers("aten.erfc.default")
@lowers("aten.special_erfc.default")
def erfc(x: Any) -> Any:
    """Write `exp(-x ** 2) * erfcx(x)`, with a relative error of at most 1.2e-7 even where `1 - erf(x)` is 0.

    Source:
        Press et al. 1992, "Numerical recipes in C", section 6.2.
    """
    tail = _scaled_tail(x, op.Neg(op.Mul(x, x)))
    return op.Where(op.Less(x, _constant(x, 0.0)), op.Sub(_constant(x, 2.0), tail), tail)


@lowers("aten.special_erfcx.default")
def erfcx(x: Any) -> Any:
    """Write `exp(x ** 2) * erfc(x)`; see `erfc`."""
    zero, tail = _constant(x, 0.0), _scaled_tail(x, None)
    below = op.Sub(op.Mul(_constant(x, 2.0), op.Exp(op.Mul(x, x))), tail)
    return op.Where(op.Less(x, zero), below, tail)


def _scaled_tail(x: Any, exponent: Any) -> Any:
    """Return `erfcx(|x|) * exp(exponent)`."""
    one = _constant(x, 1.0)
    t = op.Div(one, op.Add(one, op.Mul(op.Abs(x), _constant(x, 0.5))))
    *lower, power = (_constant(x, factor) for factor in _ERFCX)
    for factor in reversed(lower):
        power = op.Add(op.Mul(power, t), factor)
    return op.Mul(t, op.Exp(power if exponent is None else op.Add(exponent, power)))


@lowers("aten.logdet.default")
def logdet(x: Any) -> Any:
    """Write `log(det(x / c)) + n log(c)` for `c` a power of two near the largest magnitude: `det(x)` may overflow."""
    rows = op.CastLike(op.Gather(op.Shape(x), op.Constant(value_int=-1)), x)
    peak = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-2, -1]), keepdims=1)
    exponent = op.Floor(op.Div(op.Log(peak), _constant(x, math.log(2))))
    scale = op.Where(op.Equal(peak, _constant(x, 0.0)), _constant(x, 1.0), op.Pow(_constant(x, 2.0), exponent))
    factor = op.Mul(rows, op.Log(op.Squeeze(scale, op.Constant(value_ints=[-2, -1]))))
    return op.Add(op.Log(op.Det(op.Div(x, scale))), factor)


@lowers("aten.log_sigmoid.default")
def log_sigmoid(x: Any) -> Any:
    """Write `min(x, 0) - log1p(exp(-|x|))`."""
    return op.Sub(op.Min(x, _constant(x, 0.0)), _log1p(op.Exp(op.Neg(op.Abs(x))), like=x))


@lowers("aten.logaddexp.default")
def logaddexp(a: Any, b: Any) -> Any:
    """Write `max(a, b) + log1p(exp(-|a - b|))`, or `a + log(2)` if `a` equals `b`, because `inf - inf` is NaN."""
    apart = op.Add(op.Max(a, b), _log1p(op.Exp(op.Neg(op.Abs(op.Sub(a, b)))), like=a))
    return op.Where(op.Equal(a, b), op.Add(a, _constant(a, math.log(2))), apart)


@lowers("aten.logaddexp2.default")
def logaddexp2(a: Any, b: Any) -> Any:
    """Write `logaddexp` in base 2: `max(a, b) + log1p(2 ** -|a - b|) / log(2)`."""
    distance = op.Mul(op.Abs(op.Sub(a, b)), _constant(a, -math.log(2)))
    apart = op.Add(op.Max(a, b), op.Div(_log1p(op.Exp(distance), like=a), _constant(a, math.log(2))))
    return op.Where(op.Equal(a, b), op.Add(a, _constant(a, 1.0)), apart)


@lowers("aten.logcumsumexp.default")
def logcumsumexp(x: Any, dim: int) -> Any:
    """Write `logsumexp` of each prefix, relative to its maximum; a size of `n` needs `n * n` intermediate values."""
    axis = dim % len(x.shape)
    after = op.Constant(value_ints=[axis])
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[axis]))
    index = op.Range(op.Constant(value_int=0), op.Squeeze(size), op.Constant(value_int=1))
    beyond = op.Less(op.Unsqueeze(index, op.Constant(value_ints=[1])), op.Unsqueeze(index, op.Constant(value_ints=[0])))
    trailing = [*range(2, len(x.shape) - axis + 1)]
    if trailing:
        beyond = op.Unsqueeze(beyond, op.Constant(value_ints=trailing))
    prefixes = op.Where(beyond, _constant(x, -math.inf), op.Unsqueeze(x, after))
    return op.ReduceLogSumExp(prefixes, op.Constant(value_ints=[axis + 1]), keepdims=0)


@lowers("aten.remainder.Scalar")
@lowers("aten.remainder.Tensor")
def remainder(x: Any, other: Any) -> Any:
    """Write `fmod`, plus the divisor where the signs differ: a quotient of large numbers loses its fraction."""
    divisor = other if isinstance(other, ir.Value) else _constant(x, other)
    if not x.dtype.is_floating_point():
        return op.Mod(x, divisor)
    rest, across = _truncated_rest(x, divisor)
    return op.Where(across, op.Add(rest, divisor), rest)


def _truncated_rest(x: Any, divisor: Any) -> tuple[Any, Any]:
    """Return `fmod` of floats, and whether the remainder is nonzero and has another sign than the divisor."""
    rest, zero = op.Mod(x, divisor, fmod=1), _constant(x, 0.0)
    return rest, op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(divisor, zero)))


@lowers("aten.div.Scalar_mode")
@lowers("aten.div.Tensor_mode")
def div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Write an integer division for integers, since floats do not represent large integers, or torch's float division.

    torch computes the floor of a float quotient from `fmod`: the quotient of 1 and 0.1 rounds to 10, but the floor of
    the exact quotient is 9.
    """
    divisor = other if isinstance(other, ir.Value) else _constant(x, other)
    if x.dtype.is_floating_point() or rounding_mode is None:
        quotient = op.Div(x, divisor)
        if rounding_mode == "trunc":
            return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))
        if rounding_mode is None:
            return quotient
        rest, across = _truncated_rest(x, divisor)
        whole = op.Div(op.Sub(x, rest), divisor)
        whole = op.Where(across, op.Sub(whole, _constant(x, 1.0)), whole)
        floor = op.Floor(whole)
        above = op.Greater(op.Sub(whole, floor), _constant(x, 0.5))  # the division rounded to below an integer
        floor = op.Where(above, op.Add(floor, _constant(x, 1.0)), floor)
        return op.Where(op.Equal(divisor, _constant(x, 0.0)), quotient, floor)
    wide = ir.DataType.INT64 if x.dtype == ir.DataType.INT64 else ir.DataType.INT32  # narrower types lack kernels
    x, divisor, narrow = op.Cast(x, to=wide), op.Cast(divisor, to=wide), x.dtype
    quotient = op.Div(x, divisor)
    if rounding_mode == "floor":
        zero = op.Constant(value=ir.Tensor(np.asarray(0, wide.numpy())))
        inexact = op.Not(op.Equal(op.Mul(quotient, divisor), x))
        below = op.And(inexact, op.Xor(op.Less(x, zero), op.Less(divisor, zero)))
        quotient = op.Sub(quotient, op.Cast(below, to=wide))
    return op.Cast(quotient, to=narrow)


@lowers("aten.group_norm.default")
def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """Write `InstanceNormalization` of groups minus their means: ONNX Runtime subtracts squares to get a variance."""
    flat = op.Reshape(x, op.Constant(value_ints=[0, num_groups, -1]))
    centered = op.Sub(flat, op.ReduceMean(flat, op.Constant(value_ints=[2]), keepdims=1))
    ones, zeros = (op.Constant(value=ir.Tensor(np.full(num_groups, value, x.dtype.numpy()))) for value in (1.0, 0.0))
    y = op.Reshape(op.InstanceNormalization(centered, ones, zeros, epsilon=eps), op.Shape(x))
    along = op.Constant(value_ints=[-1] + [1] * (len(x.shape) - 2))
    if weight is not None:
        y = op.Mul(y, op.Reshape(weight, along))
    return y if bias is None else op.Add(y, op.Reshape(bias, along))


@lowers("aten.std.correction")
def std(x: Any, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Write the standard deviation, relative to the largest deviation: squares of small deviations would underflow."""
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lowers("aten.std.dim")
def std_dim(x: Any, dim: list[int] | None, unbiased: bool = True, keepdim: bool = False) -> Any:
    """Write `std` with a correction of 1 if `unbiased`, or else 0."""
    return std(x, dim, correction=float(unbiased), keepdim=keepdim)


@lowers("aten.std_mean.correction")
def std_mean(
    x: Any, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """Write the standard deviation, as in `std`, and the mean."""
    axes = op.Constant(value_ints=[axis % len(x.shape) for axis in dim or range(len(x.shape))])
    mean = op.ReduceMean(x, axes, keepdims=1)
    deviation = op.Sub(x, mean)
    peak = op.ReduceMax(op.Abs(deviation), axes, keepdims=1)
    scale = op.Where(op.Equal(peak, _constant(x, 0.0)), _constant(x, 1.0), peak)
    squares = op.ReduceSumSquare(op.Div(deviation, scale), axes, keepdims=1)
    count = op.CastLike(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0), x)
    free = op.Max(op.Sub(count, _constant(x, 1.0 if correction is None else correction)), _constant(x, 0.0))
    root = op.Mul(op.Sqrt(op.Div(squares, free)), scale)
    return (root, mean) if keepdim else (op.Squeeze(root, axes), op.Squeeze(mean, axes))


@lowers("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    """Write `(1 - y) x - (1 + (p - 1) y) log_sigmoid(x)`, where `y` is `target` and `p` is `pos_weight`.

    `reduction` is 0 for none, 1 for the mean, and 2 for the sum.
    """
    scaled = op.Neg(log_sigmoid(x))
    if pos_weight is not None:
        one = _constant(x, 1.0)
        scaled = op.Mul(scaled, op.Add(one, op.Mul(op.Sub(pos_weight, one), target)))
    loss = op.Add(op.Mul(op.Sub(_constant(x, 1.0), target), x), scaled)
    loss = loss if weight is None else op.Mul(loss, weight)
    return (loss, op.ReduceMean(loss, keepdims=0), op.ReduceSum(loss, keepdims=0))[reduction]
