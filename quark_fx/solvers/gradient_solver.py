"""A gradient solver defines how a weight is learned until it becomes codes; the engine does everything else.

For each block, the engine chooses initial codes, draws mini-batches, adds gradients over ranks, and stores results that
are better on validation data. It reports errors, resumes interrupted runs, and predicts memory.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import BlockRun, walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import biases_at, scale_limits
from quark_fx.engine.quantized_weights import QuantizedWeight, StoredBias, own_weights, share_changed
from quark_fx.errors import Declined
from quark_fx.graph.nodes import tensor_of
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.scales import FLOAT32
from quark_fx.plan.placement import Quantized
from quark_fx.solvers.gradient_steps import Learned, Steps
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.solver import naming_failures
from quark_fx.solvers.starts import Start, descend, feed_back
from quark_fx.solvers.trainable import LearnedWeight, Trainable


@dataclass(frozen=True, kw_only=True)
class GradientSolver(Schedule, ABC):
    """Base class of passes that learn codes by gradient steps on the outputs of operators or blocks.

    A subclass is a frozen dataclass of options with `begin`, decorated with `quark_fx.solvers.solver.solver`. It is a
    pass of the quantized stage, named after its class.
    """

    registered_by: ClassVar[str] = "solver"

    @abstractmethod
    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> LearnedWeight:
        """Return learnable codes.

        Args:
            grid: Scales, zero points, and format of the codes.
            weight: Weight to stay close to, in the shape of the stored weight: the float weight or, after error
                feedback, the float weight compensated for the errors of other inputs.
            start: Initial codes, float32; not always the codes nearest to `weight`.

        Raises:
            Declined: If the method cannot learn this weight, which then keeps its codes; the report shows the reason.
        """

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Learn the codes of weights in `gm`; return how many weights changed.

        Raises:
            CalibrationError: If the error of a block is NaN or infinite; the message names its operators.
        """
        weights_of = own_weights(gm, context, self)
        learns_scales = self.scale_rate > 0 and _free_scales(context)
        if self.scale_rate and not learns_scales:
            context.note(
                Change.skipped("scale_rate", "activation scales are restricted to certain values by the option `scale`")
            )
        for run in walk_blocks(gm, context, unit=self.unit, label=type(self).__name__):
            if run.finished or not (weights := self._learnable(run, weights_of(run.module), context)):
                continue
            # With `only`, learn just the scales of the selected operators' own inputs.
            read = {weight.input_scale for weight in weights} if self.only else set(run.free_scales)
            scales = [name for name in run.free_scales if name in read] if learns_scales else []
            with naming_failures(self, run.operators):
                _Reconstruction(gm, context, self, run, weights, scales, self.begin).learn()
        return sum(change.changed for change in context.changes)

    def _learnable(self, run: BlockRun, weights: list[QuantizedWeight], context: Context) -> list[QuantizedWeight]:
        """Return the weights that can be learned from the block's error; report the skipped weights."""
        targets = context.with_room(partial(run.targets, 0))
        reasons, numbers = {}, any(isinstance(t, Tensor) and t.is_floating_point() for t in targets)
        for weight in weights:
            if not numbers:
                reasons[weight.node] = "the outputs of its block are not floating-point"
            elif self.unit is Unit.OPERATOR and weight.linear.offsets_at is not None:
                # The quantized model may route a token differently from the float model, so rows would not correspond.
                reasons[weight.node] = (
                    "which rows it multiplies depends on the data; unit='block' learns this weight together with the "
                    "selection of rows"
                )
        for weight in weights:
            if weight.node in reasons:
                context.note(Change.skipped(weight.name, reasons[weight.node]))
        return [weight for weight in weights if weight.node not in reasons]


def _free_scales(context: Context) -> bool:
    """Return whether activation scales may take any value."""
    quantized = (op for op in context.plan.values() if isinstance(op, Quantized))
    specs = (spec for op in quantized for spec in (op.input, op.output) if spec is not None)
    return all(spec.scale == FLOAT32 for spec in specs)


_EVALUATIONS = 20
"""Evaluations on the validation batches during the steps of one block."""

_SMALLEST_SHARE = 0.1
"""Lower limit of a learned activation scale, as a fraction of the scale before learning."""

_Begin = Callable[[Grid, Tensor, Tensor], LearnedWeight]
"""Function that makes codes learnable, given a grid, the weight to stay close to, and the initial codes."""


