"""Learn the scales of weights from the predictions of the whole model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.back_walk import BackWalk
from quark_fx.engine.block_walk import walk_float_blocks
from quark_fx.engine.blocks import Unit, carriers, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.engine.quantized_weights import FIXED, QuantizedWeight, StoredBias, least_bias_scale, own_weights
from quark_fx.engine.sizes import Need, Sizes
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import named_nodes, placeholders, set_parameter, tensor_of
from quark_fx.graph.pass_manager import Change, Stage, graph_pass
from quark_fx.numbers.grid import FreeScales
from quark_fx.system.options import Interval, PositiveInt


@graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True, validated=True)
@dataclass(frozen=True, kw_only=True)
class TuneScales(Selective):
    """Learn the scales of weights by gradient steps on the whole model's predictions; codes do not change.

    Solvers minimize the error of one operator or block at a time. Here every scale follows the gradient of the end loss
    (`quark_fx.engine.end_loss`): the KL divergence from the float model's predictions or, if the model returns none,
    the relative squared error. The report shows the end loss on validation data before and after. Run this pass last. A
    step takes about as long as five forward passes over its batches. Memory holds the values of one block, the inputs
    of each block for one batch, and the inputs of the last block for all batches.

    Args:
        iterations: Number of gradient steps.
        batches: Number of calibration batches per step, over all ranks.
        learning_rate: Learning rate of a scale, relative to its size; it rises over the first eighth of the steps, then
            decays to 0.
        seed: Seed of the order of batches.

    Source:
        Chen et al. 2024 (EfficientQAT), section 3.3, with the float model's predictions in place of labels, and with
        multiplicative steps.
    """

    validation_checks: ClassVar[int] = 4
    """Number of evaluations on validation data; the scales with the lowest loss in an evaluation are stored."""

    iterations: PositiveInt = 32
    batches: PositiveInt = 1
    learning_rate: Annotated[float, Interval("(0, 1)")] = 4e-3
    seed: Annotated[int, Interval("[0, 2147483647]")] = 0

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Learn the scales of `gm`; return the number of weights that changed.

        Raises:
            CalibrationError: If calibration data is missing, the model returns nothing to compare, its outputs are not
                finite, or an operator is not differentiable.
        """
        tuned, walk = self._tunable(gm, context), context.next_walk()
        finished = context.checkpoint.load(walk, 0) if context.checkpoint is not None else None
        if finished is None and tuned:
            before = len(context.changes)
            stored = self._learn(gm, context, tuned)
            context.keep_block(walk, 0, stored, context.changes[before:])
        elif finished is not None:
            for name, value in finished[0].items():
                set_parameter(gm, name, value.to(tensor_of(gm, name).device))
            for change in finished[1]:
                context.note(change)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of the steps (a forward and a backward walk each) and of evaluations on validation data."""
        one, steps = sizes.back_walk(), self.iterations * self.batches
        entering = int(sizes.batches * sizes.blocks(Unit.BLOCK)[-1].entering)
        moments = tuple(replace(moment, cached=moment.cached + entering) for moment in one.moments)
        times = 1 + steps / max(1.0, sizes.batches)
        return Need(moments, operations=int(one.operations * times), blocks=int(one.blocks * (1 + steps)))

    def _tunable(self, gm: GraphModule, context: Context) -> list[_Scales]:
        """Return the scales of selected weights that may take any value; report the skipped weights."""
        scales = []
        for weight in own_weights(gm, context, self)(gm):
            reason = ""
            if not weight.movable(gm):
                reason = f"its scales are {FIXED}"
            elif weight.scheme.scale.is_8_bit:
                reason = "its scales have 8 bits, too few for small steps"
            if reason:
                context.note(Change.skipped(weight.name, reason))
            else:
                scales.append(_Scales.of(weight, gm, context.device))
        return scales

    def _learn(self, gm: GraphModule, context: Context, tuned: Sequence[_Scales]) -> dict[str, Tensor]:
        """Take the steps, and store the best scales in the graph; return the new tensors, keyed by their names."""
        parameters, order = [scales.offset for scales in tuned], _Order(context, self.batches, self.seed)
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, betas=(0.9, 0.95))
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        every = math.ceil(self.iterations / self.validation_checks)
        with _SideBySide(gm, context, [scales.weight.scale_name for scales in tuned]) as both:
            first = best = _validation_loss(both, context)
            lowest = math.inf
            if not math.isfinite(first):
                raise CalibrationError(
                    f"the end loss of the quantized model on {context.data.judged_on} is {first}; check that the float "
                    "model returns finite values for the calibration data, and that the attention mask does not mask "
                    "all tokens"
                )
            values = [p.detach().clone() for p in parameters]
            for step in range(1, self.iterations + 1):
                self._differentiate(both, order.draw(), context, tuned)
                optimizer.step()
                decay.step()
                for scales in tuned:
                    both.run_with(scales.tensors(gm))
                if step % every == 0 or step == self.iterations:
                    now = _validation_loss(both, context)
                    lowest = min(lowest, now)
                    if now < best:
                        best, values = now, [p.detach().clone() for p in parameters]
                    elif not math.isfinite(now):
                        break  # later losses would not be finite either
        stored: dict[str, Tensor] = {}
        for scales, offset in zip(tuned, values, strict=True):
            scales.offset = offset
            stored |= scales.tensors(gm)
            name, worse = scales.weight.name, context.data.refusal(lowest)
            if bool(offset.any()):
                context.note(Change(name, "scales", before=first, after=best))
            else:
                unused = "the model's outputs do not depend on it"
                context.note(Change.skipped(name, worse if best == first else unused, first))
        for name, tensor in stored.items():
            set_parameter(gm, name, tensor.to(tensor_of(gm, name).device))
        return stored

    def _rate(self, step: int) -> float:
        warm = max(1, self.iterations // 8)
        return min(1.0, (step + 1) / warm) * (1 + math.cos(math.pi * step / self.iterations)) / 2

    def _differentiate(
        self, both: _SideBySide, batches: Sequence[int], context: Context, tuned: Sequence[_Scales]
    ) -> None:
        """Set the gradients of a step to their sums over the batches of all ranks."""
        sizes = [scales.offset.numel() for scales in tuned]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=context.device)
        slopes = flat.split(sizes)
        for batch in batches:
            _, gradients = both.gradients(batch)
            for slope, scales in zip(slopes, tuned, strict=True):
                if (gradient := gradients.get(scales.weight.scale_name)) is not None:
                    slope += gradient.flatten()
        context.ranks.add(flat)
        for slope, scales in zip(slopes, tuned, strict=True):
            scales.offset.grad = slope.view(scales.offset.shape).to(scales.offset) * scales.now


class _Order:
    """Random order of the calibration batches, equal on every rank; no batch repeats before all have been drawn.

    Args:
        context: Context with the batches of this rank.
        count: Number of batches per step, over all ranks.
        seed: Seed of the order.
    """

    def __init__(self, context: Context, count: int, seed: int) -> None:
        numbers, self._all = context.data.numbered(context.data.calibration)
        self._here, self._count = {number: batch for batch, number in numbers.items()}, count
        self._generator, self._pending = torch.Generator().manual_seed(seed), list[int]()

    def draw(self) -> list[int]:
        """Return this rank's batches of the next step."""
        while len(self._pending) < self._count:
            self._pending += torch.randperm(self._all, generator=self._generator).tolist()
        drawn, self._pending = self._pending[: self._count], self._pending[self._count :]
        return [self._here[number] for number in drawn if number in self._here]


