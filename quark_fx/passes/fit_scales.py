"""Fit scales to minimize the output errors of operators under rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import FIXED
from quark_fx.engine.sizes import Matrices
from quark_fx.errors import ConfigError
from quark_fx.solvers.error_feedback import stack_chunks, working_bytes
from quark_fx.solvers.hessian import Hessian, InputHessian
from quark_fx.solvers.importance import FileHessian
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
        importance: Path of an importance matrix of `quark_fx.export.imatrix` or llama.cpp, a GGUF file with the mean
            squares of the inputs of each weight in the float model. The pass uses them instead of the Hessian's
            diagonal, and needs no calibration data. Results are evaluated on the file as well. Weights without an
            entry, and weights that an earlier pass changed, keep their scales, with a warning. An expert without rows
            gets the average of its stack.

    Raises:
        ConfigError: If both `guided` and `importance` are set.

    Source:
        Lin et al. 2024 (AWQ), clip search of the reference code, with the sum over tokens computed in advance;
        `fit_ranges` for offsets; for `guided`, Kim et al. 2025 (GuidedQuant).
    """

    guided: bool = False
    importance: str | Path | None = None

    def __post_init__(self) -> None:
        if self.importance is not None:
            object.__setattr__(self, "importance", str(self.importance))  # plain data, for configurations in YAML
            if self.guided:
                raise ConfigError(
                    "FitScales takes guided=True or importance, not both: guided=True weights rows of the calibration "
                    "data, and an importance matrix contains only means over them"
                )

    @property
    def reads(self) -> InputHessian:
        """Hessian of the input, guided if requested, or from the file of `importance`."""
        return InputHessian(guided=self.guided) if self.importance is None else FileHessian(path=str(self.importance))

    @property
    def learns(self) -> bool:
        """True without the file of `importance`."""
        return self.importance is None

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Fit the scales in `gm`; return how many weights changed."""
        if isinstance(reads := self.reads, FileHessian):
            reads.require_entries(self, context)
        return super().__call__(gm, context)

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
            return Skip(f"its scales are {FIXED}")
        importance = hessian.h.diagonal(dim1=-2, dim2=-1)
        ranges = fit_ranges(weight.real, importance, weight.scheme, weight.ranged_columns)
        return Proposal(weight.with_ranges(*ranges).nearest(), hessian.unguided)

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes needed to process a piece of a weight."""
        return working_bytes(matrices.groups, matrices.outputs, matrices.inputs)


__all__ = ["FitScales"]
