"""Learn the codes of a block's weights so that the block makes what its float original makes.

The mechanism behind AdaRound and AdaQuant. Unit by unit, on inputs from the quantized stream and targets from the float
one: a start from the quadratic form of each operator's error, then gradient steps on what the unit makes. Of all states
on the way, the one that is best on batches that were not learned from is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import BlockRun, relative_error, walk_blocks
from quark_fx.engine.blocks import Unit, extract
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import biases_at, least_scales
from quark_fx.engine.quantized_weights import (
    QuantizedWeight,
    note_left_alone,
    quantized_weights,
    share_changed,
    shared_tensors,
)
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.errors import CalibrationError
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, placeholders, tensor_of
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.qparams import ScaleType
from quark_fx.solvers.error_feedback import working_bytes
from quark_fx.solvers.feedback import compensated, fitted_to_feedback, rounded_with_feedback
from quark_fx.solvers.products import Product, find_products
from quark_fx.solvers.rounding import OutputError, round_by_descent
from quark_fx.solvers.trainable import Trainable, trainable_block
from quark_fx.system.memory import give_back, is_shortage
from quark_fx.system.options import Interval, NonNegativeFloat, NonNegativeInt, PositiveInt

_DAMPING = 0.01
"""Of the Hessians that a start by error feedback reads, as a share of their mean diagonal."""

_LEARNED_COPIES = 6
"""Copies of a weight while it is learned: real, parameter, gradient, two moments of the optimizer, and rounded."""

_EVALUATIONS = 20
"""Looks at the held-out batches during the steps of one unit."""

_SMALLEST_SHARE = 0.1
"""A learned scale stays above this share of the calibrated one."""

_REORDERED_SUMS = 1e-6
"""Relative squared error by which a batch of fewer rows may differ: sums are taken in another order."""

_ROWS = 8192
"""Output positions of a batch, about, that enter the quadratic form."""


class Start(StrEnum):
    """What gradient steps start from."""

    CODES = "codes"
    """The codes there are: of the passes before, or the nearest."""

    DESCENT = "descent"
    """Coordinate descent on each operator's error."""

    FEEDBACK = "feedback"
    """Error feedback, each input making up for those before it, as `GPTQ(asymmetry=1)` rounds."""


class Codes(Protocol):
    """A weight on its way to codes."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What gradient steps change."""
        ...

    @property
    def ratio(self) -> Tensor | None:
        """The shares of the scales that are learned, too; `None` where scales stay."""
        ...

    def weight(self) -> Tensor:
        """Return the weight that the block computes with now."""
        ...

    def penalty(self, progress: float) -> Tensor | float:
        """Return what pulls towards codes, when `progress` of the steps (0 to 1) are done."""
        ...

    def codes(self) -> Tensor:
        """Return the codes it would be stored as now, in float32."""
        ...


