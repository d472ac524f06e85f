"""Hessians from the importance matrix of a file, for solvers that run without calibration data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from quark_fx.checkpoints.files import some_of
from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.errors import CheckpointError, Declined, PassError
from quark_fx.graph.nodes import tensor_of
from quark_fx.plan.placement import Coded
from quark_fx.solvers.hessian import Hessian, InputHessian
from quark_fx.solvers.slots import Slot, WeightSlot
from quark_fx.system.isolation import warn


@dataclass(frozen=True)
class FileHessian(InputHessian):
    """The `Hessian` of a weight with a diagonal from an importance matrix, and zeros elsewhere.

    Args:
        path: GGUF file with the importance matrix.
    """

    path: str = ""
    shared: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    def measure_parts(self, slots: Sequence[Slot], context: Context) -> tuple[Hessian, Hessian]:
        """Return the Hessian from the file twice, because the file lacks validation data.

        Raises:
            Declined: If the file does not describe the input of the weight.
        """
        (slot,) = slots
        assert isinstance(slot, WeightSlot)
        sums, counts = self._moments(slot.weight.operator, context)
        groups, _, inputs = slot.now.real.shape
        hessian = Hessian.empty(groups, inputs, context.device, shifted=False)
        hessian.h.diagonal(dim1=-2, dim2=-1).copy_(sums.view(groups, inputs))
        hessian.rows = counts.expand(groups).clone()
        hessian.finish(routed=slot.mapping.offsets is not None)
        return hessian, hessian

    def judged_on(self, context: Context) -> str:
        """Return the name of the data that proposals are evaluated on."""
        return "the importance matrix"

    def require_entries(self, chooser: Selective, context: Context) -> None:
        """Check the entries of the file for the weights of a run; warn about weights without an entry.

        Raises:
            CheckpointError: If an entry has another size than its weight, or no weight has an entry.
        """
        missing, wrong, count = list[str](), list[str](), 0
        for operator in chooser.selected(context.plan).values():
            if not isinstance(operator, Coded) or operator.linear is None or operator.linear.matrices is None:
                continue
            try:
                sums, counts = self._moments(operator, context)
            except Declined:
                missing.append(operator.name)
                continue
            weight = tensor_of(context.float_graph, str(operator.weight_node.target))
            groups, _, inputs = operator.linear.matrices.matrix(weight).shape
            count += 1
            if len(sums) != groups * inputs or len(counts) not in (1, groups):
                expected = f"{inputs} inputs" if groups == 1 else f"{groups} matrices of {inputs} inputs"
                wrong.append(f"{operator.name} ({len(counts)} counts and {len(sums)} sums for {expected})")
        if wrong:
            raise CheckpointError(
                f"{self.path} has entries of other sizes than the weights: {some_of(wrong)}; pass the importance "
                "matrix of this model"
            )
        if missing and not count:
            raise CheckpointError(
                f"{self.path} describes the input of no quantized weight, such as {some_of(missing)}; pass the "
                "importance matrix of this model, or calibration data without `importance`"
            )
        if missing:
            warn(
                f"{self.path} does not describe the inputs of {len(missing)} weights, which keep their scales: "
                f"{some_of(missing)}; the report lists the reasons"
            )

    def _moments(self, operator: Coded, context: Context) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of a weight; raise `Declined` if the file does not describe its input."""
        if self.path not in context.importance:
            raise PassError(f"the importance matrix {self.path} was not read; run the pass through `quantize`")
        node, moments = operator.weight_node, context.importance[self.path]
        if (name := str(node.meta.get("parameter", node.target))) not in moments:
            raise Declined(f"the importance matrix lacks an entry for {name}")
        if not isinstance(tensor_of(context.float_graph, str(node.target)), nn.Parameter):
            raise Declined("an earlier pass changed its weight and its input, so the importance matrix does not apply")
        return moments[name]


__all__ = ["FileHessian"]
