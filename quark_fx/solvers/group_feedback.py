"""Error feedback that chooses the scale of each group of inputs just before rounding it: GPTQ without static groups.

At that point, the values to round include the feedback of earlier errors. The group is rounded with each candidate
scale, and the actual remaining errors are compared, not expected ones. The inputs of a group are therefore rounded
consecutively, which makes `by_activation` less effective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import Factor, chunks, feed_back_blocks, quantize_block


def round_groups(
    weight: Tensor,
    factor: Factor,
    grid: Grid,
    free: FreeScales,
    sharing: Columns,
    ratios: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose codes for `weight` column by column, and the scale of each group before its first column.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        factor: Factors of the input's Hessian; columns that share a scale are consecutive.
        grid: Current scales, zero points, and format of the codes.
        free: Scales that can be stored.
        sharing: Columns of each scale, the same number for each.
        ratios: Candidate ratios for each scale; the first is kept if no other is better.
        dtype: Dtype of the codes.

    Returns:
        Codes of the shape of `weight`, and the chosen ratios, shape (groups, outputs, scales of a row).

    Source:
        Frantar et al. 2023 (GPTQ), section 4, grouping: parameters of a group are computed from the updated weights
        when the group is reached. The search is ours.
    """
    size = sharing.even
    assert size is not None
    codes = torch.empty_like(weight, dtype=dtype)
    chosen_ratios = weight.new_empty((*weight.shape[:2], sharing.count), dtype=torch.float32)
    tried = torch.tensor(ratios, device=weight.device, dtype=torch.float32)
    numbers = sharing.spread(torch.arange(sharing.count, device=weight.device))
    for groups, rows in chunks(weight, size * len(ratios)):
        piece = [p.expand_as(weight)[groups, rows].float() for p in (weight, grid.scale, grid.zero_point)]
        parts = ("order", "feedback", "pivots", "damping")
        part = replace(factor, **{name: getattr(factor, name)[groups] for name in parts})
        rounded, best = _round_chunk(
            piece, part, grid, lambda scale: free.rounded(scale * tried[:, None, None, None]), size
        )
        codes[groups, rows] = rounded.to(dtype)
        turns = numbers[part.order[:, ::size]].unsqueeze(-2).expand_as(best)
        chosen_ratios[groups, rows] = torch.zeros_like(best, dtype=torch.float32).scatter_(-1, turns, tried[best])
    return codes, chosen_ratios


def _round_chunk(
    piece: Sequence[Tensor], factor: Factor, grid: Grid, steps_of: Callable[[Tensor], Tensor], size: int
) -> tuple[Tensor, Tensor]:
    """Return the codes of a chunk, and the index of each group's scale, in the order of rounding.

    Args:
        piece: Weight, scale, and zero point, each of shape (groups, rows, inputs).
        factor: Factors of its matrices.
        grid: Format of the codes.
        steps_of: Function that returns the candidates for given scales, stacked along a new first dimension.
        size: Columns of a group.
    """
    order, best = factor.order.unsqueeze(-2).expand_as(piece[0]), list[Tensor]()
    # Inputs first: a column of the weight is then contiguous.
    real, scale, zero = (p.gather(-1, order).mT.contiguous() for p in piece)
    values, codes = real.clone(), torch.empty_like(real)

    def round_group(run: slice) -> None:
        columns = [part[:, run] for part in (values, real, zero)]
        steps, feedback = steps_of(scale[:, run][:, :1]), factor.feedback[:, run, run]
        values[:, run], codes[:, run], chosen = _round_group(columns, steps, feedback, factor.pivots[:, run], grid)
        best.append(chosen)

    feed_back_blocks(values, factor.feedback, round_group, size, size)
    return codes.mT.gather(-1, order.argsort(-1)), torch.stack(best, -1)


def _round_group(
    columns: Sequence[Tensor], steps: Tensor, feedback: Tensor, curvature: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the scale with the smallest error, the remaining errors, the codes, and the index of the scale.

    Args:
        columns: Values to round, weight, and zero point of the group, in the form that `quantize_block` takes.
        steps: Candidate scales, shape (scales, groups, 1, outputs).
        feedback: Feedback between the columns.
        curvature: Curvature of the columns, shape (groups, columns).
        grid: Format of the codes.
    """
    values, real, zero = columns
    count, outputs = len(steps), values.shape[-1]
    spread = steps.movedim(0, -2).flatten(-2).expand(-1, values.shape[1], -1)  # the outputs of all scales, concatenated
    errors, codes, offset = (part.repeat(1, 1, count) for part in (values, real, zero))
    quantize_block((errors, codes, spread, offset), feedback, grid)
    # The error of a column is the value to round (weight plus feedback of earlier errors) minus its rounded value.
    lost = (values - real).repeat(1, 1, count).add_(errors).baddbmm_(feedback.mT, errors)
    total = lost.square_().mul_(curvature.unsqueeze(-1)).sum(1).unflatten(-1, (count, outputs))
    best = total.argmin(1)  # the first on ties
    place = best[:, None, None].expand(-1, values.shape[1], 1, -1)
    errors, codes = (part.unflatten(-1, (count, outputs)).gather(2, place)[:, :, 0] for part in (errors, codes))
    return errors, codes, best


__all__ = ["round_groups"]
