"""Round a weight column by column; each column compensates for the errors of earlier columns (the solver of GPTQ).

The squared error of an operator's output is `tr((W - Q) H (W - Q)')`, where `H` is the sum of `x x'`. With the factor
`H = R R'`, `R` upper triangular, it is a sum over columns: column `k` of `(W - Q) R` depends only on the errors of
columns up to `k`. Rounding `w_k` plus the errors that earlier columns pass on minimizes that column. `H` is never
inverted, rows are independent, and most of the work is in matrix products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quark_fx.errors import CalibrationError
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Columns
from quark_fx.system import accelerator

DAMPING = 0.01
"""Fraction of a Hessian's mean diagonal that is added to the diagonal before factoring; passes can override it."""

_LEAF = 16
"""Columns rounded one by one before one matrix product adds their errors to later columns."""

_AT_ONCE = 1 << 21
"""Approximate number of weights rounded together on a processor; more would need memory and miss its caches. A GPU
takes 128 times as many, and five copies of them are a few gigabytes."""

_FACTORED = 1 << 22
"""Approximate number of Hessian elements that are factored together."""

_ARRAYS = 6
"""Arrays of the size of a piece that exist at once while it is rounded."""

_ROWS = 64
"""Rows of a Hessian that are permuted at once."""

_LARGEST_CODE = 1 << 22
"""Exclusive limit on the magnitude of integer codes in the kernel for GPUs."""

_DAMPING_STEP = 10.0
"""Factor applied to damping that does not make `H` positive definite, up to the mean diagonal itself."""


@dataclass(frozen=True)
class Factor:
    """Factors of the damped `H`, in rounding order: `(I + feedback) diag(curvature) (I + feedback)'`.

    Attributes:
        order: Columns of the weight in the order of rounding, shape (groups, inputs).
        feedback: Strictly upper triangular matrices: `feedback[j, k]` is the fraction of column `j`'s error that is
            added to column `k`.
        curvature: Squared error of the output per squared error of a column, shape (groups, inputs).
        damping: Damping of each matrix, as a fraction of its mean diagonal, shape (groups,).
        level: Largest damping, on the host.
    """

    order: Tensor
    feedback: Tensor
    curvature: Tensor
    damping: Tensor
    level: float = 0.0

    @property
    def curvature_by_input(self) -> Tensor:
        """The curvature in the order of the weight's columns."""
        return torch.empty_like(self.curvature).scatter_(-1, self.order, self.curvature)

    def left_over(self, *others: Tensor) -> list[Tensor]:
        """Return the squared error of the output, on some data, per squared rounding error of a column.

        The rounding errors `u`, taken after feedback, change the weight by `u (I + feedback)^-1`. If they are
        independent, each has the weight of its entry on the diagonal of `(I + feedback)^-1 H (I + feedback)^-T`.

        Args:
            others: Hessians of the data, shape (groups, inputs, inputs).

        Returns:
            A tensor for each Hessian, shape (groups, inputs), in the order of the weight's columns.
        """
        one = torch.eye(self.order.shape[-1], device=self.order.device, dtype=torch.float32).expand_as(self.feedback)
        off = torch.linalg.solve_triangular(self.feedback, one, upper=True, unitriangular=True)
        ordered, found = torch.empty_like(off), list[Tensor]()
        for h in others:
            _permute(h, self.order, ordered)
            left = torch.cat([(some @ ordered).mul_(some).sum(-1) for some in off.split(_ROWS, -2)], -1)
            found.append(torch.empty_like(left).scatter_(-1, self.order, left))
        return found


