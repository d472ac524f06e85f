"""The modules of the original model that round the keys and values of their attention.

Keys and values are neither inputs nor results of a module: they exist inside a module. So each module rounds the
operands of its products, product by product, in the order in which its code calls the products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from quark_fx.errors import QuarkError
from quark_fx.graph.attention import FUSED, PRODUCTS, Attention, Cached, find_attentions
from quark_fx.graph.nodes import describe, module_calls, static_size, target_name
from quark_fx.graph.operators import argument
from quark_fx.model.rounded_modules import Activation, Rounded


@dataclass(frozen=True)
class RoundedFactor:
    """A rounded operand of a product.

    Attributes:
        position: Position of the operand among the arguments of the product.
        activation: Rounding of the operand.
        transposed: Whether the operand is rounded with its last two dimensions exchanged, the layout of a cache.
        cached: Whether a cache holds the operand.
    """

    position: int
    activation: Activation
    transposed: bool = False
    cached: bool = False

    def same_as(self, other: RoundedFactor) -> bool:
        """Tell whether both round the same operand in the same way."""
        layout, other_layout = ((f.position, f.transposed, f.cached) for f in (self, other))
        return layout == other_layout and self.activation.same_as(other.activation)


Size = tuple[int | None, int | None]
"""Numbers of heads and channels; `None` for a number that is dynamic or unknown."""

Entering = tuple[tuple[Activation, Activation], tuple[Size, Size]]
"""Rounding of keys and values when they enter a cache, and their sizes."""

Product = tuple[RoundedFactor, ...]
"""Rounded operands of a product of activations; empty if all operands are unrounded."""


@dataclass(frozen=True)
class RoundedAttention:
    """The rounding of keys and values in a module with attention.

    Attributes:
        products: Fused attentions and products of activations, in the order in which its code calls them.
        entering: Rounding of keys and values when they enter a cache; `None` for a module with several attentions.
        sizes: Numbers of heads and channels of keys, and of values; `None` for a number that is dynamic or unknown.
    """

    products: tuple[Product, ...]
    entering: tuple[Activation, Activation] | None
    sizes: tuple[Size, ...] = ()

    def same_as(self, other: RoundedAttention) -> bool:
        """Tell whether both round in the same way."""
        if [len(product) for product in self.products] != [len(product) for product in other.products]:
            return False
        pairs = zip(sum(self.products, ()), sum(other.products, ()), strict=True)
        return all(a.same_as(b) for a, b in pairs)


def place_attentions(graph: Graph, rounded: Rounded) -> tuple[dict[str, RoundedAttention], set[tuple[Node, Node]]]:
    """Return the rounding of keys and values, keyed by module path, and its (value, consumer) pairs in `rounded`.

    Raises:
        QuarkError: If calls of a module differ, or round an operand in a layout that the product does not read.
    """
    factors: dict[Node, list[RoundedFactor]] = {}
    calls: dict[str, dict[str, list[Entering]]] = {}
    attentions = [*find_attentions(graph)]
    count = Counter(key for attention in attentions for key in list(module_calls(attention.scores))[-1:])
    edges: set[tuple[Node, Node]] = set()
    results = next(node for node in reversed(graph.nodes) if node.op == "output")
    for attention in attentions:
        roundings = [(c, rounded[c.value, c.reader]) for c in attention.cached or () if (c.value, c.reader) in rounded]
        if len(roundings) != 2:
            continue
        for cached, activation in roundings:
            factor = RoundedFactor(cached.position, activation, _is_transposed(cached, activation), cached=True)
            factors.setdefault(cached.product, []).append(factor)
            edges |= {(cached.value, reader) for reader in (cached.reader, results)}  # a cache that is returned
        query = argument(attention.scores, attention.query)
        if (turned := rounded.get((query, attention.scores))) is not None and not turned.rounds:
            factors.setdefault(attention.scores, []).append(RoundedFactor(attention.query, turned))
            edges.add((query, attention.scores))
        key, path = _call_of(attention, roundings[1][0].product)
        (cached_keys, keys), (cached_values, values) = roundings
        sizes = _sizes(cached_keys), _sizes(cached_values)
        calls.setdefault(path, {}).setdefault(key, []).append(((keys, values), sizes))
    owners = {key: path for path, keys in calls.items() for key in keys}
    products: dict[str, list[Product]] = {}
    for node in graph.nodes:
        inner = [key for key in module_calls(node) if key in owners]
        if inner and target_name(node) in (FUSED, *PRODUCTS):
            products.setdefault(inner[-1], []).append(tuple(factors.get(node, ())))
    # The values that enter a cache are known if the module has only one attention, quantized or not.
    entries = {path: {k: e if count[k] < 2 else [] for k, e in keys.items()} for path, keys in calls.items()}
    return {path: _alike(path, keys, products, graph) for path, keys in entries.items()}, edges


def _alike(
    path: str, calls: Mapping[str, list[Entering]], products: Mapping[str, list[Product]], graph: Graph
) -> RoundedAttention:
    """Return the rounding that all calls of a module share."""
    first, *rest = (
        RoundedAttention(tuple(products[key]), *(entering[0] if len(entering) == 1 else (None, ())))
        for key, entering in calls.items()
    )
    everywhere = {key for node in graph.nodes for key, other in module_calls(node).items() if other == path}
    if everywhere != set(calls) or not all(first.same_as(other) for other in rest):
        raise QuarkError(
            f"the calls of module {path or 'the model'} round keys and values in different ways; call the quantized "
            "model itself, or give each call a separate module"
        )
    return first


def _call_of(attention: Attention, mix: Node) -> tuple[str, str]:
    """Return the key and path of the innermost call that contains both products of an attention."""
    mix_calls = module_calls(mix)
    return next(((k, path) for k, path in reversed(module_calls(attention.scores).items()) if k in mix_calls), ("", ""))


def _sizes(cached: Cached) -> Size:
    """Return the numbers of heads and channels of keys or values."""
    shape = cached.value.meta["val"].shape
    heads = [static_size(shape[d]) for d in cached.heads]
    return heads[0] if len(heads) == 1 else None, static_size(shape[cached.channels])


def _is_transposed(cached: Cached, activation: Activation) -> bool:
    """Tell whether a product reads the value with its last two dimensions exchanged.

    Raises:
        QuarkError: If the product reads the value in another layout, and the rounding depends on the layout.
    """
    rank = cached.value.meta["val"].dim()
    tokens, channels = cached.tokens - rank, cached.channels - rank
    whole = activation.axis is None and not activation.factors
    lasting = tokens == -3 - channels or (activation.axis == -1 and channels == -1)
    if not whole and not lasting:
        raise QuarkError(
            f"{describe(cached.product)} reads keys or values whose last two dimensions are not tokens and channels; "
            "call the quantized model itself, or quantize keys and values with granularity='tensor'"
        )
    return not whole and channels != cached.across


__all__ = ["Product", "RoundedAttention", "RoundedFactor", "place_attentions"]
