"""The operator table: the positions of activation, weight, and bias of ATen operators, and which operators commute.

Passes read this table; no pass knows an operator and no file knows a model. To support an operator, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from torch import Tensor
from torch.fx import Node

from quark_fx.graph.nodes import target_name


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row: an operator with weights, or a product of two activations.

    Attributes:
        kind: Operator family, the name in patterns and the report.
        activations: Positions of the arguments that are quantized as activations.
        weight: Position of the weight, or of a recurrent layer's list of weights; `None` for products of activations.
        bias: Position of the bias, `None` if the operator has none.
        output_axis: Dimension of the weight that indexes output channels.
        input_axis: Dimension of the weight that is summed over; groups of weights run along it.
        by_default: Whether the operator is quantized without an override.
        offsets: Position of the offsets at which the rows of each matrix of a stack end, `None` if data does not select
            rows.
    """

    kind: str
    activations: tuple[int, ...]
    weight: int | None = None
    bias: int | None = None
    output_axis: int = 0
    input_axis: int = 1
    by_default: bool = True
    offsets: int | None = None


_LINEAR = Operator(kind="linear", activations=(0,), weight=1, bias=2)
_CONV = Operator(kind="conv", activations=(0,), weight=1, bias=2)
_TRANSPOSED = Operator(kind="conv_transpose", activations=(0,), weight=1, bias=2, output_axis=1, input_axis=0)
_MATMUL = Operator(kind="linear", activations=(0,), weight=1, output_axis=-1, input_axis=-2)
_PRODUCT = Operator(kind="matmul", activations=(0, 1), by_default=False)
_RECURRENT = {
    f"aten.{name}.input": Operator(kind=kind, activations=(0,), weight=2)
    for name, kind in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "rnn"), ("rnn_relu", "rnn"))
}
_EXPERTS = Operator(kind="experts", activations=(0,), weight=1, output_axis=-1, input_axis=-2, offsets=2)

_OPERATORS = {
    "aten.linear.default": _LINEAR,
    "aten.addmm.default": Operator(kind="linear", activations=(1,), weight=2, bias=0, output_axis=1, input_axis=0),
    "aten.mm.default": _MATMUL,
    "aten.matmul.default": _MATMUL,
    "aten.bmm.default": _MATMUL,
    **{f"aten.conv{d}d.{overload}": _CONV for d in (1, 2, 3) for overload in ("default", "padding")},
    "aten.conv_transpose1d.default": _TRANSPOSED,
    "aten.conv_transpose2d.input": _TRANSPOSED,
    "aten.conv_transpose3d.input": _TRANSPOSED,
    "aten.embedding.default": Operator(kind="embedding", activations=(), weight=0),
    "aten._grouped_mm.default": _EXPERTS,
    "quark_fx.grouped_mm.default": _EXPERTS,
    "transformers.grouped_mm_fallback.default": _EXPERTS,
    **_RECURRENT,
}

RECURRENT = frozenset(row.kind for row in _RECURRENT.values())
"""Families of recurrent layers."""

ATTENTION = Operator(kind="attention", activations=(), by_default=False)
"""The operator that multiplies by keys and values (`quark_fx.graph.attention`)."""

KINDS = frozenset(row.kind for row in (*_OPERATORS.values(), _PRODUCT, ATTENTION))
"""All operator families, by their names in patterns."""

BRANCH = "branch"
"""Mark of nodes for a pass's float branch parallel to a quantized operator (`node.meta`): the operator's node name."""

TARGETS = frozenset(_OPERATORS)
"""Operators with a row, by target name."""

_UNSUPPORTED = {
    "aten.convolution.default": (1,),
    "aten.embedding_bag.padding_idx": (0,),
    "aten.embedding_bag.default": (0,),
    "aten.bilinear.default": (2,),
    "aten.einsum.default": (1,),
    "aten.tensordot.default": (0, 1),
    "aten.inner.default": (0, 1),
    "aten.baddbmm.default": (1, 2),
    "aten.addbmm.default": (1, 2),
    "aten.mv.default": (0,),
    "aten.addmv.default": (1,),
    "aten.cdist.default": (0, 1),
    "aten.conv_tbc.default": (1,),
    **{f"aten.{name}_cell.default": (2, 3) for name in ("rnn_tanh", "rnn_relu", "gru")},
    "aten.lstm_cell.default": (2, 3),
}
"""Operators with weights but without a row above, and the positions of the weights: the report lists them."""

MOVING = frozenset(
    {
        *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints"),
        *("aten.unflatten.int", "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.numpy_T.default"),
        *("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default"),
        *("aten.slice.Tensor", "aten.select.int", "aten.narrow.default", "aten.expand.default", "aten.repeat.default"),
        *("aten.contiguous.default", "aten.clone.default", "aten.alias.default", "aten.flip.default"),
        *(
            "aten.roll.default",
            "aten.index_select.default",
            "aten.pixel_shuffle.default",
            "aten.channel_shuffle.default",
        ),
        *("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default"),
        *("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unbind.int"),
        *("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec"),
        *("aten.cat.default", "aten.stack.default", "python.getitem"),
    }
)
"""Operators whose outputs are input values: they share quantization parameters, and commute with rounding."""

_AVERAGES = frozenset(
    {
        *("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"),
        "aten.mean.dim",
    }
)


