"""The shifts of a DPU, which multiplies powers of two: what scales a plan may have together, and the nearest that fit.

The *position* of a tensor is the number of its fractional bits: its scale is `2**-position`. Every rule is a sum of
positions that must not exceed a bound (`Limit`), positions that must be equal (`System.ties`) or not too low
(`System.floors`), or the three shifts of a product (`Product`).

Source: AMD Quark for ONNX, `quark.onnx.refine` (`adjust_quantize_info`), on what the compiler of the DPU asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
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

_FAR = 1 << 8
"""Below the positions of all floats: lowering that got here does not end."""


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

    Positions are lowered, which costs bits but cuts nothing off, wherever that meets a limit, and none so far that it
    could be higher with all others as they are. Raised are those below a floor or held up by one, and weights and
    biases whose output cannot be lowered: it is tied to the input, has a floor, or is read again by what makes the
    input, so that lowering chases itself in a circle. Limits among activations that do so (a tensor tied to what is
    made of it) get floors of zero for the factors of their products, with which lowering ends.

    It ends: positions only go down, each time by one at least, until all holds or one is below any that a float has.
    Then, of the outputs that were lowered last because of their weights, the coarsest weight is raised by a bit, which
    is taken back later where it was not needed. If there is none, the factors get their floors, which happens once. A
    system that satisfies everything stays as it is.
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
        chased: factors of products of activations have floors.
        bits: by the index of a product, how far its weight will be raised.
        stuck: lowering did not end.
        chasing: indices of products whose output was lowered last for its weight.
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

        Floors may raise positions that nothing would lower, so call it only where something has to be lowered. It ends,
        as no floor is above the highest given one, of at most 7, and 0 is met by factors at 0.
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
            # Raising a weight does not help an output that was lowered for its bias.
            self.chasing = {index for index, rule in lowered.items() if rule == "cut"}
            self.stuck = not self._lower_all() or min(self.position.values()) < -_FAR

    def _lower_all(self) -> bool:
        """Lower until all limits hold; tell if that ended. With floors on all factors, every circle does."""
        while sum(self._lower(limit) for limit in self.limits):
            if not self.chased and min(self.position.values()) < -_FAR:
                return False
        return True

    def _coarsen_outputs(self) -> dict[int, str]:
        """Lower outputs finer than their products; return whose were, and the rules."""
        lowered = {}
        for index, fitting, rule in self._finer_outputs():
            self._move(self.group[self.system.products[index].output], fitting, rule)
            lowered[index] = rule
        return lowered

    def _finer_outputs(self) -> Iterator[tuple[int, int, str]]:
        """Yield products whose output has bits that say nothing, the position it should be lowered to, and the rule."""
        for index, product in enumerate(self.system.products):
            o = self.group[product.output]
            fitting, rule = self._fitting_output(index)
            fitting = max(fitting, self.floor.get(o, fitting))
            if fitting < self.position[o]:
                yield index, int(fitting), rule

    def _fitting_output(self, index: int) -> tuple[float, str]:
        """Return the highest position of an output for which weight and bias need no raising, and the rule."""
        product = self.system.products[index]
        i, w, o = (self.group[v] for v in (product.input, product.weight, product.output))
        if "cut" not in self.system.rules or i == o:
            return math.inf, "cut"  # no position of the output helps
        fitting = self.position[w] + self.bits[index] + self.position[i] - CUT[0], "cut"
        if product.bias is None or "bias" not in self.system.rules:
            return fitting
        return min(fitting, (self.position[self.group[product.bias]] + BIAS, "bias"))

    def raise_again(self) -> None:
        """Raise what was lowered further than the others need as they are now. Ends, as nothing passes calibration."""
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