def factor(
    h: Tensor,
    *,
    damping: float,
    by_activation: bool,
    sharing: Columns | None = None,
    failures: list[Tensor] | None = None,
) -> Factor:
    """Factor `h`; waits for the device once, or more often if a matrix needs more damping; never with `failures`.

    Args:
        h: Sum of `x x'`, float32, shape (groups, inputs, inputs).
        damping: Fraction of the mean diagonal that is added to the diagonal.
        by_activation: Round columns with the largest diagonal first, while the others can still compensate.
        sharing: Columns of each scale; columns that share a scale are rounded one after another, and `by_activation`
            then sorts scales by the sum of their diagonal.
        failures: List that gets a flag, shape (), true if the factor is invalid because `h` needs more damping or is
            not finite; the caller reads it.

    Raises:
        CalibrationError: If `h` is not finite, or not positive definite even when damped.

    Source:
        Frantar et al. 2023 (GPTQ), section 3.3; the triangular form is LDLQ of Chee et al. 2023 (QuIP), theorem 6.
    """
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    infinite = ~torch.isfinite(diagonal).all()
    if by_activation:
        order = diagonal.argsort(dim=-1, descending=True, stable=True)
    else:
        order = torch.arange(h.shape[-1], device=h.device).expand_as(diagonal)
    if sharing is not None:
        order = _together_in(order, sharing, diagonal if by_activation else None)
    mean = _mean(diagonal)
    # Reversing the order of rows and columns turns the lower triangle into the upper one.
    turned = order.flip(-1)
    diagonal = diagonal.gather(-1, turned)
    level, share = damping, torch.full_like(mean, damping)
    # Matrices of this size dominate memory, so there is only one besides `h`.
    found = torch.empty_like(h, memory_format=torch.contiguous_format)
    failed = torch.empty(h.shape[:-2], dtype=torch.int32, device=h.device)
    while True:
        _permute(h, turned, found)
        found.diagonal(dim1=-2, dim2=-1).copy_(diagonal + share * mean)
        # LAPACK stores matrices by columns: the lower triangle of this matrix, stored by rows, is its upper triangle.
        torch.linalg.cholesky_ex(found.mT, upper=True, out=(found.mT, failed))
        bad = failed.bool().unsqueeze(-1)
        if failures is not None:
            failures.append(infinite | bad.any())
            break
        is_infinite, is_bad = torch.stack((infinite, bad.any())).tolist()
        if is_infinite:
            raise CalibrationError("its input on the calibration data is not finite")
        if not is_bad:
            break
        if level >= 1:
            raise CalibrationError("the Hessian of its input is not positive definite even when damped")
        level = min(1.0, max(level, 1e-4) * _DAMPING_STEP)
        share = torch.where(bad, level, share)
    _reverse(found.flatten(-2))
    pivot = found.diagonal(dim1=-2, dim2=-1).clone()
    return Factor(order, found.div_(pivot.unsqueeze(-2)).triu_(1), pivot.square(), share.squeeze(-1), level)


def _together_in(order: Tensor, sharing: Columns, matters: Tensor | None) -> Tensor:
    """Return `order` with the columns of each scale together; `matters` sorts scales by its sums over their columns."""
    numbers = sharing.spread(torch.arange(sharing.count, device=order.device))
    if matters is not None:
        ranked = sharing.gather(matters).sum(-1).argsort(dim=-1, descending=True, stable=True)
        numbers = sharing.spread(ranked.argsort(-1))
    return order.gather(-1, numbers.expand_as(order).gather(-1, order).argsort(dim=-1, stable=True))


def damped(h: Tensor, share: Tensor) -> Tensor:
    """Return a copy of `h`, shape (groups, inputs, inputs), with `share` of the mean added to its diagonal.

    Args:
        h: Hessians.
        share: Fraction of the mean diagonal, shape (groups,).
    """
    found = h.clone()
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    diagonal += share.unsqueeze(-1) * _mean(diagonal)
    return found


def _mean(diagonal: Tensor) -> Tensor:
    """Return the mean Hessian diagonal, or 1 if that is zero, shape (groups, 1)."""
    # Inputs that are always zero have zero curvature; with damping they round to nearest.
    mean = diagonal.mean(-1, keepdim=True)
    return torch.where(mean > 0, mean, 1.0)


def _permute(h: Tensor, order: Tensor, out: Tensor) -> None:
    """Write the rows and columns of `h` in `order` to `out`, a few rows at a time."""
    for first in range(0, h.shape[-1], _ROWS):
        rows = order[..., first : first + _ROWS, None]
        some = h.gather(-2, rows.expand(*rows.shape[:-1], h.shape[-1]))
        out[..., first : first + _ROWS, :] = some.gather(-1, order.unsqueeze(-2).expand_as(some))


