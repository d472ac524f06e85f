"""Half the Hessian of an operator's squared error: the sum of `x x'` over the rows of its input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.engine.block_walk import running
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration_data import Positions, without_padding
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import placeholders
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import Factor, factor, stack_chunks

_TILE, _DEVICE_TILE = 128, 1024
"""Rows of `x' x` per product, on and above the diagonal; a GPU needs more rows to use all of its processors."""


@dataclass(eq=False)
class Hessian:
    """Sums over an operator's input rows: half the Hessian of its squared output error with respect to its weight.

    Attributes:
        h: Sum of `x x'`, float32, shape (groups, inputs, inputs); only the upper triangle until `finish`. With
            guidance, rows are weighted, here and in `shift`.
        shift: Sum of `(r - x) x'`, where `r` is the row in float, of the shape of `h`; `None` if not requested.
        rows: Number of rows, shape (groups,), on the host.
        failures: Flags that a caller of `factors` must read: if one is true, a factor is invalid, and
            `wait_for_factors` makes the next ones valid. `None`: every factor is checked at once, which waits for the
            device.
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
        """Yield the factors of `h`, each with the slice of the stack it belongs to.

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
        """Return the weight to round: `real`, moved toward the float model's outputs on its own inputs.

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
        """Return sums without rows."""
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
            weights: Function that returns the row weights of a batch, of the shape of the operator's output without
                channels; default: all equal.
        """

        def summed(batches: Sequence[int]) -> Hessian:
            hessian = cls.empty(*source.shape, context.device, shifted=reference is not None)
            positions = [context.data.kept_positions(batch) for batch in batches]
            for batch, unpadded in zip(batches, positions, strict=True):
                w = weights(batch) if weights is not None else None
                reals = reference.values(batch, unpadded).weighted(w) if reference is not None else None
                hessian.add(source.mapping, source.values(batch, unpadded).weighted(w), reals)
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

    def add(self, mapping: LinearMap, values: Entering, reals: Entering | None = None) -> None:
        """Add the rows of a batch.

        Args:
            mapping: Mapping of the operator.
            values: Quantized input of the operator.
            reals: The same input in float, if `shift` is requested.
        """
        if mapping.kernel:
            assert values.output is not None
            columns = values.columns(mapping, values.output)
            self.h.baddbmm_(columns, columns.mT)
            self.rows += columns.shape[-1]
            if self.shift is not None and reals is not None:
                self.shift.baddbmm_(reals.columns(mapping, values.output) - columns, columns.mT)
            return
        exact_rows = reals.matrices(mapping) if reals is not None else iter(())
        for group, x in enumerate(values.matrices(mapping)):
            _add_upper(self.h[group], x)
            self.rows[group] += len(x)
            if self.shift is not None:
                self.shift[group].addmm_((next(exact_rows) - x).T, x)

    def finish(self, *, routed: bool) -> None:
        """Mirror the upper triangle; if rows are routed by data, let groups with few rows borrow from the others.

        With fewer than about `n` rows, a matrix of `n` inputs is nearly singular: the rows miss some directions. The
        average of the stack is added with the weight of `n` rows.
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

        More rows never require more damping, so on a device factors are not waited for (`failures`).
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
        """Drop factors that may be invalid, and check the next ones as they are computed."""
        self._factors.clear()
        self.failures = None


@dataclass(frozen=True)
class Entering:
    """Input of an operator for one batch.

    Attributes:
        x: Activation of the operator.
        output: Output of a convolution.
        offsets: End of each expert's rows.
        kept: Positions that count; `None`: all. Rows routed to experts all count, padding included.
        roots: Square roots of the row weights, float32, of the shape of the operator's output without channels;
            `None`: all are 1.
    """

    x: Tensor
    output: Tensor | None = None
    offsets: Tensor | None = None
    kept: Positions | None = None
    roots: Tensor | None = None

    def weighted(self, weights: Tensor | None) -> Entering:
        """Return the input with row weights."""
        return self if weights is None else replace(self, roots=weights.sqrt())

    def columns(self, mapping: LinearMap, output: Tensor) -> Tensor:
        """Return the input patch of each output position of a convolution, float32, (groups, inputs, positions)."""
        patches, _ = mapping.rows(self.x, output, most=output[:, 0].numel(), seed=0)
        return patches.float() if self.roots is None else patches.float() * self.roots.flatten()

    def matrices(self, mapping: LinearMap) -> Iterator[Tensor]:
        """Yield float32 rows, shape (rows, inputs), for each group of a matrix product."""
        x = self.x.float() if self.roots is None else self.x.float() * self.roots[..., None]
        if self.offsets is not None:
            ends = [0, *self.offsets.tolist()]
            yield from (x[int(a) : int(b)] for a, b in itertools.pairwise(ends))
        elif mapping.stacked:
            yield from x
        else:
            yield without_padding(x, self.kept)


class Entrance:
    """Source of the rows that enter an operator of a block.

    Args:
        module: Module of the block.
        linear: Operator in the block.
        mapping: Mapping from the operator to matrix products.
        inputs: Function that returns the block's inputs for a batch.

    Attributes:
        mapping: Mapping from the operator to matrix products.
        shape: Number of groups, and of inputs per group.
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

    @staticmethod
    def key(linear: Linear, mapping: LinearMap) -> object:
        """Return a key that is equal for operators with the same rows; arguments as above."""
        return linear.activation, replace(mapping, transposed=False)

    def values(self, batch: int, unpadded: Positions | None) -> Entering:
        """Return the operator's input for one batch; `unpadded` marks the positions that are not padding."""
        with running(batch):
            x, *more = self._part(*self._inputs(batch))
        output = more[0] if self.mapping.kernel else None
        return Entering(x, output, more[0] if self.mapping.offsets is not None else None, unpadded)


def _add_upper(h: Tensor, x: Tensor) -> None:
    """Add the tiles of `x' x` on and above the diagonal to `h`; this saves about a third of the work."""
    tile = _TILE if h.is_cpu else _DEVICE_TILE
    for start in range(0, h.shape[-1], tile):
        h[start : start + tile, start:].addmm_(x[:, start : start + tile].T, x[:, start:])


__all__ = ["Entering", "Entrance", "Hessian"]
