"""Limits on weight codes so that sums of two products fit 16 bits: a requirement of x64 processors without VNNI.

Those processors multiply unsigned by signed bytes with `vpmaddubsw`: it adds the products of two neighbors along the
summed dimension and saturates the sum at 16 bits. Activation codes go up to 255, so the sum for a pair of weight codes
with the same sign is exact as long as their magnitudes add up to at most `32767 // 255 = 128`; the sum for a pair with
opposite signs is always exact.

ONNX Runtime orders the weight of a matrix product by input, and the weight of a convolution by kernel position, then
input channel, and pairs positions 2k and 2k+1. When it loads a file, it converts signed activations to codes from 0 to
255. It sums in 32 bits for unsigned weights, for activations whose range is measured at run time as signed codes, for
depthwise convolutions and `ConvInteger`, and for all operators on processors with VNNI and on ARM.

Source: Intel SDM, PMADDUBSW; kernels of ONNX Runtime's MLAS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.graph.linear import Linear

LARGEST_SUM = 2**15 - 1
"""Largest sum of two products that 16 bits hold."""

_VALUES_AT_ONCE = 1 << 22
_BISECTIONS = 14
"""Number of bisection steps, enough for a ratio of scales to four digits."""


@dataclass(frozen=True)
class PairBound:
    """The pairs of a weight's codes that a processor may add in 16 bits, and the limit of their sum.

    Attributes:
        limit: Largest allowed sum of the magnitudes of two codes with the same sign; at least the largest magnitude.
        order: Dimensions of the weight: dimensions that index sums, then summed dimensions in the kernel's order.
        summed: Number of summed dimensions.
    """

    limit: int
    order: tuple[int, ...]
    summed: int

    @classmethod
    def of_convolution(cls, limit: int, kernel: Sequence[int], inputs: int) -> PairBound:
        """Return the bound of a convolution's weight, summed by position in the kernel, then input channel.

        Args:
            limit: Limit of a sum.
            kernel: Dimensions of the weight that hold the kernel.
            inputs: Dimension of the weight that indexes input channels.
        """
        summed = (*kernel, inputs)
        return cls(limit, (*(dim for dim in range(len(summed) + 1) if dim not in summed), *summed), len(summed))

    @classmethod
    def of_product(cls, limit: int, rank: int, inputs: int) -> PairBound:
        """Return the bound of a matrix, or of a stack of matrices, summed over dimension `inputs`."""
        return cls(limit, (*(dim for dim in range(rank) if dim != inputs), inputs), 1)

    def rows(self, weight: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as (sums, values) in the kernel's order."""
        moved = weight.permute(self.order)
        return moved.reshape(-1, math.prod(moved.shape[-self.summed :]))

    def restore(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return the result of `rows` in the shape of `like`: the inverse of `rows`."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return rows.reshape([like.shape[dim] for dim in self.order]).permute(inverse).contiguous()

    def has_own_scales(self, weight: Tensor, scale: Tensor, axis: int | None) -> bool:
        """Tell whether `scale` along `axis` of `weight` has one value per sum, or one for all sums."""
        if scale.numel() == 1:
            return True
        counted, summed = self.order[: -self.summed], self.order[-self.summed :]
        if scale.dim() == 1:
            return axis is not None and counted == (axis % weight.dim(),)
        return all(scale.shape[dim] == 1 for dim in summed) and all(
            scale.shape[dim] == weight.shape[dim] for dim in counted
        )

    def exceeded(self, codes: Tensor) -> Tensor:
        """Tell which pairs of `codes`, integers in the weight's shape, saturate: shape (sums, pairs), bool."""
        return _exceeded(_pairs(self.rows(codes).to(torch.int16)), self.limit)

    def limited(self, codes: Tensor, position: Tensor | None = None) -> Tensor:
        """Return codes in which no pair saturates; pairs that do not saturate stay the same.

        Args:
            codes: Integers in the weight's shape.
            position: Values before rounding, in units of a code; default: the codes. A pair that saturates becomes the
                nearest pair that does not.
        """
        if not codes.is_cpu:
            return self.lowered(codes, position)
        over = self.exceeded(codes)
        if not bool(over.any()):
            return codes
        rows = self.rows(codes)
        pairs, near = (_pairs(part).clone() for part in (rows, rows if position is None else self.rows(position)))
        # Few pairs saturate: computing them alone takes a third of the time for all pairs.
        pairs[over] = self._nearest(pairs[over].float(), near[over].float(), *_extremes(rows)).to(pairs.dtype)
        return self.restore(_joined(pairs, rows), codes)

    def lowered(self, codes: Tensor, position: Tensor | None = None) -> Tensor:
        """Return `limited(codes, position)` without synchronizing with the device."""
        rows = self.rows(codes).to(torch.float32)
        near = rows if position is None else self.rows(position.to(torch.float32))
        extremes, pieces = _extremes(rows), []
        for part, near_part in zip(*map(_pieces, (rows, near)), strict=True):
            pairs = _pairs(part)
            lower = self._nearest(pairs, _pairs(near_part), *extremes)
            pieces.append(_joined(torch.where(_exceeded(pairs, self.limit)[..., None], lower, pairs), part))
        return self.restore(torch.cat(pieces), codes).to(codes.dtype)

    def _nearest(self, pairs: Tensor, near: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
        """Return, for pairs with equal signs, the pairs nearest to `near` that just do not saturate.

        Args:
            pairs: Codes, float32, shape (..., 2).
            near: Values before rounding, in units of a code.
            smallest: Smallest code of the weight, shape `()`.
            largest: Largest code of the weight, shape `()`.
        """
        sign = pairs[..., 0].sign()
        most = torch.where(sign > 0, largest, -smallest).clamp_(max=self.limit)  # -128 has no counterpart
        first, second = near.abs().unbind(-1)
        share = ((first - second + self.limit) / 2).round_()
        share = torch.minimum(torch.maximum(share, self.limit - most), most)
        return torch.stack((sign * share, sign * (self.limit - share)), -1)

    def widening(self, position: Tensor, *, joint: bool = False, doubled: bool = False) -> Tensor:
        """Return the factor, at least 1, by which each scale grows to minimize the expected squared error.

        A larger scale rounds more coarsely; a smaller scale limits more pairs. The expected error of `n` values at a
        factor of `r` is `n r**2 / 12 + sum(max(0, s - limit r)**2) / 2` over the sums `s` of pairs, in units of current
        codes. It is convex in `r`, and bisection finds its minimum.

        Args:
            position: Weight divided by its scale, in the weight's shape.
            joint: Whether the whole weight has one scale instead of one per sum.
            doubled: Whether scales can only be doubled, such as powers of two.

        Returns:
            Factors, float64, shape (sums,), or () if `joint`.
        """
        sums = [self._excess(piece) for piece in _pieces(self.rows(position))]
        values = math.prod(position.shape) if joint else self.rows(position).shape[-1]
        if joint:
            sums = [torch.cat([s.flatten() for s in sums])[None]]
        best = _doubling if doubled else _widening
        factors = torch.cat([best(piece, self.limit, values) for piece in sums])
        return factors[0] if joint else factors

    def _excess(self, rows: Tensor) -> Tensor:
        """Return the magnitude of the sum of every pair, shape (sums, pairs)."""
        first, second = _pairs(rows.to(torch.float32)).unbind(-1)
        return (first + second).abs_()


def _widening(sums: Tensor, limit: int, values: int) -> Tensor:
    low = torch.ones(len(sums), dtype=torch.float64, device=sums.device)
    high = (sums.amax(-1).double() / limit).clamp_min_(1)
    for _ in range(_BISECTIONS):
        ratio = (low + high) / 2
        lost = (sums - (limit * ratio)[:, None].to(sums)).clamp_min_(0).sum(-1).double()
        falls = values * ratio / 6 < limit * lost
        low, high = torch.where(falls, ratio, low), torch.where(falls, high, ratio)
    return torch.where(low > 1, high, torch.ones_like(high))


def _doubling(sums: Tensor, limit: int, values: int) -> Tensor:
    """Return 2 where it gives a smaller expected error than 1, otherwise 1.

    A larger factor is not needed, because sums of two codes are below `2 * limit`.
    """
    now, twice = (
        values * ratio**2 / 12 + (sums - limit * ratio).clamp_min_(0).square_().sum(-1).double() / 2
        for ratio in (1.0, 2.0)
    )
    return torch.where(twice < now, 2.0, 1.0).double()


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = rows.split(max(1, _VALUES_AT_ONCE // max(1, rows.shape[-1])))
    return pieces


def _pairs(rows: Tensor) -> Tensor:
    """Return the values of rows in pairs, shape (rows, pairs, 2); an odd last value is paired with zero."""
    pairs: Tensor = torch.nn.functional.pad(rows, (0, rows.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs


def _joined(pairs: Tensor, rows: Tensor) -> Tensor:
    """Return the rows from which `_pairs` made `pairs`, without padding."""
    return pairs.flatten(-2)[..., : rows.shape[-1]]


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest code, float32, shape `()` each."""
    return rows.amin().to(torch.float32), rows.amax().to(torch.float32)


def _exceeded(pairs: Tensor, limit: int) -> Tensor:
    """Tell which pairs of codes, shape (..., 2), add up to more than the limit.

    The codes of such a pair have equal signs: with opposite signs, the sum is at most the larger magnitude, which the
    limit allows.
    """
    first, second = pairs.unbind(-1)
    return (first + second).abs() > limit


def pair_bound(
    kind: str, linear: Linear | None, weight: TensorSpec | None, input: TensorSpec | None
) -> PairBound | None:
    """Return the pairs of an operator's codes that are added in 16 bits; `None` if all sums have 32 bits.

    Args:
        kind: Operator family.
        linear: View of the operator, `None` for a recurrent layer. The only recurrent layer with integer kernels is an
            LSTM whose input range is measured at run time.
        weight: Spec of the weight, `None` for float.
        input: Spec of the activation, `None` for float.
    """
    if weight is None or input is None or not (kind in ("conv", "linear") or (kind == "lstm" and input.dynamic)):
        return None
    largest = _largest_code(input)
    if largest is None or weight.granularity is Granularity.GROUP or not weight.format.is_integer:
        return None
    limit = LARGEST_SUM // largest
    if not weight.format.signed or weight.format.bits > 8 or 2 * -weight.format.qmin <= limit:
        return None
    if linear is None:
        return PairBound.of_product(limit, 2, 1)
    outputs, inputs = linear.shape[linear.output_axis], linear.shape[linear.input_axis]
    if not linear.kernel:
        return PairBound.of_product(limit, len(linear.shape), linear.input_axis)
    if input.dynamic or (inputs == 1 and linear.groups == outputs):
        return None  # ranges measured at run time need ConvInteger; it and depthwise convolutions sum in 32 bits
    return PairBound.of_convolution(limit, linear.kernel_axes, linear.input_axis)


def _largest_code(spec: TensorSpec) -> int | None:
    """Return the largest code that a kernel multiplies by, or `None` if it does not multiply 8-bit codes.

    ONNX Runtime converts signed codes to codes from 0 to 255 when it loads a file.
    """
    fmt = spec.format
    if not fmt.is_integer or fmt.bits > 8 or spec.granularity is not Granularity.TENSOR:
        return None
    if spec.dynamic and fmt.signed:
        return None
    return fmt.qmax + 128 * fmt.signed


__all__ = ["LARGEST_SUM", "PairBound", "pair_bound"]
