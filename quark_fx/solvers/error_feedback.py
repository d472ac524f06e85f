"""GPTQ: round a weight column by column; each column compensates for the errors of earlier columns.

The squared error of an operator's output is `tr((W - Q) H (W - Q)')`, where `H` is the sum of `x x'`. The steps
follow the paper:

1. Damping, column order, and Cholesky: `factor`. The paper factors the inverse of `H`. Here, `H` itself is
   factored as `(I + F) D (I + F)'`, `F` strictly upper triangular, and never inverted. The error is then a sum over
   columns: column `k` of `(W - Q) (I + F)`, squared, times `D_k`. Each term depends only on errors up to column `k`.
2. Error feedback: `quantize_block` rounds `w_k` plus the errors of earlier columns times column `k` of `F`, which
   minimizes the error of that column. The paper passes on the errors of updated columns, times rows of its Cholesky
   factor; the values to round are the same.
3. Blocks, with lazy batch updates: `gptq_round` applies the feedback within a block column by column, and the feedback
   of a block on later blocks as one matrix product.

Rows of the weight are independent, and so are the matrices of a stack (groups).

Source:
    Frantar et al. 2023 (GPTQ), algorithm 1. The triangular form is LDLQ of Chee et al. 2023 (QuIP), theorem 6.
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

_BLOCK = 16
"""Number of columns in the smallest block, which are rounded one by one."""

_CHUNK = 1 << 21
"""Approximate number of weights rounded together on a CPU; more would take more memory and miss the caches. A GPU
rounds 128 times as many together; five copies of them are a few gigabytes."""

_FACTORED = 1 << 22
"""Approximate number of Hessian elements that are factored together."""

_ARRAYS = 6
"""Number of arrays of a chunk's size that exist at once while the chunk is rounded."""

_ROWS = 64
"""Number of rows of a Hessian that are permuted at once."""

_LARGEST_CODE = 1 << 22
"""Exclusive limit on the magnitude of integer codes in the kernel for GPUs."""

_DAMPING_STEP = 10.0
"""Factor by which damping grows until it makes `H` positive definite, up to the mean diagonal itself."""


@dataclass(frozen=True)
class Factor:
    """Factors of the damped `H`, in rounding order: `(I + feedback) diag(pivots) (I + feedback)'`.

    Attributes:
        order: Columns of the weight in the order of rounding, shape (groups, inputs).
        feedback: Strictly upper triangular matrices: `feedback[j, k]` is the fraction of column `j`'s error that is
            added to column `k`.
        pivots: Squared error of the output per squared error of a column, shape (groups, inputs).
        damping: Damping of each matrix, as a fraction of its mean diagonal, shape (groups,).
        level: Largest damping of all matrices, a number on the host.
    """

    order: Tensor
    feedback: Tensor
    pivots: Tensor
    damping: Tensor
    level: float = 0.0

    @property
    def pivots_by_input(self) -> Tensor:
        """The pivots in the order of the weight's columns."""
        return torch.empty_like(self.pivots).scatter_(-1, self.order, self.pivots)

    def residual_curvature(self, *hessians: Tensor) -> list[Tensor]:
        """Return the squared error of the output, on some data, per squared rounding error of each column.

        Rounding errors `u` after feedback change the weight by `u (I + feedback)^-1`. If they are independent, the
        result is the diagonal of `(I + feedback)^-1 H (I + feedback)^-T`.

        Args:
            hessians: Hessians of the data, shape (groups, inputs, inputs).

        Returns:
            One tensor per Hessian, shape (groups, inputs), in the order of the weight's columns.
        """
        identity = torch.eye(self.order.shape[-1], device=self.order.device, dtype=torch.float32)
        inverse = torch.linalg.solve_triangular(
            self.feedback, identity.expand_as(self.feedback), upper=True, unitriangular=True
        )
        ordered, curvatures = torch.empty_like(inverse), list[Tensor]()
        for h in hessians:
            _permute(h, self.order, ordered)
            diagonal = torch.cat([(rows @ ordered).mul_(rows).sum(-1) for rows in inverse.split(_ROWS, -2)], -1)
            curvatures.append(torch.empty_like(diagonal).scatter_(-1, self.order, diagonal))
        return curvatures

    def compensated(self, target: Tensor, value: Tensor) -> Tensor:
        """Return the values that `gptq_round` rounded: the target plus the feedback of earlier columns.

        Args:
            target: Weight to approximate, shape (groups, outputs, inputs).
            value: Dequantized codes, of the same shape.
        """
        columns = self.order.unsqueeze(-2).expand_as(target)
        lost = (target - value).gather(-1, columns)
        return target.scatter_add(-1, columns, lost @ self.feedback)

    def solve(self, right: Tensor) -> Tensor:
        """Return `right` times the inverse of the damped `H`; `right` has shape (groups, outputs, inputs)."""
        columns = self.order.unsqueeze(-2).expand_as(right)
        upper = self.feedback + torch.eye(right.shape[-1], device=right.device, dtype=torch.float32)
        # X (I + F) D (I + F)' = B
        right = right.gather(-1, columns)
        x = torch.linalg.solve_triangular(upper.mT, right, upper=False, left=False, unitriangular=True)
        x = torch.linalg.solve_triangular(
            upper, x / self.pivots.unsqueeze(-2), upper=True, left=False, unitriangular=True
        )
        return torch.empty_like(x).scatter_(-1, columns, x)


