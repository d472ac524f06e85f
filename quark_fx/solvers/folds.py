"""Data for solvers: folds over the batches, merged over the ranks."""

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
from quark_fx.errors import ConfigError, Declined
from quark_fx.graph.nodes import named_nodes
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.slots import Activation, Bias, OperatorSlot, Slot, WeightSlot
from quark_fx.system.untrusted import brief


class Fold(Protocol):
    """Summary of the data observed so far; every observer is one."""

    def observe(self, x: Tensor) -> Self:
        """Return the fold that includes `x`, shape `(channels, values)`."""
        ...

    def merge(self, other: Self) -> Self:
        """Return the fold of the data of `self`, then of `other`; either may be empty."""
        ...


def _require_fold(reading: Input | OutputError) -> None:
    fold: object = reading.fold
    if isinstance(fold, type) or not (hasattr(fold, "observe") and hasattr(fold, "merge")):
        raise ConfigError(f"{type(reading).__name__} takes an observer or another fold, as MinMax(), not {brief(fold)}")


class Reading(ABC):
    """Data of a solver, measured for a slot, over the batches of all ranks.

    Attributes:
        shared: True if operators with the same input get the same data.
        choices: Types that can be chosen from this data.
    """

    shared: ClassVar[bool] = True
    choices: ClassVar[tuple[type, ...]] = (QuantizedMatrix, Bias, Activation)

    @abstractmethod
    def measure(self, slots: Sequence[Slot], context: Context, batches: Sequence[int]) -> object:
        """Return the data for `Solver.solve`, equal on all ranks.

        Args:
            slots: Values to choose: all that have the same input if the data is `shared`, one otherwise.
            context: Context of the run.
            batches: Batches of this rank to include.

        Raises:
            CalibrationError, ValueError: For data that cannot be used.
        """


@dataclass(frozen=True)
class InputHessian(Reading):
    """The `Hessian` of a weight, measured on its operator's input with everything before it quantized.

    Args:
        shifted: Measure `Hessian.shift`, which takes a second forward pass.
        guided: Weight each row by the sensitivity of the end loss to an error there (`quark_fx.engine.guidance`). It
            takes a forward and a backward pass of the float model, and each operator gets its own Hessian.
        two_sided: Evaluate weights also by how errors of output channels add up in the end loss
            (`QuantizedMatrix.outputs`). It takes the same passes.
    """

    shifted: bool = False
    guided: bool = False
    two_sided: bool = False
    choices: ClassVar = (QuantizedMatrix,)

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """True if operators with the same input get the same Hessian."""
        return not self.guided

    def guidance(self, context: Context) -> Guidance | None:
        """Return the measurements of the end loss; collective: every rank must call it."""
        asked = self.guided or self.two_sided
        return guidance_of(context, outputs=self.two_sided) if asked else None

    def now(self, slot: WeightSlot, context: Context) -> QuantizedMatrix:
        """Return the current quantized weight, with the weighting of its errors; measures nothing."""
        if not self.two_sided or context.guidance is None:
            return slot.now
        try:
            return replace(slot.now, outputs=context.guidance.together(slot.weight.linear), one_sided="")
        except Declined as declined:
            return replace(slot.now, outputs=None, one_sided=declined.reason)

    def measure(self, slots: Sequence[Slot], context: Context, batches: Sequence[int]) -> Hessian:
        """Return the sums over all rows."""
        (hessian,) = self._measured(slots, context, [batches])
        return hessian

    def measure_parts(self, slots: Sequence[Slot], context: Context) -> tuple[Hessian, Hessian]:
        """Return the sums over calibration and over validation batches; without validation data, the same object."""
        hessians = self._measured(slots, context, context.data.parts)
        return hessians[0], hessians[-1]

    def _measured(self, slots: Sequence[Slot], context: Context, parts: Sequence[Sequence[int]]) -> list[Hessian]:
        slot = slots[0]
        assert isinstance(slot, WeightSlot)
        linear, mapping, run = slot.weight.linear, slot.mapping, slot.run
        source, reference = Entrance(run.module, linear, mapping, run.inputs), None
        # The float model may route other tokens to an expert than the quantized model, so rows do not correspond.
        if self.shifted and mapping.offsets is None:
            real = named_nodes(run.reference)[linear.node.name]
            reference = Entrance(run.reference, linear.at(real), mapping, run.reference_inputs)
        guidance = self.guidance(context) if self.guided else None
        unguided = "" if guidance is None else guidance.missing(linear)
        weights = None if guidance is None or unguided else partial(guidance.of, linear.node.name)
        hessians = Hessian.measure(context, source, reference, parts=parts, weights=weights)
        for hessian in hessians:
            hessian.unguided = f"unguided: {unguided}" * bool(unguided)
        return hessians


@dataclass(frozen=True)
class Input(Reading):
    """A fold of an operator's input, or of the values rounded to an activation, in a single channel without padding.

    An operator's input comes from the quantized graph, with everything before it quantized. Activations are observed in
    float, like in calibration.

    Args:
        fold: Observer with its options, or another fold.

    Raises:
        ConfigError: For anything else, or for a class instead of an instance.
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
        """Return the mean of the data of both."""
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
            raise ValueError("nothing was observed")
        return (self.total / self.count).float()


@dataclass(frozen=True)
class OutputError(Reading):
    """A fold of the float output minus the quantized output, per output channel of an operator.

    Args:
        fold: Observer or another fold, with its options; default: the mean.

    Raises:
        ConfigError: For anything else, like `Input`.
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


__all__ = ["Fold", "Input", "InputHessian", "Mean", "OutputError", "Reading"]