def _validation_loss(both: _SideBySide, context: Context) -> float:
    """Return the end loss on the validation data of all ranks."""
    sums = torch.zeros(both.count, 2, dtype=torch.float32, device=context.device)
    for batch in context.data.validation:
        sums += both.loss(batch)
    context.ranks.add(sums)
    return float((sums[:, 0] / sums[:, 1]).sum())


@dataclass
class _Scales:
    """The scales of a weight while they are learned, on the device: `free.stored * exp(offset)`.

    Attributes:
        weight: Weight that the scales belong to.
        free: Original scales.
        bias: Int32 bias whose scales depend on the scales of the weight, with its original value and scales; or `None`.
        offset: Learned tensor, float32, of the shape of the scales.
        now: Scales that the graph currently uses.
    """

    weight: QuantizedWeight
    free: FreeScales
    bias: tuple[StoredBias, Tensor, Tensor] | None
    offset: Tensor
    now: Tensor

    @classmethod
    def of(cls, weight: QuantizedWeight, gm: GraphModule, device: torch.device) -> _Scales:
        """Return the scales of a weight in the graph `gm`."""
        scale, bias = weight.scale(gm).to(device), weight.int32_bias
        free = FreeScales(scale, weight.layout(gm), weight.scheme.scale)
        offset = torch.zeros_like(scale, dtype=torch.float32)
        follows = None if bias is None else (bias, bias.value(gm).to(device), bias.scale(gm).to(device))
        return cls(weight, free, follows, offset, scale)

    def tensors(self, gm: GraphModule) -> dict[str, Tensor]:
        """Return the current tensors of the scales, and of a bias that depends on them, keyed by their names."""
        ratio = self.offset.exp()
        if self.bias is not None:  # the bias must fit int32
            bias, value, units = self.bias
            ratio = ratio.maximum(least_bias_scale(value) / units.abs())
        self.now = self.free.times(ratio)
        tensors = {self.weight.scale_name: self.now}
        if self.bias is not None:
            tensors |= bias.tensors(gm, value, units * (self.now / self.free.stored))
        return tensors


