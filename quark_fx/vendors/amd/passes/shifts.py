"""Constraints on power-of-two scales from the shifts that a DPU supports, and a solver for the nearest valid scales.

The *position* of a tensor is the number of its fractional bits: its scale is `2**-position`. A rule bounds a sum of
positions (`Limit`), requires equal positions (`System.ties`) or a lowest position (`System.floors`), or bounds the
shifts of a convolution or matrix product (`Product`).

Source: AMD Quark for ONNX, `quark.onnx.refine` (`adjust_quantize_info`), on the requirements of the DPU's compiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Name = Any
"""Hashable identifier of a tensor."""

CUT, BIAS = (0, 16), 15
"""Range of the shift from product to output, and largest shift from bias to product, in bits."""
READ, WRITE, WRITE_PRODUCT, SWISH = 7, (-7, 25), 32, 15
"""Largest shift between addends; range of the shift from a sum to its output; largest shift from a product of two
activations to its output, and from the product of a swish to its output."""
SIGMOID_INPUT, SIGMOID_OUTPUT, SIGMOID_SHIFT = (0, 15), 7, 14
"""Range of a hard sigmoid's input position, its lowest output position, and their largest difference in bits."""
FREE_BITS = 16
"""Bits of a 24-bit accumulator above the bias's 8: a bias may have this many more fractional bits than the output."""

_FAR = 1 << 8
"""Bound on the magnitude of positions, beyond the position of any float. Limits that would lower tensors without end
stop at this bound."""