@dataclass(frozen=True)
class _State:
    """State during learning: codes, scale ratios, zero points, and bias of each weight, and activation scales."""

    codes: list[Tensor]
    ratios: list[Tensor | None]
    zero_points: list[Tensor | None]
    biases: list[Tensor | None]
    activation_scales: dict[str, Tensor]

    @classmethod
    def of(cls, learned: Learned) -> _State:
        """Return the current state."""
        ratios = [_copy(c.ratio) for c in learned.codes]
        zero_points = [_copy(c.zero_points) for c in learned.codes]
        biases = [_copy(bias) for bias in learned.biases]
        scales = {name: _copy(scale) for name, scale in learned.scales.items()}
        return cls([c.codes() for c in learned.codes], ratios, zero_points, biases, scales)

    def grids(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return the grids with the scales and zero points of this state."""
        triples = zip(grids, self.ratios, self.zero_points, strict=True)
        return [grid.times(ratio).with_zero_points(points) for grid, ratio, points in triples]

    def weights(self, grids: Sequence[Grid]) -> list[Tensor]:
        """Return the dequantized weights."""
        return [grid.value(codes) for grid, codes in zip(self.grids(grids), self.codes, strict=True)]


@dataclass(frozen=True)
class _Reconstruction:
    """Reconstruction of one block, so that its output matches the output of the float block.

    Inputs come from the quantized stream, targets from the float stream. The initial codes of each operator are chosen
    separately (`Start`); gradient steps then minimize the error of the block's output. The best state on validation
    data is stored if it is better than the original state.

    Attributes:
        gm: Whole quantized graph.
        context: Context of the run.
        schedule: Schedule of the learning.
        run: Block to reconstruct.
        weights: Weights to learn.
        scales: Names of the activation scales to learn.
        begin: Function that makes codes learnable.
    """

    gm: GraphModule
    context: Context
    schedule: Schedule
    run: BlockRun
    weights: Sequence[QuantizedWeight]
    scales: Sequence[str]
    begin: _Begin

    declined: dict[str, str] = field(default_factory=dict)
    """Names of the weights that `begin` declined, with the reasons."""

    def learn(self) -> None:
        """Learn the codes, and report the result for each weight."""
        began, original = time.perf_counter(), self._stored()
        before = self.run.validation_error()
        near, best = self._start(before)
        if self.schedule.iterations:
            best = self._take_steps(near, best)
        seconds = (time.perf_counter() - began) / len(self.weights)
        now = self._stored()
        moved = [name for name in self.scales if not torch.equal(original[name], now[name])]
        for i, weight in enumerate(self.weights):
            share = float(share_changed(original[weight.codes], now[weight.codes]))
            # Activation scales belong to the block, so they are counted once.
            count = len(moved) if i == 0 else 0
            parts = {
                "scales": not torch.equal(original[weight.scale_name], now[weight.scale_name]),
                "zero points": not torch.equal(original[weight.zero_point_name], now[weight.zero_point_name]),
                # Biases that are not learned may still be rounded again, at learned scales.
                "bias": self._learned_bias(weight) is not None
                and not torch.equal(original[weight.name], now[weight.name]),
                f"{count} activation scale{'s' * (count > 1)}": count > 0,
            }
            changed_parts = [what for what, changed in parts.items() if changed]
            what = ", ".join([f"{share:.1%} of the codes"] * (share > 0 or not changed_parts) + changed_parts)
            if self.schedule.fits_scales and not weight.movable(self.run.module):
                what += "; scales kept, because they are fixed"
            if reason := self.declined.get(weight.name):
                what += f"; not learned: {reason}"
            self.context.note(Change(weight.name, what, share > 0 or bool(changed_parts), before, best, seconds))

    def _stored(self) -> dict[str, Tensor]:
        """Return the stored values that may be learned, by the name of the tensor or, for biases, of the module."""
        names = [name for w in self.weights for name in (w.codes, w.scale_name, w.zero_point_name)]
        tensors = {name: tensor_of(self.run.module, name) for name in (*names, *self.scales)}
        biases = {weight.name: self._learned_bias(weight) for weight in self.weights}
        return tensors | {name: bias.value(self.run.module) for name, bias in biases.items() if bias is not None}

    def _learned_bias(self, weight: QuantizedWeight) -> StoredBias | None:
        return weight.bias if self.schedule.bias_rate > 0 else None

    @property
    def _seed(self) -> int:
        return 1_000_003 * self.schedule.seed + self.run.index

    def _start(self, before: float) -> tuple[list[Tensor], float]:
        """Store the initial codes if they are better; return the weights to stay close to, and the error."""
        real = {w.node.name: tensor_of(self.run.reference, w.weight).detach().float() for w in self.weights}
        rounded: dict[str, Tensor] = {}

        def round_() -> None:
            if self.schedule.start is Start.DESCENT:
                descend(self.run, self.context, self.weights, self._seed)
            else:
                rounded.update(feed_back(self.run, self.context, self.weights, fits_scales=self.schedule.fits_scales))

        best = before if self.schedule.start is Start.CODES else min(before, self.run.attempt(round_, before)[0])
        return list((real | rounded if best < before else real).values()), best

    def _take_steps(self, near: Sequence[Tensor], best: float) -> float:
        """Take gradient steps, and store the best state if its error is below `best`; return the resulting error."""
        schedule, run, module = self.schedule, self.run, self.run.module
        grids = [weight.grid(module) for weight in self.weights]
        starts = [weight.scheme.format.decode(tensor_of(module, weight.codes)) for weight in self.weights]
        learned = Learned(
            [self._begin(*arguments) for arguments in zip(self.weights, grids, near, starts, strict=True)],
            [None if (bias := self._learned_bias(w)) is None else _leaf(bias.value(module)) for w in self.weights],
            {name: _leaf(tensor_of(module, name)) for name in self.scales},
        )
        if not any(group["params"] for group in learned.groups(schedule)):
            return best
        block = Trainable.of(run, self.weights, biases=schedule.bias_rate > 0, scales=self.scales)
        steps = Steps(run, self.context, schedule, block, learned, self._scale_limits(), self._seed)
        state, waited, start = None, 0, best
        for step, training in steps.taken(max(1, schedule.iterations // _EVALUATIONS)):
            error = self._error_of(block, learned, grids, training)
            waited = 0 if error < best else waited + 1
            if error < best:
                state, best = _State.of(learned), error
            if waited >= schedule.patience and 2 * step > schedule.iterations:
                break
        # The stored state is evaluated again, because biases are rounded when stored, but not while they are learned.
        return best if state is None else min(start, run.attempt(lambda: self._store(state, grids), start)[0])

    def _begin(self, weight: QuantizedWeight, grid: Grid, near: Tensor, start: Tensor) -> LearnedWeight:
        try:
            return self.begin(grid, near, start)
        except Declined as declined:
            self.declined[weight.name] = declined.reason
            return _Kept(grid, start)

    def _error_of(self, block: Trainable, learned: Learned, grids: Sequence[Grid], training: Tensor) -> float:
        with torch.no_grad():
            weights = _State.of(learned).weights(grids)
        arguments = learned.others
        return self.run.validation_error(lambda batch: block(self.run.inputs(batch), weights, *arguments), training)

    def _scale_limits(self) -> dict[str, tuple[float, float]]:
        """Return the lower and upper limit of each activation scale."""
        limits = scale_limits(self.gm, self.context.plan, self.scales)
        now = {name: float(tensor_of(self.run.module, name)) for name in limits}
        return {name: (max(least, _SMALLEST_SHARE * now[name]), most) for name, (least, most) in limits.items()}

    def _store(self, state: _State, grids: Sequence[Grid]) -> None:
        """Store a state; int32 biases are rounded again at the new scales.

        Raises:
            OverflowError: If an int32 bias overflows at the new scales of its weight.
        """
        module, tensors = self.run.module, dict(state.activation_scales)
        learned = zip(self.weights, grids, state.codes, state.ratios, state.zero_points, strict=True)
        for weight, grid, codes, ratio, zero_points in learned:
            tensors[weight.codes] = weight.storable(codes)
            if zero_points is not None and grid.free is not None and grid.free.zero_points is not None:
                tensors[weight.zero_point_name] = grid.free.rounded_zero_points(zero_points, grid.limits)
            if ratio is not None and grid.free is not None:
                tensors[weight.scale_name] = scale = grid.free.times(ratio)
                if (bias := weight.int32_bias) is not None:
                    tensors |= bias.rescaled(module, scale / grid.free.stored)
        self.run.store_all(tensors)
        pairs = zip(self.weights, state.biases, strict=True)
        biases = {weight.node.name: bias for weight, bias in pairs if bias is not None}
        self.run.store_all(biases_at(self.gm, self.context.plan, state.activation_scales, biases))


class _Kept(LearnedWeight):
    """Weight that keeps its codes."""

    parameters = ()

    def __init__(self, grid: Grid, start: Tensor) -> None:
        self.value, self.start = grid.value(start), start

    def weight(self) -> Tensor:
        return self.value

    def codes(self) -> Tensor:
        return self.start


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def _copy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


__all__ = ["GradientSolver"]