def row_by_target(node: Node) -> Operator | None:
    """Return the row of a node's operator; it may multiply by a parameter, codes, or another activation."""
    return _OPERATORS.get(target_name(node)) if node.op == "call_function" else None


def operator_row(node: Node) -> Operator | None:
    """Return the row of a node, or `None` if it is neither an operator with weights nor a product of activations."""
    row = row_by_target(node)
    if row is None or row.weight is None:
        return row
    weights = stored_weights(node, row)
    if not weights:
        return _PRODUCT if row is _MATMUL else None
    order = weights[0].order
    return row if order is None else replace(row, output_axis=order[row.output_axis], input_axis=order[row.input_axis])


@dataclass(frozen=True)
class StoredWeight:
    """The parameter that an operator's weight argument comes from.

    Attributes:
        node: The `get_attr` node.
        position: Position of the weight among the operator's arguments.
        reader: First consumer of the parameter: the operator, or a transposition before it.
        order: Dimension of the parameter for each dimension of the argument if the parameter is transposed on the way,
            otherwise `None`.
    """

    node: Node
    position: int
    reader: Node
    order: tuple[int, ...] | None


def stored_weights(node: Node, row: Operator) -> tuple[StoredWeight, ...]:
    """Return the parameters that the operator multiplies by: one, or the weights of all layers of a recurrent one."""
    given = None if row.weight is None else argument(node, row.weight)
    if row.weight is not None and isinstance(given, list | tuple):
        own = dict.fromkeys(weight for weight in given if _is_weight(weight))
        return tuple(StoredWeight(weight, row.weight, node, None) for weight in own)
    found = stored_weight(node, row)
    return () if found is None else (found,)


def stored_weight(node: Node, row: Operator) -> StoredWeight | None:
    """Return the one parameter that the operator multiplies by, looking through transpositions, or `None`."""
    if row.weight is None:
        return None
    reader, value = node, argument(node, row.weight)
    order: tuple[int, ...] | None = None
    looked_up = not row.activations  # an embedding reads rows of the stored table
    while not looked_up and isinstance(value, Node) and value.op == "call_function" and len(value.users) == 1:
        step = permutation(value)
        if step is None:
            return None
        order = step if order is None else tuple(step[i] for i in order)
        reader, value = value, value.args[0]
    return StoredWeight(value, row.weight, reader, order) if _is_weight(value) else None


def permutation(node: Node) -> tuple[int, ...] | None:
    """Return, for a transposition, the input's dimension for each dimension of the output."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    dims = list(range(value.dim()))
    name = target_name(node)
    if name in ("aten.t.default", "aten.numpy_T.default"):
        return tuple(reversed(dims))
    if name == "aten.permute.default":
        return tuple(d % len(dims) for d in argument(node, 1))
    if name in ("aten.transpose.int", "aten.swapaxes.default"):
        a, b = argument(node, 1), argument(node, 2)
        dims[a], dims[b] = dims[b], dims[a]
        return tuple(dims)
    return None


def is_average(node: Node) -> bool:
    """Tell whether the node is a mean or a pool of averages."""
    return target_name(node) in _AVERAGES


def argument(node: Node, position: int) -> Any:
    """Return the argument at a schema position, given by position or name; `None` if it was not given."""
    if position < len(node.args):
        return node.args[position]
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return node.kwargs.get(schema[position].name)


def measured_share(node: Node) -> float:
    """Return the fraction of the range that a `dynamic_qparams` node keeps; models of earlier versions keep all."""
    return float(argument(node, 7) or 1)


def named_argument(node: Node, name: str) -> Any:
    """Return the argument with a name in the operator's schema; `None` if it was not given."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return argument(node, next(i for i, entry in enumerate(schema) if entry.name == name))


def set_argument(node: Node, position: int, value: Any) -> None:
    """Set the argument at a schema position; omitted arguments before it get their defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    if position < len(node.args):
        node.update_arg(position, value)
    elif schema[position].name in node.kwargs or schema[position].kwarg_only:
        node.update_kwarg(schema[position].name, value)
    else:
        defaults = [schema[i].default_value for i in range(len(node.args), position)]
        node.args = (*node.args, *defaults, value)


def unsupported_positions(node: Node) -> tuple[int, ...]:
    """Return the positions of the weights of an operator that has weights but no row in the table."""
    return _UNSUPPORTED.get(target_name(node), ())


def _is_weight(node: Any) -> TypeGuard[Node]:
    if not isinstance(node, Node) or node.op != "get_attr":
        return False
    value = node.meta.get("val")
    return value is None or (value.is_floating_point() and value.dim() >= 2)


def clamp_bounds(node: Node) -> tuple[float | None, float | None] | None:
    """Return the bounds of an activation that a saturating zero point can absorb: relu, relu6, clamp, hardtanh.

    `None` for every other node, and for bounds that are not constants.
    """
    name = target_name(node)
    if name == "aten.relu.default":
        return 0.0, None
    if name == "aten.relu6.default":
        return 0.0, 6.0
    if name in ("aten.clamp.default", "aten.hardtanh.default"):
        low, high = argument(node, 1), argument(node, 2)
        if name == "aten.hardtanh.default":
            low, high = -1.0 if low is None else low, 1.0 if high is None else high
        if all(bound is None or isinstance(bound, int | float) for bound in (low, high)):
            return low, high
    return None
