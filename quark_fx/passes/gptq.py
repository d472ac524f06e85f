"""Choose codes column by column; each column compensates for the errors of earlier columns.

The algorithm of the paper is in `quark_fx.solvers.error_feedback`. This file adds the options that no other pass has:
scales chosen while rounding (`static_groups=False`), rows that compensate for each other (`two_sided`), and sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.quantized_weights import FIXED
from quark_fx.engine.sizes import Matrices
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Columns
from quark_fx.solvers.error_feedback import (
    DAMPING,
    Factor,
    chunks,
    damped,
    factor,
    feed_back_blocks,
    gptq_round,
    quantize_block,
    stack_chunks,
    working_bytes,
)
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.rounding import refine_by_descent
from quark_fx.solvers.scale_search import MOST_TRIED, around, fitted_to_feedback
from quark_fx.solvers.solver import InputHessian, Proposal, Solver, solver
from quark_fx.system import accelerator
from quark_fx.system.options import Interval, NonNegativeInt

_ROWS, _STEPS = 32, 8
"""Largest number of rows that are rounded together, and smallest number of steps, if rows compensate for each other."""


@solver
@dataclass(frozen=True, kw_only=True)
class GPTQ(Solver):
    """Round the weights of matrix products and convolutions to minimize the errors of outputs instead of weights.

    Each operator's input is computed by the quantized operators before it (true sequential), in one forward pass over
    the data. Operators with the same input share its Hessian and factors, unless `guided`. In a stack of experts, each
    expert uses the tokens routed to it, plus the average of all experts, which matters if its tokens are few. Positions
    that the data's `attention_mask` leaves out are excluded, except for experts. A weight keeps its codes if the error
    on validation data would not decrease.

    Args:
        damping: Fraction of the Hessian's mean diagonal that is added to its diagonal.
        by_activation: Whether to round the inputs with the largest diagonal first (activation order); the result stores
            no order.
        asymmetry: Position of the target between the float weight's output on quantized inputs (0, as in the paper) and
            the float model's output on its own inputs (1); values above 0 cost a second forward pass.
        fit_scales: Whether to shrink each scale first, to the scale with the smallest expected error for this rounding.
        static_groups: Whether to keep scales fixed while rounding. Otherwise each scale is chosen just before its first
            input is rounded: among the storable scales around it, the scale with the smallest error, including errors
            of earlier inputs. Inputs that share a scale are then rounded consecutively, which restricts `by_activation`
            to the order of groups, and of inputs within a group. This suits small blocks with closely spaced scales
            (NVFP4), not powers of two (MXFP4). Scales stay fixed if groups differ in size, or outputs share a scale.
        sweeps: Largest number of coordinate-descent sweeps over the codes from error feedback. Error feedback
            compensates for the error of an input only in later inputs; a sweep moves each code to the best code given
            all others. Each sweep costs as much as rounding. Rows that compensate for each other are not swept.
        two_sided: Whether rows of a weight compensate for the errors of other rows as well, based on how errors of
            output channels add up in the model's predictions. This costs the passes of `guided`, and a Hessian of the
            outputs for each operator; both options together cost the passes only once. Operators with several matrices,
            such as stacks of experts, are rounded without this option.
        guided: Whether to weight each row of the data by the sensitivity of the model's predictions to it. This costs a
            forward and a backward pass of the float model, and a Hessian for each operator. Rows routed to experts have
            equal weights.

    Raises:
        ConfigError: If a value is out of range.

    Source:
        Frantar et al. 2023 (GPTQ), which recomputes the range of each group while rounding, where this pass searches;
        for `asymmetry`, the objective of Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos), minimized column by
        column (Qronos rounds the first column given the float weights of the others); for `sweeps`, Behdin et al. 2023
        (QuantEase); for `guided`, Kim et al. 2025 (GuidedQuant); for `two_sided`, Tseng et al. 2025 (YAQA).
    """

    damping: Annotated[float, Interval("(0, 1]")] = DAMPING
    by_activation: bool = True
    asymmetry: Annotated[float, Interval("[0, 1]")] = 0.0
    fit_scales: bool = False
    static_groups: bool = True
    sweeps: NonNegativeInt = 0
    guided: bool = False
    two_sided: bool = False

    def __post_init__(self) -> None:
        if self.two_sided and not self.static_groups:
            raise ConfigError(
                "two_sided=True of GPTQ needs static_groups=True, because scales that change during the pass assume "
                "independent rows; set static_groups=True, or drop two_sided"
            )

    @property
    def reads(self) -> InputHessian:
        """Hessian of the input, guided if requested, and with the shift between inputs if `asymmetry` is above 0."""
        return InputHessian(shifted=self.asymmetry > 0, guided=self.guided, two_sided=self.two_sided)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        """Round the weight with error feedback."""
        dynamic = not self.static_groups and weight.columns is not None and weight.columns.even is not None
        sharing = weight.columns if dynamic else None
        factors = partial(seen.factors, damping=self.damping, by_activation=self.by_activation, sharing=sharing)
        target = seen.target(weight.real, self.asymmetry, factors())
        fits = self.fit_scales and (weight.columns is not None or weight.ranged_columns is not None)
        if fits:
            weight = fitted_to_feedback(weight, target, factors())
        weight, damping, level = _rounded(weight, target, factors(), sharing)
        if self.sweeps and weight.outputs is None:
            weight = _refined(weight, target, seen.h, damping, sweeps=self.sweeps)
        remarks = (
            f"scales kept: they are {FIXED}" * (self.fit_scales and not fits),
            "groups stay static: they differ in size or share scales across outputs"
            * (not self.static_groups and not dynamic),
            f"damped by {level:g}" * (level > self.damping),
            seen.unguided,
            f"one-sided: {weight.one_sided}" * bool(weight.one_sided),
            _few(seen),
        )
        return Proposal(weight, "; ".join(filter(None, remarks)), self.asymmetry)

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes of a factor and of a piece of a weight, and of the copies that the options need."""
        more = matrices.moment * bool(self.asymmetry or self.fit_scales) + matrices.target * bool(self.asymmetry)
        more += matrices.moment * bool(self.sweeps)
        if self.two_sided:  # the errors and the target in steps of the grid, and the factor of the outputs
            more += 4 * matrices.target + 2 * together_bytes(matrices)
        tried = 0 if self.static_groups else MOST_TRIED
        return working_bytes(matrices.groups, matrices.outputs, matrices.inputs, tried) + more

    def working_operations(self, matrices: Matrices) -> float:
        """Return the number of multiplications needed to round a weight."""
        rounding = 2 * matrices.inputs * matrices.values
        two_sided = self.two_sided and matrices.groups == 1
        return rounding * (3 if two_sided else 1 + self.sweeps)  # two-sided errors use all outputs, before and after


