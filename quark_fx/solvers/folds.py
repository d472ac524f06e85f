"""Data for solvers besides Hessians: folds over the batches, merged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from quark_fx.engine.context import Context
from quark_fx.errors import ConfigError
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.slots import Bias, OperatorSlot, Reading, Slot
from quark_fx.system.untrusted import brief


class Fold(Protocol):
    """Summary of the data observed so far; every observer is a fold."""

    def observe(self, x: Tensor) -> Self:
        """Return the fold that includes `x`, shape `(channels, values)`."""
        ...

    def merge(self, other: Self) -> Self:
        """Return the fold of the data of `self`, then of `other`; either may be empty."""
        ...


def _require_fold(reading: Input | OutputError) -> None:
    fold: object = reading.fold
    if isinstance(fold, type) or not (hasattr(fold, "observe") and hasattr(fold, "merge")):
        raise ConfigError(
            f"{type(reading).__name__} takes an observer, such as MinMax(), or another fold, not {brief(fold)}"
        )


@dataclass(frozen=True)
class Input(Reading):
    """Fold of an operator's input, or of an activation before rounding, as a single channel without padding.

    An operator's input comes from the quantized graph, with everything before it quantized. Activations are observed in
    float, like in calibration.

    Args:
        fold: Observer with its options, or another fold.

    Raises:
        ConfigError: If `fold` is not a fold, or is a class instead of an instance.
    """

    fold: Fold

    def __post_init__(self) -> None:
        _require_fold(self)

    def measure(self, slots: Sequence[Slot], context: Context, batches: Sequence[int]) -> Fold:
        """Return the fold of all values."""
        return _folded(self.fold, partial(slots[0].inputs, context, batches), context)


@dataclass(frozen=True)
class Mean:
    """Mean of each channel.

    Attributes:
        total: Sum per channel, float64, shape `(channels,)`; `None` before the first tensor.
        count: Number of values per channel.
    """

    total: Tensor | None = None
    count: int = 0

    def observe(self, x: Tensor) -> Self:
        """Return the mean that includes `x`, shape `(channels, values)`."""
        return self.merge(replace(self, total=x.sum(1).double(), count=x.shape[1]))

    def merge(self, other: Self) -> Self:
        """Return the mean of the data of `self` and `other` together."""
        if self.total is None or other.total is None:
            return other if self.total is None else self
        return replace(self, total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> Tensor:
        """The mean, float32.

        Raises:
            ValueError: If nothing was observed.
        """
        if self.total is None:
            raise ValueError("nothing was observed; call `observe` first")
        return (self.total / self.count).float()


@dataclass(frozen=True)
class OutputError(Reading):
    """Fold of the float output minus the quantized output, per output channel of an operator.

    Args:
        fold: Observer or another fold, with its options; default: the mean.

    Raises:
        ConfigError: If `fold` is not a fold, or is a class instead of an instance.
    """

    fold: Fold = field(default_factory=Mean)
    shared: ClassVar[bool] = False
    choices: ClassVar = (QuantizedMatrix, Bias)

    def __post_init__(self) -> None:
        _require_fold(self)

    def measure(self, slots: Sequence[Slot], context: Context, batches: Sequence[int]) -> Fold:
        """Return the fold of all errors."""
        (slot,) = slots
        assert isinstance(slot, OperatorSlot)
        return _folded(self.fold, partial(slot.output_errors, batches), context)


def _folded(empty: Fold, tensors: Callable[[], Iterable[Tensor]], context: Context) -> Fold:
    def folded() -> Fold:
        with torch.no_grad():
            return reduce(lambda fold, x: fold.observe(x), tensors(), empty)

    return context.ranks.fold(context.with_room(folded), lambda a, b: a.merge(b))


__all__ = ["Fold", "Input", "Mean", "OutputError"]