@dataclass(frozen=True)
class Limit:
    """A bound on positions: `sum(plus) - sum(minus) <= bound`.

    Attributes:
        rule: Name of the rule.
        plus: Tensors whose positions are added; lowering a position helps to satisfy the limit.
        minus: Tensors whose positions are subtracted.
        bound: Largest difference of the two sums, in bits.
    """

    rule: str
    plus: tuple[Name, ...]
    minus: tuple[Name, ...]
    bound: int


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product.

    Attributes:
        input: Input tensor.
        weight: Weight tensor.
        bias: Bias tensor; `None` without a quantized bias.
        output: Output tensor.
        leaky: Whether a leaky relu is applied before the output is rounded.
    """

    input: Name
    weight: Name
    bias: Name | None
    output: Name
    leaky: bool = False

    def limits(self, rules: frozenset[str]) -> Iterator[Limit]:
        """Yield the limits on the shifts of the product that belong to `rules`."""
        factors = (self.input, self.weight)
        if "cut" in rules:
            yield Limit("cut", (self.output,), factors, -CUT[0])
            yield Limit("cut", factors, (self.output,), CUT[1])
        if self.bias is not None and "bias" in rules:
            yield Limit("bias", factors, (self.bias,), BIAS)
            yield Limit("bias", (self.bias,), (self.output,), FREE_BITS)
            if "cut" in rules:  # the sum of the first "cut" and the first "bias" limit, in which the factors cancel
                yield Limit("bias", (self.output,), (self.bias,), BIAS - CUT[0])
            if self.leaky:
                yield Limit("bias", (self.bias,), factors, 0)


@dataclass
class System:
    """Positions of a graph and their constraints.

    Attributes:
        positions: Calibrated position of every tensor.
        ties: Groups of tensors that must have equal positions, with the name of the rule.
        limits: Limits on sums of activations' positions.
        floors: Lowest positions, each with the name of the rule and the tensor; at most 7.
        products: Operators with weights.
        rules: Subset of `"cut"` and `"bias"` that applies to the products.
    """

    positions: dict[Name, int]
    ties: list[tuple[str, tuple[Name, ...]]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    floors: list[tuple[str, Name, int]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    rules: frozenset[str] = frozenset({"cut", "bias"})


@dataclass(frozen=True)
class Settled:
    """Positions that satisfy a `System`, and the names of the rules that changed each position."""

    positions: dict[Name, int]
    reasons: dict[Name, tuple[str, ...]]


def settle(system: System) -> Settled:
    """Return the positions nearest to the calibrated positions that satisfy all constraints of `system`.

    The positions solve an integer program with four objectives, each subject to the objectives before it:

    1. Raise activations by as few bits as possible. Floors require raising, and so do limits on a tensor that is tied
       to a result computed from it, because lowering both would never satisfy them.
    2. Raise weights and biases by as few bits as possible: if lowering the output satisfies a limit, too, the output is
       lowered, which costs bits but saturates no values.
    3. Lower activations by as few bits as possible.
    4. Change weights and biases by as few bits as possible, weights rather than biases.

    Among equally good solutions, a solution that raises positions below 0 is preferred, then one that changes tensors
    with higher positions. If the position of a factor in a product of activations is negative and has to be raised, it
    is raised to at least 0; if objective 1 cannot be solved with the biases unchanged, all negative positions of
    factors are raised to 0. A system that already satisfies all constraints does not change.
    """
    if not system.positions:
        return Settled({}, {})
    program = _Program(system)
    position = program.calibrated + program.changes()
    positions = {tensor: int(position[g]) for tensor, g in program.group.items()}
    reasons = {}
    for tensor in (tensor for tensor in positions if positions[tensor] != system.positions[tensor]):
        g = program.group[tensor]
        rules = [rule for rule, tied in system.ties if tensor in tied]
        rules = rules if system.positions[tensor] > program.calibrated[g] else []
        reasons[tensor] = tuple(dict.fromkeys([*rules, *program.broken(g, position)]))
    return Settled(positions, reasons)


class _Program:
    """The integer program of `settle`, on groups of tied tensors.

    The unknowns of a group are three numbers of bits, each at least 0: the change down, the change up to position 0,
    and the change up beyond position 0.

    Attributes:
        group: Index of each tensor's group.
        calibrated: Lowest calibrated position in each group, shape `(groups,)`.
        limits: Rule, coefficients by group, and bound of every constraint except the ties.
    """

    def __init__(self, system: System) -> None:
        self.group = _groups(system)
        self.calibrated = np.full(max(self.group.values()) + 1, _FAR)
        np.minimum.at(self.calibrated, list(self.group.values()), list(system.positions.values()))
        activations = [self._of_groups(limit) for limit in system.limits]
        self.factors = {g for _, s, _ in activations for g in s if sum(abs(f) for f in s.values() if f * s[g] > 0) > 1}
        floors = [Limit(rule, (), (tensor,), -bound) for rule, tensor, bound in system.floors]
        products = [limit for product in system.products for limit in product.limits(system.rules)]
        self.limits = [*map(self._of_groups, (*floors, *products)), *activations]
        self.weights = np.zeros(len(self.calibrated), bool)
        self.biases, self.free_biases = self.weights.copy(), self.weights.copy()
        for product in system.products:
            self.weights[self.group[product.weight]] = True
            if product.bias is not None:
                self.biases[self.group[product.bias]] = True
                # Input and output are tied, so lowering the output cannot replace raising this bias.
                self.free_biases[self.group[product.bias]] |= self.group[product.input] == self.group[product.output]

    def _of_groups(self, limit: Limit) -> tuple[str, dict[int, int], int]:
        sums = Counter(self.group[tensor] for tensor in limit.plus)
        sums.subtract(self.group[tensor] for tensor in limit.minus)
        return limit.rule, {g: factor for g, factor in sums.items() if factor}, limit.bound

    def broken(self, g: int, position: np.ndarray) -> list[str]:
        """Return the rules that the calibrated position of group `g` breaks, given the positions of all other groups.

        For an activation, rules that a change of a weight or bias could satisfy are left out.
        """
        trial, constant = position.copy(), self.weights | self.biases
        trial[g] = self.calibrated[g]
        lowered = position[g] < trial[g]
        return [
            rule
            for rule, sums, bound in self.limits
            if g in sums
            and sum(f * trial[h] for h, f in sums.items()) > bound
            and (constant[g] or not any(constant[h] and (f > 0 or not lowered) for h, f in sums.items()))
        ]

    def changes(self) -> np.ndarray:
        """Solve the integer program and return the change of each group's position, in bits."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array, hstack

        calibrated, count = self.calibrated, len(self.calibrated)
        entries = [(row, g, f) for row, (_, sums, _) in enumerate(self.limits) for g, f in sums.items()]
        rows, columns, coefficients = np.array(entries, int).reshape(-1, 3).T
        sums = coo_array((coefficients, (rows, columns)), (len(self.limits), count)).tocsr()
        room: Any = np.array([bound for *_, bound in self.limits], int) - sums @ calibrated
        if (room >= 0).all():
            return np.zeros(count, int)
        limits = LinearConstraint(hstack([-sums, sums, sums]), -np.inf, room)

        upper: Any = np.stack([calibrated + _FAR, np.maximum(-calibrated, 0), _FAR - np.maximum(calibrated, 0)])
        lower: Any = np.zeros_like(upper)
        finest_first = np.argsort(np.argsort(-calibrated, kind="stable")) / count
        price = 1 + 1e-3 * finest_first + np.array([[0], [0], [1e-2]])
        price[:, self.biases] *= 2

        def solve(which: np.ndarray) -> np.ndarray | None:
            """Return the unknowns that minimize the sum of the unknowns in `which`; `None` if the limits conflict."""
            cost, bounds = np.where(which, price, 0).ravel(), Bounds(lower.ravel(), upper.ravel())
            for integer in (False, True):  # without products of activations, the linear program's vertices are integers
                # With presolve, HiGHS 1.12 returns worse integer solutions, and calls them optimal.
                options = {"mip_rel_gap": 0, "presolve": not integer}
                x = milp(cost, integrality=int(integer), bounds=bounds, constraints=limits, options=options).x
                if x is None or np.abs(x - x.round()).max() < 1e-6:
                    break
            return None if x is None else np.asarray(x).round().astype(int).reshape(lower.shape)

        up, constant = np.array([[False], [True], [True]]), self.weights | self.biases
        below = np.isin(np.arange(count), list(self.factors)) & (calibrated < 0)
        free = upper.copy()
        upper[1:, self.biases & ~self.free_biases] = 0
        while (bits := solve(up & ~constant)) is not None and (low := below & (bits[1] > lower[1])).any():
            upper[0, low], lower[1, low] = 0, -calibrated[low]
        if bits is None:
            upper, free[0, below], lower[1, below] = free, 0, -calibrated[below]
        for which in (up & ~constant, up & constant & ~self.free_biases, ~up & ~constant, np.full(lower.shape, True)):
            bits = solve(which)
            assert bits is not None, (
                "no solution, although activations at 7, and weights and biases at 0, satisfy all constraints"
            )
            lower[which] = upper[which] = bits[which]
        return np.asarray(lower[1] + lower[2] - lower[0])


