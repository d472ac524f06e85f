"""Integer program that chooses one option per group, with the least total cost under a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_CUTS = 32
"""Number of solutions to forbid one by one; the solver computes in floats and may exceed the limit by its tolerance."""

_SLACK = 1e-4
"""Fraction of the limit that stays unused if forbidding solutions is not enough."""

_SECONDS = 60.0
"""Time limit of the solver in seconds; it then returns the best solution so far."""


def choose(
    costs: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], limit: float, *, gap: float = 0.0
) -> list[int] | None:
    """Choose one option per group, with the least total cost and a total weight of at most `limit`.

    Args:
        costs: Costs, by group and option; infinite for forbidden options.
        weights: Weights, by group and option, at least 0.
        limit: Largest total weight.
        gap: Accepted excess over the least total cost, as a fraction of that cost.

    Returns:
        Index of one option per group; `None` if no choice meets the limit.
    """
    lightest = [min(range(len(row)), key=lambda i: (math.isinf(costs[g][i]), row[i])) for g, row in enumerate(weights)]
    if _total(weights, lightest) > limit or math.isinf(_total(costs, lightest)):
        return None
    cuts: list[list[int]] = []
    while costs and len(cuts) <= _CUTS:
        solution = _solved(costs, weights, limit * (1 - _SLACK * (len(cuts) == _CUTS)), gap, cuts)
        if solution is None:
            break
        if _total(weights, solution) <= limit:
            return solution
        cuts.append(solution)
    return lightest


def _total(numbers: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
    return sum(row[i] for row, i in zip(numbers, chosen, strict=True))


def _solved(
    costs: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    limit: float,
    gap: float,
    cuts: Sequence[Sequence[int]],
) -> list[int] | None:
    from scipy import sparse
    from scipy.optimize import LinearConstraint, milp

    flat, weight = (np.concatenate([np.asarray(row, dtype=np.float64) for row in rows]) for rows in (costs, weights))
    allowed = np.isfinite(flat) & np.isfinite(weight)
    owner = np.repeat(np.arange(len(costs)), [len(row) for row in costs])
    one_each = sparse.csr_array((np.ones(len(flat)), (owner, np.arange(len(flat)))))
    starts = np.searchsorted(owner, np.arange(len(costs)))
    forbidden = np.zeros((len(cuts), len(flat)))
    for row, cut in zip(forbidden, cuts, strict=True):
        row[starts + np.asarray(cut)] = 1
    # The tolerances of the solver suit numbers near 1.
    (cost, weight), unit = np.where(allowed, (flat, weight), 0.0), limit or 1.0
    solution = milp(
        cost / (np.abs(cost).max() or 1.0),
        integrality=np.ones(len(flat)),
        bounds=(0, allowed.astype(np.float64)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(weight[None] / unit, -np.inf, limit / unit),
            *([LinearConstraint(forbidden, -np.inf, len(costs) - 1)] if cuts else []),
        ],
        options={"mip_rel_gap": gap, "time_limit": _SECONDS},
    )
    if solution.x is None:
        return None
    return [int(part.argmax()) for part in np.split(solution.x, starts[1:])]


__all__ = ["choose"]
