"""Range of another observer, multiplied by a ratio or widened to a smallest scale."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers.base import Observer, observer, state
from quark_fx.observers.minmax import MinMax, Placeholder
from quark_fx.system.options import Interval, NonNegativeFloat


@observer
@dataclass(frozen=True, kw_only=True)
class Adjusted(Observer):
    """Range of another observer, with both ends multiplied by `ratio` and widened to a scale of at least `eps`.

    Args:
        observer: Observer that finds the range, its name, or its dictionary.
        ratio: Fraction of the range that is kept; values outside it saturate.
        eps: Smallest scale, 0 for no limit. Torch's observers have `torch.finfo(torch.float32).eps`.

    Raises:
        ConfigError: For a value out of range, or an observer without a range or with its own choice of scales.

    Source:
        `ratio` of Neural Compressor's `quant_tensor`, for symmetric formats; `eps` of `torch.ao.quantization` and of
        Quark for PyTorch.
    """

    observer: Observer = field(default_factory=MinMax)
    ratio: Annotated[float, Interval("(0, 1]")] = 1.0
    eps: NonNegativeFloat = 0.0
    collected: Observer | None = state()
    """Wrapped observer with its data."""

    def __post_init__(self) -> None:
        if isinstance(self.observer, Placeholder):
            raise ConfigError(f"Adjusted needs an observer that measures a range, not {self.observer!r}")
        if self.observer.weights_only:
            raise ConfigError(
                f"observer {self.observer.name!r} chooses scales, not a range; Adjusted only changes ranges"
            )

    def observe(self, x: Tensor) -> Self:
        return replace(self, collected=(self.collected or self.observer).observe(x))

    def merge(self, other: Self) -> Self:
        if self.collected is None or other.collected is None:
            return other if self.collected is None else self
        return replace(self, collected=self.collected.merge(other.collected))

    def reading(self, seen: Observer) -> Self | None:
        """Return this observer with the data of `seen`, if the wrapped observer can use it."""
        inner = self.observer.reading(seen.collected or seen.observer if isinstance(seen, Adjusted) else seen)
        return None if inner is None else replace(self, collected=inner)

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        low, high = (bound.double() * self.ratio for bound in (self.collected or self.observer).range(scheme))
        if scheme.symmetric:
            return low, high.clamp(min=self.eps * scheme.largest)
        low, high = low.clamp(max=0), high.clamp(min=0)
        return low, torch.maximum(high, low + self.eps * (scheme.qmax - scheme.qmin))


__all__ = ["Adjusted"]
