"""A solver of one file: least-squares scales for the current codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal, Skip, Solver, solver


@solver
@dataclass(frozen=True, kw_only=True)
class RefitScales(Solver):
    """Choose the scales that bring each operator's output nearest to the float output; keep the codes.

    For one output, `|sum_b s_b q_b X - w X|^2` is quadratic in the scales `s_b` of its blocks: one small linear
    system, `A s = c` with `A_bc = q_b H q_c'` and `c_b = q_b H w'`.

    Args:
        damping: share of the mean diagonal of `A` that keeps scales near what they are.
        most: a scale changes by at most this share.
    """

    damping: float = 0.01
    most: float = 0.25

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        """Solve the system of every output."""
        if weight.columns is None or weight.scheme.scale.is_8_bit:
            return Skip("its scales are fixed (per tensor, power of two, or shared)")
        value = weight.grid().value(weight.codes.float())  # with ratios for unknowns, ones are the present state
        blocks = weight.columns.members(value.device)
        parts = torch.zeros(len(blocks), *value.shape, device=value.device)
        for part, block in zip(parts, blocks, strict=True):
            part[..., block] = value[..., block]
        through = torch.einsum("bgoi,gij->bgoj", parts, seen.h)
        a = torch.einsum("bgoj,cgoj->gobc", through, parts)
        c = torch.einsum("bgoj,goj->gob", through, weight.real.float())
        pull = self.damping * a.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(1e-20)
        ratio = torch.linalg.solve(a + torch.diag_embed(pull.expand_as(c)), c + pull)
        return Proposal(weight.with_scales(ratio.nan_to_num(1.0).clamp(1 - self.most, 1 + self.most)))