_LAST = "inputs of the last block"
"""Stream of the cached float inputs of the last block: they are smaller than predictions, which are recomputed."""


class _SideBySide:
    """Difference between the outputs of a quantized graph and of the float graph, with its gradients.

    The values of one block at a time are in memory, as in a `BackWalk`.

    Args:
        gm: Quantized graph.
        context: Context with `float_graph`, from which `gm` was converted.
        tensors: Names of tensors of `gm` to differentiate.

    Raises:
        CalibrationError: If calibration data is missing, or none of the model's outputs is a floating-point tensor.
    """

    def __init__(self, gm: GraphModule, context: Context, tensors: Collection[str] = ()) -> None:
        reference = context.float_graph
        blocks, nodes = find_blocks(reference, Unit.BLOCK), named_nodes(reference)
        self._context, self._loss = context, EndLoss.of(reference)
        if all(logits is None for logits in self._loss.predictions):
            raise CalibrationError(
                "the model returns no floating-point tensor, so an end loss cannot be computed; return logits, or "
                "leave out the pass"
            )
        self._float = BackWalk(reference, blocks[-1:], nodes, context, stream=_LAST)
        self._quantized = BackWalk(gm, blocks, carriers(gm), context, tensors=frozenset(tensors), stream="quantized")
        inputs = {node.name for node in placeholders(reference)}  # already in the cache
        names = [name for name in blocks[-1].inputs if name not in inputs]
        self._keys = [(_LAST, name, batch) for name in names for batch in range(len(context.data.batches))]
        for run in walk_float_blocks(reference, context, label="predictions"):
            if run.block.inputs == blocks[-1].inputs:
                for batch in range(len(context.data.batches)):
                    values = context.with_room(partial(run.inputs, batch))
                    for name, value in zip(run.block.inputs, values, strict=True):
                        if name not in inputs:
                            context.with_room(partial(context.cache.put, (_LAST, name, batch), value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._quantized.close()
        for key in self._keys:
            self._context.cache.drop(key)

    def run_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Use other tensors in all further runs of the quantized graph; the tensors in the graph do not change.

        Args:
            tensors: Tensors to use, keyed by the names of the tensors that they replace.
        """
        self._quantized.changed.update(tensors)

    def loss(self, batch: int) -> Tensor:
        """Return the sums of a batch that the end loss is computed from (`EndLoss.compared`)."""
        return self._compared(batch, keep=False)[0]

    def gradients(self, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the result of `loss`, and the gradients of this batch's loss with respect to the named tensors.

        Raises:
            CalibrationError: If an operator is not differentiable; the message names its block.
        """
        sums, gradients = self._compared(batch, keep=True)
        by_name: dict[str, Tensor] = {}
        for name, gradient in self._quantized.backward(gradients):
            by_name[name] = by_name[name] + gradient if name in by_name else gradient
        return sums, by_name

    def _compared(self, batch: int, *, keep: bool) -> tuple[Tensor, list[Any]]:
        float_results, results = self._float.forward(batch, keep=True), self._quantized.forward(batch, keep=keep)
        return self._loss.compared(results, float_results, self._context.data.kept_positions(batch))

    @property
    def count(self) -> int:
        """Number of results with a loss, which is the number of rows that `loss` returns."""
        return sum(logits is not None for logits in self._loss.predictions)
