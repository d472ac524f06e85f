"""Choose initial codes for gradient steps, for each operator in order, given the outputs of quantized operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.blocks import extract
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import QuantizedWeight
from quark_fx.errors import CalibrationError
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, placeholders, tensor_of
from quark_fx.solvers.error_feedback import DAMPING, gptq_round
from quark_fx.solvers.hessian import InputHessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.rounding import QuadraticError, round_by_descent
from quark_fx.solvers.scale_search import fitted_to_feedback
from quark_fx.solvers.slots import WeightSlot, weights_by_input
from quark_fx.solvers.solver import blamed
from quark_fx.system.memory import give_back

ROWS = 8192
"""Approximate number of output positions per batch in the quadratic form of coordinate descent."""


class Start(StrEnum):
    """Initial codes of gradient steps."""

    CODES = "codes"
    """Current codes: from earlier passes, or rounded to nearest."""

    DESCENT = "descent"
    """Coordinate descent on each operator's error."""

    FEEDBACK = "feedback"
    """Error feedback, where each input compensates for the errors of earlier inputs, like `GPTQ(asymmetry=1)`."""


def descend(run: BlockRun, context: Context, weights: Sequence[QuantizedWeight], seed: int) -> None:
    """Choose and store codes by coordinate descent on the error of each operator's output.

    Args:
        run: Block of the weights.
        context: Context with the calibration batches.
        weights: Weights of the block; a weight that coordinate descent does not support keeps its codes.
        seed: Seed of the sampled rows.
    """
    for weight in weights:
        mapping = weight.linear.matrices
        if mapping is None or mapping.stacked or not weight.is_plain:
            continue
        error = _output_error(run, context, weight, mapping, seed)
        run.store(weight.codes, context.with_room(partial(_descended, run, weight, mapping, error)))


def _descended(run: BlockRun, weight: QuantizedWeight, mapping: LinearMap, error: QuadraticError) -> Tensor:
    """Return the codes of coordinate descent, in stored form."""
    real, grid = tensor_of(run.reference, weight.weight).detach().float(), weight.grid(run.module)
    scale, zero_point = (mapping.matrix(p.expand_as(real)) for p in (grid.scale, grid.zero_point))
    codes = round_by_descent(mapping.matrix(real), error, replace(grid, scale=scale, zero_point=zero_point))
    return weight.storable(mapping.restore(codes, real))


def feed_back(
    run: BlockRun, context: Context, weights: Sequence[QuantizedWeight], *, fits_scales: bool
) -> dict[str, Tensor]:
    """Choose and store codes by error feedback, with the float model's outputs as the target.

    Args:
        run: Block of the weights.
        context: Context with the calibration batches.
        weights: Weights of the block; a weight that error feedback does not support keeps its codes.
        fits_scales: Whether to shrink adjustable scales first.

    Returns:
        Values that were rounded, by the name of the node: the float weights, compensated for the errors of earlier
        inputs, in the shape of the stored weight.
    """
    return {
        name: rounded
        for slots in weights_by_input(run, weights)
        for name, rounded in _feed_back(slots, context, fits_scales).items()
    }


def _feed_back(slots: Sequence[WeightSlot], context: Context, fits_scales: bool) -> dict[str, Tensor]:
    give_back()
    hessian = InputHessian(shifted=True).measure(slots, context, context.data.calibration)
    factors = partial(hessian.factors, damping=DAMPING, by_activation=True)
    rounded = {}

    def round_(slot: WeightSlot, fits: bool) -> tuple[QuantizedMatrix, Tensor]:
        now = slot.now
        target = hessian.target(now.real, 1.0, factors())
        fitted = fitted_to_feedback(now, target, factors()) if fits and now.columns is not None else now
        codes, compensated = torch.empty_like(fitted.codes), torch.empty_like(target, dtype=torch.float32)
        for matrices, factor in factors():
            codes[matrices] = gptq_round(target[matrices], factor, fitted.grid(matrices), codes.dtype)
        matrix = fitted.with_codes(codes)
        for matrices, factor in factors():
            value = matrix.grid(matrices).value(matrix.codes[matrices].float())
            compensated[matrices] = factor.compensated(target[matrices].float(), value)
        return matrix, compensated

    try:
        for slot in slots:
            matrix, compensated = context.with_room(partial(round_, slot, fits_scales))
            try:
                slot.store(matrix)
            except OverflowError:  # an int32 bias overflows at the new scales
                matrix, compensated = context.with_room(partial(round_, slot, False))
                slot.store(matrix)
            rounded[slot.weight.node.name] = slot.mapping.restore(compensated, slot.real)
    except CalibrationError as error:
        raise blamed((slot.name for slot in slots), error) from error
    return rounded


def _output_error(
    run: BlockRun, context: Context, weight: QuantizedWeight, mapping: LinearMap, seed: int
) -> QuadraticError:
    """Return the error of the operator's output as a function of its weight, over all calibration batches."""
    real = tensor_of(run.reference, weight.weight)
    activation = extract(run.module, placeholders(run.module), [weight.linear.activation])
    output = extract(run.reference, placeholders(run.reference), [named_nodes(run.reference)[weight.node.name]])
    bias = None if weight.bias is None else weight.bias.value(run.module)

    def summed() -> QuadraticError:
        total = QuadraticError.of_nothing(mapping.matrix(real))
        with torch.no_grad():
            for batch in context.data.calibration:
                (x,), (y,) = activation(*run.inputs(batch)), output(*run.reference_inputs(batch))
                columns, outputs = mapping.rows(x, y, most=ROWS, seed=seed + context.data.first + batch)
                if bias is not None:
                    outputs = outputs - bias.reshape(outputs.shape[0], -1, 1)
                total += QuadraticError.of(columns, outputs)
        return total

    total = context.with_room(summed)
    rows = torch.full((), total.rows, device=total.h.device, dtype=torch.int64)
    context.ranks.add(total.h, total.g, total.c, rows)
    return replace(total, rows=int(rows))


__all__ = ["ROWS", "Start", "descend", "feed_back"]
