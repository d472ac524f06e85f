"""Attention in a graph, and its keys and values in the form that a KV cache holds.

Attention is recognized by its computation: the fused operator, or a softmax of a product of two activations, multiplied
by a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from quark_fx.graph.nodes import CAST, is_parameter, target_name
from quark_fx.graph.operators import Motion, argument, motion, permutation


@dataclass(frozen=True)
class Cached:
    """Keys or values in the form that a cache holds: before heads are repeated for groups of queries.

    Attributes:
        value: Node that computes the keys or values.
        reader: Consumer of `value` in the attention: the product itself, or the first data movement before it.
        product: Operator that multiplies by the keys or values.
        position: Position of the keys or values among the arguments of `product`.
        tokens: Dimension of `value` that indexes tokens, counted from 0.
        channels: Dimension of `value` that indexes the channels of a head, counted from 0.
        across: Dimension of the argument of `product` that indexes the channels, counted from the last (-1).
    """

    value: Node
    reader: Node
    product: Node
    position: int
    tokens: int
    channels: int
    across: int

    @property
    def heads(self) -> list[int]:
        """Dimensions of `value` other than samples, tokens, and channels: in most models, one that indexes heads."""
        return [d for d in range(len(_sizes(self.value))) if d not in (0, self.tokens, self.channels)]

    @property
    def shares_channels(self) -> bool:
        """True if some channels are the same in all heads, as in multi-head latent attention."""
        whole, pending = _sizes(self.value), [self.value]
        while pending:
            part = pending.pop()
            if motion(part) in (Motion.JOIN, Motion.SCATTER):
                pending += part.all_input_nodes
            elif len(part.all_input_nodes) == 1:
                sizes, before = _sizes(part), _sizes(part.all_input_nodes[0])
                if sizes == before:  # a cast or a copy
                    pending += part.all_input_nodes
                    continue
                narrower = len(sizes) == len(before) == len(whole) and sizes[self.channels] != whole[self.channels]
                if narrower and any(before[d] == "1" != sizes[d] for d in self.heads):
                    return True
        return False


@dataclass(frozen=True)
class Attention:
    """One attention operation of a graph.

    Attributes:
        node: The fused operator, or the softmax.
        scores: Operator that multiplies queries by keys: the same fused operator, or a product.
        query: Position of the queries in the arguments of `scores`.
        keys: Keys in the form that a cache holds, or the reason why a cache cannot hold them.
        values: Values in the form that a cache holds, or the reason why a cache cannot hold them.
    """

    node: Node
    scores: Node
    query: int
    keys: Cached | str
    values: Cached | str

    @property
    def cached(self) -> tuple[Cached, Cached] | None:
        """Keys and values; `None` if a cache cannot hold both."""
        keys, values = self.keys, self.values
        return (keys, values) if isinstance(keys, Cached) and isinstance(values, Cached) else None

    @property
    def reason(self) -> str:
        """Reason why a cache cannot hold the keys and values; empty if it can."""
        return next((entry for entry in (self.keys, self.values) if isinstance(entry, str)), "")


FUSED = "aten.scaled_dot_product_attention.default"
"""Fused operator on queries, keys, and values."""

PRODUCTS = {
    **dict.fromkeys(("aten.matmul.default", "aten.bmm.default", "aten.mm.default"), (0, 1)),
    "aten.baddbmm.default": (1, 2),
    "aten.einsum.default": (0, 1),
}
"""Products of two activations, with the positions of the two factors."""

_EINSUM = "aten.einsum.default"

_SOFTMAX = frozenset({"aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default"})

_REPEATING = frozenset({Motion.EXPAND, Motion.REPEAT})

_IN_PLACE = frozenset({*_REPEATING, Motion.RESHAPE, Motion.COPY, Motion.SLICE})
"""Data movement that leaves the last dimensions in place if their sizes do not change."""

_PADDING = frozenset({"aten.cat.default", "aten.slice.Tensor"})
"""Operators that add or remove positions to attend to, such as an attention sink."""


def find_attentions(graph: Graph) -> Iterator[Attention]:
    """Yield every attention of a graph, in order."""
    for node in graph.nodes:
        if target_name(node) == FUSED:
            keys, values = (_cached(node, position, _NAMES[position - 1], -2, -1) for position in (1, 2))
            yield Attention(node, node, 0, keys, values)
        elif target_name(node) in _SOFTMAX and (attention := _spelled_out(node)) is not None:
            yield attention


def _spelled_out(softmax: Node) -> Attention | None:
    """Return the attention around a softmax; `None` without a product before the softmax and a product after it."""
    dim, rank = int(argument(softmax, 1)), len(_sizes(softmax))
    axis = dim if dim < 0 else dim - rank
    before, after = list(_scores(softmax.all_input_nodes[0], axis)), list(_mixes(softmax, axis))
    if not before or not after or axis not in (-1, -2):
        return None
    (scores, summed), (mix, weights) = before[0], after[0]
    why = ""
    if _EINSUM in (target_name(scores), target_name(mix)):
        why = "einsum is not supported; write it with torch.matmul"
    elif len(before) > 1:
        why = "its scores are a sum of several products"
    if why:
        return Attention(softmax, scores, 0, why, why)
    # The dimension along which the softmax normalizes indexes the tokens of the keys: columns of the scores come from
    # the right factor, rows from the left factor.
    left_factor, right_factor = PRODUCTS[target_name(scores)]
    key, query = (right_factor, left_factor) if summed == -1 else (left_factor, right_factor)
    keys = _cached(scores, key, _NAMES[0], summed, -3 - summed)
    left_factor, right_factor = PRODUCTS[target_name(mix)]
    value = right_factor if weights == -1 else left_factor
    values = _cached(mix, value, _NAMES[1], -3 - weights, weights)
    return Attention(softmax, scores, query, keys, values)


def _scores(value: Node, axis: int) -> Iterator[tuple[Node, int]]:
    """Yield the products from which a value is computed element by element, each with its dimension that is `axis`."""
    pending, visited = [(value, axis)], set[Node]()
    while pending:
        value, axis = pending.pop()
        if value in visited or value.op != "call_function":
            continue
        visited.add(value)
        if target_name(value) in PRODUCTS:
            if all(not is_parameter(argument(value, i)) for i in PRODUCTS[target_name(value)]):
                yield value, axis
        elif is_pointwise(value) or target_name(value) in _PADDING:
            pending += [(node, axis) for node in reversed(value.all_input_nodes)]
        elif (source := _before(value, (axis,))) is not None:
            pending.append((source[0], source[1][0]))


def _mixes(value: Node, axis: int) -> Iterator[tuple[Node, int]]:
    """Yield the products that sum a value along `axis`, each with the dimension of its factor that is `axis`."""
    pending, visited = [(value, axis)], set[tuple[Node, int]]()
    while pending:
        step = value, axis = pending.pop()
        if step in visited:
            continue
        visited.add(step)
        if target_name(value) in PRODUCTS:
            yield step
            continue
        after = [(user, dim) for user in value.users for dim in _after(user, value, axis)]
        pending += reversed(after)


def _after(user: Node, value: Node, axis: int) -> Iterator[int]:
    """Yield the dimensions, counted from the last (-1), of a consumer's result that hold dimension `axis` of a value.

    For a product, yield `axis` itself if the product sums over it.
    """
    name = target_name(user)
    if name in PRODUCTS:
        left_factor, right_factor = (argument(user, i) for i in PRODUCTS[name])
        if name == _EINSUM or (value is left_factor and axis == -1) or (value is right_factor and axis == -2):
            yield axis
    elif is_pointwise(user) or name in _PADDING:
        yield axis
    else:
        yield from (dim for dim in (-1, -2) if _before(user, (dim,)) == (value, (axis,)))


def is_pointwise(node: Node) -> bool:
    """Tell whether a node computes each element from the elements at the same position."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _cached(product: Node, position: int, what: str, tokens: int, channels: int) -> Cached | str:
    """Return a factor in the form that a cache holds, or the reason why a cache cannot hold it.

    The dimensions `tokens` and `channels` are counted from the last (-1).
    """
    steps: list[tuple[Node, tuple[int, ...]]] = [(argument(product, position), (tokens, channels))]
    while (before := _before(*steps[-1])) is not None:
        steps.append(before)
    if is_parameter(steps[-1][0]):
        return f"its {what} are constants of the model"
    # A step with another consumer stays before the cache.
    alone = next((i for i, (node, _) in enumerate(steps) if sum(map(_is_tensor, node.users)) > 1), len(steps) - 1)
    repeated = [i for i, ((a, _), (b, _)) in enumerate(pairwise(steps)) if i < alone and _repeats(a, b)]
    chosen = repeated[-1] + 1 if repeated else 0
    while repeated and chosen < alone and target_name(steps[chosen][0]) in _SPREADING:
        chosen += 1
    lasting = (i for i in range(chosen, alone + 1) if steps[i][1][1] == -1)
    chosen = next(lasting, chosen)
    value, dims = steps[chosen]
    rank = len(_sizes(value))
    reader = steps[chosen - 1][0] if chosen else product
    return Cached(value, reader, product, position, dims[0] + rank, dims[1] + rank, channels)


