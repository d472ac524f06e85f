"""Queries and keys of an attention, rotated by one matrix, which leaves their products unchanged.

Source: Ashkboos et al. 2024 (QuaRot), where the cache of keys is rotated after the rotary embedding.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from quark_fx.graph.attention import Attention, Cached
from quark_fx.graph.nodes import is_parameter, output_node, static_size, value_of
from quark_fx.graph.operators import argument
from quark_fx.numbers.rotation import Rotation
from quark_fx.rescale.rotation_sites import insert_rotation


def channels_of_keys(gm: GraphModule, attention: Attention) -> int | str:
    """Return the number of channels in the queries and keys of a head, or the reason why these cannot be rotated."""
    keys, values, query = attention.keys, attention.values, _query(attention)
    if not isinstance(keys, Cached):
        return keys
    if isinstance(values, Cached) and (keys.value, keys.reader) == (values.value, values.reader):
        return "its keys are its values"
    if query is keys.value and keys.reader is attention.scores:
        return "its keys are its queries"
    if is_parameter(query):
        return "its queries are constants of the model"
    if output_node(gm) in keys.value.users:
        return "the model returns its keys"
    shape = value_of(gm, keys.value).shape
    fused = attention.node is attention.scores
    if keys.channels != len(shape) - 1 or not (fused or keys.across == -2):
        return "the channels of its queries and keys are not their last dimension"
    size = static_size(shape[-1])
    return size if size is not None and size > 1 else f"its heads have {shape[-1]} channels"


def rotate_keys(gm: GraphModule, attention: Attention, rotation: Rotation) -> None:
    """Multiply the queries and keys of an attention by a matrix of the size that `channels_of_keys` returns."""
    keys, query = attention.keys, _query(attention)
    assert isinstance(keys, Cached)
    insert_rotation(gm, keys.value, rotation, [keys.reader])
    insert_rotation(gm, query, rotation, [attention.scores])


def _query(attention: Attention) -> Node:
    query: Node = argument(attention.scores, attention.query)
    return query


__all__ = ["channels_of_keys", "rotate_keys"]
