"""Half the Hessian of an operator's squared error: the sum of `x x'` over what enters it."""

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
from quark_fx.engine.room import with_room
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import placeholders
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import Factor, at_once, factor, solve

_TILE, _DEVICE_TILE = 128, 1024
"""Rows of `x' x` that one product computes, on and above the diagonal: few rows do not fill the processors of a GPU."""


@dataclass
class Hessian:
    """Sums over the rows that enter an operator: half the Hessian of its squared output error by its weight.

    Attributes:
        h: sum of `x x'`, float32, shape (groups, inputs, inputs); the upper triangle until `finish`. With guidance each
            row counts by its weight, here and in `shift`.
        shift: sum of `(r - x) x'` with `r` the row in float, the shape of `h`; `None` if it was not asked for.
        rows: how many, shape (groups,), on the host.
        failures: flags that a caller of `factors` has to read: a factor is wrong where one is true, and
            `wait_for_factors` makes the next ones right. `None`: the device is waited for instead.
        unguided: a note on why all rows count alike although guidance was asked for; otherwise empty.
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
        """Yield the factors of `h`, each with the matrices of a stack that it is of.

        They are kept for the next operator that reads the same values, unless a stack is long: its factors would fill
        the memory, and are made as they come.

        Args:
            damping, by_activation, sharing: as `quark_fx.solvers.error_feedback.factor` takes them.

        Raises:
            CalibrationError: if `h` has no factor.
        """
        slices = [slice(None)] if self.shift is not None else at_once(self.h)
        key = damping, by_activation, None if sharing is None else tuple(sharing.numbers.tolist())
        if key not in self._factors:
            how: dict[str, Any] = {"damping": damping, "by_activation": by_activation, "sharing": sharing}
            how["failures"] = self.failures
            made = ((some, factor(self.h[some], **how)) for some in slices)
            if len(slices) > 1:
                yield from made
                return
            self._factors[key] = list(made)
        yield from self._factors[key]

    def target(self, real: Tensor, share: float, factors: Iterable[tuple[slice, Factor]]) -> Tensor:
        """Return the weight to round: `real`, moved towards what the float model makes of its own inputs.

        Args:
            real: float weight, shape (groups, outputs, inputs).
            share: of the way, 0 to 1; where `shift` was not measured there is none to go.
            factors: of the Hessian.
        """
        if self.shift is None:
            return real
        ((_, found),) = factors
        return real + share * solve(found, real.float() @ self.shift)

    @classmethod
    def empty(cls, groups: int, inputs: int, device: torch.device, *, shifted: bool) -> Hessian:
        """Return the sums over no rows."""
        h = torch.zeros(groups, inputs, inputs, device=device, dtype=torch.float32)
        rows = torch.zeros(groups, dtype=torch.int64)
        return cls(h, torch.zeros_like(h) if shifted else None, rows)

    @classmethod
    def measure(
        cls,
        context: Context,
        entrance: Entrance,
        reference: Entrance | None = None,
        *,
        batches: Sequence[int] | None = None,
        weights: Callable[[int], Tensor | None] | None = None,
    ) -> Hessian:
        """Return the sums over calibration batches.

        Args:
            context: with the batches.
            entrance: where the rows come from.
            reference: where the same rows come from in float, for `shift`.
            batches: which; default: all.
            weights: of a batch's rows, the shape of the operator's output without channels; default: equal ones.
        """
        here = range(len(context.data.batches)) if batches is None else batches

        def summed() -> Hessian:
            moment = cls.empty(*entrance.shape, context.device, shifted=reference is not None)
            with torch.no_grad():
                for batch in here:
                    kept = context.data.kept_positions(batch)
                    found = weights(batch) if weights is not None else None
                    reals = reference.values(batch, kept).weighted(found) if reference is not None else None
                    moment.add(entrance.mapping, entrance.values(batch, kept).weighted(found), reals)
            return moment

        moment = with_room(context, summed)
        asked = () if moment.shift is None else (moment.shift,)
        if not context.ranks.alone:
            rows = moment.rows.to(context.device)
            context.ranks.add(moment.h, rows, *asked)
            moment.rows = rows.cpu()
        moment.finish(routed=entrance.mapping.offsets is not None)
        return moment

    @classmethod
    def of_parts(cls, context: Context, entrance: Entrance) -> tuple[Hessian, Hessian]:
        """Return the sums over the batches to learn from, and over those that judge; without any, the same ones."""
        learned = cls.measure(context, entrance, batches=context.data.calibration)
        judged = context.data.has_validation
        return learned, cls.measure(context, entrance, batches=context.data.validation) if judged else learned

    def add(self, mapping: LinearMap, values: Entering, reals: Entering | None = None) -> None:
        """Add the rows of a batch.

        Args:
            mapping: of the operator.
            values: what enters it, quantized.
            reals: the same in float, where `shift` is wanted.
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
        """Mirror the upper triangle, and where data chooses rows, let groups that saw few borrow from the others.

        A matrix of `n` inputs that saw fewer than about `n` rows leaves directions open which its rows do not reach.
        The average of the stack counts as `n` rows more.
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
        """Add the rows that another Hessian of the same operator was measured on.

        With more rows a matrix needs no more damping, so on a device its factors are not waited for (`failures`).
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
        """Return whether a sum of squares is not finite, shape (), bool."""
        return ~self.h.diagonal(dim1=-2, dim2=-1).isfinite().all()

    def put_off_failures(self) -> None:
        """Do not wait for the factors to come on a device, most of which are right: see `failures`."""
        self.failures = None if self.h.is_cpu else []

    def wait_for_factors(self) -> None:
        """Drop factors that may be wrong, and let those to come be read as they are made."""
        self._factors.clear()
        self.failures = None


