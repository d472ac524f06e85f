"""The module that quantizes a weight, bias, or activation during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quark_fx.numbers import ops
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.plan.pair_sums import PairBound

_SMALLEST_SHARE = 0.1
"""Lower bound of a learned scale, as a fraction of its initial value."""


class FakeQuantize(nn.Module):
    """A module that rounds a float tensor to the values of its codes, with a straight-through gradient.

    Args:
        scale: Scale, float32, in the shape that `quark_fx.numbers.ops` takes; learned if it is a parameter.
        zero_point: Zero point, int32, or float32 offsets, with the shape of `scale` or `()`; never learned. The
            buffer is float32, because averaging integer buffers truncates.
        scheme: Scheme that defines the range of codes.
        axis: See `quark_fx.numbers.ops`.
        block_size: See `quark_fx.numbers.ops`.
        dtype: Dtype of the result.
        pairs: Bound for pairs of codes whose products the target adds in 16 bits; codes above the bound are lowered.
        factors: Fake quantizers of an activation and a weight whose scales multiply to the scale of an int32 bias.
    """

    scale: Tensor
    start: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: Tensor,
        zero_point: Tensor,
        scheme: Scheme,
        axis: int | None = None,
        block_size: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        pairs: PairBound | None = None,
        factors: tuple[FakeQuantize, FakeQuantize] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(scale, nn.Parameter):
            self.scale = scale
            self.register_buffer("start", scale.detach().clone())
        else:
            self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point.to(torch.float32, copy=True))
        self._offsets = zero_point.is_floating_point()
        self.scheme, self.axis, self.block_size = scheme, axis, block_size
        self.dtype, self.pairs, self.factors = dtype, pairs, factors

    def step(self) -> Tensor:
        """Return the current scale, a product of two for an int32 bias; a learned scale is kept away from zero."""
        if self.factors is not None:
            one, other = self.factors
            return (one.step() * other.step()).detach()
        if not isinstance(self.scale, nn.Parameter):
            return self.scale
        sign = self.start.sign()
        with torch.no_grad():
            step = torch.maximum(self.scale * sign, self.start.abs() * _SMALLEST_SHARE) * sign
        return ops.straight_through(step, self.scale)

    def point(self) -> Tensor:
        """Return the zero point in the dtype that graphs store: float32 for offsets, otherwise int32."""
        return self.zero_point if self._offsets else self.zero_point.round().to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the codes of `x`; the gradient is 1 within the clip range, 0 outside of it."""
        step, (low, high), layout = self.step(), self.scheme.limits, (self.axis, self.block_size)
        point = self.point()
        value: Tensor = ops.fake_quantize(x.float(), step, point, str(self.scheme.format), *layout, low, high)
        if self.pairs is not None or self.scheme.format.bits > 16:
            with torch.no_grad():
                codes = self.codes(x)
                stored = ops.dequantize(codes, step, point, str(self.scheme.format), *layout)
            value = ops.straight_through(stored, value)
        return value.to(self.dtype)

    @torch.no_grad()
    def codes(self, x: Tensor) -> Tensor:
        """Return the codes of `x`, in the format's dtype."""
        step, point = self.step(), self.point()
        codes = ops.encode(x.float(), QParams(step, point), self.scheme, self.axis, self.block_size)
        if self.pairs is None:
            return codes
        position, zero_point = (ops.spread(p, x, self.axis, self.block_size) for p in (step, point))
        return self.pairs.lowered(codes, x.float() / position + zero_point)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantize:
        require_float32(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        learned = ", learned" if isinstance(self.scale, nn.Parameter) else ""
        return f"{self.scheme.format}, axis={self.axis}, block_size={self.block_size}{learned}"


class Cast(nn.Module):
    """A module that rounds a float32 tensor to the 16-bit dtype in which it is stored.

    Args:
        stored: The 16-bit dtype.
        dtype: Dtype of the result.
    """

    def __init__(self, stored: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored, self.dtype = stored, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, rounded to the stored dtype, in `dtype`."""
        return x.to(self.stored).to(self.dtype)

    @torch.no_grad()
    def codes(self, x: Tensor) -> Tensor:
        """Return `x` in its stored dtype."""
        return x.to(self.stored)


@dataclass(frozen=True)
class Trained:
    """Tensors and modules that a quantized graph and its eager model share in training, keyed by names in the graph.

    Attributes:
        weights: Float values and the modules that round them, keyed by the names of the codes.
        floats: Parameters that stay in float.
        activations: Modules that round activations, keyed by the names of the scales.
        buffers: Tensors of the graph that are not parameters.
    """

    weights: Mapping[str, tuple[nn.Parameter, FakeQuantize | Cast]] = field(default_factory=dict)
    floats: Mapping[str, nn.Parameter] = field(default_factory=dict)
    activations: Mapping[str, FakeQuantize] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def require_float32(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise `RuntimeError` if the function given to `nn.Module._apply` would convert scales."""
    if fn(torch.zeros((), dtype=torch.float32)).dtype != torch.float32:
        raise RuntimeError("the scales of a quantized model are float32; convert the model before quantizing it")


__all__ = ["Cast", "FakeQuantize", "Trained", "require_float32"]