@dataclass(frozen=True, kw_only=True)
class Schedule(Selective):
    """How long and how fast to learn. Every position of a batch counts, those of padding too.

    Args:
        unit: what is reconstructed at once: `"operator"` (with what follows it) or `"block"`.
        iterations: gradient steps per unit, at most; 0 keeps the start.
        batch_size: samples per step.
        learning_rate: of the codes; its unit is the method's.
        scale_rate: of activation scales, relative to their size; 0 leaves them as they are.
        bias_rate: of biases, relative to their mean magnitude; 0 leaves them as they are.
        drop: probability that an activation stays in float during a step (QDrop).
        start: what the steps start from: `"descent"`, `"feedback"`, or the `"codes"` of the passes before.
        patience: looks at the held-out batches, of twenty, without improvement before it stops.
        seed: of the samples, and of what is dropped.

    Raises:
        ConfigError: for a value out of range.
    """

    unit: Unit = Unit.OPERATOR
    iterations: NonNegativeInt = 250
    batch_size: PositiveInt = 32
    learning_rate: NonNegativeFloat = 1e-2
    scale_rate: NonNegativeFloat = 0.0
    bias_rate: NonNegativeFloat = 0.0
    drop: Annotated[float, Interval("[0, 1)")] = 0.0
    start: Start = Start.DESCENT
    patience: PositiveInt = 5
    seed: int = 0

    @property
    def rate(self) -> float:
        """The learning rate of the codes that is used."""
        return self.learning_rate

    @property
    def fits_scales(self) -> bool:
        """Whether a start by error feedback shrinks scales first, where nothing else depends on them."""
        return False

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: a gradient's values, and of each weight what it is learned through."""

        def turn(block: BlockSize) -> int:
            rows = (FLOAT32 * m.groups * m.inputs * min(m.rows, _ROWS) for m in block.matrices)
            descent = (3 * m.moment + values for m, values in zip(block.matrices, rows, strict=True))
            # Two moments and a factor's squares beside it, what it rounds, and what it rounded of the whole block.
            rounded = (working_bytes(m.groups, m.outputs, m.inputs) + 2 * m.target for m in block.matrices)
            moments = (3 * m.moment + block.weights for m in block.matrices)
            feedback = (kept + working for kept, working in zip(moments, rounded, strict=True))
            starts: dict[Start, Iterable[int]] = {Start.DESCENT: descent, Start.FEEDBACK: feedback}
            copies = _LEARNED_COPIES + (self.start is Start.FEEDBACK)
            steps = 2 * block.every_value + copies * block.weights
            return max((steps, *starts.get(self.start, ())))

        def work(block: BlockSize) -> int:
            return 3 * self.iterations * block.operations

        return sizes.walk(self.unit, turn, streams=2, work=work)

    def optimizer(
        self, groups: list[dict[str, Any]]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return what takes the steps, and how its rates decay."""
        optimizer = torch.optim.Adam(groups, foreach=False)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)


Begin = Callable[[Grid, Tensor, Tensor], Codes]
"""From a grid, the weight that codes are to be nearest to and the codes to start from, to codes that can be learned."""


def reconstruct(gm: GraphModule, context: Context, schedule: Schedule, begin: Begin, label: str) -> int:
    """Learn the codes of every weight of `gm`, unit by unit; return how many changed.

    Raises:
        CalibrationError: if the error of a unit is NaN or infinite; the message names its operators.
    """
    note_left_alone(gm, context, schedule)
    learns_scales = schedule.scale_rate > 0 and _free_scales(context)
    if schedule.scale_rate and not learns_scales:
        what = "left: activation scales may not take any value (scale_type)"
        context.note(Change("scale_rate", what, changed=False))
    shared = shared_tensors(gm)
    for run in walk_blocks(gm, context, unit=schedule.unit, label=label):
        if run.finished:
            continue
        weights = [w for w in quantized_weights(run.module, schedule.selected(context.plan)) if w.codes not in shared]
        if schedule.unit is Unit.OPERATOR:
            weights = [weight for weight in weights if not _leave_routed(weight, context)]
        if not weights:
            continue
        if not any(isinstance(t, Tensor) and t.is_floating_point() for t in run.targets(0)):
            for weight in weights:
                context.note(Change(name=weight.name, what="left: what it makes is no number", changed=False))
            continue
        # Of a pass that is limited, only what the operators themselves read.
        read = {weight.input_scale for weight in weights} if schedule.only else set(run.free_scales)
        learnable = [name for name in run.free_scales if name in read] if learns_scales else []
        _Unit(gm, context, schedule, run, weights, learnable).learn(begin)
    return sum(change.changed for change in context.changes)


def _leave_routed(weight: QuantizedWeight, context: Context) -> bool:
    """Tell whether data chooses the rows of an operator, and note that it is left then.

    The quantized model may send a token elsewhere than the float one, and the rows of both are then no pairs.
    """
    if weight.linear.offsets_at is None:
        return False
    what = "left: data chooses the rows it multiplies; unit='block' learns it with what chooses them"
    context.note(Change(name=weight.name, what=what, changed=False))
    return True


def _free_scales(context: Context) -> bool:
    """Tell whether activation scales may take any value."""
    specs = (spec for op in context.plan.values() for spec in (op.input, op.output) if spec is not None)
    return all(spec.scale_type is ScaleType.FLOAT32 for spec in specs)


@dataclass
class _State:
    """What a unit computes with: codes, biases and shares of the weights' scales per weight, scales by name.

    `None` stands for what there is not, or is not learned.
    """

    codes: list[Tensor]
    biases: Sequence[Tensor | None]
    ratios: list[Tensor | None]
    scales: dict[str, Tensor]


@dataclass
class _Unit:
    """One unit's turn."""

    gm: GraphModule
    context: Context
    schedule: Schedule
    run: BlockRun
    weights: list[QuantizedWeight]
    scales: list[str]

    def __post_init__(self) -> None:
        self.real = [tensor_of(self.run.reference, weight.weight).detach().float() for weight in self.weights]
        self.near = self.real  # what codes are nearest to
        self.grids = self._grids()
        self.seed = 1_000_003 * self.schedule.seed + self.run.index
        self.least = self._least_scales() if self.scales else {}

    def learn(self, begin: Begin) -> None:
        """Learn the unit's codes, and note what became of each weight."""
        start = time.perf_counter()
        original, ranges = self._learned(), self._weight_scales()
        before = self.run.held_out_error()
        best = self._start(before)
        if self.schedule.iterations:
            best = self._take_steps(begin, best)
        seconds = (time.perf_counter() - start) / len(self.weights)
        learned = self._learned()
        moved = [share_changed(a, b) for a, b in zip(original.codes, learned.codes, strict=True)]
        pairs = zip(original.biases, learned.biases, strict=True)
        biases = [a is not None and b is not None and not torch.equal(a, b) for a, b in pairs]
        steps = [not torch.equal(a, b) for a, b in zip(ranges, self._weight_scales(), strict=True)]
        scales = [not torch.equal(scale, learned.scales[name]) for name, scale in original.scales.items()]
        for i, weight in enumerate(self.weights):
            # Scales are the unit's; they are counted once.
            count = sum(scales) if i == 0 else 0
            others = (
                ["scales"] * steps[i]
                + ["bias"] * biases[i]
                + [f"{count} activation scale{'s' * (count > 1)}"] * (count > 0)
            )
            changed = moved[i] > 0 or bool(others)
            what = ", ".join([f"{moved[i]:.1%} of the codes"] * (moved[i] > 0 or not others) + others)
            self.context.note(Change(weight.name, what, changed, before, best, seconds))

    def _learned(self) -> _State:
        """Return what may be learned, as it is now."""
        module = self.run.module
        # Where they are not learned, biases are at most rounded anew, to scales that are.
        taught = [weight.bias is not None and self.schedule.bias_rate > 0 for weight in self.weights]
        biases = [w.bias_value(module) if learns else None for w, learns in zip(self.weights, taught, strict=True)]
        return _State(
            self._codes(), biases, [None] * len(biases), {name: tensor_of(module, name) for name in self.scales}
        )

    def _grids(self) -> list[Grid]:
        return [weight.grid(self.run.module) for weight in self.weights]

    def _weight_scales(self) -> list[Tensor]:
        return [weight.scale(self.run.module) for weight in self.weights]

    def _codes(self) -> list[Tensor]:
        return [tensor_of(self.run.module, weight.codes) for weight in self.weights]

    # The start: each operator by itself, in order, on what those before it make of the data now.

    def _start(self, before: float) -> float:
        """Store the codes to start from if they are better on held-out batches; return the error then."""
        round_ = {Start.DESCENT: self._descend, Start.FEEDBACK: self._feed_back}.get(self.schedule.start)
        if round_ is None:
            return before
        names = [name for weight in self.weights for name in (weight.codes, weight.scale_name)]
        original = {name: tensor_of(self.run.module, name) for name in names}
        round_()
        if (after := self.run.held_out_error()) < before:
            return after
        for name, tensor in original.items():
            self.run.store(name, tensor)
        self.near, self.grids = self.real, self._grids()
        return before

    def _descend(self) -> None:
        """Store the codes of coordinate descent."""
        for weight, real, grid in zip(self.weights, self.real, self.grids, strict=True):
            mapping = weight.linear.matrices
            if mapping is not None and not mapping.stacked and weight.is_plain:
                scale, zero_point = (mapping.matrix(p.expand_as(real)) for p in (grid.scale, grid.zero_point))
                error = self._output_error(weight, mapping)
                matrices = replace(grid, scale=scale, zero_point=zero_point)
                codes = round_by_descent(mapping.matrix(real), error, matrices)
                self._store_codes(weight, mapping.restore(codes, real))

    def _feed_back(self) -> None:
        """Store codes of error feedback that aim at what the float model makes, and the scales that fit best."""
        near = dict(zip((weight.node.name for weight in self.weights), self.real, strict=True))
        for product in find_products(self.run, self.weights):
            give_back()
            near |= self._feed_back_product(product)
        self.near, self.grids = list(near.values()), self._grids()

    def _feed_back_product(self, product: Product) -> dict[str, Tensor]:
        """Round the parts of a product; return what was rounded, by node."""
        seen = product.hessian(self.context, shifted=True, batches=self.context.tuning)
        factors = partial(seen.factors, damping=_DAMPING, by_activation=True)
        near = {}
        try:
            for part in product.parts:
                matrix = part.matrix
                target = seen.target(matrix.real, 1.0, factors())
                movable = self.schedule.fits_scales and part.weight.grid(self.run.module).movable
                if movable and matrix.columns is not None:
                    matrix = fitted_to_feedback(matrix, target, factors())
                matrix, _ = rounded_with_feedback(matrix, target, factors())
                part.store(matrix)
                near[part.weight.node.name] = part.mapping.restore(compensated(matrix, target, factors()), part.real)
        except CalibrationError as error:
            raise product.blamed(error) from error
        return near

    def _output_error(self, weight: QuantizedWeight, mapping: LinearMap) -> OutputError:
        """Return the error of the operator's output as a function of its weight, over the tuning batches."""
        run = self.run
        real = named_nodes(run.reference)[weight.node.name]
        activation = extract(run.module, placeholders(run.module), [weight.linear.activation])
        output = extract(run.reference, placeholders(run.reference), [real])
        bias = weight.bias_value(run.module) if weight.bias is not None else None
        total: OutputError | None = None
        with torch.no_grad():
            for batch in self.context.tuning:
                (x,), (y,) = activation(*run.inputs(batch)), output(*run.reference_inputs(batch))
                columns, outputs = mapping.rows(x, y, most=_ROWS, seed=self.seed + batch)
                if bias is not None:
                    outputs = outputs - bias.reshape(outputs.shape[0], -1, 1)
                part = OutputError.of(columns, outputs)
                total = part if total is None else total + part
        assert total is not None
        return total

    # Gradient steps: all of the unit's weights together.

    def _take_steps(self, begin: Begin, best: float) -> float:
        """Learn; store the state that is best on held-out batches if it beats `best`; return the error then."""
        schedule, start = self.schedule, best
        block = trainable_block(self.run, self.weights, biases=schedule.bias_rate > 0, scales=self.scales)
        codes = [begin(*given) for given in zip(self.grids, self.near, map(Tensor.float, self._codes()), strict=True)]
        biases = [self._learnable_bias(weight) for weight in self.weights]
        scales = {name: tensor_of(self.run.module, name).clone().requires_grad_() for name in self.scales}
        optimizer, decay = self._optimizer(codes, biases, scales)
        extra = [bias for bias in biases if bias is not None], list(scales.values())
        every = max(1, schedule.iterations // _EVALUATIONS)
        kept, waited = None, 0
        chance = _Chance(self.seed, self.context.device)
        for step in range(1, schedule.iterations + 1):
            inputs, targets = self._sample(chance)
            with torch.enable_grad():
                made = block(
                    inputs, [c.weight() for c in codes], *extra, drop=schedule.drop, generator=chance.on_device
                )
                loss = relative_error(made, targets)
                for c in codes:
                    loss = loss + c.penalty(step / schedule.iterations)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
            optimizer.step()
            decay.step()
            self._keep_above_least(scales)
            if step % every and step != schedule.iterations:
                continue
            self._require_finite(loss)
            error = self._error_of(block, codes, extra)
            waited = 0 if error < best else waited + 1
            if error < best:
                best = error
                learned = {name: _copy(scale) for name, scale in scales.items()}
                ratios = [_copy(c.ratio) for c in codes]
                kept = _State([c.codes() for c in codes], [_copy(bias) for bias in biases], ratios, learned)
            if waited >= schedule.patience and 2 * step > schedule.iterations:
                break
        return self._store(kept, before=start, after=best) if kept is not None else best

    def _least_scales(self) -> dict[str, float]:
        """Return, for each scale, the smallest that lets no int32 bias overflow, and is not a vanishing share of it."""
        least = least_scales(self.gm, self.context.plan, self.scales)
        now = {name: float(tensor_of(self.run.module, name)) for name in self.scales}
        return {name: max(least[name], _SMALLEST_SHARE * now[name]) for name in self.scales}

    def _keep_above_least(self, scales: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, scale in scales.items():
                scale.clamp_(min=self.least[name])

    def _learnable_bias(self, weight: QuantizedWeight) -> Tensor | None:
        if not self.schedule.bias_rate or weight.bias is None:
            return None
        return weight.bias_value(self.run.module).clone().requires_grad_()

    def _optimizer(
        self, codes: Sequence[Codes], biases: Sequence[Tensor | None], scales: Mapping[str, Tensor]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        schedule = self.schedule
        groups: list[dict[str, Any]] = [{"params": [p for c in codes for p in c.parameters], "lr": schedule.rate}]
        for bias in (bias for bias in biases if bias is not None):
            size = max(float(bias.detach().abs().mean()), 1e-6)
            groups.append({"params": [bias], "lr": schedule.bias_rate * size})
        groups += [{"params": [scale], "lr": schedule.scale_rate * float(scale.detach())} for scale in scales.values()]
        return schedule.optimizer(groups)

    def _sample(self, chance: _Chance) -> tuple[list[Any], list[Any]]:
        """Return inputs and targets of some samples of one tuning batch, or all of it where samples are not rows."""
        tuning, run, drop = self.context.tuning, self.run, self.schedule.drop
        batch = tuning[int(torch.randint(len(tuning), (), generator=chance.on_host))]
        inputs, targets = run.inputs(batch), run.targets(batch)
        if drop:
            reals = run.reference_inputs(batch)
            inputs = [_mixed(x, real, drop, chance.on_device) for x, real in zip(inputs, reals, strict=True)]
        if not self.divisible:
            return inputs, targets
        rows = torch.randperm(len(targets[0]), generator=chance.on_host)[: self.schedule.batch_size].to(
            self.context.device
        )
        return [x[rows] for x in inputs], [t[rows] for t in targets]

    @cached_property
    def divisible(self) -> bool:
        """Whether rows are samples: the first of what enters make, by themselves, the first of what leaves."""
        run, batch = self.run, self.context.tuning[0]
        inputs, targets = run.reference_inputs(batch), run.targets(batch)
        sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in (*inputs, *targets)}
        if len(sizes) != 1 or None in sizes:
            return False
        few = slice(0, min(self.schedule.batch_size, len(targets[0])))
        try:
            with torch.no_grad():
                made = run.made(run.reference(*(x[few] for x in inputs)))
        except RuntimeError as error:
            if is_shortage(error):
                raise
            return False  # a mask, for one, does not fit fewer rows
        alone = [t[few] for t in targets]
        same = all(y.shape == t.shape for y, t in zip(made, alone, strict=True))
        return same and float(relative_error(made, alone)) < _REORDERED_SUMS

    def _error_of(self, block: Trainable, codes: Sequence[Codes], extra: tuple[list[Tensor], list[Tensor]]) -> float:
        with torch.no_grad():
            grids = [
                grid if c.ratio is None else grid.times(c.ratio) for grid, c in zip(self.grids, codes, strict=True)
            ]
            hard = [grid.value(c.codes()) for grid, c in zip(grids, codes, strict=True)]
        return self.run.held_out_error(lambda batch: block(self.run.inputs(batch), hard, *extra))

    def _require_finite(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise CalibrationError(
                f"the reconstruction error of {self.run.operators} became {float(loss)} while it was learned; lower "
                "the learning rate, or exclude the operators"
            )

    # Storing.

    def _store_codes(self, weight: QuantizedWeight, codes: Tensor) -> None:
        self.run.store(weight.codes, weight.storable(self.run.module, codes))

    def _store(self, state: _State, *, before: float, after: float) -> float:
        """Store a state whose error is `after`, unless as stored it is not below `before`; return the error then."""
        tensors = self._tensors(state)
        original = {name: tensor_of(self.gm, name) for name in tensors}
        for name, tensor in tensors.items():
            self.run.store(name, tensor)
        # Biases are rounded now, and were not while it was learned.
        if (stored := self.run.held_out_error()) < before:
            return stored
        for name, tensor in original.items():
            self.run.store(name, tensor)
        return before

    def _tensors(self, state: _State) -> dict[str, Tensor]:
        """Return what is to be stored, by name."""
        tensors = dict(state.scales)
        for weight, codes, ratio in zip(self.weights, state.codes, state.ratios, strict=True):
            tensors[weight.codes] = weight.storable(self.run.module, codes)
            if ratio is not None:
                tensors[weight.scale_name] = weight.scale(self.run.module) * ratio
        biases: dict[str, Tensor] = {}
        for weight, bias in zip(self.weights, state.biases, strict=True):
            if bias is not None:
                biases[weight.node.name] = bias
        return tensors | biases_at(self.gm, self.context.plan, state.scales, biases)


class _Chance:
    """Random numbers of one walk of steps, which no other thread draws from.

    Attributes:
        on_host: draws samples.
        on_device: draws what is dropped; the same one on the CPU.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.on_host = torch.Generator().manual_seed(seed)
        self.on_device = self.on_host if device.type == "cpu" else torch.Generator(device).manual_seed(seed)


def _mixed(x: Any, real: Any, share: float, generator: torch.Generator) -> Any:
    """Return `x` with about that share of its values taken from `real`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.where(torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32) < share, real, x)


def _copy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


__all__ = ["Begin", "Codes", "Schedule", "Start", "note_left_alone", "reconstruct"]