def _rounded(
    weight: QuantizedMatrix, target: Tensor, factors: Iterable[tuple[slice, Factor]], sharing: Columns | None
) -> tuple[QuantizedMatrix, Tensor, float]:
    """Return `weight` with the codes of `target`, the damping of each matrix, shape (groups,), and the largest damping.

    Args:
        weight: Quantized weight that defines scales and format of the codes.
        target: Weight to round, shape (groups, outputs, inputs).
        factors: Factors of the input's Hessian, each with the slice of the stack it belongs to.
        sharing: Columns of each scale, if each scale is chosen just before its columns are rounded; these columns are
            consecutive in the factors.
    """
    codes, free = torch.empty_like(weight.codes), weight.free
    ratios, dampings, level = list[Tensor](), list[Tensor](), 0.0
    for matrices, part in factors:
        values, grid = target[matrices], weight.grid(matrices)
        if sharing is not None:
            ratios_tried = around(weight.scheme)
            codes[matrices], ratio = _round_groups(values.float(), part, grid, free, sharing, ratios_tried, codes.dtype)
            ratios.append(ratio)
        elif weight.outputs is not None:
            codes[matrices] = _round_rows(values, part, grid, weight.outputs, codes.dtype)
        else:
            codes[matrices] = gptq_round(values, part, grid, codes.dtype)
        dampings.append(part.damping)
        level = max(level, part.level)
    if ratios:
        weight = weight.with_scales(torch.cat(ratios))
    return weight.with_codes(codes), torch.cat(dampings), level


def _refined(weight: QuantizedMatrix, target: Tensor, h: Tensor, damping: Tensor, *, sweeps: int) -> QuantizedMatrix:
    """Return `weight` with codes improved by coordinate descent, so that their error against `target` is smaller.

    `damping` is the fraction of each matrix's mean diagonal that was added to its diagonal, shape (groups,).
    """
    codes = weight.codes.clone()
    for matrices in stack_chunks(h):
        values, form = target[matrices], damped(h[matrices], damping[matrices])
        better = refine_by_descent(codes[matrices], values, form, weight.grid(matrices), sweeps=sweeps)
        codes[matrices] = better.to(codes.dtype)
    return weight.with_codes(codes)


def _few(hessian: Hessian) -> str:
    """Return a remark on the experts of a stack that have fewer rows than inputs."""
    inputs = hessian.h.shape[-1]
    few = [f"{expert} ({count})" for expert, count in enumerate(hessian.rows.tolist()) if count < inputs]
    return f"too few calibration rows: expert {', '.join(few)}" if len(hessian.rows) > 1 and few else ""


