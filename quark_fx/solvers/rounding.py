"""Choose the codes of a weight so that its operator's output, not the weight itself, is nearest to the float output.

For an operator that is linear in its weight, the squared error of the output over the calibration data is a quadratic
form of the weight: two matrices summarize the data, and every code can be chosen given all others, without gradient
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quark_fx.numbers.grid import Grid
from quark_fx.numbers.quantized_tensor import decode
from quark_fx.solvers.error_feedback import chunks

_BLOCK = 128
"""Number of inputs whose changes are propagated to the other inputs in one matrix product."""

_LEAST_CURVATURE = 1e-20
"""Smallest curvature of a weight; a weight whose input is always zero is rounded to nearest."""

_CONVERGED = 1e-4
"""Decrease of the relative squared error; a sweep that lowers the error by less is the last."""

_SETTLED = 1e-3
"""Fraction of the initial error; refinement stops after a sweep that lowers the error by less."""


@dataclass
class QuadraticError:
    """Squared error of an operator's output as a quadratic form of its weight.

    With rows `x` on the quantized stream and outputs `y` in float, `sum |W x - y|^2 = tr(W H W') - 2 tr(W G') + c`.

    Attributes:
        h: Sum of `x x'`, shape (groups, inputs, inputs).
        g: Sum of `y x'`, shape (groups, outputs, inputs).
        c: Sum of `y y'`, shape ().
        rows: Number of rows.
    """

    h: Tensor
    g: Tensor
    c: Tensor
    rows: int

    @classmethod
    def of_nothing(cls, like: Tensor) -> QuadraticError:
        """Return the form over zero rows, for a weight of the shape of `like`: (groups, outputs, inputs)."""
        groups, _, inputs = like.shape
        h = torch.zeros(groups, inputs, inputs, device=like.device, dtype=torch.float32)
        return cls(h, torch.zeros_like(like, dtype=torch.float32), h.new_zeros(()), 0)

    @classmethod
    def of(cls, columns: Tensor, outputs: Tensor) -> QuadraticError:
        """Return the form over some rows, given in the shapes that `LinearMap.rows` returns."""
        x, y = columns.float(), outputs.float()
        return cls(x @ x.mT, y @ x.mT, y.square().sum(), x.shape[-1])

    def __add__(self, other: QuadraticError) -> QuadraticError:
        return QuadraticError(self.h + other.h, self.g + other.g, self.c + other.c, self.rows + other.rows)

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the relative squared error of `weight`, shape (groups, outputs, inputs)."""
        return ((weight @ self.h - 2 * self.g) * weight).sum().add(self.c).div(self.c.clamp_min(1e-30))


def round_by_descent(
    weight: Tensor,
    error: QuadraticError,
    grid: Grid,
    *,
    sweeps: int = 8,
    damping: float = 0.1,
) -> Tensor:
    """Choose codes that minimize the error of the output by cyclic coordinate descent.

    The first sweep starts at the float weight and rounds column by column, each column compensating for earlier ones;
    later sweeps move each code, column by column, to the best code given all others, until the error hardly falls.

    Args:
        weight: Weight of shape (groups, outputs, inputs).
        error: Quadratic form to minimize.
        grid: Scales, zero points, and format of the codes.
        sweeps: Largest number of sweeps.
        damping: Fraction of the mean diagonal of `h` that pulls toward `weight`, in directions where the data has
            little energy; the number of inputs per row is added, because few rows leave many such directions.

    Returns:
        Codes in float32, of the shape of `weight`.

    Source:
        QuantEase (Behdin et al. 2023), with targets from the float model instead of the quantized stream.
    """
    target, grid = weight.float().mT.contiguous(), _inputs_first(grid, weight)
    diagonal = error.h.diagonal(dim1=-2, dim2=-1)
    damping += target.shape[-2] / error.rows
    pull = (damping * diagonal.mean(-1, keepdim=True)).clamp_min(_LEAST_CURVATURE)
    h = error.h + torch.diag_embed(pull.expand_as(diagonal))
    g = error.g.mT + pull.unsqueeze(-1) * target
    values, codes = target.clone(), torch.empty_like(target)
    slope = h @ values - g
    # The first sweep replaces float values by codes, so its gain does not count.
    _sweep(values, codes, slope, h, grid)
    _descend(values, codes, slope, h, grid, sweeps=sweeps - 1, least=_CONVERGED * error.c)
    return codes.mT


