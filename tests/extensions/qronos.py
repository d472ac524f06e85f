"""A solver of one file: Qronos as it was published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from quark_fx.engine.sizes import Matrices
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import InputHessian, Proposal, Skip, Solver, solver
from quark_fx.system.options import Interval


@solver
@dataclass(frozen=True, kw_only=True)
class Qronos(Solver):
    """Round a weight so that its outputs, of quantized inputs, are nearest to the float model's; in float64.

    Args:
        alpha: share of the largest eigenvalue of the Hessian that is added to its diagonal.

    Source:
        Zhang et al. 2025 (Qronos). Brevitas and AMD Quark estimate the eigenvalue by 30 power iterations.
    """

    alpha: Annotated[float, Interval("(0, 1]")] = 1e-6
    reads = InputHessian(shifted=True)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        """Round the input with the largest diagonal for the float weights of the others, then one after the other."""
        if seen.shift is None or not bool(seen.h.any((-1, -2)).all()):
            return Skip("what it reads is always zero, or data chooses its rows")
        order = seen.h.diagonal(dim1=-2, dim2=-1).argsort(descending=True, stable=True)
        across, down = order.unsqueeze(-2), order.unsqueeze(-1).expand_as(seen.h)
        h, shift = (m.double().gather(-2, down).gather(-1, across.expand_as(m)) for m in (seen.h, seen.shift))
        grid, across = weight.grid(), across.expand_as(weight.real)
        parts = (p.expand_as(weight.real).gather(-1, across) for p in (weight.real, grid.scale, grid.zero_point))
        w, scale, zero = (p.double() for p in parts)
        damping = self.alpha * torch.linalg.eigvalsh(h)[..., -1, None, None] * torch.eye(h.shape[-1]).to(h)
        inverse = torch.linalg.inv((h + damping)[..., 1:, 1:])
        upper = torch.linalg.cholesky(inverse, upper=True)
        codes, first = torch.empty_like(w), slice(0, 1)
        wanted = w[..., first] + w @ shift[..., first] / h[..., first, first]  # (w G_1 - w_{>1} H_{>1,1}) / H_11
        for k in range(w.shape[-1]):
            column = replace(grid, scale=scale[..., k], zero_point=zero[..., k])
            codes[..., k] = column.round_(column.position(wanted[..., 0]).float())
            value = column.value(codes[..., k]).unsqueeze(-1)
            if k == 0:
                wanted = ((w @ (h + shift + damping))[..., 1:] - value * h[..., first, 1:]) @ inverse
            else:
                error = (wanted[..., first] - value) / upper[..., k - 1, k - 1, None, None]
                wanted = (wanted - error * upper[..., k - 1 : k, k - 1 :])[..., 1:]
        return Proposal(weight.with_codes(torch.empty_like(codes).scatter_(-1, across, codes)), asymmetry=1.0)

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes of matrices and weights at work, in float64."""
        return 2 * (8 * matrices.moment + 8 * matrices.target)
