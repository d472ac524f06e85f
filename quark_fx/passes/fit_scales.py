"""Fit scales to minimize the output errors of operators under rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quark_fx.engine.sizes import Matrices
from quark_fx.solvers.error_feedback import stack_chunks, working_bytes
from quark_fx.solvers.hessian import Hessian, InputHessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.scale_search import RATIOS, around, fit_ranges, fit_scales
from quark_fx.solvers.solver import Proposal, Skip, Solver, solver


@solver
@dataclass(frozen=True, kw_only=True)
class FitScales(Solver):
    """Choose each weight scale to minimize the operator's output error under round-to-nearest.

    Scales of integer formats only shrink. Scales of float formats may also grow, because the spacing of float codes
    grows with their magnitude. After `AWQ`, this pass is the clip search of that paper; `GPTQ(fit_scales=True)` begins
    with a similar search. Scales with offsets, and scales of two levels (`quark_fx.gguf_types`), are fitted by least
    squares instead, with inputs weighted by their mean square, like llama.cpp's importance matrix. When the input of an
    operator is measured, all operators before it are quantized; this takes one forward pass over the data. Scales per
    tensor, `POWER_OF_TWO` scales, and scales of sub-blocks (MX4 to MX9) do not change. A result that is not better on
    validation data is rejected.

    Args:
        guided: Whether to weight each row of the data by the sensitivity of the model's predictions to it, as in
            `GPTQ`. This costs a forward and a backward pass of the float model, and a Hessian for each operator.

    Source:
        Lin et al. 2024 (AWQ), clip search of the reference code, with the sum over tokens computed in advance;
        `fit_ranges` for offsets; for `guided`, Kim et al. 2025 (GuidedQuant).
    """

    guided: bool = False

    @property
    def reads(self) -> InputHessian:
        """Hessian of the input, guided if requested."""
        return InputHessian(guided=self.guided)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        """Fit the scales, and round to nearest."""
        if weight.columns is None:
            return self._with_ranges(weight, seen)
        columns, allowed = weight.columns, weight.allowed
        tried = RATIOS if weight.scheme.format.is_integer else around(weight.scheme)
        ratio = [
            fit_scales(weight.real[chunk].float(), seen.h[chunk], weight.grid(chunk), columns, allowed, tried)
            for chunk in stack_chunks(seen.h)
        ]
        return Proposal(weight.with_scales(torch.cat(ratio)).nearest(), seen.unguided)

    def _with_ranges(self, weight: QuantizedMatrix, hessian: Hessian) -> Proposal | Skip:
        if weight.ranged_columns is None:
            return Skip("its scales are not free to change")
        importance = hessian.h.diagonal(dim1=-2, dim2=-1)
        ranges = fit_ranges(weight.real, importance, weight.scheme, weight.ranged_columns)
        return Proposal(weight.with_ranges(*ranges).nearest(), hessian.unguided)

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes needed to process a piece of a weight."""
        return working_bytes(matrices.groups, matrices.outputs, matrices.inputs)


__all__ = ["FitScales"]
