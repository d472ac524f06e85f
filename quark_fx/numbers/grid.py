"""Grids of the values that a weight can be rounded to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from quark_fx.numbers.formats import INT32, Format
from quark_fx.numbers.layout import Layout
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor, decode
from quark_fx.numbers.scales import FLOAT32, ScaleFormat


@dataclass(frozen=True, eq=False)
class FreeScales:
    """Stored scales of a weight that can change one by one.

    Attributes:
        stored: Scales, of shape `layout.scale_shape`.
        layout: Assignment of scales to values.
        format: Format in which scales are stored.
        zero_points: Stored zero points, in the shape of `stored`; `None` if they cannot change.
    """

    stored: Tensor
    layout: Layout
    format: ScaleFormat = FLOAT32
    zero_points: Tensor | None = None

    @classmethod
    def of(cls, tensor: QuantizedTensor, scheme: Scheme) -> FreeScales:
        """Return the scales of a tensor, and its zero points if the scheme is asymmetric."""
        points = tensor.zero_point if scheme.symmetry is Symmetry.ASYMMETRIC and not scheme.symmetric else None
        return cls(tensor.scale, tensor.layout, scheme.scale, points)

    @cached_property
    def allowed(self) -> Callable[[Tensor], Tensor]:
        """Function that rounds ideal scales, nonnegative float64, to scales that can be stored."""
        return self.format.allowed(self.stored)

    def times(self, ratio: Tensor) -> Tensor:
        """Return every scale times its ratio, rounded to a scale that can be stored.

        Args:
            ratio: Factors in the shape of `stored`.
        """
        return self.rounded(self.stored * ratio).to(self.stored)

    def rounded_zero_points(self, zero_points: Tensor, limits: tuple[float, float]) -> Tensor:
        """Return zero points, in the shape of `stored`, rounded and clamped to `limits`, in the stored dtype."""
        assert self.zero_points is not None
        return zero_points.detach().round().clamp(*limits).to(self.zero_points.dtype)

    def rounded(self, scale: Tensor) -> Tensor:
        """Return scales of any shape and sign, rounded to scales that can replace the stored ones, float32."""
        return self.allowed(scale.abs().double()).copysign(scale)


@dataclass(frozen=True)
class Grid:
    """Values that the codes of a weight can represent.

    The methods take and return codes in float32: integers, or the values of a format without integer codes.

    Attributes:
        scale: Scales, float32, broadcastable to the weight.
        zero_point: Zero points in steps, broadcastable to the weight; fractions if the tensor has offsets.
        limits: Smallest and largest code.
        free: Stored scales and zero points that `times` and `with_zero_points` can change; `None` if they cannot
            change, and in `QuantizedMatrix.grid`.
        format: Number format of the codes. Default: integers.
    """

    scale: Tensor
    zero_point: Tensor
    limits: tuple[float, float]
    free: FreeScales | None = None
    format: Format = INT32

    @classmethod
    def of(cls, tensor: QuantizedTensor, scheme: Scheme, *, movable: bool = False) -> Grid:
        """Return the grid of a tensor, with scales and zero points spread over its codes.

        Args:
            tensor: Quantized tensor.
            scheme: Scheme of its codes.
            movable: Whether `times` and `with_zero_points` can change the scales and zero points.
        """
        zero_point = tensor.points
        if scheme.symmetric:  # all zero points are equal, and expanding one number is free
            zero_point = zero_point.flatten()[:1].reshape(())
        spread = tensor.layout.spread
        scale, zero_point = (spread(p).expand(tensor.layout.shape) for p in (tensor.scale.float(), zero_point))
        free = FreeScales.of(tensor, scheme) if movable else None
        return cls(scale, zero_point, scheme.limits, free, tensor.format)

    def times(self, ratio: Tensor | None) -> Grid:
        """Return the grid with every stored scale multiplied by `ratio` and rounded to a scale that can be stored.

        Args:
            ratio: Factors in the shape of the stored scales; they get a straight-through gradient. `None` leaves the
                scales unchanged.
        """
        if ratio is None or self.free is None:
            return self
        spread = self.free.layout.spread
        scale = self.scale * spread(ratio)
        if self.free.format != FLOAT32:
            scale = scale + (spread(self.free.times(ratio.detach()).float()) - scale).detach()
        return replace(self, scale=scale)

    def with_zero_points(self, zero_points: Tensor | None) -> Grid:
        """Return the grid with other zero points, rounded to integers within the limits.

        Args:
            zero_points: Values in the shape of `free.zero_points`; they get a straight-through gradient. `None` leaves
                the zero points unchanged.
        """
        if zero_points is None or self.free is None or self.free.zero_points is None:
            return self
        rounded = self.free.rounded_zero_points(zero_points, self.limits).to(zero_points.dtype)
        return replace(self, zero_point=self.free.layout.spread(zero_points + (rounded - zero_points).detach()))

    def position(self, weight: Tensor) -> Tensor:
        """Return `weight / scale + zero_point`, the unrounded codes."""
        return weight / self.scale + self.zero_point

    def value(self, codes: Tensor) -> Tensor:
        """Return the weights that codes represent; `codes` may be fractions."""
        return decode(codes, self.scale, self.zero_point)

    def round_(self, position: Tensor) -> Tensor:
        """Round each position, float32, to the nearest code in place: half to even, saturating."""
        return self.format.round_(position, self.limits)

    def round(self, position: Tensor) -> Tensor:
        """Return the nearest code of each position, without a gradient."""
        return self.round_(position.detach().clone())

    def step(self, position: Tensor) -> Tensor:
        """Return the distance between the codes around a position, without a gradient."""
        return self.format.step(position.detach())

    def above(self, codes: Tensor) -> Tensor:
        """Return the next code above each code, as if there were one above the largest."""
        return self.format.above(codes)

    def below(self, codes: Tensor) -> Tensor:
        """Return the next code below each code, as if there were one below the smallest."""
        return self.format.below(codes)

    def within_reach(self, position: Tensor) -> Tensor:
        """Clamp positions to the range in which rounding does not saturate; clamped positions get no gradient."""
        (low, high), (first, last) = self.limits, self.format.end_steps
        return position.clamp(low - first / 2, high + last / 2)


__all__ = ["FreeScales", "Grid"]
