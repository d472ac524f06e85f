"""Choose codes column by column, so that each column makes up for the errors of those before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.sizes import Matrices
from quark_fx.errors import ConfigError
from quark_fx.solvers.error_feedback import DAMPING, Factor, working_bytes
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.matrix_feedback import (
    can_choose,
    can_fit,
    fitted_to_feedback,
    refined,
    round_groups_of,
    round_matrix,
)
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.scale_search import MOST_TRIED
from quark_fx.solvers.solver import InputHessian, Proposal, Solver, solver
from quark_fx.system.options import Interval, NonNegativeInt


@solver
@dataclass(frozen=True, kw_only=True)
class GPTQ(Solver):
    """Round the weights of matrix products and convolutions so that their outputs, not the weights, are nearest.

    Every operator sees inputs that the quantized operators before it compute from the data (true sequential), in one
    forward pass over it. Operators that read one value share its Hessian and its factors, unless guided; of a stack of
    experts each has the tokens routed to it, and borrows from the average of all where they are few. Positions that the
    data's `attention_mask` leaves out do not count, but for experts. A weight keeps its codes where the error on
    validation data would be higher.

    Args:
        damping: share of the mean diagonal of the Hessian that is added to it.
        by_activation: round the inputs that matter most first (activation order; no trace of it in the result).
        asymmetry: how far the target moves from what the float weight makes of the quantized inputs (0, the paper's)
            to what the float model makes of its own inputs (1), at the cost of a second forward pass.
        fit_scales: first shrink each scale to the one that this rounding is expected to lose least with.
        static_groups: keep scales fixed while rounding. Otherwise each is chosen just before the first of its inputs is
            rounded: of the scales around it that can be stored, the one that this rounding loses least with, errors of
            earlier inputs included. Inputs of a scale are then rounded one after the other, which restricts
            `by_activation` to ordering groups, and inputs within a group: it suits small blocks whose scales are close
            to each other (NVFP4), not powers of two (MXFP4). Scales stay where groups differ in size, or outputs share
            a scale.
        sweeps: of coordinate descent over the codes that error feedback chose, at most. Error feedback makes up for the
            error of an input in those after it alone; a sweep moves each code to the best one given all others. Each
            costs as much as rounding. Rows that make up for each other are not swept.
        two_sided: rows of a weight make up for the errors of other rows, too, by which output channels' errors add up
            in what the model predicts. It costs the passes of `guided`, and a Hessian of the outputs for each operator;
            together they cost the passes once. Operators of several matrices, as stacks of experts, are rounded as
            without.
        guided: weight each row of the data by how much the model's predictions depend on it. It costs a forward and a
            backward pass of the float model, and a Hessian for each operator. Rows routed to experts weigh the same.

    Raises:
        ConfigError: for a value out of range.

    Source:
        Frantar et al. 2023 (GPTQ), which recomputes the range of each group on the way, where we search; for
        `asymmetry` the objective of Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos), minimized column by column
        (Qronos rounds the first column for the float weights of the others); for `sweeps` Behdin et al. 2023
        (QuantEase); for `guided` Kim et al. 2025 (GuidedQuant); for `two_sided` Tseng
        et al. 2025 (YAQA).
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
                "two_sided=True of GPTQ needs static_groups=True, as scales that move treat rows as independent; leave "
                "out one of them"
            )

    @property
    def reads(self) -> InputHessian:
        """The Hessian, as guided, and where the target moves, what the float model makes of its own inputs."""
        return InputHessian(shifted=self.asymmetry > 0, guided=self.guided, two_sided=self.two_sided)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        """Round the weight with error feedback."""
        chooses = not self.static_groups and can_choose(weight)
        sharing = weight.columns if chooses else None
        make, levels = partial(seen.factors, damping=self.damping, by_activation=self.by_activation), list[float]()

        def factors() -> Iterator[tuple[slice, Factor]]:
            for some, found in make(sharing=sharing):
                levels.append(found.level)
                yield some, found

        target, fits = seen.target(weight.real, self.asymmetry, factors()), self.fit_scales and can_fit(weight)
        if fits:
            weight = fitted_to_feedback(weight, target, factors())
        weight, damping = (round_groups_of if chooses else round_matrix)(weight, target, factors())
        if self.sweeps and weight.outputs is None:
            weight = refined(weight, target, seen.h, damping, sweeps=self.sweeps)
        remarks = (
            "scales kept: not free to change" * (self.fit_scales and not fits),
            "static groups kept: groups differ in size or share scales across outputs"
            * (not self.static_groups and not chooses),
            f"damped by {max(levels):g}" * (max(levels) > self.damping),
            seen.unguided,
            f"one-sided: {weight.one_sided}" * bool(weight.one_sided),
            _few(seen),
        )
        return Proposal(weight, "; ".join(filter(None, remarks)), self.asymmetry)

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes of a factor and a piece of a weight at work, and of what moves targets and fits scales."""
        more = matrices.moment * bool(self.asymmetry or self.fit_scales) + matrices.target * bool(self.asymmetry)
        more += matrices.moment * bool(self.sweeps)
        if self.two_sided:  # the errors and the target in steps, and the factor of the outputs
            more += 4 * matrices.target + 2 * together_bytes(matrices)
        tried = 0 if self.static_groups else MOST_TRIED
        return working_bytes(matrices.groups, matrices.outputs, matrices.inputs, tried) + more

    def working_operations(self, matrices: Matrices) -> float:
        """Return the multiplications of rounding a weight."""
        rounding = 2 * matrices.inputs * matrices.values
        two_sided = self.two_sided and matrices.groups == 1
        return rounding * (3 if two_sided else 1 + self.sweeps)  # judging takes all outputs, once before and once after


def _few(seen: Hessian) -> str:
    """Say which of a stack of experts saw fewer rows than it has inputs."""
    inputs = seen.h.shape[-1]
    few = [f"{expert} ({count})" for expert, count in enumerate(seen.rows.tolist()) if count < inputs]
    return f"few rows: expert {', '.join(few)}" if len(seen.rows) > 1 and few else ""


__all__ = ["GPTQ"]
