"""Search space: groups of operators, with the size and error of each group for each candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from torch import Tensor
from torch.fx import GraphModule

from quark_fx.analysis.switches import RoundedValue, SwitchedGraph
from quark_fx.analysis.trials import Trials
from quark_fx.config.quant_config import OperatorSpecs, QuantConfig
from quark_fx.errors import ConfigError
from quark_fx.mixed_precision.candidates import Candidate, base_of, is_expressible, mixed
from quark_fx.mixed_precision.groups import Group, groups_of
from quark_fx.mixed_precision.program import choose
from quark_fx.mixed_precision.result import Choice, Point
from quark_fx.plan.placement import PlannedOperator
from quark_fx.plan.report import Row, stored_size
from quark_fx.system.isolation import without_warnings

_HALF = 0.5
"""Fraction of the rounding errors at which the slope of the error is computed.

If the error is quadratic in the rounding errors, the slope at any fraction gives the contribution of each operator. At
2 bits, the error is far from quadratic, and the slope at the full rounding errors is too steep. The slope at half of
them is closer to the contribution of an operator if the other operators have more bits.
"""

_POINTS = 24
"""Number of sizes at which the curve is computed."""

_GAP = 1e-3
"""Accepted excess of the error of a curve's point over the least error, as a fraction of the least error."""