@dataclass(frozen=True)
class Entering:
    """What enters an operator for one batch.

    Attributes:
        x: its activation.
        output: what it makes, for a convolution.
        offsets: where the rows of each expert end.
        kept: which positions count; `None`: all. Rows that are routed to experts all count, those of padding too.
        roots: square roots of the weights of the rows, float32, the shape of the operator's output without channels;
            `None`: all are 1.
    """

    x: Tensor
    output: Tensor | None = None
    offsets: Tensor | None = None
    kept: Positions | None = None
    roots: Tensor | None = None

    def weighted(self, weights: Tensor | None) -> Entering:
        """Return the same with weights of rows."""
        return self if weights is None else replace(self, roots=weights.sqrt())

    def columns(self, mapping: LinearMap, output: Tensor) -> Tensor:
        """Return what each value of a convolution's output is the product of, float32, (groups, inputs, positions)."""
        found, _ = mapping.rows(self.x, output, most=output[:, 0].numel(), seed=0)
        return found.float() if self.roots is None else found.float() * self.roots.flatten()

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
    """Where rows enter an operator of a block.

    Args:
        module: the block.
        linear: the operator.
        mapping: how it multiplies.
        inputs: returns what enters the block for a batch.

    Attributes:
        mapping: how the operator multiplies.
        shape: groups, and inputs of each.
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
        """Return what is equal for operators that multiply the same rows; arguments as above."""
        return linear.activation, replace(mapping, transposed=False)

    def values(self, batch: int, kept: Positions | None) -> Entering:
        """Return what enters for one batch; `kept` says which positions are no padding."""
        with running(batch):
            x, *more = self._part(*self._inputs(batch))
        output = more[0] if self.mapping.kernel else None
        return Entering(x, output, more[0] if self.mapping.offsets is not None else None, kept)


def _add_upper(h: Tensor, x: Tensor) -> None:
    """Add the tiles of `x' x` on and above the diagonal to `h`; a third less work than all of it."""
    tile = _TILE if h.is_cpu else _DEVICE_TILE
    for start in range(0, h.shape[-1], tile):
        h[start : start + tile, start:].addmm_(x[:, start : start + tile].T, x[:, start:])


__all__ = ["Entering", "Entrance", "Hessian"]