def _groups(system: System) -> dict[Name, int]:
    """Return the index of each tensor's group of tied tensors."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    index = {tensor: i for i, tensor in enumerate(system.positions)}
    pairs = [(index[tied[0]], index[tensor]) for _, tied in system.ties for tensor in tied[1:]]
    graph = coo_array((np.ones(len(pairs)), np.array(pairs, int).reshape(-1, 2).T), (len(index), len(index)))
    return dict(zip(index, connected_components(graph, directed=False)[1].tolist(), strict=True))


def sum_limits(inputs: Iterable[Name], output: Name | None, rules: frozenset[str]) -> list[Limit]:
    """Return the limits on the shifts of an addition or subtraction."""
    inputs = list(inputs)
    limits = [Limit("read", (a,), (b,), READ) for a in inputs for b in inputs if a != b] if "read" in rules else []
    if output is not None and "write" in rules:
        limits += [Limit("write", (output,), (a,), -WRITE[0]) for a in inputs]
        # The rule restricts the coarsest addend only. The other limits are harmless: an addend that is much finer than
        # the output can become coarser without loss.
        limits += [Limit("write", (a,), (output,), WRITE[1]) for a in inputs]
    return limits


def product_limits(inputs: tuple[Name, Name], output: Name, rule: str, most: int) -> list[Limit]:
    """Return the limits on the shift of a product of two activations, which must be from 0 to `most`."""
    return [Limit(rule, (output,), inputs, 0), Limit(rule, inputs, (output,), most)]


def sigmoid_limits(read: Name, output: Name | None) -> tuple[list[Limit], list[tuple[str, Name, int]]]:
    """Return the limits and floors on the positions of a hard sigmoid's input (`read`) and output."""
    rule = "hard_sigmoid"
    limits, floors = [Limit(rule, (read,), (), SIGMOID_INPUT[1])], [(rule, read, SIGMOID_INPUT[0])]
    if output is not None:
        limits.append(Limit(rule, (output,), (read,), SIGMOID_SHIFT))
        floors.append((rule, output, SIGMOID_OUTPUT))
    return limits, floors