@dataclass(frozen=True)
class Space:
    """Candidates, operators, and the costs of each group for each candidate.

    Attributes:
        candidates: Candidates.
        operators: Operators of the float graph.
        groups: Groups that at least one candidate quantizes.
        rows: Report rows of all operators, by candidate.
        errors: Estimated errors, by group and candidate; infinite if a configuration cannot express the choice, or
            the outputs are not finite.
        float_graph: Float graph that contains the operators.
        latencies: Estimated latencies in milliseconds, by group and candidate; empty unless the budget is a latency.
        shares: Ratio of written to reported bytes of the weights, by candidate; empty if the budget does not limit the
            size of files.
        overhead: Number of bytes of a file that do not depend on weights or the candidate.
    """

    candidates: Sequence[Candidate]
    operators: Sequence[PlannedOperator]
    groups: Sequence[Group]
    rows: Sequence[Sequence[Row]]
    errors: Sequence[Sequence[float]]
    float_graph: GraphModule
    latencies: Sequence[Sequence[float]] = ()
    shares: Sequence[float] = ()
    overhead: int = 0

    @classmethod
    def measure(cls, trials: Trials, candidates: Sequence[Candidate]) -> Self:
        """Convert a model with each candidate, and run a forward and a backward pass of each converted model."""
        trials.targets()
        float_graph = trials.convert(candidates[0].config).float_graph
        operators, groups = groups_of(float_graph)
        rows, errors = list[list[Row]](), list[list[float]]()
        for candidate in candidates:
            with without_warnings():
                conversion = trials.convert(candidate.config)
            graph = SwitchedGraph(conversion.float_graph, conversion.gm, conversion.plan)
            _, slopes = trials.slopes(graph, _HALF)
            rows.append(conversion.rows)
            added = _by_operator(graph.rounded, slopes / (2 * _HALF))
            errors.append([_error(group, candidate, operators, added) for group in groups])
        free = [g for g, group in enumerate(groups) if any(not row[i].reason for row in rows for i in group.places)]
        if not free:
            raise ConfigError(
                "no candidate quantizes an operator of this model; quantize with one of them and see its report()"
            )
        by_group = [[of_candidate[g] for of_candidate in errors] for g in free]
        for g, of_group in zip(free, by_group, strict=True):
            if any(map(math.isnan, of_group)) and not any(map(math.isfinite, of_group)):
                raise ConfigError(
                    f"no candidate gives finite outputs and derivatives on the calibration data, so the error of "
                    f"{groups[g].names[0]!r} is unknown; add a candidate with a wider range, such as 'float'"
                )
            if not any(map(math.isfinite, of_group)):
                raise ConfigError(
                    f"every candidate has different formats for operators that share the name {groups[g].names[0]!r}, "
                    "which override patterns cannot tell apart; exclude these operators, or add a candidate with the "
                    "same format for all of them"
                )
        group_errors = [[math.inf if math.isnan(error) else error for error in of_group] for of_group in by_group]
        return cls(candidates, operators, [groups[g] for g in free], rows, group_errors, float_graph)

    def timed(self, alone: Sequence[Sequence[float]], whole: Sequence[float]) -> Self:
        """Return a space with latencies of groups; for each candidate, they add up to the latency of the whole model.

        The latencies of operators that run alone only determine their shares of this sum: alone, operators also convert
        their inputs and outputs, which is unnecessary between operators with the same formats.

        Args:
            alone: Milliseconds of each group's operators, timed alone, by group and candidate.
            whole: Milliseconds of the whole model, by candidate.
        """
        sums = [sum(of_candidate) for of_candidate in zip(*alone, strict=True)]
        shares = [one / total for one, total in zip(whole, sums, strict=True)]
        return replace(self, latencies=[[a * s for a, s in zip(row, shares, strict=True)] for row in alone])

    def written(self, whole: Sequence[int]) -> Self:
        """Return a space with the sizes of written weights; for each candidate, sizes add up to the size of its file.

        Args:
            whole: Size of the file in bytes, by candidate.
        """
        totals = [sum(of_candidate) for of_candidate in zip(*self.sizes, strict=True)]
        more = [size - self.fixed - total for size, total in zip(whole, totals, strict=True)]
        shares = [1 + (one - min(more)) / (total or 1) for one, total in zip(more, totals, strict=True)]
        return replace(self, shares=shares, overhead=min(more))

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Sizes of the weights in bytes, by group and candidate."""
        shares = self.shares or [1.0] * len(self.rows)
        columns = [*zip(self.rows, shares, strict=True)]
        return [[math.ceil(group.size(rows) * share) for rows, share in columns] for group in self.groups]

    @cached_property
    def weights(self) -> dict[str, int]:
        """Number of values of each weight that at least one candidate quantizes; the keys are names of weights."""
        return {name: count for group in self.groups for name, count in group.weights.items()}

    @cached_property
    def fixed(self) -> int:
        """Size in bytes of all other weights, and of the other parts of a file."""
        return self.overhead + stored_size(self.rows[0]) - sum(group.size(self.rows[0]) for group in self.groups)

    def bits(self, size: float) -> float:
        """Return the average bits per weight if the weights of all groups take `size` bytes."""
        return 8 * size / (sum(self.weights.values()) or 1)

    def bits_of(self, rows: Sequence[Row]) -> float:
        """Return the average bits per weight, from the rows of a report."""
        return self.bits(stored_size([row for row in rows if row.parameter in self.weights]))

    def total(self, chosen: Sequence[int]) -> int:
        """Return the size in bytes of the weights of all groups for a choice, a candidate index per group."""
        return sum(row[i] for row, i in zip(self.sizes, chosen, strict=True))

    def latency(self, chosen: Sequence[int]) -> float | None:
        """Return the estimated milliseconds of a call for a choice; `None` unless the budget is a latency."""
        if not self.latencies:
            return None
        return sum(row[i] for row, i in zip(self.latencies, chosen, strict=True))

    def error(self, chosen: Sequence[int]) -> float:
        """Return the estimated error of a choice."""
        return sum(row[i] for row, i in zip(self.errors, chosen, strict=True))

    def settled(self, chosen: Sequence[int]) -> list[int]:
        """Return an equivalent choice: groups that get the same specs from the most frequent candidate use it."""
        most = max(range(len(self.candidates)), key=[*chosen].count)
        pairs = zip(self.groups, chosen, strict=True)
        return [most if self._specs(group, most) == self._specs(group, i) else i for group, i in pairs]

    def _specs(self, group: Group, candidate: int) -> list[OperatorSpecs | None]:
        return [self.candidates[candidate].specs(self.operators[i]) for i in group.places]

    def config(self, chosen: Sequence[int]) -> QuantConfig:
        """Return the configuration of a choice."""
        return mixed(self.candidates, self.operators, self._by_place(chosen))

    def preset(self, chosen: Sequence[int]) -> str:
        """Return the name of the preset that `config` is based on; empty if none."""
        return base_of(self.candidates, self._by_place(chosen)).preset

    def _by_place(self, chosen: Sequence[int]) -> list[int]:
        most = max(range(len(self.candidates)), key=[*chosen].count)
        indices = [most] * len(self.operators)  # default for operators that no candidate quantizes
        for group, i in zip(self.groups, chosen, strict=True):
            for place in group.places:
                indices[place] = i
        return indices

    def curve(self) -> list[Point]:
        """Return the points with the least error for their size or latency, the smallest or fastest first."""
        costs = self.latencies or self.sizes
        low = least(costs, self.errors)
        best = [min(range(len(row)), key=row.__getitem__) for row in self.errors]
        high = sum(row[i] for row, i in zip(costs, best, strict=True))
        points: list[Point] = []
        for step in range(_POINTS):
            chosen = choose(self.errors, costs, low + (high - low) * step / (_POINTS - 1), gap=_GAP)
            if chosen is not None and (not points or self.error(chosen) < points[-1].error):
                points.append(self.point(chosen))
        return points

    def point(self, chosen: Sequence[int]) -> Point:
        """Return the bits, size, error, and latency of a choice, all estimated."""
        error, latency = self.error(chosen), self.latency(chosen)
        reported = sum(group.size(self.rows[i]) for group, i in zip(self.groups, chosen, strict=True))
        return Point(bits=self.bits(reported), size=self.fixed + self.total(chosen), error=error, latency=latency)

    def choices(self, chosen: Sequence[int]) -> list[Choice]:
        """Return the results of all groups for a choice."""
        results = []
        latencies = self.latencies or [()] * len(self.groups)
        columns = zip(self.groups, chosen, self.sizes, self.errors, latencies, strict=True)
        for group, i, sizes, errors, times in columns:
            formats = dict.fromkeys(self.rows[i][place].weight or "float" for place in group.places)
            count, size = sum(group.weights.values()), group.size(self.rows[i])
            results.append(
                Choice(
                    operators=group.names,
                    candidate=self.candidates[i].name,
                    weight=", ".join(formats),
                    bits=8 * size / count if count else 0.0,
                    size=sizes[i],
                    errors=tuple(errors),
                    latencies=tuple(times),
                )
            )
        return results


def least(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]]) -> float:
    """Return the sum over all groups of the smallest cost among candidates with a finite error."""
    pairs = (zip(*rows, strict=True) for rows in zip(costs, errors, strict=True))
    return sum(min(cost for cost, error in row if math.isfinite(error)) for row in pairs)


def _by_operator(rounded: Sequence[RoundedValue], added: Tensor) -> dict[str, float]:
    """Return the error that each operator's roundings add, by node name.

    The error of a value that several operators read is split evenly among them.
    """
    errors: dict[str, float] = {}
    for value, error in zip(rounded, added.tolist(), strict=True):
        for name in value.operators:
            errors[name] = errors.get(name, 0.0) + error / len(value.operators)
    return errors


def _error(group: Group, candidate: Candidate, operators: Sequence[PlannedOperator], added: dict[str, float]) -> float:
    members = [operators[i] for i in group.places]
    if not is_expressible(candidate, members):
        return math.inf
    # Interactions with other operators' roundings can make an estimate negative; use its magnitude as the error.
    return abs(sum(added.get(name, 0.0) for name in dict.fromkeys(op.node.name for op in members)))


__all__ = ["Space", "least"]
