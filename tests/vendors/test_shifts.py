"""Positions that satisfy the shifts of a DPU: hand-computed cases, and random systems."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quark_fx.vendors.amd.passes import shifts
from quark_fx.vendors.amd.passes.shifts import Product, Settled, System, settle

ADD = frozenset({"read", "write"})


def added(a: int, b: int, out: int) -> Settled:
    return settle(System({"a": a, "b": b, "out": out}, limits=shifts.sum_limits("ab", "out", ADD)))


def multiplied(a: int, b: int, out: int, most: int = shifts.WRITE_PRODUCT) -> Settled:
    return settle(System({"a": a, "b": b, "out": out}, limits=shifts.product_limits(("a", "b"), "out", "write", most)))


def product(i: int, w: int, o: int, b: int | None = None, *, leaky: bool = False) -> Settled:
    known = {"i": i, "w": w, "o": o} | ({} if b is None else {"b": b})
    return settle(System(dict(known), products=[Product("i", "w", None if b is None else "b", "o", leaky)]))


def sigmoid(read: int, made: int) -> Settled:
    limits, floors = shifts.sigmoid_limits("x", "y")
    return settle(System({"x": read, "y": made}, limits=limits, floors=floors))


CASES: dict[str, tuple[Settled, dict[Hashable, int]]] = {
    "nothing binds": (added(5, 3, 4), {"a": 5, "b": 3, "out": 4}),
    "read: 12 - 3 = 9 bits between addends, 7 allowed": (added(12, 3, 3), {"a": 10, "b": 3, "out": 3}),
    "read at the limit": (added(10, 3, 3), {"a": 10, "b": 3, "out": 3}),
    "write: a sum 9 bits finer than its coarsest addend, 7 allowed": (added(3, 4, 12), {"a": 3, "b": 4, "out": 10}),
    "write: addends 27 and 28 bits finer than the sum, 25 allowed": (added(27, 28, 0), {"a": 25, "b": 25, "out": 0}),
    "write: a product finer than its factors": (multiplied(2, 3, 6), {"a": 2, "b": 3, "out": 5}),
    "write: a product 35 bits coarser, 32 allowed": (multiplied(20, 15, 0), {"a": 17, "b": 15, "out": 0}),
    "swish: 19 bits, 15 allowed": (multiplied(12, 7, 0, shifts.SWISH), {"a": 8, "b": 7, "out": 0}),
    "cut: 7 + 14 - 2 = 19, 16 allowed": (product(7, 14, 2), {"i": 7, "w": 11, "o": 2}),
    "cut at the limits": (product(7, 11, 2), {"i": 7, "w": 11, "o": 2}),
    "cut: an output 2 bits finer than its products": (product(3, 4, 9), {"i": 3, "w": 4, "o": 7}),
    "bias: 7 + 9 - 0 = 16, 15 allowed": (product(7, 9, 4, 0), {"i": 7, "w": 8, "o": 4, "b": 0}),
    "bias: 24 bits finer than the output, 16 allowed": (product(7, 8, 0, 24), {"i": 7, "w": 8, "o": 0, "b": 16}),
    "bias: finer than the product by what the cut leaves": (product(7, 8, 5, 21), {"i": 7, "w": 8, "o": 5, "b": 21}),
    "bias: none finer before a leaky relu": (product(7, 8, 5, 21, leaky=True), {"i": 7, "w": 8, "o": 5, "b": 15}),
    "bias and cut: an output 16 bits finer than the bias": (product(0, 30, 20, 4), {"i": 0, "w": 19, "o": 19, "b": 4}),
    "hard sigmoid: an input of range 512": (sigmoid(-2, 7), {"x": 0, "y": 7}),
    "hard sigmoid: an input of range 2**-9": (sigmoid(16, 7), {"x": 15, "y": 7}),
    "hard sigmoid: an output that reaches 1": (sigmoid(4, 6), {"x": 4, "y": 7}),
    "hard sigmoid: an output finer by more than 14": (sigmoid(1, 17), {"x": 1, "y": 15}),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case: str) -> None:
    settled, expected = CASES[case]
    assert settled.positions == expected


def test_tied_tensors_get_the_lowest_position() -> None:
    settled = settle(System({"a": 6, "b": 4, "c": 5, "d": 1}, ties=[("concat", ("a", "b")), ("pool", ("b", "c"))]))
    assert settled.positions == {"a": 4, "b": 4, "c": 4, "d": 1}
    assert settled.reasons == {"a": ("concat",), "c": ("pool",)}


def test_a_change_names_its_rules() -> None:
    limits = shifts.sum_limits("ab", "out", ADD)
    settled = settle(System({"a": 30, "b": 1, "out": 20, "c": 25}, ties=[("concat", ("a", "c"))], limits=limits))
    assert settled.positions == {"a": 8, "b": 1, "out": 8, "c": 8}
    assert settled.reasons == {"a": ("concat", "read"), "c": ("read",), "out": ("write",)}


def test_a_tensor_tied_to_its_product_does_not_sink() -> None:
    """`cat([x, x * y])`: the product is `y` below `x`, which it is tied to; only a finer `y` helps."""
    limits = shifts.product_limits(("x", "y"), "out", "write", 32)
    settled = settle(System({"x": 5, "y": -3, "out": 4}, ties=[("concat", ("x", "out"))], limits=limits))
    assert settled.positions == {"x": 4, "y": 0, "out": 4}


def test_a_longer_circle_ends_too() -> None:
    limits = [
        *shifts.product_limits(("x", "y"), "p", "write", 32),
        *shifts.product_limits(("p", "z"), "q", "write", 32),
    ]
    settled = settle(System({"x": 5, "y": -3, "p": 3, "z": -1, "q": 4}, ties=[("concat", ("x", "q"))], limits=limits))
    assert settled.positions == {"x": 3, "y": 0, "p": 3, "z": 0, "q": 3}


def test_a_square_that_is_added_to_its_root_ends() -> None:
    """`x + x * x` with `x` up to 2**15: each is lowered for the other, twice as far every time."""
    limits = [*shifts.product_limits(("x", "x"), "p", "write", 32), *shifts.sum_limits("xp", "y", ADD)]
    assert settle(System({"x": -8, "p": -1, "y": 0}, limits=limits)).positions == {"x": 0, "p": -1, "y": 0}


def test_a_square_that_is_added_to_its_root_ends_where_a_bias_is_coarse() -> None:
    """No weight, however fine, lets an output be finer than its bias by more than 15."""
    limits = [*shifts.product_limits(("o", "o"), "p", "write", 32), *shifts.sum_limits("op", "y", ADD)]
    system = System({"i": -1, "w": -4, "b": -25, "o": -5, "p": 10, "y": 25}, limits=limits)
    system.products.append(Product("i", "w", "b", "o"))
    assert settle(system).positions == {"i": -1, "w": 1, "b": -15, "o": 0, "p": 0, "y": 7}


def test_a_dense_block_raises_a_weight_rather_than_sink() -> None:
    """`cat([x, conv(x)])` with weights beyond 128: the output cannot be coarser than the input it is tied to."""
    system = System({"i": 4, "w": -2, "o": 5}, ties=[("concat", ("i", "o"))], products=[Product("i", "w", None, "o")])
    assert settle(system).positions == {"i": 4, "w": 0, "o": 4}


def chain(weights: list[int]) -> System:
    """Return `y = x + f(x)`, `z = y + g(y)`, …: what is made is added to what it is made of; the last product first."""
    system = System({("x", 0): 0}, limits=[])
    for n, weight in enumerate(weights):
        system.positions |= {("w", n): weight, ("o", n): 12, ("x", n + 1): 0}
        system.products.insert(0, Product(("x", n), ("w", n), None, ("o", n)))
        system.limits += shifts.sum_limits((("x", n), ("o", n)), ("x", n + 1), ADD)
    return system


def test_a_long_chain_of_sums_lowers_outputs() -> None:
    """Each weight of -3 lowers what is made of it, and so do all that follow."""
    system = System({("x", n): 0 for n in range(9)} | {("w", n): -3 for n in range(8)})
    for n in reversed(range(8)):
        system.products.append(Product(("x", n), ("w", n), None, ("x", n + 1)))
    assert settle(system).positions == system.positions | {("x", n): -3 * n for n in range(9)}


def test_a_sum_with_its_input_lowers_the_output_not_the_weight() -> None:
    settled = settle(chain([-3] * 6)).positions
    assert [settled["w", n] for n in range(6)] == [-3] * 6
    assert [settled["o", n] - settled["x", n] for n in range(6)] == [-3] * 6


def test_of_a_circle_the_coarsest_weight_is_raised() -> None:
    """Times 2**4 and 2**6, and back to what it is tied to: what is lowered would be lowered for itself."""
    products = [Product("i", "v", None, "m"), Product("m", "w", None, "o")]
    system = System({"i": 4, "v": -4, "m": 9, "w": -6, "o": 5}, ties=[("concat", ("i", "o"))], products=products)
    assert settle(system).positions == {"i": 4, "v": 0, "m": 4, "w": 0, "o": 4}
    assert settle(system).reasons["w"] == ("cut",)


def test_what_follows_a_circle_keeps_its_weight() -> None:
    """The last weight is the coarsest, and its output can be lowered; the first is raised as far as it has to be."""
    products = [Product("i", "v", None, "o"), Product("o", "w", None, "p")]
    system = System({"i": 4, "v": -9, "o": 5, "w": -20, "p": 3}, limits=shifts.sum_limits("io", None, ADD))
    system.products = products
    assert settle(system).positions == {"i": 4, "v": -7, "o": -3, "w": -20, "p": -23}


def test_what_was_lowered_too_far_is_raised_again() -> None:
    """`x` makes room in `x * y` first, `y` has to be lowered by more: `x` gets its bits back."""
    limits = [*shifts.product_limits(("x", "y"), "p", "write", 32), shifts.Limit("read", ("y",), ("z",), 7)]
    settled = settle(System({"x": 25, "y": 20, "p": 0, "z": -7}, limits=limits)).positions
    assert settled == {"x": 25, "y": 0, "p": 0, "z": -7}


def test_a_factor_that_a_floor_holds_up_spares_the_other() -> None:
    """`x` is tied to what a hard sigmoid makes, at 7 at least: `y` may be as low as -7 for a product at 0."""
    limits = shifts.product_limits(("x", "y"), "p", "write", 32)
    for y, x in ((7, 7), (-2, 7)):
        system = System({"x": x, "y": y, "p": 0}, limits=limits, floors=[("hard_sigmoid", "x", 7), ("any", "p", 0)])
        assert settle(system).positions == {"x": x, "y": y, "p": 0}


def test_nothing_to_settle() -> None:
    assert settle(System({})) == Settled({}, {})


def test_rules_that_are_off_change_nothing() -> None:
    system = System({"i": 7, "w": 14, "o": 2, "b": -9}, products=[Product("i", "w", "b", "o")], rules=frozenset())
    assert settle(system).positions == system.positions
    assert not settle(system).reasons


@st.composite
def graphs(draw: st.DrawFn) -> System:
    """Draw operators that each read earlier values and make a new one, and concatenations that tie any."""
    position = st.integers(-25, 40)
    system = System({0: draw(position), 1: draw(position)})
    for out in range(2, draw(st.integers(3, 12))):
        a, b = (draw(st.integers(0, out - 1)) for _ in range(2))
        system.positions[out] = draw(position)
        kind = draw(st.sampled_from(["product", "product", "add", "multiply", "swish", "sigmoid", "sigmoid", "tie"]))
        if kind == "product":
            has_bias = draw(st.booleans())
            system.positions["w", out] = draw(position)
            if has_bias:
                system.positions["b", out] = draw(position)
            bias = ("b", out) if has_bias else None
            system.products.append(Product(a, ("w", out), bias, out, draw(st.booleans())))
        elif kind == "add":
            system.limits += shifts.sum_limits((a, b), out, ADD)
        elif kind in ("multiply", "swish"):
            most = shifts.SWISH if kind == "swish" else shifts.WRITE_PRODUCT
            system.limits += shifts.product_limits((a, b), out, kind, most)
        elif kind == "sigmoid":
            limits, floors = shifts.sigmoid_limits(a, out)
            system.limits += limits
            system.floors += floors
        else:
            system.ties.append(("concat", (a, b, out)))
    return system


def powers() -> System:
    """Return `y = s + x * z * z` with sums `s` and `z`; a hard sigmoid reads `x`, which several floors may hold up."""
    limits = [
        *shifts.sum_limits("xx", "s", ADD),
        *shifts.sum_limits("xx", "z", ADD),
        *shifts.product_limits(("x", "z"), "p", "write", 32),
        *shifts.product_limits(("p", "z"), "q", "write", 32),
        *shifts.sum_limits("sq", "y", ADD),
    ]
    return System({"x": 0, "s": 0, "z": -1, "p": 0, "q": 0, "y": 0}, limits=limits, floors=[("hard_sigmoid", "x", 0)])


def two_readers() -> System:
    """Return two products of one input, one of which has to be lowered by a bit: its output."""
    products = [Product("i", "v", None, "o"), Product("i", "w", "b", "p")]
    return System({"i": 0, "a": 0, "o": 0, "v": 0, "p": 0, "w": -1, "b": 15}, products=products)


@given(system=graphs())
@example(system=powers())
@example(system=two_readers())
@settings(max_examples=100, deadline=None)
def test_random_graphs(system: System) -> None:
    p = settle(system).positions
    require_satisfied(system, p)
    require_no_activation_lower_than_needed(system, p)
    again = settle(System(dict(p), system.ties, system.limits, system.floors, system.products))
    assert again == Settled(p, {})


def require_satisfied(system: System, p: dict[Hashable, int]) -> None:
    for _, group in system.ties:
        assert all(p[a] == p[b] for a, b in combinations(group, 2))
    for limit in system.limits:
        assert sum(p[v] for v in limit.plus) - sum(p[v] for v in limit.minus) <= limit.bound, limit
    for rule, v, bound in system.floors:
        assert p[v] >= bound, rule
    for op in system.products:
        cut = p[op.weight] + p[op.input] - p[op.output]
        assert 0 <= cut <= 16
        if op.bias is not None:
            lowest = 0 if op.leaky else min(0, -(24 - (8 + cut)))
            assert lowest <= p[op.weight] + p[op.input] - p[op.bias] <= 15


def require_no_activation_lower_than_needed(system: System, p: dict[Hashable, int]) -> None:
    """A bit more for a lowered activation and its tied tensors breaks a limit, or raises a weight or bias."""
    tied = {v: {v} for v in p}
    for _, group in system.ties:
        union = set().union(*(tied[v] for v in group))
        tied |= dict.fromkeys(union, union)
    constants = {v for op in system.products for v in (op.weight, op.bias)}
    for v in set(p) - constants:
        if p[v] >= min(system.positions[u] for u in tied[v]):
            continue
        higher = p | {u: p[u] + 1 for u in tied[v]}
        broken: list[Any] = [
            limit
            for limit in system.limits
            if sum(higher[u] for u in limit.plus) - sum(higher[u] for u in limit.minus) > limit.bound
        ]
        for op in system.products:
            known = max(system.positions[op.weight], p[op.weight]) + higher[op.input] - higher[op.output] < 0
            known |= op.bias is not None and higher[op.output] - system.positions[op.bias] > shifts.BIAS
            broken += [op] if known and op.output in tied[v] and op.input not in tied[v] else []
        assert broken, v


@st.composite
def sums_and_products(draw: st.DrawFn) -> System:
    """Draw operators whose limits are all between two tensors, which have a highest solution."""
    position = st.integers(-25, 40)
    system = System({0: draw(position)})
    for out in range(1, draw(st.integers(2, 14))):
        a, b = (draw(st.integers(0, out - 1)) for _ in range(2))
        system.positions |= {out: draw(position)}
        if draw(st.booleans()):
            system.limits += shifts.sum_limits((a, b), out, ADD)
        else:
            system.positions["w", out] = draw(st.integers(-9, 20))
            system.products.append(Product(a, ("w", out), None, out))
    draw(st.randoms()).shuffle(system.products)
    return system


def highest_solution(system: System) -> dict[Hashable, int] | None:
    """Return the highest positions that need no weight raised, by shortest paths; `None` if there are none."""
    edges = [(limit.plus[0], limit.minus[0], limit.bound) for limit in system.limits]
    edges += [(op.output, op.input, system.positions[op.weight]) for op in system.products]
    p = dict(system.positions)
    for _ in range(len(p) + 1):
        lowered = [(a, p[b] + bound) for a, b, bound in edges if p[a] > p[b] + bound]
        for a, bound in lowered:
            p[a] = min(p[a], bound)
        if not lowered:
            return {v: n for v, n in p.items() if isinstance(v, int)}
    return None


@given(system=sums_and_products())
@settings(max_examples=100, deadline=None)
def test_positions_are_the_highest_there_are_and_no_weight_is_raised_without_need(system: System) -> None:
    settled, highest = settle(system).positions, highest_solution(system)
    raised = [op for op in system.products if settled[op.weight] > system.positions[op.weight]]
    assert bool(raised) == (highest is None)
    if highest is not None:
        assert {v: settled[v] for v in highest} == highest
    for op in raised:
        weights = {other.weight: max(settled[other.weight], system.positions[other.weight]) for other in raised}
        lower = system.positions | weights | {op.weight: weights[op.weight] - 1}
        assert highest_solution(System(lower, limits=system.limits, products=system.products)) is None