def _round_rows(target: Tensor, factor_: Factor, grid: Grid, outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of a matrix, rounding a few rows at a time; each row compensates for errors of earlier rows.

    After `outputs` is factored like `h`, the error `tr(outputs E h E')` is a sum over rows, for any `h`. Each term
    depends on the error of a row plus fractions of the errors of earlier rows. Rows that are rounded together do not
    compensate for each other.

    Args:
        target: Weight to round, shape (1, outputs, inputs).
        factor_: Factors of the input's Hessian.
        grid: Scales, zero points, and format of the codes.
        outputs: Hessian of the outputs, shape (runs, n, n), for runs of `n` rows.
        dtype: Dtype of the codes.

    Raises:
        CalibrationError: If `outputs` is not positive definite.

    Source:
        Tseng et al. 2025 (YAQA), who round along diagonals, with the same feedback in another order.
    """
    runs, size, _ = outputs.shape
    failed: list[Tensor] = []
    by_row = factor(outputs, damping=0.0, by_activation=True, failures=failed)
    accelerator.require(~failed[0], lambda: CalibrationError("the Hessian of its outputs is not positive definite"))
    place = by_row.order + size * torch.arange(runs, device=outputs.device).unsqueeze(-1)
    real, codes = target[0].float(), torch.empty_like(target, dtype=dtype)
    lost = torch.zeros(runs, size, real.shape[-1], dtype=torch.float32, device=real.device)
    scale, zero_point = (p.expand_as(target)[0] for p in (grid.scale, grid.zero_point))
    together = max(1, min(_ROWS, size // _STEPS))
    for first in range(0, size, together):
        block = slice(first, first + together)
        rows, before = place[:, block].flatten(), by_row.feedback[:, :first, block]
        rows_grid = replace(grid, scale=scale[rows].unsqueeze(0), zero_point=zero_point[rows].unsqueeze(0))
        aim = real[rows] + (before.mT @ lost[:, :first]).flatten(0, 1)
        rounded = gptq_round(aim.unsqueeze(0), factor_, rows_grid, dtype)
        codes[0, rows] = rounded[0]
        lost[:, block] = (real[rows] - rows_grid.value(rounded.float())[0]).view(runs, -1, real.shape[-1])
    return codes


def _round_groups(
    weight: Tensor,
    factor_: Factor,
    grid: Grid,
    free: FreeScales,
    sharing: Columns,
    ratios: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose codes for `weight` column by column, and the scale of each group before its first column.

    At that point, the values to round include the feedback of earlier errors. The group is rounded with each candidate
    scale, and the actual remaining errors are compared instead of expected errors.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        factor_: Factors of the input's Hessian; columns that share a scale are consecutive.
        grid: Current scales, zero points, and format of the codes.
        free: Scales that can be stored.
        sharing: Columns of each scale, the same number for each scale.
        ratios: Candidate ratios for each scale; the first ratio is kept if no other ratio is better.
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
        part = replace(factor_, **{name: getattr(factor_, name)[groups] for name in parts})
        rounded, best = _round_group_chunk(
            piece, part, grid, lambda scale: free.rounded(scale * tried[:, None, None, None]), size
        )
        codes[groups, rows] = rounded.to(dtype)
        turns = numbers[part.order[:, ::size]].unsqueeze(-2).expand_as(best)
        chosen_ratios[groups, rows] = torch.zeros_like(best, dtype=torch.float32).scatter_(-1, turns, tried[best])
    return codes, chosen_ratios


def _round_group_chunk(
    piece: Sequence[Tensor], factor_: Factor, grid: Grid, steps_of: Callable[[Tensor], Tensor], size: int
) -> tuple[Tensor, Tensor]:
    """Return the codes of a chunk, and the index of each group's scale, in the order of rounding.

    Args:
        piece: Weight, scale, and zero point, each of shape (groups, rows, inputs).
        factor_: Factors of the Hessians for the chunk's matrices.
        grid: Format of the codes.
        steps_of: Function that returns the candidates for given scales, stacked along a new first dimension.
        size: Number of columns in a group.
    """
    order, best = factor_.order.unsqueeze(-2).expand_as(piece[0]), list[Tensor]()
    # With inputs as the first matrix dimension, a column of the weight is contiguous.
    real, scale, zero = (p.gather(-1, order).mT.contiguous() for p in piece)
    values, codes = real.clone(), torch.empty_like(real)

    def round_group(run: slice) -> None:
        columns = [part[:, run] for part in (values, real, zero)]
        steps, feedback = steps_of(scale[:, run][:, :1]), factor_.feedback[:, run, run]
        values[:, run], codes[:, run], chosen = _round_group(columns, steps, feedback, factor_.pivots[:, run], grid)
        best.append(chosen)

    feed_back_blocks(values, factor_.feedback, round_group, size, size)
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


__all__ = ["GPTQ"]
