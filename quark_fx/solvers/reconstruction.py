"""Learn the codes of a block's weights so that the block makes what its float original makes.

Inputs are from the quantized stream and targets from the float one. A start chooses the codes of each operator by
itself; gradient steps go on from there, on what the block makes. Of all states on the way, the one that is best on
validation data is stored, if it is better than what there was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import biases_at, scale_limits
from quark_fx.engine.quantized_weights import QuantizedWeight, StoredBias, share_changed
from quark_fx.graph.nodes import tensor_of
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.grid import Grid
from quark_fx.solvers.gradient_steps import Learned, Steps
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.starts import Start, descend, feed_back
from quark_fx.solvers.trainable import LearnedWeight, Trainable, trainable_block

_EVALUATIONS = 20
"""Looks at the validation batches during the steps of one block."""

_SMALLEST_SHARE = 0.1
"""A learned activation scale stays above this share of the calibrated one."""

Begin = Callable[[Grid, Tensor, Tensor], LearnedWeight]
"""From a grid, the weight that codes are to be nearest to and the codes to start from, to codes that can be learned."""


@dataclass(frozen=True)
class _Found:
    """A state on the way: codes, ratios of scales and biases of each weight, activation scales by name."""

    codes: list[Tensor]
    ratios: list[Tensor | None]
    biases: list[Tensor | None]
    scales: dict[str, Tensor]

    @classmethod
    def of(cls, learned: Learned) -> _Found:
        """Return the state there is now."""
        ratios = [_copy(c.ratio) for c in learned.codes]
        biases = [_copy(bias) for bias in learned.biases]
        return cls([c.codes() for c in learned.codes], ratios, biases, {n: _copy(s) for n, s in learned.scales.items()})

    def weights(self, grids: Sequence[Grid]) -> list[Tensor]:
        """Return the weights that the codes stand for."""
        triples = zip(grids, self.codes, self.ratios, strict=True)
        return [grid.times(ratio).value(codes) for grid, codes, ratio in triples]


@dataclass(frozen=True)
class Reconstruction:
    """The turn of one block.

    Attributes:
        gm: the whole quantized graph.
        context: of the run.
        schedule: how to learn.
        run: the block.
        weights: those that are learned.
        scales: names of the activation scales that are learned.
        begin: makes codes learnable.
    """

    gm: GraphModule
    context: Context
    schedule: Schedule
    run: BlockRun
    weights: Sequence[QuantizedWeight]
    scales: Sequence[str]
    begin: Begin

    def learn(self) -> None:
        """Learn the codes, and note what became of each weight."""
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
            # Activation scales are the block's; they are counted once.
            count = len(moved) if i == 0 else 0
            parts = {
                "scales": not torch.equal(original[weight.scale_name], now[weight.scale_name]),
                # Where they are not learned, biases are at most rounded anew, to scales that are.
                "bias": self._learned_bias(weight) is not None
                and not torch.equal(original[weight.name], now[weight.name]),
                f"{count} activation scale{'s' * (count > 1)}": count > 0,
            }
            others = [what for what, changed in parts.items() if changed]
            what = ", ".join([f"{share:.1%} of the codes"] * (share > 0 or not others) + others)
            if self.schedule.fits_scales and not weight.movable(self.run.module):
                what += "; scales kept: not free to change"
            self.context.note(Change(weight.name, what, share > 0 or bool(others), before, best, seconds))

    def _stored(self) -> dict[str, Tensor]:
        """Return what may be learned, as it is stored now: codes and scales by name, values of biases by module."""
        names = [name for weight in self.weights for name in (weight.codes, weight.scale_name)]
        tensors = {name: tensor_of(self.run.module, name) for name in (*names, *self.scales)}
        biases = {weight.name: self._learned_bias(weight) for weight in self.weights}
        return tensors | {name: bias.value(self.run.module) for name, bias in biases.items() if bias is not None}

    def _learned_bias(self, weight: QuantizedWeight) -> StoredBias | None:
        return weight.bias if self.schedule.bias_rate > 0 else None

    @property
    def _seed(self) -> int:
        return 1_000_003 * self.schedule.seed + self.run.index

    def _start(self, before: float) -> tuple[list[Tensor], float]:
        """Store the codes to start from if they are better; return what they are nearest to, and the error."""
        real = {w.node.name: tensor_of(self.run.reference, w.weight).detach().float() for w in self.weights}
        rounded: dict[str, Tensor] = {}

        def round_() -> None:
            if self.schedule.start is Start.DESCENT:
                descend(self.run, self.context, self.weights, self._seed)
            else:
                rounded.update(feed_back(self.run, self.context, self.weights, fits_scales=self.schedule.fits_scales))

        best = before if self.schedule.start is Start.CODES else self.run.attempt(round_, before)
        return list((real | rounded if best < before else real).values()), best

    def _take_steps(self, near: Sequence[Tensor], best: float) -> float:
        """Learn; store the best state if it is below `best`; return the error then."""
        schedule, run, module = self.schedule, self.run, self.run.module
        grids = [weight.grid(module) for weight in self.weights]
        starts = [weight.scheme.format.decode(tensor_of(module, weight.codes)) for weight in self.weights]
        learned = Learned(
            [self.begin(*given) for given in zip(grids, near, starts, strict=True)],
            [None if (bias := self._learned_bias(w)) is None else _leaf(bias.value(module)) for w in self.weights],
            {name: _leaf(tensor_of(module, name)) for name in self.scales},
        )
        block = trainable_block(run, self.weights, biases=schedule.bias_rate > 0, scales=self.scales)
        steps = Steps(run, self.context, schedule, block, learned, self._scale_limits(), self._seed)
        kept, waited, start = None, 0, best
        for step, training in steps.taken(max(1, schedule.iterations // _EVALUATIONS)):
            error = self._error_of(block, learned, grids, training)
            waited = 0 if error < best else waited + 1
            if error < best:
                kept, best = _Found.of(learned), error
            if waited >= schedule.patience and 2 * step > schedule.iterations:
                break
        # Biases are rounded when they are stored, and were not while they were learned.
        return best if kept is None else run.attempt(lambda: self._store(kept, grids), start)

    def _error_of(self, block: Trainable, learned: Learned, grids: Sequence[Grid], training: Tensor) -> float:
        with torch.no_grad():
            weights = _Found.of(learned).weights(grids)
        others = learned.others
        return self.run.validation_error(lambda batch: block(self.run.inputs(batch), weights, *others), training)

    def _scale_limits(self) -> dict[str, tuple[float, float]]:
        """Return how small and how large each activation scale may become."""
        limits = scale_limits(self.gm, self.context.plan, self.scales)
        now = {name: float(tensor_of(self.run.module, name)) for name in limits}
        return {name: (max(least, _SMALLEST_SHARE * now[name]), most) for name, (least, most) in limits.items()}

    def _store(self, found: _Found, grids: Sequence[Grid]) -> None:
        """Store a state; biases follow the scales.

        Raises:
            OverflowError: if an int32 bias does not fit its type at the new scales of its weight.
        """
        module, tensors = self.run.module, dict(found.scales)
        for weight, grid, codes, ratio in zip(self.weights, grids, found.codes, found.ratios, strict=True):
            tensors[weight.codes] = weight.storable(codes)
            if ratio is not None and grid.free is not None:
                tensors[weight.scale_name] = scale = grid.free.times(ratio)
                if (bias := weight.int32_bias) is not None:
                    tensors |= bias.rescaled(module, scale / grid.free.stored)
        self.run.store_all(tensors)
        pairs = zip(self.weights, found.biases, strict=True)
        biases = {weight.node.name: bias for weight, bias in pairs if bias is not None}
        self.run.store_all(biases_at(self.gm, self.context.plan, found.scales, biases))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def _copy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


__all__ = ["Begin", "Reconstruction"]
