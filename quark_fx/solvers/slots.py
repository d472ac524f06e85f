"""Values that solvers choose: find them in a block, read them, measure data for them, and replace them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import NOT_SELECTED, Selective
from quark_fx.engine.block_walk import BlockRun, running
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration_data import without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import QuantizedActivation, quantized_activations
from quark_fx.engine.quantized_weights import (
    QuantizedWeight,
    StoredBias,
    own_weights,
    quantized_weights,
    share_changed,
    shared_tensors,
)
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, placeholders, tensor_of
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.numbers.scales import FLOAT32
from quark_fx.solvers.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True, eq=False)
class Bias:
    """Bias that an operator adds.

    Attributes:
        name: Module of the operator.
        value: Bias of each output channel, float32; an int32 bias is rounded when it is stored.
    """

    name: str
    value: Tensor


@dataclass(frozen=True, eq=False)
class Activation:
    """Static quantization of an activation to integers.

    Attributes:
        name: Name of the value in the captured graph.
        scheme: Scheme that limits scale and zero point.
        qparams: Static scale and zero point, shape `()`.
        low, high: Bounds of a clamp that saturation replaces; ranges are clipped to them.

    Raises:
        ValueError: If the scale is not positive and finite, or the zero point is not a code.
    """

    name: str
    scheme: Scheme
    qparams: QParams
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        scale, zero_point = float(self.qparams.scale), int(self.qparams.zero_point)
        if not (0 < scale < math.inf and self.scheme.qmin <= zero_point <= self.scheme.qmax):
            raise ValueError(
                f"{self.name}: {self.scheme.format} cannot have the scale {scale:g} with zero point {zero_point}"
            )

    def with_range(self, low: Tensor | float, high: Tensor | float) -> Activation:
        """Return the activation with the scale and zero point for the real range from `low` to `high`, two numbers."""
        like = self.qparams.scale.double()
        low, high = (like.new_tensor(float(end)).clamp(self.low, self.high) for end in (low, high))
        return replace(self, qparams=affine_qparams(low, high, self.scheme))


class Slot(ABC):
    """Value in a block that a solver chooses."""

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
        """Return the tensors of the quantized graph that store `new`, a value of the type of `now`, by their names.

        Raises:
            OverflowError: If `new` cannot be stored; the message is the reason.
        """

    @abstractmethod
    def changed(self, new: Any) -> list[str]:
        """Return the names of the parts that `new` changes."""

    @abstractmethod
    def inputs(self, context: Context, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the operator's input, or the activation, batch by batch, without padding, shape `(1, values)`."""


@dataclass(frozen=True, eq=False)
class OperatorSlot(Slot):
    """Value of a weighted operator: its weight or its bias.

    Attributes:
        run: Block of the operator.
        weight: Weight of the operator.
    """

    run: BlockRun
    weight: QuantizedWeight

    @property
    def name(self) -> str:
        """Name of the operator's module."""
        return self.weight.operator.name

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


@dataclass(frozen=True, eq=False)
class WeightSlot(OperatorSlot):
    """Weight of an operator.

    Attributes:
        mapping: Mapping from the operator to matrix products.
        real: Float weight in its stored shape.
    """

    mapping: LinearMap
    real: Tensor

    @cached_property
    def now(self) -> QuantizedMatrix:
        """Quantized weight before this visit of the block."""
        weight, module, real = self.weight, self.run.module, self.mapping.matrix(self.real)
        stored, movable = weight.stored(module), weight.movable(module)
        ranges = weight.storable_ranges(stored.layout.axis)
        return QuantizedMatrix(self.name, real, stored, weight.scheme, self.mapping, movable, weight.limited, ranges)

    def tensors(self, new: QuantizedMatrix) -> dict[str, Tensor]:
        """Return the codes, scales, and offsets that changed, and an int32 bias that is rounded again at new scales.

        Raises:
            OverflowError: If the int32 bias overflows at the new scales.
        """
        weight, old, tensors = self.weight, self.now.stored, dict[str, Tensor]()
        if new.stored.scale is not old.scale:
            tensors[weight.scale_name] = new.stored.scale
            if (bias := weight.int32_bias) is not None:
                tensors |= bias.rescaled(self.run.module, new.stored.scale / old.scale)
        if new.stored.zero_point is not old.zero_point:
            tensors[weight.zero_point_name] = new.stored.zero_point
        if new.stored.codes is not old.codes:
            tensors[weight.codes] = new.stored.codes
        return tensors

    def difference(self, new: QuantizedMatrix) -> Tensor:
        """Return the fraction of codes that changed, and 1 for changed scales and zero points; float64, shape (3,)."""
        old, stored = self.now.stored, new.stored
        others = [(old.scale != stored.scale).any(), (old.zero_point != stored.zero_point).any()]
        return torch.stack((share_changed(old.codes, stored.codes), *(changed.double() for changed in others)))

    @staticmethod
    def changed_parts(share: float, scales: float, zero_points: float) -> list[str]:
        """Return the names of a weight's changed parts, given its `difference`."""
        others = ["scales"] * bool(scales) + ["zero points"] * bool(zero_points)
        return others + [f"{share:.1%} of the codes"] * bool(share)

    def changed(self, new: QuantizedMatrix) -> list[str]:
        """Return the names of the parts that `new` changes."""
        return self.changed_parts(*self.difference(new).tolist())

    def store(self, new: QuantizedMatrix) -> None:
        """Store another quantized weight; raises the errors of `tensors`."""
        self.run.store_all(self.tensors(new))