def factor(
    h: Tensor,
    *,
    damping: float,
    by_activation: bool,
    sharing: Columns | None = None,
    failures: list[Tensor] | None = None,
) -> Factor:
    """Factor `h`; wait for the device once, again for each increase of damping, or not at all with `failures`.

    Args:
        h: Sum of `x x'`, float32, shape (groups, inputs, inputs).
        damping: Fraction of the mean diagonal that is added to the diagonal.
        by_activation: Whether to round the columns with the largest diagonal first, while others can still compensate.
        sharing: Columns of each scale; columns that share a scale are rounded one after another, and `by_activation`
            then sorts scales by the sum of their diagonal.
        failures: List that gets a flag, shape (), true if the factor is invalid because `h` needs more damping or is
            not finite; the caller reads it.

    Raises:
        CalibrationError: If `h` is not finite, or not positive definite even when damped.
    """
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    infinite, mean = ~torch.isfinite(diagonal).all(), _mean(diagonal)
    order = _order(diagonal, by_activation, sharing)
    # The lower triangular factor of the reversed matrix, reversed, is the upper triangular factor.
    backward = order.flip(-1)
    diagonal = diagonal.gather(-1, backward)
    level, share = damping, torch.full_like(mean, damping)
    # Matrices of this size dominate memory, so there is only one besides `h`.
    matrix = torch.empty_like(h, memory_format=torch.contiguous_format)
    errors = torch.empty(h.shape[:-2], dtype=torch.int32, device=h.device)
    while True:
        _permute(h, backward, matrix)
        matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal + share * mean)
        # LAPACK stores matrices by columns: the lower triangle of this matrix, stored by rows, is its upper triangle.
        torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, errors))
        indefinite = errors.bool().unsqueeze(-1)
        if failures is not None:
            failures.append(infinite | indefinite.any())
            break
        is_infinite, is_indefinite = torch.stack((infinite, indefinite.any())).tolist()
        if is_infinite:
            raise CalibrationError("its input on the calibration data is not finite")
        if not is_indefinite:
            break
        if level >= 1:
            raise CalibrationError("the Hessian of its input is not positive definite even when damped")
        level = min(1.0, max(level, 1e-4) * _DAMPING_STEP)
        share = torch.where(indefinite, level, share)
    _reverse(matrix.flatten(-2))
    root = matrix.diagonal(dim1=-2, dim2=-1).clone()
    return Factor(order, matrix.div_(root.unsqueeze(-2)).triu_(1), root.square(), share.squeeze(-1), level)


def _order(diagonal: Tensor, by_activation: bool, sharing: Columns | None) -> Tensor:
    """Return the columns in the order of rounding; `sharing` puts columns that share a scale side by side."""
    if by_activation:
        order = diagonal.argsort(dim=-1, descending=True, stable=True)
    else:
        order = torch.arange(diagonal.shape[-1], device=diagonal.device).expand_as(diagonal)
    if sharing is None:
        return order
    rank = sharing.spread(torch.arange(sharing.count, device=order.device))
    if by_activation:
        scales = sharing.gather(diagonal).sum(-1).argsort(dim=-1, descending=True, stable=True)
        rank = sharing.spread(scales.argsort(-1))
    return order.gather(-1, rank.expand_as(order).gather(-1, order).argsort(dim=-1, stable=True))


def damped(h: Tensor, share: Tensor) -> Tensor:
    """Return a copy of `h` with `share` of the mean diagonal added to its diagonal.

    Args:
        h: Hessians, shape (groups, inputs, inputs).
        share: Fraction of the mean diagonal, shape (groups,).
    """
    matrix = h.clone()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += share.unsqueeze(-1) * _mean(diagonal)
    return matrix