_NAMES = ("keys", "values")

_SPREADING = frozenset({"aten.unsqueeze.default", "aten.slice.Tensor"})
"""Operators applied to heads before they are repeated."""


def _repeats(node: Node, source: Node) -> bool:
    """Tell whether a step of data movement repeats values."""
    ones = [[size for size in _sizes(n) if size != "1"] for n in (node, source)]
    return motion(node) in _REPEATING and ones[0] != ones[1]


def _before(node: Node, dims: tuple[int, ...]) -> tuple[Node, tuple[int, ...]] | None:
    """Return the input of a data movement and the input's dimensions that become `dims`; `None` for any other node.

    Args:
        node: Data movement.
        dims: Dimensions of its result, counted from the last (-1).
    """
    name, sources = target_name(node), [n for n in node.all_input_nodes if _sizes(n)]
    if len(sources) != 1 or not _sizes(node):
        return None
    (source,), rank = sources, len(_sizes(node))
    before = len(_sizes(source))
    if (order := permutation(node)) is not None:
        return source, tuple(order[d + rank] - before for d in dims)
    if name == "aten.unsqueeze.default":
        at = int(argument(node, 1)) % rank - rank
        moved = tuple(d if d > at else d + 1 for d in dims)
        return None if at in dims else (source, moved)
    in_place = (name == CAST or motion(node) in _IN_PLACE) and all(-d <= before for d in dims)
    if motion(node) is Motion.RESHAPE:  # only dimensions after the last reshaped one stay
        in_place = in_place and _sizes(node)[min(dims) :] == _sizes(source)[min(dims) :]
    return (source, dims) if in_place and all(_sizes(node)[d] == _sizes(source)[d] for d in dims) else None


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _sizes(node: Node) -> tuple[str, ...]:
    """Return the sizes of a value as text that is equal for equal sizes; empty if it is not a tensor."""
    return tuple(map(str, node.meta["val"].shape)) if _is_tensor(node) else ()


__all__ = ["FUSED", "PRODUCTS", "Attention", "Cached", "find_attentions", "is_pointwise"]
