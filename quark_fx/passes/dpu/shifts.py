"""Shift constraints of a DPU, which multiplies powers of two, on the scales of a plan; find the nearest valid scales.

The *position* of a tensor is the number of its fractional bits: its scale is `2**-position`. Every rule is a sum of
positions that must not exceed a bound (`Limit`), positions that must be equal (`System.ties`) or not too low
(`System.floors`), or the three shifts of a product (`Product`).

Source: AMD Quark for ONNX, `quark.onnx.refine` (`adjust_quantize_info`), on the requirements of the DPU's compiler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Name = Any
"""Hashable identifier of a tensor."""

CUT, BIAS = (0, 16), 15
"""Range of the shift from product to output, and largest shift from bias to product."""
READ, WRITE, WRITE_PRODUCT, SWISH = 7, (-7, 25), 32, 15
"""Largest shift between addends, and shifts to the output from a sum, from a product of activations, from a swish."""
SIGMOID_INPUT, SIGMOID_OUTPUT, SIGMOID_SHIFT = (0, 15), 7, 14
"""Range of a hard sigmoid's input position, lowest output position, and largest difference of output and input."""
FREE_BITS = 16
"""Bits of a 24-bit accumulator above the bias's 8: a bias may have this many more fractional bits than the output."""

_FAR = 1 << 8
"""A position below all positions of floats; if lowering reaches it, it does not terminate."""


@dataclass(frozen=True)
class Limit:
    """`sum(plus) - sum(minus) <= bound`.

    Attributes:
        rule: Name of the rule.
        plus: Tensors whose positions may be lowered to satisfy it.
        minus: Other tensors.
        bound: Bound in bits.
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
        bias: Bias tensor, if it has one with a position.
        output: Output tensor.
        leaky: True if a leaky relu follows before the output is rounded.
    """

    input: Name
    weight: Name
    bias: Name | None
    output: Name
    leaky: bool = False