def _mean(diagonal: Tensor) -> Tensor:
    """Return the mean Hessian diagonal, or 1 if that is zero, shape (groups, 1)."""
    # Inputs that are always zero have zero curvature; with damping they round to nearest.
    mean = diagonal.mean(-1, keepdim=True)
    return torch.where(mean > 0, mean, 1.0)


def _permute(h: Tensor, order: Tensor, out: Tensor) -> None:
    """Write the rows and columns of `h` in `order` to `out`, a few rows at a time."""
    for first in range(0, h.shape[-1], _ROWS):
        rows = order[..., first : first + _ROWS, None]
        part = h.gather(-2, rows.expand(*rows.shape[:-1], h.shape[-1]))
        out[..., first : first + _ROWS, :] = part.gather(-1, order.unsqueeze(-2).expand_as(part))


def _reverse(x: Tensor) -> None:
    """Reverse the elements along the last dimension in place, a limited number at a time."""
    size, step = x.shape[-1], _ROWS << 10
    for first in range(0, size // 2, step):
        last = min(first + step, size // 2)
        front, back = x[..., first:last], x[..., size - last : size - first]
        swapped = front.flip(-1)
        front.copy_(back.flip(-1))
        back.copy_(swapped)


def stack_chunks(h: Tensor) -> list[slice]:
    """Split a stack `h`, shape (groups, inputs, inputs), into slices to factor together."""
    groups, inputs, _ = h.shape
    most = max(1, accelerator.values_at_once(h, _FACTORED, 6) // inputs**2)
    return [slice(first, first + most) for first in range(0, groups, most)]


def gptq_round(weight: Tensor, factor: Factor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Round `weight` column by column with error feedback; return codes of its shape.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        factor: Factors of the Hessian of the operator's input.
        grid: Scales, zero points, and format of the codes; fixed while rounding (static groups).
        dtype: Dtype of the result; it must hold all codes.
    """
    codes = torch.empty_like(weight, dtype=dtype)
    buffers: list[Tensor] = []  # reused for all chunks, because the system zeroes newly allocated memory
    for groups, rows in chunks(weight):
        parts = [p.expand_as(weight)[groups, rows] for p in (weight, grid.scale, grid.zero_point)]
        buffers = buffers or [weight.new_empty(parts[0].numel(), dtype=torch.float32) for _ in range(4)]
        order, feedback = factor.order[groups].unsqueeze(-2), factor.feedback[groups]
        codes[groups, rows] = _round_chunk(parts, order, feedback, grid, buffers)
    return codes


def _round_chunk(
    parts: Sequence[Tensor], order: Tensor, feedback: Tensor, grid: Grid, buffers: Sequence[Tensor]
) -> Tensor:
    """Round a chunk of rows; return its codes.

    Args:
        parts: Weight, scale, and zero point, each of shape (groups, rows, inputs).
        order: Columns in the order of rounding, shape (groups, 1, inputs).
        feedback: Feedback of the columns in that order.
        grid: Format of the codes.
        buffers: Four float32 vectors, each at least as large as the weight, overwritten.
    """
    groups, rows, inputs = parts[0].shape
    # Inputs first: a column of the weight is then contiguous.
    columns = [buffer[: groups * inputs * rows].view(groups, inputs, rows) for buffer in buffers]
    targets, real, *_ = columns
    for column, part in zip(columns[1:], parts, strict=True):
        column.copy_(part.gather(-1, order.expand_as(part)).mT)
    targets.copy_(real)
    quantize, longest = _block_function(targets, grid)

    def quantize_columns(block: slice) -> None:
        quantize([part[:, block] for part in columns], feedback[:, block, block], grid)

    feed_back_blocks(targets, feedback, quantize_columns, longest)
    return real.mT.gather(-1, order.argsort(-1).expand_as(parts[0]))  # `real` now holds the codes


def feed_back_blocks(
    targets: Tensor,
    feedback: Tensor,
    quantize: Callable[[slice], None],
    longest: int,
    whole: int = 1,
    columns: tuple[int, int] | None = None,
) -> None:
    """Quantize columns in blocks, and add the errors of each block to later columns.

    The first half of the columns is quantized, then its errors are added to the second half in one matrix product; each
    half is treated in the same way. These are the paper's lazy batch updates with blocks of every size.

    Args:
        targets: Values to round, shape (groups, columns, outputs); overwritten with the weight minus its rounded
            values.
        feedback: Feedback between the columns, shape (groups, columns, columns).
        quantize: Function that rounds a block in place, after the errors of earlier columns were added.
        longest: Largest number of columns in a block.
        whole: Number of adjacent columns that must be in one block; divides `longest` and the number of columns.
        columns: First column, and the column after the last; default: all columns.
    """
    first, last = columns or (0, targets.shape[1])
    if last - first <= longest:
        quantize(slice(first, last))
        return
    middle = (first + last) // 2 // whole * whole
    # A nested function that calls itself would keep all tensors alive until garbage collection.
    feed_back_blocks(targets, feedback, quantize, longest, whole, (first, middle))
    targets[:, middle:last].baddbmm_(feedback[:, first:middle, middle:last].mT, targets[:, first:middle])
    feed_back_blocks(targets, feedback, quantize, longest, whole, (middle, last))


def quantize_block(columns: Sequence[Tensor], feedback: Tensor, grid: Grid) -> None:
    """Round a block of columns in place, one by one, and add the error of each to later columns.

    Args:
        columns: Values to round, weight, scale, and zero point, each float32, shape (groups, columns, outputs). The
            values to round are overwritten with the weight minus its rounded values, the weight with the codes.
        feedback: Feedback between these columns, shape (groups, columns, columns).
        grid: Format of the codes; its scales are not used.
    """
    targets, real, scale, zero_point = columns
    is_integer, (low, high) = grid.format.is_integer, grid.limits
    # real - (code - zero_point) * scale is offset - code * scale, with a single product.
    offset = torch.addcmul(real, zero_point, scale)
    parts = (targets, real, scale.reciprocal(), zero_point, offset, scale)
    for k, (want, code, inverse, zero, start, step) in enumerate(zip(*(p.unbind(1) for p in parts), strict=True)):
        torch.addcmul(zero, want, inverse, out=code)
        if is_integer:  # `grid.round_`, inlined because it runs for every column
            code.round_().clamp_(low, high)
        else:
            grid.round_(code)
        torch.addcmul(start, code, step, value=-1, out=want)
        if k + 1 < targets.shape[1]:
            targets[:, k + 1 :].baddbmm_(feedback[:, k, k + 1 :, None], targets[:, k : k + 1])


def _block_function(like: Tensor, grid: Grid) -> tuple[Callable[[Sequence[Tensor], Tensor, Grid], None], int]:
    """Return the function that rounds a block on the device of `like`, and the most columns that it can round."""
    # The kernel computes the nearest code of integer and float formats; it has no lookup table for other formats.
    fmt, largest = grid.format, max(map(abs, grid.limits))
    computed = fmt.is_float or (fmt.is_integer and largest < _LARGEST_CODE)
    if computed and like.is_cuda and importlib.util.find_spec("triton") is not None:
        kernel = importlib.import_module("quark_fx.solvers.error_feedback_kernel")
        return kernel.quantize_block, kernel.COLUMNS
    return quantize_block, _BLOCK


def chunks(weight: Tensor, least: int = 0) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of groups and rows to round together; ranges are independent of each other.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        least: Number of values that a row takes in memory, if more than its inputs.
    """
    groups, rows, inputs = weight.shape
    inputs = max(inputs, least)
    most = accelerator.values_at_once(weight, _CHUNK, 7)
    matrices, lines = max(1, most // (rows * inputs)), max(1, most // inputs)
    for group in range(0, groups, matrices):
        for row in range(0, rows, lines if matrices == 1 else rows):
            yield slice(group, group + matrices), slice(row, row + (lines if matrices == 1 else rows))


def working_bytes(groups: int, outputs: int, inputs: int, tried: int = 0) -> int:
    """Return the bytes needed on a CPU to round a weight of this shape, in addition to the Hessian.

    Args:
        groups, outputs, inputs: Shape of the weight.
        tried: Number of scales tried per group of inputs, if more than one.
    """
    together, values = min(groups, max(1, _FACTORED // inputs**2)), outputs * inputs
    # The factor, expanded scales, codes as computed and as stored, and the chunk being rounded.
    at_work = min(together * values, _CHUNK) + min(together * values * tried, _CHUNK)
    return 4 * together * (inputs**2 + values) + 2 * groups * values + 4 * _ARRAYS * at_work


__all__ = [
    "DAMPING",
    "Factor",
    "chunks",
    "damped",
    "factor",
    "feed_back_blocks",
    "gptq_round",
    "quantize_block",
    "stack_chunks",
    "working_bytes",
]
