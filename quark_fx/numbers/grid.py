"""Grid of the values that a weight can be rounded to."""

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
    """The stored scales of a weight, where they may change one by one.

    Attributes:
        stored: Scales, of shape `layout.scale_shape`.
        layout: Assignment of scales to values.
        format: Format of scales.
        zero_points: Stored zero points, of the shape of `stored`; `None` if they cannot change.
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
        """Function from ideal scales, float64 and not negative, to ones that can be stored."""
        return self.format.allowed(self.stored)

    def times(self, ratio: Tensor) -> Tensor:
        """Return every scale times its ratio, of the shape of `stored`, rounded to one that can be stored."""
        return self.rounded(self.stored * ratio).to(self.stored)

    def rounded_zero_points(self, zero_points: Tensor, limits: tuple[float, float]) -> Tensor:
        """Return zero points of the shape of `stored`, rounded to codes within the limits, in their stored dtype."""
        assert self.zero_points is not None
        return zero_points.detach().round().clamp(*limits).to(self.zero_points.dtype)

    def rounded(self, scale: Tensor) -> Tensor:
        """Return scales of any shape and sign, rounded to ones that can be stored in the place of these, float32."""
        return self.allowed(scale.abs().double()).copysign(scale)


@dataclass(frozen=True)
class Grid:
    """Values that the codes of a weight stand for.

    Codes are in float32 here: integers, or values of another format.

    Attributes:
        scale: Scales, float32, broadcastable to the weight.
        zero_point: Zero points in steps, broadcastable to the weight; offsets make them fractions.
        limits: Smallest and largest code.
        free: Stored scales and zero points if they can change, for `times` and `with_zero_points`; `None` otherwise,
            and in `QuantizedMatrix.grid`.
        format: Number format, of integers by default.
    """

    scale: Tensor
    zero_point: Tensor
    limits: tuple[float, float]
    free: FreeScales | None = None
    format: Format = INT32

    @classmethod
    def of(cls, tensor: QuantizedTensor, scheme: Scheme, *, movable: bool = False) -> Grid:
        """Return the grid of a tensor, with a scale and a zero point for each code."""
        zero_point = tensor.points
        if scheme.symmetric:  # a single number needs little memory when it is spread
            zero_point = zero_point.flatten()[:1].reshape(())
        spread = tensor.layout.spread
        scale, zero_point = (spread(p).expand(tensor.layout.shape) for p in (tensor.scale.float(), zero_point))
        free = FreeScales.of(tensor, scheme) if movable else None
        return cls(scale, zero_point, scheme.limits, free, tensor.format)

    def times(self, ratio: Tensor | None) -> Grid:
        """Return the grid with every stored scale multiplied by `ratio`, and rounded to a scale that can be stored.

        Args:
            ratio: Factors in the shape of the stored scales, to which rounding passes the gradient on; `None` leaves
                the scales unchanged.
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
            zero_points: Values in the shape of `free.zero_points`, to which rounding passes the gradient on; `None`
                for the present ones.
        """
        if zero_points is None or self.free is None or self.free.zero_points is None:
            return self
        rounded = self.free.rounded_zero_points(zero_points, self.limits).to(zero_points.dtype)
        return replace(self, zero_point=self.free.layout.spread(zero_points + (rounded - zero_points).detach()))

    def position(self, weight: Tensor) -> Tensor:
        """Return `weight` in units of codes, unrounded."""
        return weight / self.scale + self.zero_point

    def value(self, codes: Tensor) -> Tensor:
        """Return the weights that codes, or values between codes, stand for."""
        return decode(codes, self.scale, self.zero_point)

    def round_(self, position: Tensor) -> Tensor:
        """Replace each position, float32, by the nearest code: half to even, saturating."""
        return self.format.round_(position, self.limits)

    def round(self, position: Tensor) -> Tensor:
        """Return the nearest code of each position, without a gradient."""
        return self.round_(position.detach().clone())

    def step(self, position: Tensor) -> Tensor:
        """Return the distance between the codes around a position, without a gradient."""
        return self.format.step(position.detach())

    def above(self, codes: Tensor) -> Tensor:
        """Return the next code above each, as if there were such a one above the largest."""
        return self.format.above(codes)

    def below(self, codes: Tensor) -> Tensor:
        """Return the next code below each, as if there were such a one below the smallest."""
        return self.format.below(codes)

    def within_reach(self, position: Tensor) -> Tensor:
        """Return positions moved to where rounding just does not saturate; the gradient of those it moves is zero."""
        (low, high), (first, last) = self.limits, self.format.end_steps
        return position.clamp(low - first / 2, high + last / 2)


__all__ = ["FreeScales", "Grid"]