@dataclass
class System:
    """Positions of a graph and their constraints.

    Attributes:
        positions: Calibrated position of every tensor.
        ties: Groups of tensors with equal positions, with the name of the rule.
        limits: Limits on sums of activations' positions.
        floors: Rule, tensor, and its lowest position, at most 7.
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
    """Positions that satisfy a `System`, and the rules that changed each of them."""

    positions: dict[Name, int]
    reasons: dict[Name, tuple[str, ...]]


def settle(system: System) -> Settled:
    """Return positions near the calibrated ones that satisfy all constraints of `system`.

    A position is lowered, which costs bits but saturates nothing, wherever that satisfies a limit, and never further
    than needed given all other positions. A position is raised if it is below a floor or is kept up by one; so are
    weights and biases if the output cannot be lowered, because it is tied to the input, has a floor, or feeds back into
    the input, so that lowering would not terminate. If limits among activations form such a cycle (a tensor tied to a
    result computed from it), the factors of their products get floors of zero, with which lowering terminates.

    The algorithm terminates: positions only decrease, each time by at least one, until all constraints hold or a
    position is below the range of floats. In that case, among the outputs that were lowered last because of their
    weights, the coarsest weight is raised by a bit, which is undone later if it was not needed. If there is none, the
    factors get their floors, which happens once. A system that satisfies all constraints does not change.
    """
    chased, bits = False, Counter[int]()
    while (settling := _settled(system, chased, bits)).stuck:
        if settling.chasing:
            weights = {n: system.positions[system.products[n].weight] + bits[n] for n in settling.chasing}
            bits[min(weights, key=lambda n: weights[n])] += 1
        else:
            chased = True
    for index in list(bits):
        while bits[index] and not (other := _settled(system, chased, bits - Counter([index]))).stuck:
            bits, settling = bits - Counter([index]), other
    settling.raise_again()
    for product in system.products:
        settling.settle_product(product)
    return settling.result()


def _settled(system: System, chased: bool, bits: Counter[int]) -> _Settling:
    settling = _Settling(system, chased, bits)
    settling.settle_activations()
    return settling


class _Settling:
    """The state of `settle`: positions of groups of tied tensors.

    Attributes:
        chased: True if factors of products of activations have floors.
        bits: Number of bits to raise weights by, per index of the product.
        stuck: True if lowering did not terminate.
        chasing: Indices of products with outputs that were lowered last because of their weights.
    """

    def __init__(self, system: System, chased: bool, bits: Counter[int]) -> None:
        self.system, self.chased, self.bits = system, chased, bits
        self.stuck, self.chasing = False, set[int]()
        self.group = _groups(system)
        self.calibrated = {g: min(system.positions[v] for v in vs) for g, vs in _members(self.group).items()}
        self.position = dict(self.calibrated)
        self.reasons: dict[Name, list[str]] = {}
        self.floor: dict[Name, int] = {}
        self.limits = [self._cancelled(limit) for limit in system.limits]
        floors = [(rule, self.group[v], bound) for rule, v, bound in system.floors]
        if chased:
            sides = [(limit.rule, side) for limit in self.limits for side in (limit.plus, limit.minus)]
            floors += [(rule, g, 0) for rule, side in sides if len(side) > 1 for g in side]
        for rule, g, bound in floors:
            self._hold(g, bound, rule)
        if any(self._excess(limit) > 0 for limit in self.limits) or any(self._finer_outputs()):
            self._spread_floors()

    def _cancelled(self, limit: Limit) -> Limit:
        """Return a limit on groups, without groups that are on both sides."""
        plus, minus = (Counter(self.group[v] for v in side) for side in (limit.plus, limit.minus))
        return Limit(limit.rule, tuple((plus - minus).elements()), tuple((minus - plus).elements()), limit.bound)

    def _hold(self, g: Name, bound: int, rule: str) -> bool:
        """Set the floor of a group; return whether it is higher than before."""
        if g in self.floor and self.floor[g] >= bound:
            return False
        self.floor[g] = bound
        if self.position[g] < bound:
            self._move(g, bound, rule)
        return True

    def _spread_floors(self) -> None:
        """Propagate floors to groups whose lowering would violate a limit on a group with a floor.

        Floors may raise positions that nothing would lower, so call it only if something must be lowered. It
        terminates, because floors never exceed the highest initial one, at most 7, and factors at 0 satisfy 0.
        """
        news = True
        while news:
            news = False
            for limit in self.limits:
                if not all(g in self.floor for g in limit.plus) or not limit.minus:
                    continue
                needed = sum(self.floor[g] for g in limit.plus) - limit.bound
                if sum(self.floor.get(g, -math.inf) for g in limit.minus) >= needed:
                    continue
                others = sorted(limit.minus, key=lambda g: (g not in self.floor, self.position[g]))
                for g in others[:-1]:
                    news |= self._hold(g, min(0, needed), limit.rule)
                held = sum(self.floor[g] for g in others[:-1])
                count = others.count(others[-1])
                last = needed - held if count == 1 else -(-needed // count)
                news |= self._hold(others[-1], last, limit.rule)

    def _move(self, g: Name, position: int, rule: str) -> None:
        self.position[g] = position
        reasons = self.reasons.setdefault(g, [])
        if rule not in reasons:
            reasons.append(rule)

    def settle_activations(self) -> None:
        """Lower activations until all their limits hold, and outputs until they fit their products."""
        self.stuck = not self._lower_all()
        while not self.stuck and (lowered := self._coarsen_outputs()):
            # Raising a weight does not help an output that was lowered because of its bias.
            self.chasing = {index for index, rule in lowered.items() if rule == "cut"}
            self.stuck = not self._lower_all() or min(self.position.values()) < -_FAR

    def _lower_all(self) -> bool:
        """Lower until all limits hold; return whether that terminated. With floors on all factors, it always does."""
        while sum(self._lower(limit) for limit in self.limits):
            if not self.chased and min(self.position.values()) < -_FAR:
                return False
        return True

    def _coarsen_outputs(self) -> dict[int, str]:
        """Lower outputs that are finer than their products; return the products' indices, and the rules."""
        lowered = {}
        for index, fitting, rule in self._finer_outputs():
            self._move(self.group[self.system.products[index].output], fitting, rule)
            lowered[index] = rule
        return lowered

    def _finer_outputs(self) -> Iterator[tuple[int, int, str]]:
        """Yield products whose output has meaningless bits, the position it should be lowered to, and the rule."""
        for index, product in enumerate(self.system.products):
            o = self.group[product.output]
            fitting, rule = self._fitting_output(index)
            fitting = max(fitting, self.floor.get(o, fitting))
            if fitting < self.position[o]:
                yield index, int(fitting), rule

    def _fitting_output(self, index: int) -> tuple[float, str]:
        """Return the highest position of an output at which weight and bias need no raising, and the rule."""
        product = self.system.products[index]
        i, w, o = (self.group[v] for v in (product.input, product.weight, product.output))
        if "cut" not in self.system.rules or i == o:
            return math.inf, "cut"  # no output position helps
        fitting = self.position[w] + self.bits[index] + self.position[i] - CUT[0], "cut"
        if product.bias is None or "bias" not in self.system.rules:
            return fitting
        return min(fitting, (self.position[self.group[product.bias]] + BIAS, "bias"))

    def raise_again(self) -> None:
        """Raise positions that are lower than the others require; terminates at the calibrated positions."""
        limits: dict[Name, list[Limit]] = {}
        for limit in self.limits:
            for g in set(limit.plus):
                limits.setdefault(g, []).append(limit)
        makers: dict[Name, list[int]] = {}
        for index, product in enumerate(self.system.products):
            makers.setdefault(self.group[product.output], []).append(index)
        raised = True
        while raised:
            raised = False
            for g, position in self.position.items():
                rooms = [self.calibrated[g] - position]
                rooms += [-self._excess(limit) // limit.plus.count(g) for limit in limits.get(g, ())]
                rooms += [self._fitting_output(index)[0] - position for index in makers.get(g, ())]
                if (room := min(rooms)) > 0:
                    self.position[g] += int(room)
                    raised = True

    def _lower(self, limit: Limit) -> bool:
        changed = False
        while (excess := self._excess(limit)) > 0:
            free = [g for g in limit.plus if g not in self.floor or self.position[g] > self.floor[g]]
            assert free, "floors are spread so that they contradict no limit"
            g = max(free, key=lambda g: self.position[g])
            lowered = self.position[g] - -(-excess // limit.plus.count(g))
            self._move(g, max(lowered, self.floor.get(g, lowered)), limit.rule)
            changed = True
        return changed

    def _excess(self, limit: Limit) -> int:
        plus, minus = (sum(self.position[g] for g in side) for side in (limit.plus, limit.minus))
        return int(plus - minus - limit.bound)

    def settle_product(self, product: Product) -> None:
        """Choose the positions of weight and bias; they exist for any positions of input and output."""
        i, w, o = (self.group[v] for v in (product.input, product.weight, product.output))
        b = None if product.bias is None or "bias" not in self.system.rules else self.group[product.bias]
        read, made = self.position[i], self.position[o]
        low, high = (made - read + cut for cut in CUT) if "cut" in self.system.rules else (-math.inf, math.inf)
        if b is not None:
            # With a bias coarser than this, no weight satisfies both the limit of the bias and the cut.
            self._clamp(b, low + read - BIAS, made + FREE_BITS, "bias")
            self._clamp(w, low, high, "cut")
            self._clamp(w, -math.inf, BIAS + self.position[b] - read, "bias")
            if product.leaky:
                self._clamp(b, -math.inf, self.position[w] + read, "bias")
        else:
            self._clamp(w, low, high, "cut")

    def _clamp(self, g: Name, low: float, high: float, rule: str) -> None:
        if not low <= self.position[g] <= high:
            self._move(g, int(max(low, min(high, self.position[g]))), rule)

    def result(self) -> Settled:
        before, after = self.system.positions, {v: self.position[g] for v, g in self.group.items()}
        lowest = {g: min(before[v] for v in vs) for g, vs in _members(self.group).items()}
        reasons = {}
        for v, g in self.group.items():
            tied = [rule for rule, group in self.system.ties if v in group and before[v] > lowest[g]]
            if after[v] != before[v]:
                reasons[v] = tuple(dict.fromkeys([*tied, *self.reasons.get(g, [])]))
        return Settled(after, reasons)


def _groups(system: System) -> dict[Name, Name]:
    """Return the representative of each tensor's group of tied tensors."""
    leader = {v: v for v in system.positions}

    def find(v: Name) -> Name:
        while leader[v] != v:
            leader[v] = v = leader[leader[v]]
        return v

    for _, group in system.ties:
        for v in group[1:]:
            leader[find(v)] = find(group[0])
    return {v: find(v) for v in leader}


def _members(group: dict[Name, Name]) -> dict[Name, list[Name]]:
    members: dict[Name, list[Name]] = {}
    for v, g in group.items():
        members.setdefault(g, []).append(v)
    return members


def sum_limits(inputs: Iterable[Name], output: Name | None, rules: frozenset[str]) -> list[Limit]:
    """Return the limits of an addition or subtraction."""
    inputs = list(inputs)
    limits = [Limit("read", (a,), (b,), READ) for a in inputs for b in inputs if a != b] if "read" in rules else []
    if output is not None and "write" in rules:
        limits += [Limit("write", (output,), (a,), -WRITE[0]) for a in inputs]
        # The rule concerns the coarsest addend; an addend that is much finer than the output loses nothing.
        limits += [Limit("write", (a,), (output,), WRITE[1]) for a in inputs]
    return limits


def product_limits(inputs: tuple[Name, Name], output: Name, rule: str, most: int) -> list[Limit]:
    """Return the limits of a product of two activations."""
    return [Limit(rule, (output,), inputs, 0), Limit(rule, inputs, (output,), most)]


def sigmoid_limits(read: Name, made: Name | None) -> tuple[list[Limit], list[tuple[str, Name, int]]]:
    """Return limits and floors of a hard sigmoid."""
    rule = "hard_sigmoid"
    limits, floors = [Limit(rule, (read,), (), SIGMOID_INPUT[1])], [(rule, read, SIGMOID_INPUT[0])]
    if made is not None:
        limits.append(Limit(rule, (made,), (read,), SIGMOID_SHIFT))
        floors.append((rule, made, SIGMOID_OUTPUT))
    return limits, floors
