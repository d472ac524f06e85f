"""Error feedback that chooses the scale of a group of inputs when it comes to it: GPTQ without static groups.

What there is to round when a group's turn comes holds what makes up for the errors before, and the group is rounded
with each scale that is tried: what is compared is the error that is left, not one that is expected. The inputs of a
group are therefore rounded one after the other, which leaves less to `by_activation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import Factor, in_runs, pieces, round_run


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
        weight: shape (groups, outputs, inputs).
        factor: of the Hessian of what it multiplies, with the columns of a scale one after the other.
        grid: what codes stand for now.
        free: which scales can be stored.
        sharing: columns of a scale, as many of each.
        ratios: to be tried of each scale, first the one that is kept if none is better.
        dtype: of the codes.

    Returns:
        Codes, the shape of `weight`, and the ratios that were chosen, shape (groups, outputs, scales of a row).

    Source:
        Frantar et al. 2023 (GPTQ), section 4, grouping: parameters of a group are taken of the weights as they are when
        it is reached. The search is ours.
    """
    size = sharing.even
    assert size is not None
    codes = torch.empty_like(weight, dtype=dtype)
    found = weight.new_empty((*weight.shape[:2], sharing.count), dtype=torch.float32)
    tried = torch.tensor(ratios, device=weight.device, dtype=torch.float32)
    numbers = sharing.spread(torch.arange(sharing.count, device=weight.device))
    for groups, rows in pieces(weight, size * len(ratios)):
        piece = [p.expand_as(weight)[groups, rows].float() for p in (weight, grid.scale, grid.zero_point)]
        parts = ("order", "feedback", "curvature", "damping")
        part = replace(factor, **{name: getattr(factor, name)[groups] for name in parts})
        some, best = _round_piece(
            piece, part, grid, lambda scale: free.rounded(scale * tried[:, None, None, None]), size
        )
        codes[groups, rows] = some.to(dtype)
        turns = numbers[part.order[:, ::size]].unsqueeze(-2).expand_as(best)
        found[groups, rows] = torch.zeros_like(best, dtype=torch.float32).scatter_(-1, turns, tried[best])
    return codes, found


def _round_piece(
    piece: Sequence[Tensor], factor: Factor, grid: Grid, steps_of: Callable[[Tensor], Tensor], size: int
) -> tuple[Tensor, Tensor]:
    """Return the codes of a piece, and which scale each group has, in the order of their turns.

    Args:
        piece: weight, scale and zero point, shape (groups, rows, inputs).
        factor: of its matrices.
        grid: what codes there are.
        steps_of: returns the scales to be tried in the place of some, as the first of more dimensions.
        size: columns of a group.
    """
    order, best = factor.order.unsqueeze(-2).expand_as(piece[0]), list[Tensor]()
    # Inputs first: a column of the weight is then contiguous.
    real, scale, zero = (p.gather(-1, order).mT.contiguous() for p in piece)
    wanted, codes = real.clone(), torch.empty_like(real)

    def round_group(run: slice) -> None:
        columns = [part[:, run] for part in (wanted, real, zero)]
        steps, feedback = steps_of(scale[:, run][:, :1]), factor.feedback[:, run, run]
        wanted[:, run], codes[:, run], chosen = _round_group(columns, steps, feedback, factor.curvature[:, run], grid)
        best.append(chosen)

    in_runs(wanted, factor.feedback, round_group, size, size)
    return codes.mT.gather(-1, order.argsort(-1)), torch.stack(best, -1)


def _round_group(
    columns: Sequence[Tensor], steps: Tensor, feedback: Tensor, curvature: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of the scale that loses least, what its codes leave of the weight, the codes, and its number.

    Args:
        columns: of the group: what is wanted, the weight and the zero point, as `round_run` takes them.
        steps: scales to be tried, shape (scales, groups, 1, outputs).
        feedback: of the columns on each other.
        curvature: of the columns, shape (groups, columns).
        grid: what codes there are.
    """
    wanted, real, zero = columns
    count, outputs = len(steps), wanted.shape[-1]
    spread = steps.movedim(0, -2).flatten(-2).expand(-1, wanted.shape[1], -1)  # outputs of each scale beside each other
    errors, codes, offset = (part.repeat(1, 1, count) for part in (wanted, real, zero))
    round_run((errors, codes, spread, offset), feedback, grid)
    # A column lost what was to be rounded, the weight and what made up for the errors before, less what its code is.
    lost = (wanted - real).repeat(1, 1, count).add_(errors).baddbmm_(feedback.mT, errors)
    total = lost.square_().mul_(curvature.unsqueeze(-1)).sum(1).unflatten(-1, (count, outputs))
    best = total.argmin(1)  # the first of equal ones
    place = best[:, None, None].expand(-1, wanted.shape[1], 1, -1)
    errors, codes = (part.unflatten(-1, (count, outputs)).gather(2, place)[:, :, 0] for part in (errors, codes))
    return errors, codes, best


__all__ = ["round_groups"]