@dataclass(frozen=True, eq=False)
class _BiasSlot(OperatorSlot):
    """Bias that only one operator adds."""

    bias: StoredBias

    @property
    def now(self) -> Bias:
        """Current bias."""
        return Bias(self.name, self.bias.value(self.run.module))

    def tensors(self, new: Bias) -> dict[str, Tensor]:
        """Return the tensors of the bias; int32 codes saturate."""
        return self.bias.tensors(self.run.module, new.value)

    def changed(self, new: Bias) -> list[str]:
        """Return the name of the bias."""
        return ["bias"]


@dataclass(frozen=True, eq=False)
class _ActivationSlot(Slot):
    """Static scale and zero point of an activation.

    Attributes:
        run: First block that uses the scale.
        activation: Activation that is quantized with the scale.
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
        """Return the names of the parts that `new` changes: scale, zero point, or both."""
        old = self.now.qparams
        scale = [] if torch.equal(old.scale, new.qparams.scale) else ["scale"]
        return scale + ([] if torch.equal(old.zero_point, new.qparams.zero_point) else ["zero point"])

    def inputs(self, context: Context, batches: Sequence[int]) -> Iterator[Tensor]:
        """Yield the values of the activation in the float model."""
        reference = self.run.reference
        read = extract(reference, placeholders(reference), [named_nodes(reference)[self.name]])
        return _values(read, self.run.reference_inputs, context, batches)


def _values(
    part: GraphModule, inputs: Callable[[int], list[Any]], context: Context, batches: Sequence[int]
) -> Iterator[Tensor]:
    for batch in batches:
        with running(context.data.number_of(batch)):
            (x,) = part(*inputs(batch))
        yield without_padding(x, context.data.kept_positions(batch)).reshape(1, -1)


class Reading(ABC):
    """Kind of data that a solver reads, measured for a slot over the batches of all ranks.

    Attributes:
        shared: True if operators with the same input get the same data.
        choices: Types of values that a solver can choose from this data.
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


Find = Callable[[BlockRun], Iterator[Sequence[Slot]]]
"""Function that yields the slots of a block in order; operators with the same input are yielded together."""


def slots_of(
    kind: type[QuantizedMatrix | Bias | Activation], gm: GraphModule, context: Context, chooser: Selective
) -> Find:
    """Return the function that finds the slots of a kind.

    Args:
        kind: `QuantizedMatrix`, `Bias`, or `Activation`.
        gm: Quantized graph.
        context: Context of the run, which collects the reasons for skipping.
        chooser: Selection of operators.
    """
    return {QuantizedMatrix: _weights, Bias: _biases, Activation: _activations}[kind](gm, context, chooser)


def _weights(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    weights_in = own_weights(gm, context, chooser)
    for weight in weights_in(gm):
        if weight.linear.matrices is None:
            context.note(Change.skipped(weight.name, "unsupported weight layout"))

    def find(run: BlockRun) -> Iterator[Sequence[Slot]]:
        yield from weights_by_input(run, weights_in(run.module))

    return find


def weights_by_input(run: BlockRun, weights: Iterable[QuantizedWeight]) -> Iterator[tuple[WeightSlot, ...]]:
    """Yield the weights of a block in order; operators with the same input are together.

    Args:
        run: Block of the operators.
        weights: Weights to yield; weights of an unsupported layout are left out.
    """
    inputs: dict[object, list[WeightSlot]] = {}
    for weight in weights:
        if (mapping := weight.linear.matrices) is not None:
            real = tensor_of(run.reference, weight.weight).detach()
            inputs.setdefault(weight.linear.rows_key, []).append(WeightSlot(run, weight, mapping, real))
    while inputs:  # a slot holds old codes, so it is dropped before the end of the block
        yield tuple(inputs.pop(next(iter(inputs))))


def own_biases(gm: GraphModule, context: Context, chooser: Selective) -> list[tuple[QuantizedWeight, StoredBias]]:
    """Return selected operators whose stored bias no other operator adds, with the bias; report skipped operators."""
    shared, biases = shared_tensors(gm), []
    for weight in quantized_weights(gm, context.plan):
        if reason := chooser.why_not(weight.operator):
            context.note(Change.skipped(weight.name, reason))
        elif (bias := weight.bias) is None:
            context.note(Change.skipped(weight.name, "it does not have a stored bias"))
        elif bias.name in shared:
            context.note(Change.skipped(weight.name, "several operators add its bias"))
        else:
            biases.append((weight, bias))
    return biases


def _biases(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    nodes = {weight.node.name for weight, _ in own_biases(gm, context, chooser)}

    def find(run: BlockRun) -> Iterator[Sequence[Slot]]:
        for weight in quantized_weights(run.module, context.plan):
            if weight.node.name in nodes and weight.bias is not None:
                yield (_BiasSlot(run, weight, weight.bias),)

    return find


def _activations(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    read = {weight.input_scale for weight in quantized_weights(gm, chooser.selected(context.plan))}
    free = {}
    for activation in quantized_activations(gm):
        name = activation.rounding.value
        if chooser.only and activation.scale_name not in read:
            context.note(Change.skipped(name, NOT_SELECTED))
        elif activation.rounding.spec.scale != FLOAT32:
            context.note(Change.skipped(name, "its scale is restricted to certain values by the option `scale`"))
        else:
            free[activation.scale_name] = activation

    def find(run: BlockRun) -> Iterator[Sequence[Slot]]:
        nodes = named_nodes(run.reference)
        for name in run.free_scales:
            if name not in free:
                continue
            if (value := free[name].rounding.value) in nodes:
                yield (_ActivationSlot(run, free[name], gm, context),)
            elif context.ranks.index == 0:
                context.note(Change.skipped(value, "it is computed from values of several blocks"))

    return find


__all__ = [
    "Activation",
    "Bias",
    "Find",
    "OperatorSlot",
    "Reading",
    "Slot",
    "WeightSlot",
    "own_biases",
    "slots_of",
    "weights_by_input",
]
