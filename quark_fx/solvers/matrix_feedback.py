"""Error feedback on an operator's weight: its codes, the scales with the smallest error, and the rounded values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from quark_fx.errors import CalibrationError
from quark_fx.numbers.grid import Grid
from quark_fx.solvers.error_feedback import Factor, compensated_weight, damped, factor, gptq_round, stack_chunks
from quark_fx.solvers.group_feedback import round_groups
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.range_search import fit_ranges
from quark_fx.solvers.rounding import refine_by_descent
from quark_fx.solvers.scale_search import around, fit_scales_to_feedback
from quark_fx.system import accelerator

Factors = Iterable[tuple[slice, Factor]]
"""Factors of a Hessian, each with the slice of the stack it belongs to."""

_ROWS, _STEPS = 32, 8
"""Largest number of rows of a run that are rounded together if rows compensate for each other, and fewest steps."""


def round_matrix(
    weight: QuantizedMatrix, target: Tensor, factors: Factors, *, dynamic_groups: bool = False
) -> tuple[QuantizedMatrix, Tensor, float]:
    """Return `weight` with codes of `target` by error feedback, the damping of each matrix, and the largest damping.

    With `weight.outputs`, rows compensate for the errors of earlier rows as well.

    Args:
        weight: Quantized weight that defines scales and format of the codes.
        target: Weight to round, shape (groups, outputs, inputs).
        factors: Factors of the input's Hessian.
        dynamic_groups: Choose each scale just before its group is rounded. The weight must support it
            (`supports_dynamic_groups`), and inputs that share a scale are consecutive in the factors.

    Returns:
        The weight, the damping, shape (groups,), and the largest damping on the host.
    """
    codes, free, columns = torch.empty_like(weight.codes), weight.free, weight.columns if dynamic_groups else None
    ratios, dampings, level = list[Tensor](), list[Tensor](), 0.0
    for matrices, factor_ in factors:
        values, grid = target[matrices], weight.grid(matrices)
        if columns is not None:
            args = values.float(), factor_, grid, free, columns, around(weight.scheme), codes.dtype
            codes[matrices], ratio = round_groups(*args)
            ratios.append(ratio)
        elif weight.outputs is None:
            codes[matrices] = gptq_round(values, factor_, grid, codes.dtype)
        else:
            codes[matrices] = _round_rows(values, factor_, grid, weight.outputs, codes.dtype)
        dampings.append(factor_.damping)
        level = max(level, factor_.level)
    if ratios:
        weight = weight.with_scales(torch.cat(ratios))
    return weight.with_codes(codes), torch.cat(dampings), level


def _round_rows(target: Tensor, factor_: Factor, grid: Grid, outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of a matrix, rounding a few rows at a time; each row compensates for errors of earlier rows.

    The error `tr(outputs E h E')` is a sum over rows once `outputs` is factored like `h`: each term is the error of a
    row plus its fractions of the errors of earlier rows, for any `h`. Rows that are rounded together do not compensate
    for each other.

    Args:
        target: Weight to round, shape (1, outputs, inputs).
        factor_: Factors of the input's Hessian.
        grid: Scales, zero points, and format of the codes.
        outputs: Hessian of the outputs, shape (runs, n, n), for runs of `n` rows.
        dtype: Dtype of the codes.

    Raises:
        CalibrationError: If `outputs` is not positive definite.

    Source:
        Tseng et al. 2025 (YAQA), who round along diagonals: the same feedback in another order.
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


def supports_dynamic_groups(weight: QuantizedMatrix) -> bool:
    """Return whether `round_matrix` can choose the scales of a weight: each is for the same number of inputs."""
    return weight.columns is not None and weight.columns.even is not None


def refined(weight: QuantizedMatrix, target: Tensor, h: Tensor, damping: Tensor, *, sweeps: int) -> QuantizedMatrix:
    """Return `weight` with codes improved by coordinate descent, so that their error against `target` is smaller.

    Args:
        weight: Quantized weight with the initial codes.
        target: Weight that was rounded, shape (groups, outputs, inputs).
        h: Hessian of the input, shape (groups, inputs, inputs).
        damping: Fraction of each matrix's mean diagonal that is added to its diagonal, shape (groups,).
        sweeps: Largest number of sweeps over the inputs.
    """
    codes = weight.codes.clone()
    for matrices in stack_chunks(h):
        values, form = target[matrices], damped(h[matrices], damping[matrices])
        better = refine_by_descent(codes[matrices], values, form, weight.grid(matrices), sweeps=sweeps)
        codes[matrices] = better.to(codes.dtype)
    return weight.with_codes(codes)


def fitted_to_feedback(weight: QuantizedMatrix, target: Tensor, factors: Factors) -> QuantizedMatrix:
    """Return `weight` with the scales that minimize the expected error of `round_matrix`.

    Its scales must be adjustable, individually or with offsets (`supports_scale_fit`). Scales with offsets, and scales
    of two levels, are fitted to the weights with the curvature of each input.
    """
    if weight.columns is None:
        return _fitted_ranges(weight, target, factors)
    columns, allowed, ratios = weight.columns, weight.allowed, []
    for matrices, factor_ in factors:
        grid, values = weight.grid(matrices), target[matrices].float()
        ratios.append(fit_scales_to_feedback(values, factor_, grid, columns, allowed))
    return weight.with_scales(torch.cat(ratios))


def supports_scale_fit(weight: QuantizedMatrix) -> bool:
    """Return whether `fitted_to_feedback` accepts a weight."""
    return weight.columns is not None or weight.ranged_columns is not None


def _fitted_ranges(weight: QuantizedMatrix, target: Tensor, factors: Factors) -> QuantizedMatrix:
    columns, ranges = weight.ranged_columns, []
    assert columns is not None
    for matrices, factor_ in factors:
        ranges.append(fit_ranges(target[matrices].float(), factor_.pivots_by_input, weight.scheme, columns))
    scale, offset = zip(*ranges, strict=True)
    return weight.with_ranges(torch.cat(scale), None if offset[0] is None else torch.cat(offset))


def compensated(weight: QuantizedMatrix, target: Tensor, factors: Factors) -> Tensor:
    """Return the values that error feedback rounded: the target, compensated for errors of earlier columns."""
    result, codes = torch.empty_like(target, dtype=torch.float32), weight.codes
    for matrices, factor_ in factors:
        value = weight.grid(matrices).value(codes[matrices].float())
        result[matrices] = compensated_weight(target[matrices].float(), value, factor_)
    return result


__all__ = [
    "Factors",
    "compensated",
    "fitted_to_feedback",
    "refined",
    "round_matrix",
    "supports_dynamic_groups",
    "supports_scale_fit",
]
