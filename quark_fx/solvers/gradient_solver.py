"""A gradient solver defines how a weight is learned until it becomes codes; the engine does everything else.

For each block, the engine chooses initial codes, draws mini-batches, adds gradients over ranks, and stores results that
are better on validation data. It reports errors, resumes interrupted runs, and predicts memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import BlockRun, walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import QuantizedWeight, own_weights
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.scales import FLOAT32
from quark_fx.plan.placement import Quantized
from quark_fx.solvers.reconstruction import Reconstruction
from quark_fx.solvers.schedule import Schedule
from quark_fx.solvers.solver import naming_failures
from quark_fx.solvers.trainable import LearnedWeight


@dataclass(frozen=True, kw_only=True)
class GradientSolver(Schedule, ABC):
    """Base class of passes that learn codes by gradient steps on the outputs of operators or blocks.

    A subclass is a frozen dataclass of options with `begin`, decorated with `quark_fx.solvers.solver.solver`. It is a
    pass of the quantized stage, named after its class.
    """

    @abstractmethod
    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> LearnedWeight:
        """Return learnable codes.

        Args:
            grid: Scales, zero points, and format of the codes.
            weight: Weight to stay nearest to, in the shape of the stored weight: the float weight or, after error
                feedback, the float weight compensated for the errors of other inputs.
            start: Initial codes, float32; not always the nearest.

        Raises:
            Declined: If it cannot learn this weight; the weight keeps its codes, and the report shows the reason.
        """

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Learn the codes of `gm`; return how many weights changed.

        Raises:
            CalibrationError: If the error of a block is NaN or infinite; the message names its operators.
        """
        weights_of = own_weights(gm, context, self)
        learns_scales = self.scale_rate > 0 and _free_scales(context)
        if self.scale_rate and not learns_scales:
            context.note(Change.skipped("scale_rate", "activation scales may not take any value (scale)"))
        for run in walk_blocks(gm, context, unit=self.unit, label=type(self).__name__):
            if run.finished or not (weights := self._learnable(run, weights_of(run.module), context)):
                continue
            # With `only`, learn just the scales of the selected operators' own inputs.
            read = {weight.input_scale for weight in weights} if self.only else set(run.free_scales)
            scales = [name for name in run.free_scales if name in read] if learns_scales else []
            with naming_failures(self, run.operators):
                Reconstruction(gm, context, self, run, weights, scales, self.begin).learn()
        return sum(change.changed for change in context.changes)

    def _learnable(self, run: BlockRun, weights: list[QuantizedWeight], context: Context) -> list[QuantizedWeight]:
        """Return the weights that the block's error depends on; report the skipped ones."""
        targets = context.with_room(partial(run.targets, 0))
        reasons, numbers = {}, any(isinstance(t, Tensor) and t.is_floating_point() for t in targets)
        for weight in weights:
            if not numbers:
                reasons[weight.node] = "the outputs of its block are not floating-point"
            elif self.unit is Unit.OPERATOR and weight.linear.offsets_at is not None:
                # The quantized model may route a token differently from the float model, so rows would not correspond.
                reasons[weight.node] = (
                    "data selects the rows it multiplies; unit='block' learns it together with that selection"
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


__all__ = ["GradientSolver"]
