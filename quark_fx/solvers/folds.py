"""What a solver reads of the data: folds over the batches, merged over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from quark_fx.engine.context import Context
from quark_fx.engine.guidance import Guidance, guidance_of
from quark_fx.engine.room import with_room
from quark_fx.errors import ConfigError
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.places import OperatorPlace, Place
from quark_fx.solvers.products import Part, Product
from quark_fx.solvers.proposals import Activation, Bias
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.system.untrusted import brief


class Fold(Protocol):
    """What holds what was seen so far; every observer is one."""

    def observe(self, x: Tensor) -> Self:
        """Return the fold after it saw `x`, shape `(channels, values)`."""
        ...

    def merge(self, other: Self) -> Self:
        """Return the fold that saw what `self` saw and then what `other` saw; either may have seen nothing."""
        ...


def _require_fold(reading: Input | OutputError) -> None:
    fold: object = reading.fold
    if isinstance(fold, type) or not (hasattr(fold, "observe") and hasattr(fold, "merge")):
        raise ConfigError(f"{type(reading).__name__} takes an observer or another fold, as MinMax(), not {brief(fold)}")


class Reading(ABC):
    """What a solver reads: how it is measured for a place, over the data of all ranks.

    Attributes:
        shared: operators that multiply one value get the same.
        choices: what can be chosen by it.
    """

    shared: ClassVar[bool] = True
    choices: ClassVar[tuple[type, ...]] = (QuantizedMatrix, Bias, Activation)

    @abstractmethod
    def measure(self, places: Sequence[Place], context: Context, batches: Sequence[int]) -> object:
        """Return what `Solver.solve` gets, equal on all ranks.

        Args:
            places: what is chosen: of several operators that read one value if it is `shared`, one otherwise.
            context: of the run.
            batches: those of this rank that count.

        Raises:
            CalibrationError, ValueError: for data that cannot be learned from.
        """


@dataclass(frozen=True)
class InputHessian(Reading):
    """The `Hessian` of a weight: of what its operator multiplies, everything before it quantized.

    Args:
        shifted: with `Hessian.shift`, which takes a second forward pass.
        guided: weight each row by how sensitive the end loss is to an error there (`quark_fx.engine.guidance`). It
            takes a forward and a backward pass of the float model, and each operator has a Hessian of its own.
        two_sided: judge weights by which output channels' errors add up in the end loss, too
            (`QuantizedMatrix.outputs`). It takes the same passes.
    """

    shifted: bool = False
    guided: bool = False
    two_sided: bool = False
    choices: ClassVar = (QuantizedMatrix,)

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether operators that multiply one value get the same."""
        return not self.guided

    def guidance(self, context: Context) -> Guidance | None:
        """Return what it reads of the end loss; every rank has to ask for it."""
        asked = self.guided or self.two_sided
        return guidance_of(context, outputs=self.two_sided) if asked else None

    def now(self, part: Part, context: Context) -> QuantizedMatrix:
        """Return a weight as it is quantized, with what says how its errors count; it measures nothing."""
        if not self.two_sided or context.guidance is None:
            return part.now
        outputs, why = context.guidance.together(part.weight.linear)
        return replace(part.now, outputs=outputs, one_sided=why)

    def measure(self, places: Sequence[Place], context: Context, batches: Sequence[int]) -> Hessian:
        """Return the sums over all rows."""
        parts = tuple(place for place in places if isinstance(place, Part))
        guidance = self.guidance(context) if self.guided else None
        return Product(parts).hessian(context, shifted=self.shifted, guidance=guidance, batches=batches)


@dataclass(frozen=True)
class Input(Reading):
    """A fold of what an operator reads, or of what is rounded to an activation; without padding, as one channel.

    Operators read what everything before them, quantized, makes of the data. Activations are seen in float, as
    calibration sees them.

    Args:
        fold: with its options: any observer.

    Raises:
        ConfigError: for something else, or a class without the parentheses.
    """

    fold: Fold

    def __post_init__(self) -> None:
        _require_fold(self)

    def measure(self, places: Sequence[Place], context: Context, batches: Sequence[int]) -> Fold:
        """Return the fold of all values."""
        return _folded(self.fold, partial(places[0].inputs, context, batches), context)


@dataclass(frozen=True)
class Mean:
    """The mean of each channel.

    Attributes:
        total: float64, shape `(channels,)`; `None` before the first tensor.
        count: values in a channel.
    """

    total: Tensor | None = None
    count: int = 0

    def observe(self, x: Tensor) -> Self:
        """Return the mean after it saw `x`, shape `(channels, values)`."""
        return self.merge(replace(self, total=x.sum(1).double(), count=x.shape[1]))

    def merge(self, other: Self) -> Self:
        """Return the mean of what both saw."""
        if self.total is None or other.total is None:
            return other if self.total is None else self
        return replace(self, total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> Tensor:
        """The mean, float32.

        Raises:
            ValueError: if nothing was observed.
        """
        if self.total is None:
            raise ValueError("nothing was observed")
        return (self.total / self.count).float()


@dataclass(frozen=True)
class OutputError(Reading):
    """A fold of what the float model makes less what the quantized one makes, per output channel of an operator.

    Args:
        fold: with its options; by default the mean.

    Raises:
        ConfigError: as `Input`.
    """

    fold: Fold = field(default_factory=Mean)
    shared: ClassVar[bool] = False
    choices: ClassVar = (QuantizedMatrix, Bias)

    def __post_init__(self) -> None:
        _require_fold(self)

    def measure(self, places: Sequence[Place], context: Context, batches: Sequence[int]) -> Fold:
        """Return the fold of all errors."""
        (place,) = places
        assert isinstance(place, OperatorPlace)
        return _folded(self.fold, partial(place.output_errors, batches), context)


def _folded(empty: Fold, tensors: Callable[[], Iterable[Tensor]], context: Context) -> Fold:
    def folded() -> Fold:
        with torch.no_grad():
            return reduce(lambda fold, x: fold.observe(x), tensors(), empty)

    return context.ranks.fold(with_room(context, folded), lambda a, b: a.merge(b))


__all__ = ["Fold", "Input", "InputHessian", "Mean", "OutputError", "Reading"]
