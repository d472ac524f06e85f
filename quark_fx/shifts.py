"""The shifts of a DPU, which multiplies powers of two: what scales a plan may have together, and the nearest that fit.

The *position* of a tensor is the number of its fractional bits: its scale is `2**-position`. Every rule is a sum of
positions that must not exceed a bound (`Limit`), positions that must be equal (`System.ties`) or not too low
(`System.floors`), or the three shifts of a product (`Product`).

Source: AMD Quark for ONNX, `quark.onnx.refine` (`adjust_quantize_info`), on what the compiler of the DPU asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Name = Any
"""Whatever tells tensors apart; hashable."""

CUT, BIAS = (0, 16), 15
"""Product to output, and the most from bias to product."""
READ, WRITE, WRITE_PRODUCT, SWISH = 7, (-7, 25), 32, 15
"""Between addends; from a sum to its output, from a product of activations to its output, and from that of a swish."""
SIGMOID_INPUT, SIGMOID_OUTPUT, SIGMOID_SHIFT = (0, 15), 7, 14
"""Of a hard sigmoid: positions of its input, lowest of its output, and the most that is above its input."""
FREE_BITS = 16
"""Of an accumulator of 24 bits, above 8 of the bias: a bias may be as much finer than the output."""

_FAR = 1 << 10
"""More than the positions of a float's range: lowering that got here does not end."""


@dataclass(frozen=True)
class Limit:
    """`sum(plus) - sum(minus) <= bound`.

    Attributes:
        rule: its name.
        plus: tensors whose positions may be lowered to meet it.
        minus: the others.
        bound: bits.
    """

    rule: str
    plus: tuple[Name, ...]
    minus: tuple[Name, ...]
    bound: int


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product.

    Attributes:
        input: tensor it reads.
        weight: its weight.
        bias: its bias, if it has one with a position.
        output: tensor it makes.
        leaky: a leaky relu follows before anything is rounded.
    """

    input: Name
    weight: Name
    bias: Name | None
    output: Name
    leaky: bool = False


@dataclass
class System:
    """The positions of a graph and what they have to satisfy.

    Attributes:
        positions: of every tensor, as calibrated.
        ties: groups of tensors, with the name of the rule, whose positions are equal.
        limits: sums of activations.
        floors: rule, tensor and the lowest position it may have, at most 7.
        products: operators with weights.
        rules: which of `"cut"` and `"bias"` hold for them.
    """

    positions: dict[Name, int]
    ties: list[tuple[str, tuple[Name, ...]]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    floors: list[tuple[str, Name, int]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    rules: frozenset[str] = frozenset({"cut", "bias"})


@dataclass(frozen=True)
class Settled:
    """Positions that satisfy a `System`, and the rules that changed each."""

    positions: dict[Name, int]
    reasons: dict[Name, tuple[str, ...]]


def settle(system: System) -> Settled:
    """Return positions near those of `system` that satisfy all of it.

    Positions are lowered, which costs bits but cuts nothing off, wherever that meets a limit. Raised are only those
    below a floor, those that a floor holds up, and weights and biases whose output cannot be lowered, or was not within
    two rounds over the products, which long chains of sums may need more of. Limits that chase
    each other in a circle (a tensor tied to what is made of it) get floors of zero for the factors of their products,
    with which lowering ends.
    """
    settling = _Settling(system, chased=False)
    if not settling.settle_activations():
        settling = _Settling(system, chased=True)
        settling.settle_activations()
    for product in system.products:
        settling.settle_product(product)
    return settling.result()


class _Settling:
    """The state of `settle`: positions of groups of tied tensors."""

    def __init__(self, system: System, chased: bool) -> None:
        self.system, self.chased = system, chased
        self.group = _groups(system)
        self.position = {g: min(system.positions[v] for v in vs) for g, vs in _members(self.group).items()}
        self.reasons: dict[Name, list[str]] = {}
        self.floor: dict[Name, int] = {}
        self.limits = [self._cancelled(limit) for limit in system.limits]
        floors = [(rule, self.group[v], bound) for rule, v, bound in system.floors]
        if chased:
            sides = [(limit.rule, side) for limit in self.limits for side in (limit.plus, limit.minus)]
            floors += [(rule, g, 0) for rule, side in sides if len(side) > 1 for g in side]
        for rule, g, bound in floors:
            self._hold(g, bound, rule)
        self._spread_floors()

    def _cancelled(self, limit: Limit) -> Limit:
        """Return a limit on groups, without those on both sides."""
        plus, minus = (Counter(self.group[v] for v in side) for side in (limit.plus, limit.minus))
        return Limit(limit.rule, tuple((plus - minus).elements()), tuple((minus - plus).elements()), limit.bound)

    def _hold(self, g: Name, bound: int, rule: str) -> bool:
        """Give a group a floor; tell whether it is news."""
        if g in self.floor and self.floor[g] >= bound:
            return False
        self.floor[g] = bound
        if self.position[g] < bound:
            self._move(g, bound, rule)
        return True

    def _spread_floors(self) -> None:
        """Give floors to what could otherwise be lowered below what a floor holds up.

        Ends, as no floor is above the highest given one, of at most 7, and 0 is met by factors at 0.
        """
        news = True
        while news:
            news = False
            for limit in self.limits:
                if not all(g in self.floor for g in limit.plus) or not limit.minus:
                    continue
                needed = sum(self.floor[g] for g in limit.plus) - limit.bound
                others = sorted(limit.minus, key=lambda g: self.position[g])
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

    def settle_activations(self) -> bool:
        """Lower activations until all their limits hold, outputs finer than their products too; tell if that ended."""
        ended = self._lower_all()
        for _ in range(2 if "cut" in self.system.rules else 0):
            for product in self.system.products:
                ended = ended and (not self._coarsen_output(product) or self._lower_all())
        return ended

    def _lower_all(self) -> bool:
        # A chain of limits takes as many rounds as it has links; with floors on all factors, every circle ends.
        rounds = 2 * len(self.limits) + 8
        while self.chased or (rounds and min(self.position.values(), default=0) > -_FAR):
            lowered = sum(self._lower(limit) for limit in self.limits)
            if not lowered:
                return True
            rounds -= 1
        return False

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
        return plus - minus - limit.bound

    def _coarsen_output(self, product: Product) -> bool:
        """Lower an output that is finer than its products, which has bits that say nothing; tell whether it was."""
        i, w, o = (self.group[v] for v in (product.input, product.weight, product.output))
        wanted = self.position[w] + self.position[i] - CUT[0]
        wanted = max(wanted, self.floor.get(o, wanted))
        if i == o or self.position[o] <= wanted:
            return False
        self._move(o, wanted, "cut")
        return True

    def settle_product(self, product: Product) -> None:
        """Choose the positions of weight and bias; whatever input and output are, there are some."""
        i, w, o = (self.group[v] for v in (product.input, product.weight, product.output))
        b = None if product.bias is None or "bias" not in self.system.rules else self.group[product.bias]
        read, made = self.position[i], self.position[o]
        low, high = (made - read + cut for cut in CUT) if "cut" in self.system.rules else (-math.inf, math.inf)
        if b is not None:
            # A bias coarser than this has no weight beside it that satisfies both its own limit and the cut.
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
        # The rule is about the coarsest addend. Those finer than the output by more have nothing to lose.
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
