"""Queries and keys of an attention, rotated by one matrix, which leaves their products unchanged.

Source: Ashkboos et al. 2024 (QuaRot), where the cache of keys is rotated after the rotary embedding.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from quark_fx.errors import Declined
from quark_fx.graph.attention import Attention, Cached
from quark_fx.graph.nodes import is_parameter, output_node, static_size, value_of
from quark_fx.graph.operators import argument
from quark_fx.numbers.rotation import Rotation
from quark_fx.rescale.rotation_sites import insert_rotation


def channels_of_keys(gm: GraphModule, attention: Attention) -> int:
    """Return the number of channels in the queries and keys of a head.

    Raises:
        Declined: If they cannot be rotated.
    """
    keys, values, query = attention.keys, attention.values, _query(attention)
    if not isinstance(keys, Cached):
        raise Declined(keys)
    if isinstance(values, Cached) and (keys.value, keys.reader) == (values.value, values.reader):
        raise Declined("its keys are its values")
    if query is keys.value and keys.reader is attention.scores:
        raise Declined("its keys are its queries")
    if is_parameter(query):
        raise Declined("its queries are constants of the model")
    if output_node(gm) in keys.value.users:
        raise Declined("the model returns its keys")
    shape = value_of(gm, keys.value).shape
    fused = attention.node is attention.scores
    if keys.channels != len(shape) - 1 or not (fused or keys.across == -2):
        raise Declined("the channels of its queries and keys are not their last dimension")
    size = static_size(shape[-1])
    if size is None or size == 1:
        raise Declined(f"its heads have {shape[-1]} channels")
    return size


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
