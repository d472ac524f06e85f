"""Learn the scales of weights from what the whole model predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import QuantizedWeight, StoredBias, own_weights
from quark_fx.engine.side_by_side import SideBySide
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import set_parameter
from quark_fx.graph.pass_manager import Change, Stage, graph_pass
from quark_fx.numbers.grid import FreeScales
from quark_fx.system.options import Interval, PositiveInt


@graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True, validated=True)
@dataclass(frozen=True, kw_only=True)
class TuneScales(Selective):
    """Learn the scales of weights by gradient steps on the whole model's predictions; codes stay.

    What solvers minimize is the error of one operator or block at a time. Here every scale follows the gradient of the
    end loss: how far predictions diverge from the float model's (`quark_fx.engine.end_loss`); the report has that of
    validation data before and after. Place it last. A step takes four forward passes over its samples; memory is that
    of one block.

    Args:
        iterations: gradient steps.
        batches: calibration batches of a step; several ranks share them.
        learning_rate: of a scale, relative to its size; it rises over the first steps and decays to 0.
        looks: how often validation data is looked at; the best scales found there are kept.
        seed: of the order of batches.

    Source:
        Chen et al. 2024 (EfficientQAT), section 3.3, with the divergence from the float model's predictions in the
        place of a data set's labels.
    """

    iterations: PositiveInt = 32
    batches: PositiveInt = 1
    learning_rate: Annotated[float, Interval("[0, 1)")] = 2e-3
    looks: PositiveInt = 4
    seed: Annotated[int, Interval("[0, 2147483647]")] = 0

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Learn the scales of `gm`; return how many weights changed.

        Raises:
            CalibrationError: if there is no data, the loss is not finite, or an operator has no gradient.
        """
        tuned, walk = self._tunable(gm, context), context.next_walk()
        known = context.checkpoint.load(walk, 0) if context.checkpoint is not None else None
        if known is None and tuned:
            before = len(context.changes)
            stored = self._learn(gm, context, tuned)
            context.keep_block(walk, 0, stored, context.changes[before:])
        elif known is not None:
            for name, value in known[0].items():
                set_parameter(gm, name, value)
            for change in known[1]:
                context.note(change)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return what the steps take, each a walk forward and back, and what looking at validation data does."""
        one, steps = sizes.back_walk(), self.iterations * self.batches
        times = 1 + steps / max(1.0, sizes.batches)
        return Need(one.moments, operations=int(one.operations * times), blocks=int(one.blocks * (1 + steps)))

    def _tunable(self, gm: GraphModule, context: Context) -> list[_Scales]:
        """Return the selected weights whose scales may take any value; note the others."""
        found = []
        for weight in own_weights(gm, context, self)(gm):
            if not weight.movable(gm):
                context.note(Change(weight.name, "skipped: its scales are not free to change", changed=False))
            elif weight.scheme.scale_type.is_8_bit:
                context.note(
                    Change(weight.name, "skipped: its scales have 8 bits, too few for small steps", changed=False)
                )
            else:
                found.append(_Scales.of(weight, gm))
        return found

    def _learn(self, gm: GraphModule, context: Context, tuned: Sequence[_Scales]) -> dict[str, Tensor]:
        """Take the steps, and leave the best scales in the graph; return its new tensors."""
        parameters, order = [scales.offset for scales in tuned], _Order(context, self.batches, self.seed)
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, betas=(0.9, 0.95), foreach=False)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        every = math.ceil(self.iterations / self.looks)
        with SideBySide(gm, context, [scales.weight.scale_name for scales in tuned]) as both:
            first = best = _divergence(both, context)
            _require_finite(first)
            kept = [p.detach().clone() for p in parameters]
            for step in range(1, self.iterations + 1):
                loss = self._differentiate(both, order.draw(), context, tuned)
                _require_finite(loss)
                optimizer.step()
                decay.step()
                for scales in tuned:
                    scales.store(gm)
                if (step % every == 0 or step == self.iterations) and (now := _divergence(both, context)) < best:
                    best, kept = now, [p.detach().clone() for p in parameters]
        stored: dict[str, Tensor] = {}
        for scales, offset in zip(tuned, kept, strict=True):
            scales.offset = offset
            stored |= scales.store(gm)
            what = "scales" if best < first else f"skipped: no better on {context.judged_on}"
            context.note(Change(scales.weight.name, what, best < first, first, best))
        return stored

    def _rate(self, step: int) -> float:
        warm = max(1, self.iterations // 8)
        return min(1.0, (step + 1) / warm) * (1 + math.cos(math.pi * step / self.iterations)) / 2

    def _differentiate(
        self, both: SideBySide, batches: Sequence[int], context: Context, tuned: Sequence[_Scales]
    ) -> float:
        """Set the gradients of a step of all ranks; return the loss."""
        sizes = [2, *(scales.offset.numel() for scales in tuned)]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=context.device)
        total, *slopes = flat.split(sizes)
        for batch in batches:
            loss, gradients = both.gradients(batch)
            total += loss
            for slope, scales in zip(slopes, tuned, strict=True):
                if (gradient := gradients.get(scales.weight.scale_name)) is not None:
                    slope += gradient.flatten()
        context.ranks.add(flat)
        for slope, scales in zip(slopes, tuned, strict=True):
            scales.offset.grad = slope.view(scales.offset.shape).to(scales.free.stored) * scales.free.stored
        return float(total[0] / total[1])


class _Order:
    """Draws the calibration batches of each step, all of them before one comes again; the same on every rank.

    Args:
        context: with the batches of this rank.
        count: batches of a step.
        seed: of the order.
    """

    def __init__(self, context: Context, count: int, seed: int) -> None:
        here = context.calibration
        counts = context.ranks.gather(len(here))
        first = sum(counts[: context.ranks.index])
        self._here = {first + i: batch for i, batch in enumerate(here)}
        self._all, self._count = sum(counts), count
        self._chance, self._pending = torch.Generator().manual_seed(seed), list[int]()

    def draw(self) -> list[int]:
        """Return those batches of the next step that this rank has."""
        while len(self._pending) < self._count:
            self._pending += torch.randperm(self._all, generator=self._chance).tolist()
        drawn, self._pending = self._pending[: self._count], self._pending[self._count :]
        return [self._here[number] for number in drawn if number in self._here]


def _require_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise CalibrationError(
            f"the end loss of the quantized model is {loss}; check what the float model returns for the calibration "
            "data, or lower the learning_rate of TuneScales"
        )


def _divergence(both: SideBySide, context: Context) -> float:
    """Return the loss of the validation data of all ranks, divided by its rows."""
    total = torch.zeros(2, dtype=torch.float32, device=context.device)
    for batch in context.validation:
        total += both.divergence(batch)
    context.ranks.add(total)
    return float(total[0] / total[1])


@dataclass
class _Scales:
    """The scales of a weight while they are learned: `free.stored * (1 + offset)`.

    Attributes:
        weight: whose they are.
        free: the scales as they were.
        bias: the int32 bias that has a scale for each of them, with its value and scales as they were.
        offset: what is learned, float32, the shape of the scales.
    """

    weight: QuantizedWeight
    free: FreeScales
    bias: tuple[StoredBias, Tensor, Tensor] | None
    offset: Tensor

    @classmethod
    def of(cls, weight: QuantizedWeight, gm: GraphModule) -> _Scales:
        """Return those of a weight of a graph."""
        stored, bias = weight.stored(gm), weight.int32_bias
        free = FreeScales(stored.scale, stored.layout, weight.scheme.scale_type)
        offset = torch.zeros_like(stored.scale, dtype=torch.float32)
        return cls(weight, free, None if bias is None else (bias, bias.value(gm), bias.scale(gm)), offset)

    def store(self, gm: GraphModule) -> dict[str, Tensor]:
        """Put the scales, and a bias in their units, into a graph; return these tensors by name."""
        scale = self.free.times(1 + self.offset)
        found = {self.weight.scale_name: scale}
        if self.bias is not None:
            bias, value, units = self.bias
            found |= bias.tensors(gm, value, units * (scale / self.free.stored))
        for name, tensor in found.items():
            set_parameter(gm, name, tensor)
        return found
