"""Half the Hessian of an operator's squared error: the sum of `x x'` over the rows of its input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import running
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration_data import Positions, without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import Guidance
from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, placeholders
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import Factor, factor, stack_chunks
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.slots import Reading, Slot, WeightSlot

_TILE, _DEVICE_TILE = 128, 1024
"""Rows of `x' x` per product, on and above the diagonal; a GPU needs more rows to use all of its processors."""


Rows = Tensor | Iterable[Tensor]
"""Rows of an operator's input, float32: for a convolution the input patch of each output position, shape (groups,
inputs, positions); for a matrix product a tensor of shape (rows, inputs) for each group."""


@dataclass(eq=False)
class Hessian:
    """Sums over an operator's input rows: half the Hessian of its squared output error with respect to its weight.

    Attributes:
        h: Sum of `x x'`, float32, shape (groups, inputs, inputs); only the upper triangle until `finish`. With
            guidance, rows are weighted, here and in `shift`.
        shift: Sum of `(r - x) x'`, where `r` is the row in float, of the shape of `h`; `None` if not requested.
        rows: Number of rows, shape (groups,), on the host.
        failures: Flags that a caller of `factors` must read: if one is true, a factor is invalid, and the caller must
            call `wait_for_factors` and get the factors again. `None` if every factor is checked when it is computed,
            which waits for the device.
        unguided: Reason that rows are not weighted although guidance was requested; empty otherwise.
    """

    h: Tensor
    shift: Tensor | None
    rows: Tensor
    unguided: str = ""
    failures: list[Tensor] | None = None
    _borrowed: Tensor | None = None
    _factors: dict[Hashable, list[tuple[slice, Factor]]] = field(default_factory=dict)

    def factors(
        self, *, damping: float, by_activation: bool, sharing: Columns | None = None
    ) -> Iterator[tuple[slice, Factor]]:
        """Yield the factors of `h`, each after the slice of the stack that it belongs to.

        Factors are cached for the next operator that has the same input, except for a long stack: its factors would
        fill memory, so they are computed one at a time.

        Args:
            damping: Argument of `quark_fx.solvers.error_feedback.factor`.
            by_activation: Argument of the same function.
            sharing: Argument of the same function.

        Raises:
            CalibrationError: If `h` cannot be factored.
        """
        slices = [slice(None)] if self.shift is not None else stack_chunks(self.h)
        key = damping, by_activation, None if sharing is None else tuple(sharing.numbers.tolist())
        how: dict[str, Any] = {"damping": damping, "by_activation": by_activation, "sharing": sharing}
        factors: Iterable[tuple[slice, Factor]] = self._factors.get(key, ())
        if key not in self._factors:
            factors = ((part, factor(self.h[part], **how, failures=self.failures)) for part in slices)
            if len(slices) == 1:
                factors = self._factors[key] = list(factors)
        yield from factors

    def target(self, real: Tensor, share: float, factors: Iterable[tuple[slice, Factor]]) -> Tensor:
        """Return the weight to round: `real`, changed so that its outputs are closer to the float model's outputs.

        Args:
            real: Float weight, shape (groups, outputs, inputs).
            share: Fraction of the correction, 0 to 1; without `shift` there is nothing to correct.
            factors: Factors of the Hessian.
        """
        if self.shift is None:
            return real
        ((_, whole),) = factors
        return real + share * whole.solve(real.float() @ self.shift)

    @classmethod
    def empty(cls, groups: int, inputs: int, device: torch.device, *, shifted: bool) -> Hessian:
        """Return sums over zero rows."""
        h = torch.zeros(groups, inputs, inputs, device=device, dtype=torch.float32)
        rows = torch.zeros(groups, dtype=torch.int64)
        return cls(h, torch.zeros_like(h) if shifted else None, rows)

    @classmethod
    def measure(
        cls,
        context: Context,
        source: Entrance,
        reference: Entrance | None = None,
        *,
        parts: Sequence[Sequence[int]],
        weights: Callable[[int], Tensor | None] | None = None,
    ) -> list[Hessian]:
        """Return the sums over each of several parts of the data.

        Args:
            context: Context with the batches.
            source: Source of the rows.
            reference: Source of the same rows in float, for `shift`.
            parts: Indices of the batches of each part.
            weights: Function that returns the row weights of a batch, in the shape of the operator's output without
                channels; default: 1 for every row.
        """

        def summed(batches: Sequence[int]) -> Hessian:
            hessian = cls.empty(*source.shape, context.device, shifted=reference is not None)
            for batch in batches:
                w = weights(batch) if weights is not None else None
                exact_rows = reference.rows(batch, context, w) if reference is not None else None
                hessian.add(source.rows(batch, context, w), exact_rows)
            return hessian

        with torch.no_grad():
            hessians = context.with_room(lambda: [summed(batches) for batches in parts])
        ranks = context.ranks
        is_alone = ranks.alone
        for hessian in hessians:
            if not is_alone:
                rows = hessian.rows.to(context.device)
                ranks.add(hessian.h, rows, *(() if hessian.shift is None else (hessian.shift,)))
                hessian.rows = rows.cpu()
            hessian.finish(routed=source.mapping.offsets is not None)
        return hessians

    @classmethod
    def of_parts(cls, context: Context, source: Entrance) -> tuple[Hessian, Hessian]:
        """Return the sums over calibration and over validation batches; without validation data, the same object."""
        hessians = cls.measure(context, source, parts=context.data.parts)
        return hessians[0], hessians[-1]

    def add(self, rows: Rows, exact_rows: Rows | None = None) -> None:
        """Add the rows of a batch.

        Args:
            rows: Quantized input of the operator.
            exact_rows: The same input in float, if `shift` is requested.
        """
        if isinstance(rows, Tensor):
            self.h.baddbmm_(rows, rows.mT)
            self.rows += rows.shape[-1]
            if self.shift is not None and isinstance(exact_rows, Tensor):
                self.shift.baddbmm_(exact_rows - rows, rows.mT)
            return
        exact = iter(() if exact_rows is None else exact_rows)
        for group, x in enumerate(rows):
            _add_upper(self.h[group], x)
            self.rows[group] += len(x)
            if self.shift is not None:
                self.shift[group].addmm_((next(exact) - x).T, x)

    def finish(self, *, routed: bool) -> None:
        """Mirror the upper triangle; if data routes rows to groups, add the average of the stack to every group.

        With fewer than about `n` rows, a matrix of `n` inputs is nearly singular: the rows miss some directions. The
        average is added with the weight of `n` rows.
        """
        inputs = self.h.shape[-1]
        for start in range(0, inputs, _TILE):  # a copy of a stack of matrices would be large
            tile, rest = slice(start, start + _TILE), slice(start + _TILE, None)
            self.h[:, rest, tile] = self.h[:, tile, rest].mT
            corner = self.h[:, tile, tile]
            corner.copy_(corner.triu() + corner.triu(1).mT)
        if routed:
            self._borrow()

    def _borrow(self) -> None:
        self._borrowed = self.h.sum(0) * (self.h.shape[-1] / self.rows.sum().clamp_min(1))
        self.h += self._borrowed

    def add_rows_of(self, other: Hessian) -> None:
        """Add the rows of another Hessian of the same operator.

        More rows never require more damping, so on a device the host does not wait for new factors (`failures`).
        """
        self._factors.clear()
        self.put_off_failures()
        self.h += other.h
        self.rows += other.rows
        if self.shift is not None and other.shift is not None:
            self.shift += other.shift
        if self._borrowed is not None and other._borrowed is not None:
            self.h -= self._borrowed + other._borrowed
            self._borrow()

    def not_finite(self) -> Tensor:
        """Return whether any sum of squares is not finite, shape (), bool."""
        return ~self.h.diagonal(dim1=-2, dim2=-1).isfinite().all()

    def put_off_failures(self) -> None:
        """On a device, check factors later, since most are valid; see `failures`."""
        self.failures = None if self.h.is_cpu else []

    def wait_for_factors(self) -> None:
        """Drop factors that may be invalid, and check later factors when they are computed."""
        self._factors.clear()
        self.failures = None


class Entrance:
    """Source of the rows that enter an operator of a block.

    Args:
        module: Module of the block.
        linear: Operator in the block.
        mapping: Mapping from the operator to matrix products.
        inputs: Function that returns the block's inputs for a batch.

    Attributes:
        mapping: Mapping from the operator to matrix products.
        shape: Number of groups, and number of inputs per group.
    """

    def __init__(
        self, module: GraphModule, linear: Linear, mapping: LinearMap, inputs: Callable[[int], list[Any]]
    ) -> None:
        nodes = [linear.activation]
        if mapping.kernel:
            nodes.append(linear.node)
        if linear.offsets is not None:
            nodes.append(linear.offsets)
        groups, _, columns = mapping.matrix(torch.empty(linear.shape, device="meta", dtype=torch.float32)).shape
        self.mapping, self.shape, self._inputs = mapping, (groups, columns), inputs
        self._part = extract(module, placeholders(module), nodes)

    def rows(self, batch: int, context: Context, weights: Tensor | None = None) -> Rows:
        """Return the operator's input for one batch, without padding; rows routed to experts may include padding.

        Args:
            batch: Index of the batch.
            context: Context with the batches.
            weights: Weights of the rows, float32, in the shape of the operator's output without channels; each row is
                multiplied by the square root of its weight. `None` if all weights are 1.
        """
        mapping = self.mapping
        with running(context.data.number_of(batch)):
            x, *more = self._part(*self._inputs(batch))
        if mapping.kernel:
            (output,) = more
            patches, _ = mapping.rows(x, output, most=output[:, 0].numel(), seed=0)
            return patches.float() if weights is None else patches.float() * weights.sqrt().flatten()
        x = x.float() if weights is None else x.float() * weights.sqrt()[..., None]
        ends = more[0] if mapping.offsets is not None else None
        return _rows_by_group(x, mapping, ends, context.data.kept_positions(batch))


def _rows_by_group(
    x: Tensor, mapping: LinearMap, ends: Tensor | None = None, unpadded: Positions | None = None
) -> Iterable[Tensor]:
    """Return the rows of a matrix product, shape (rows, inputs), for each group.

    Args:
        x: Activation of the operator.
        mapping: Mapping from the operator to matrix products.
        ends: Offsets at which the rows of each expert end.
        unpadded: Positions that are not padding.
    """
    if ends is not None:
        return (x[int(a) : int(b)] for a, b in itertools.pairwise([0, *ends.tolist()]))
    return x.unbind() if mapping.stacked else [without_padding(x, unpadded)]


@dataclass(frozen=True)
class InputHessian(Reading):
    """The `Hessian` of a weight, measured on its operator's input with everything before it quantized.

    Args:
        shifted: Whether to measure `Hessian.shift`, which takes a second forward pass.
        guided: Whether to weight each row by the sensitivity of the end loss to an error in that row
            (`quark_fx.engine.guidance`). This takes a forward and a backward pass of the float model, and each operator
            gets its own Hessian.
        two_sided: Whether to evaluate weights also by how errors of output channels add up in the end loss
            (`QuantizedMatrix.outputs`). This takes the same passes.
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
        """Return the guidance, measured once on the float graph; collective: every rank must call it.

        Raises:
            CalibrationError: If calibration data is missing.
        """
        if not (self.guided or self.two_sided):
            return None
        if context.guidance is None or (self.two_sided and context.guidance.outputs is None):
            context.guidance = Guidance.measure(context.float_graph, context, outputs=self.two_sided)
        return context.guidance

    def now(self, slot: WeightSlot, context: Context) -> QuantizedMatrix:
        """Return the current quantized weight, with the weighting of its errors, which must be measured already."""
        if not self.two_sided or context.guidance is None:
            return slot.now
        try:
            return replace(slot.now, outputs=context.guidance.together(slot.weight.linear), one_sided="")
        except Declined as declined:
            return replace(slot.now, outputs=None, one_sided=declined.reason)

    def measure(self, slots: Sequence[Slot], context: Context, batches: Sequence[int]) -> Hessian:
        """Return the sums over all rows of `batches`."""
        (hessian,) = self._measured(slots, context, [batches])
        return hessian

    def judged_on(self, context: Context) -> str:
        """Return the name of the data that proposals are evaluated on."""
        return context.data.judged_on

    def measure_parts(self, slots: Sequence[Slot], context: Context) -> tuple[Hessian, Hessian]:
        """Return the sums over calibration and over validation batches; without validation data, the same object.

        Raises:
            Declined: If there is no data for the slots.
        """
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


def _add_upper(h: Tensor, x: Tensor) -> None:
    """Add the tiles of `x' x` on and above the diagonal to `h`; this saves about a third of the work."""
    tile = _TILE if h.is_cpu else _DEVICE_TILE
    for start in range(0, h.shape[-1], tile):
        h[start : start + tile, start:].addmm_(x[:, start : start + tile].T, x[:, start:])


__all__ = ["Entrance", "Hessian", "InputHessian"]
