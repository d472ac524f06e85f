"""Choose codes column by column; each column compensates for the errors of earlier columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.sizes import Matrices
from quark_fx.errors import ConfigError
from quark_fx.solvers.error_feedback import DAMPING, working_bytes
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.matrix_feedback import (
    fitted_to_feedback,
    refined,
    round_matrix,
    supports_dynamic_groups,
    supports_scale_fit,
)
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.scale_search import MOST_TRIED
from quark_fx.solvers.solver import InputHessian, Proposal, Solver, solver
from quark_fx.system.options import Interval, NonNegativeInt


@solver
@dataclass(frozen=True, kw_only=True)
class GPTQ(Solver):
    """Round the weights of matrix products and convolutions so that their outputs, not the weights, are nearest.

    Each operator's input is computed by the quantized operators before it (true sequential), in one forward pass over
    the data. Operators with the same input share its Hessian and factors, unless guided. In a stack of experts, each
    expert uses the tokens routed to it, and borrows from the average of all if they are few. Positions that the data's
    `attention_mask` leaves out are excluded, except for experts. A weight keeps its codes if the error on validation
    data would not decrease.

    Args:
        damping: Fraction of the Hessian's mean diagonal that is added to its diagonal.
        by_activation: Round the inputs with the largest diagonal first (activation order); the result stores no order.
        asymmetry: Position of the target between the float weight's output on quantized inputs (0, the paper's) and the
            float model's output on its own inputs (1); values above 0 cost a second forward pass.
        fit_scales: First shrink each scale to the one with the smallest expected error for this rounding.
        static_groups: Keep scales fixed while rounding. Otherwise each scale is chosen just before its first input is
            rounded: among the storable scales around it, the one with the smallest error, including errors of earlier
            inputs. Inputs that share a scale are then rounded consecutively, which restricts `by_activation` to the
            order of groups, and of inputs within a group. This suits small blocks with closely spaced scales (NVFP4),
            not powers of two (MXFP4). Scales stay fixed if groups differ in size, or outputs share a scale.
        sweeps: Largest number of coordinate-descent sweeps over the codes from error feedback. Error feedback
            compensates for the error of an input only in later inputs; a sweep moves each code to the best one given
            all others. Each sweep costs as much as rounding. Rows that compensate for each other are not swept.
        two_sided: Let rows of a weight compensate for the errors of other rows as well, based on how errors of output
            channels add up in the model's predictions. It costs the passes of `guided`, and a Hessian of the outputs
            for each operator; both options together cost the passes once. Operators with several matrices, such as
            stacks of experts, are rounded as usual.
        guided: Weight each row of the data by the sensitivity of the model's predictions to it. It costs a forward and
            a backward pass of the float model, and a Hessian for each operator. Rows routed to experts are weighted
            equally.

    Raises:
        ConfigError: For a value out of range.

    Source:
        Frantar et al. 2023 (GPTQ), which recomputes the range of each group on the way, while this searches; for
        `asymmetry` the objective of Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos), minimized column by column
        (Qronos rounds the first column given the float weights of the others); for `sweeps` Behdin et al. 2023
        (QuantEase); for `guided` Kim et al. 2025 (GuidedQuant); for `two_sided` Tseng et al. 2025 (YAQA).
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
                "two_sided=True of GPTQ needs static_groups=True, because scales that move treat rows as independent; "
                "leave out one of them"
            )

    @property
    def reads(self) -> InputHessian:
        """Hessian of the input, guided if requested, with the shift if `asymmetry` is above 0."""
        return InputHessian(shifted=self.asymmetry > 0, guided=self.guided, two_sided=self.two_sided)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        """Round the weight with error feedback."""
        dynamic = not self.static_groups and supports_dynamic_groups(weight)
        sharing = weight.columns if dynamic else None
        factors = partial(seen.factors, damping=self.damping, by_activation=self.by_activation, sharing=sharing)
        target = seen.target(weight.real, self.asymmetry, factors())
        fits = self.fit_scales and supports_scale_fit(weight)
        if fits:
            weight = fitted_to_feedback(weight, target, factors())
        weight, damping, level = round_matrix(weight, target, factors(), dynamic_groups=dynamic)
        if self.sweeps and weight.outputs is None:
            weight = refined(weight, target, seen.h, damping, sweeps=self.sweeps)
        remarks = (
            "scales kept: not free to change" * (self.fit_scales and not fits),
            "static groups kept: groups differ in size or share scales across outputs"
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
        """Return the multiplications of rounding a weight."""
        rounding = 2 * matrices.inputs * matrices.values
        two_sided = self.two_sided and matrices.groups == 1
        return rounding * (3 if two_sided else 1 + self.sweeps)  # two-sided errors use all outputs, before and after


def _few(hessian: Hessian) -> str:
    """Return a remark on the experts of a stack that have fewer rows than inputs."""
    inputs = hessian.h.shape[-1]
    few = [f"{expert} ({count})" for expert, count in enumerate(hessian.rows.tolist()) if count < inputs]
    return f"few rows: expert {', '.join(few)}" if len(hessian.rows) > 1 and few else ""


__all__ = ["GPTQ"]