def refine_by_descent(codes: Tensor, target: Tensor, h: Tensor, grid: Grid, *, sweeps: int) -> Tensor:
    """Lower the squared error of the output, `tr((W - T) H (W - T)')`, starting from given codes.

    Every sweep moves each code to the best code given all others, column by column, which never raises the error.

    Args:
        codes: Initial codes, shape (groups, outputs, inputs).
        target: Weight `T` to approximate, of the same shape.
        h: Sum of `x x'`, damped so that its diagonal is positive, shape (groups, inputs, inputs).
        grid: Scales, zero points, and format of the codes.
        sweeps: Largest number of sweeps; a sweep that lowers the error by less than a thousandth of its initial value
            is the last.

    Returns:
        Codes in float32, of the shape of `target`.

    Source:
        Behdin et al. 2023 (QuantEase), from the codes of GPTQ instead of the float weight.
    """
    refined = torch.empty_like(target, dtype=torch.float32)
    for piece in chunks(target):
        aim, form = target[piece].float(), h[piece[0]]
        scale, zero_point = (p.expand_as(target)[piece] for p in (grid.scale, grid.zero_point))
        part = _inputs_first(replace(grid, scale=scale, zero_point=zero_point), aim)
        moved = codes[piece].float().mT.contiguous()
        values = part.value(moved)
        lost = values - aim.mT
        slope = form @ lost
        _descend(values, moved, slope, form, part, sweeps=sweeps, least=_SETTLED * (slope * lost).sum())
        refined[piece] = moved.mT
    return refined


def _inputs_first(grid: Grid, weight: Tensor) -> Grid:
    """Return the grid with parameters of shape (groups, inputs, outputs); columns of the weight are then contiguous."""
    scale, zero_point = (p.float().expand_as(weight).mT.contiguous() for p in (grid.scale, grid.zero_point))
    return replace(grid, scale=scale, zero_point=zero_point)


def _descend(
    values: Tensor, codes: Tensor, slope: Tensor, h: Tensor, grid: Grid, *, sweeps: int, least: Tensor
) -> None:
    """Sweep until a sweep lowers the error by at most `least`; tensors have shape (groups, inputs, outputs).

    Codes change in place; on return, `values` and `slope` need not match them. On a device, stopping early would make
    the host wait, so all sweeps run there, and changes by sweeps after the stop are undone.
    """
    if codes.is_cpu:
        for _ in range(sweeps):
            if bool(_sweep(values, codes, slope, h, grid) <= least):
                return
        return
    done = torch.zeros((), dtype=torch.bool, device=codes.device)
    for _ in range(sweeps):
        before = codes.clone()
        gained = _sweep(values, codes, slope, h, grid)
        codes.copy_(torch.where(done, before, codes))
        done |= gained <= least


def _sweep(values: Tensor, codes: Tensor, slope: Tensor, h: Tensor, grid: Grid) -> Tensor:
    """Set the codes of one input after another to the best codes, in place; return the decrease of the squared error.

    Args:
        values: Dequantized codes, or the float weight in the first sweep, shape (groups, inputs, outputs).
        codes: Codes of the same shape.
        slope: Half the gradient of the squared error with respect to `values`.
        h: Half the second derivative, shape (groups, inputs, inputs).
        grid: Grid with parameters of the shape of `values`.
    """
    curvature = h.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (groups, inputs, 1)
    gained = torch.zeros((), device=values.device, dtype=torch.float32)
    for start in range(0, values.shape[-2], _BLOCK):
        block = slice(start, start + _BLOCK)
        change = _round_block(values, codes, slope, h, curvature, grid, block)
        gained = gained - (change * (2 * slope[:, block] + h[:, block, block] @ change)).sum()
        slope += h[:, :, block] @ change
    return gained


def _round_block(
    values: Tensor,
    codes: Tensor,
    slope: Tensor,
    h: Tensor,
    curvature: Tensor,
    grid: Grid,
    block: slice,
) -> Tensor:
    """Set the codes of a block's inputs to the best codes in place; return the change, (groups, inputs, outputs)."""
    scale, zero_point = grid.scale, grid.zero_point
    before, local, inner = values[:, block].clone(), slope[:, block].clone(), h[:, block, block]
    for j in range(before.shape[1]):
        i = block.start + j
        best = values[:, i] - local[:, j] / curvature[:, i]
        code = grid.round_((best / scale[:, i]).add_(zero_point[:, i]))
        value = decode(code, scale[:, i], zero_point[:, i])
        change = value - values[:, i]
        local[:, j + 1 :].baddbmm_(inner[:, j + 1 :, j, None], change.unsqueeze(1))
        values[:, i], codes[:, i] = value, code
    return values[:, block] - before


__all__ = ["QuadraticError", "refine_by_descent", "round_by_descent"]