def _reverse(x: Tensor) -> None:
    """Reverse the elements along the last dimension in place, a few at a time."""
    size, some = x.shape[-1], _ROWS << 10
    for first in range(0, size // 2, some):
        last = min(first + some, size // 2)
        front, back = x[..., first:last], x[..., size - last : size - first]
        kept = front.flip(-1)
        front.copy_(back.flip(-1))
        back.copy_(kept)


def at_once(h: Tensor) -> list[slice]:
    """Split a stack `h`, shape (groups, inputs, inputs), into slices to factor together."""
    groups, inputs, _ = h.shape
    most = max(1, accelerator.values_at_once(h, _FACTORED, 6) // inputs**2)
    return [slice(first, first + most) for first in range(0, groups, most)]


def _together(inputs: int) -> int:
    return max(1, _FACTORED // inputs**2)


def round_with_feedback(weight: Tensor, factor: Factor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Choose codes for `weight`, column by column.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        factor: Factors of the Hessian of the operator's input.
        grid: Scales, zero points, and format of the codes; fixed while rounding (static groups).
        dtype: Dtype of the result; it must hold all codes.

    Returns:
        Codes of the shape of `weight`.

    Source:
        Frantar et al. 2023 (GPTQ), algorithm 1.
    """
    codes = torch.empty_like(weight, dtype=dtype)
    room: list[Tensor] = []  # reused for all pieces, because the system zeroes newly allocated memory
    for groups, rows in pieces(weight):
        piece = [p.expand_as(weight)[groups, rows] for p in (weight, grid.scale, grid.zero_point)]
        room = room or [weight.new_empty(piece[0].numel(), dtype=torch.float32) for _ in range(4)]
        order, feedback = factor.order[groups].unsqueeze(-2), factor.feedback[groups]
        codes[groups, rows] = _round_piece(piece, order, feedback, grid, room)
    return codes


def pieces(weight: Tensor, least: int = 0) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of groups and rows to round together; ranges are independent of each other.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        least: Values that a row takes, if more than its inputs.
    """
    groups, rows, inputs = weight.shape
    inputs = max(inputs, least)
    most = accelerator.values_at_once(weight, _AT_ONCE, 7)
    matrices, lines = max(1, most // (rows * inputs)), max(1, most // inputs)
    for group in range(0, groups, matrices):
        for row in range(0, rows, lines if matrices == 1 else rows):
            yield slice(group, group + matrices), slice(row, row + (lines if matrices == 1 else rows))


def working_bytes(groups: int, outputs: int, inputs: int, tried: int = 0) -> int:
    """Return the bytes needed on a processor to round a weight of this shape, in addition to the Hessian.

    Args:
        groups, outputs, inputs: Shape of the weight.
        tried: Number of scales tried per group of inputs, if more than one.
    """
    together, values = min(groups, _together(inputs)), outputs * inputs
    # The factor, expanded scales, codes as computed and as stored, and the piece being rounded.
    at_work = min(together * values, _AT_ONCE) + min(together * values * tried, _AT_ONCE)
    return 4 * together * (inputs**2 + values) + 2 * groups * values + 4 * _ARRAYS * at_work


def _round_piece(
    piece: Sequence[Tensor], order: Tensor, feedback: Tensor, grid: Grid, room: Sequence[Tensor]
) -> Tensor:
    """Return the codes of one piece.

    Args:
        piece: Weight, scale, and zero point, each of shape (groups, rows, inputs).
        order: Columns in the order of rounding, shape (groups, 1, inputs).
        feedback: Feedback of the columns in that order.
        grid: Format of the codes.
        room: Four float32 vectors, each at least as large as the piece, overwritten.
    """
    groups, rows, inputs = piece[0].shape
    # Inputs first: a column of the weight is then contiguous.
    columns = [part[: groups * inputs * rows].view(groups, inputs, rows) for part in room]
    wanted, real, *_ = columns
    for column, part in zip(columns[1:], piece, strict=True):
        column.copy_(part.gather(-1, order.expand_as(part)).mT)
    wanted.copy_(real)
    round_run, longest = _runs(wanted, grid)

    def rounded(run: slice) -> None:
        round_run([part[:, run] for part in columns], feedback[:, run, run], grid)

    in_runs(wanted, feedback, rounded, longest)
    return real.mT.gather(-1, order.argsort(-1).expand_as(piece[0]))  # `real` now holds the codes


def in_runs(
    wanted: Tensor,
    feedback: Tensor,
    round_run: Callable[[slice], None],
    longest: int,
    whole: int = 1,
    some: tuple[int, int] | None = None,
) -> None:
    """Round columns in runs, and add the errors of each run to later columns.

    Args:
        wanted: Values to round, shape (groups, columns, outputs); overwritten with the weight minus its rounded values.
        feedback: Feedback between the columns, shape (groups, columns, columns).
        round_run: Function that rounds a run of columns in place, after the errors of earlier columns were added.
        longest: Largest number of columns in a run.
        whole: Number of columns that must be in one run; divides `longest` and the number of columns.
        some: First column and the one after the last; default: all.
    """
    first, last = some or (0, wanted.shape[1])
    if last - first <= longest:
        round_run(slice(first, last))
        return
    middle = (first + last) // 2 // whole * whole
    # A nested function that calls itself would keep all tensors alive until garbage collection.
    in_runs(wanted, feedback, round_run, longest, whole, (first, middle))
    wanted[:, middle:last].baddbmm_(feedback[:, first:middle, middle:last].mT, wanted[:, first:middle])
    in_runs(wanted, feedback, round_run, longest, whole, (middle, last))


def _runs(like: Tensor, grid: Grid) -> tuple[Callable[[Sequence[Tensor], Tensor, Grid], None], int]:
    """Return the function that rounds a run of columns on the device of `like`, and the longest run it takes."""
    # The kernel computes the nearest code: it uses no lookup table, and sums of at most 22 bits.
    fmt, largest = grid.format, max(map(abs, grid.limits))
    computed = fmt.is_float or (fmt.is_integer and largest < _LARGEST_CODE)
    if computed and like.is_cuda and importlib.util.find_spec("triton") is not None:
        kernel = importlib.import_module("quark_fx.solvers.error_feedback_kernel")
        return kernel.round_run, kernel.COLUMNS
    return round_run, _LEAF


def round_run(columns: Sequence[Tensor], feedback: Tensor, grid: Grid) -> None:
    """Round a run of columns in place, one by one.

    Args:
        columns: Values to round, weight, scale, and zero point, each float32, shape (groups, columns, outputs). The
            values to round are overwritten with the weight minus its rounded values, the weight with the codes.
        feedback: Feedback between these columns, shape (groups, columns, columns).
        grid: Format of the codes; its scales are not used.
    """
    wanted, real, scale, zero_point = columns
    # real - (code - zero_point) * scale, a single product to subtract
    offset = torch.addcmul(real, zero_point, scale)
    parts = (wanted, real, scale.reciprocal(), zero_point, offset, scale)
    for k, (want, code, inverse, zero, start, step) in enumerate(zip(*(p.unbind(1) for p in parts), strict=True)):
        grid.round_(torch.addcmul(zero, want, inverse, out=code))
        torch.addcmul(start, code, step, value=-1, out=want)
        if k + 1 < wanted.shape[1]:
            wanted[:, k + 1 :].baddbmm_(feedback[:, k, k + 1 :, None], wanted[:, k : k + 1])


def made_up_for(target: Tensor, value: Tensor, factor: Factor) -> Tensor:
    """Return the values that were rounded: the target plus, in each column, the feedback of earlier columns.

    Args:
        target: Weight to approximate, shape (groups, outputs, inputs).
        value: Dequantized codes, of the same shape.
        factor: Factors that `round_with_feedback` used.
    """
    columns = factor.order.unsqueeze(-2).expand_as(target)
    lost = (target - value).gather(-1, columns)
    return target.scatter_add(-1, columns, lost @ factor.feedback)


def solve(factor: Factor, right: Tensor) -> Tensor:
    """Return `right` times the inverse of the damped `H`; `right` has shape (groups, outputs, inputs)."""
    columns = factor.order.unsqueeze(-2).expand_as(right)
    upper = factor.feedback + torch.eye(right.shape[-1], device=right.device, dtype=torch.float32)
    # X (I + F) D (I + F)' = B
    x = torch.linalg.solve_triangular(upper.mT, right.gather(-1, columns), upper=False, left=False, unitriangular=True)
    x = torch.linalg.solve_triangular(
        upper, x / factor.curvature.unsqueeze(-2), upper=True, left=False, unitriangular=True
    )
    return torch.empty_like(x).scatter_(-1, columns, x)


__all__ = [
    "DAMPING",
    "Factor",
    "at_once",
    "damped",
    "factor",
    "in_runs",
    "made_up_for",
    "pieces",
    "round_run",
    "round_with_feedback",
    "solve",
    "working_bytes",
]
