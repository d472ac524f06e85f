"""Storage of a solver's result, and the data the result can be chosen from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import BlockRun, running
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration_data import without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import QuantizedActivation
from quark_fx.engine.quantized_weights import QuantizedWeight, StoredBias
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import named_nodes, placeholders
from quark_fx.solvers.proposals import Activation, Bias


class Place(ABC):
    """One value in a block that a solver chooses."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in the report."""

    @property
    @abstractmethod
    def now(self) -> Any:
        """Current value, passed to `Solver.solve`."""

    @abstractmethod
    def tensors(self, new: Any) -> dict[str, Tensor]:
        """Return the tensors of the quantized graph that store `new`, of the type of `now`, with their names.

        Raises:
            OverflowError: If `new` cannot be stored; the message is the reason.
        """

    @abstractmethod
    def changed(self, new: Any) -> list[str]:
        """Return the names of the parts that `new` changes."""

    @abstractmethod
    def inputs(self, context: Context, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the input values, batch by batch, without padding, shape `(1, values)`."""


@dataclass(frozen=True)
class OperatorPlace(Place):
    """A value of a weighted operator.

    Attributes:
        run: Block of the operator.
        weight: Weight of the operator.
    """

    run: BlockRun
    weight: QuantizedWeight

    @property
    def name(self) -> str:
        """Name of the operator's module."""
        return self.weight.name

    def inputs(self, context: Context, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the operator's input, with everything before it quantized."""
        module = self.run.module
        read = extract(module, placeholders(module), [self.weight.linear.activation])
        return _values(read, self.run.inputs, context, batches)

    def output_errors(self, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the operator's float output minus its quantized output, by batch, shape `(output channels, values)`."""
        run, name = self.run, self.weight.node.name
        quantized = extract(run.module, placeholders(run.module), [self.weight.node])
        real = extract(run.reference, placeholders(run.reference), [named_nodes(run.reference)[name]])
        for batch in batches:
            (y,), (t,) = quantized(*run.inputs(batch)), real(*run.reference_inputs(batch))
            yield (t.float() - y.float()).movedim(self.weight.channel_dim(y), 0).flatten(1)


@dataclass(frozen=True)
class BiasPlace(OperatorPlace):
    """Bias of an operator, added by that operator only."""

    bias: StoredBias

    @property
    def now(self) -> Bias:
        """Current bias."""
        return Bias(self.name, self.bias.value(self.run.module))

    def tensors(self, new: Bias) -> dict[str, Tensor]:
        """Return the bias, in int32 if it is stored so; values out of range saturate."""
        return self.bias.tensors(self.run.module, new.value)

    def changed(self, new: Bias) -> list[str]:
        """Return the name of the bias."""
        return ["bias"]


@dataclass(frozen=True)
class ActivationPlace(Place):
    """A static scale and zero point.

    Attributes:
        run: First block that uses them.
        activation: Activation they belong to.
        whole: Graph that contains the block.
        context: Context of the run.
    """

    run: BlockRun
    activation: QuantizedActivation
    whole: GraphModule
    context: Context

    @property
    def name(self) -> str:
        """Name of the value in the captured graph."""
        return self.activation.rounding.value

    @property
    def now(self) -> Activation:
        """Current scale and zero point of the value, with their scheme."""
        rounding, qparams = self.activation.rounding, self.activation.qparams(self.run.module)
        return Activation(self.name, rounding.spec.scheme, qparams, rounding.low, rounding.high)

    def tensors(self, new: Activation) -> dict[str, Tensor]:
        """Return scale, zero point, and the int32 biases that depend on them."""
        return self.activation.tensors(self.whole, self.context.plan, new.qparams)

    def changed(self, new: Activation) -> list[str]:
        """Return which of scale and zero point are new."""
        old = self.now.qparams
        scale = [] if torch.equal(old.scale, new.qparams.scale) else ["scale"]
        return scale + ([] if torch.equal(old.zero_point, new.qparams.zero_point) else ["zero point"])

    def inputs(self, context: Context, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the value of the float model."""
        reference = self.run.reference
        read = extract(reference, placeholders(reference), [named_nodes(reference)[self.name]])
        return _values(read, self.run.reference_inputs, context, batches)


def blamed(places: Iterable[Place], error: Exception) -> CalibrationError:
    """Return an error that names the places and suggests a fix."""
    names = ", ".join(place.name for place in places)
    return CalibrationError(f"{names}: {error}; check the calibration data, or exclude the operator")


def _values(
    part: GraphModule, inputs: Callable[[int], list[Any]], context: Context, batches: Sequence[int]
) -> Iterator[Tensor]:
    for batch in batches:
        with running(context.data.number_of(batch)):
            (x,) = part(*inputs(batch))
        yield without_padding(x, context.data.kept_positions(batch)).reshape(1, -1)


__all__ = ["ActivationPlace", "BiasPlace", "OperatorPlace", "Place", "blamed"]
