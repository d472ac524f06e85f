"""The operator table: roles of ATen operators, and the positions of their operands.

An operator multiplies (`Operator`: positions of activation, weight, and bias), moves data (`MOTIONS`), or limits values
(`CLAMPS`). Passes look operators up in this table, and no rule depends on a model. To support an operator, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.graph.nodes import target_name


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row: an operator with weights, or a product of two activations.

    Attributes:
        kind: Operator family: its name in patterns and in the report.
        activations: Positions of the arguments that are quantized as activations.
        weight: Position of the weight, or of a recurrent layer's list of weights; `None` for products of activations.
        bias: Position of the bias, `None` if the operator has none.
        output_axis: Dimension of the weight that indexes output channels.
        input_axis: Dimension of the weight that is summed over; it is split into quantization groups.
        by_default: Whether the operator is quantized without an override.
        offsets: Position of the offsets at which the rows of each matrix of a stack end, `None` for an operator without
            offsets.
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
"""Key in `node.meta` of nodes in a float branch next to a quantized operator; its value is the operator's node name."""

TARGETS = frozenset(_OPERATORS)
"""Names of the operators with a row, such as `aten.linear.default`."""

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
"""Operators with weights but without a row above, with the positions of the weights; the report lists the operators."""

_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")


class Motion(StrEnum):
    """The way in which an operator moves data: all of its output values are input values."""

    COPY = "copy"  # the same values in the same shape
    RESHAPE = "reshape"  # all values in the same order, in another shape
    PERMUTE = "permute"  # all values, with the dimensions in another order
    EXPAND = "expand"  # dimensions of size 1, repeated
    REPEAT = "repeat"  # values next to or after their copies
    SLICE = "slice"  # a range of one dimension
    SELECT = "select"  # one position of a dimension, without the dimension
    SPLIT = "split"  # several results, each with a part of the values
    REORDER = "reorder"  # values in another order, across dimensions or along one
    JOIN = "join"  # the values of several inputs
    CHOOSE = "choose"  # the largest value of each window
    LOOK_UP = "look_up"  # values at positions that are data
    SCATTER = "scatter"  # one input with a part replaced by another input


MOTIONS: dict[str, Motion] = {
    f"aten.{name}": motion
    for motion, names in {
        Motion.COPY: ("contiguous.default", "clone.default", "alias.default", "detach.default"),
        Motion.RESHAPE: (
            *("view.default", "reshape.default", "_unsafe_view.default", "view_as.default", "reshape_as.default"),
            *("flatten.using_ints", "unflatten.int", "unsqueeze.default"),
            *("squeeze.default", "squeeze.dim", "squeeze.dims"),
        ),
        Motion.PERMUTE: (
            *("permute.default", "transpose.int", "t.default", "numpy_T.default", "swapaxes.default"),
            *("swapdims.default", "movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist"),
            *("mT.default", "mH.default", "adjoint.default", "matrix_H.default"),
        ),
        Motion.EXPAND: ("expand.default", "expand_as.default", "broadcast_to.default"),
        Motion.REPEAT: (
            *("repeat.default", "tile.default", "repeat_interleave.self_int"),
            *(f"{kind}{d}d.{how}" for kind in _NEAREST for d in (1, 2, 3) for how in ("vec", "default")),
        ),
        Motion.SLICE: ("slice.Tensor", "narrow.default"),
        Motion.SELECT: ("select.int",),
        Motion.SPLIT: (
            *("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", "unbind.int"),
            *("tensor_split.sections", "tensor_split.indices", "unsafe_chunk.default", "unsafe_split.Tensor"),
            *("unsafe_split_with_sizes.default", *(f"{d}split.{how}" for d in "hvd" for how in ("int", "array"))),
        ),
        Motion.REORDER: (
            *("flip.default", "fliplr.default", "flipud.default", "roll.default", "rot90.default", "diagonal.default"),
            *("pixel_shuffle.default", "pixel_unshuffle.default", "channel_shuffle.default", "unfold.default"),
            *(f"{kind}_pad{d}d.default" for kind in ("reflection", "replication") for d in (1, 2, 3)),
        ),
        Motion.JOIN: (
            *("cat.default", "stack.default", "hstack.default", "vstack.default", "dstack.default"),
            "column_stack.default",
        ),
        Motion.CHOOSE: (
            *(f"max_pool{d}d.default" for d in (1, 2, 3)),
            *(f"max_pool{d}d_with_indices.default" for d in (1, 2, 3)),
            *(f"adaptive_max_pool{d}d.default" for d in (1, 2, 3)),
        ),
        Motion.LOOK_UP: (
            *("index.Tensor", "index_select.default", "gather.default", "take.default", "take_along_dim.default"),
            "masked_select.default",
        ),
        Motion.SCATTER: ("slice_scatter.default", "select_scatter.default"),
    }.items()
    for name in names
} | {"python.getitem": Motion.SPLIT}
"""Operators that move data, in the spellings before and after capture."""

_CONJUGATING = frozenset(f"aten.{name}.default" for name in ("mH", "adjoint", "matrix_H"))

KEEPS_ORDER = frozenset({Motion.COPY, Motion.RESHAPE})
"""Data movement that returns all values in their order."""

PADS = frozenset({"aten.pad.default", "aten.constant_pad_nd.default"})
"""Operators that pad an input with a constant, or, in the other modes of `pad`, with values of the input."""


@dataclass(frozen=True)
class _Clamp:
    """One row: an operator that limits values.

    Attributes:
        low: Position of the lower bound, `None` if it is fixed.
        high: Position of the upper bound, `None` if it is fixed.
        fixed: Lower and upper bound of a call without bound arguments; `None` for no bound.
    """

    low: int | None = None
    high: int | None = None
    fixed: tuple[float | None, float | None] = (None, None)


CLAMPS = {
    "aten.relu.default": _Clamp(fixed=(0.0, None)),
    "aten.relu6.default": _Clamp(fixed=(0.0, 6.0)),
    "aten.hardtanh.default": _Clamp(1, 2, (-1.0, 1.0)),
    "aten.clamp.default": _Clamp(1, 2),
    "aten.clamp.Tensor": _Clamp(1, 2),
    "aten.clamp_min.default": _Clamp(low=1),
    "aten.clamp_min.Tensor": _Clamp(low=1),
    "aten.clamp_max.default": _Clamp(high=1),
    "aten.clamp_max.Tensor": _Clamp(high=1),
}
"""Operators that limit values."""

AVERAGES = frozenset(
    {
        *("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"),
        "aten.mean.dim",
    }
)


def row_by_target(node: Node) -> Operator | None:
    """Return the row of a node's operator, which may multiply by a parameter, by codes, or by another activation."""
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
        order: Dimension of the parameter for each dimension of the argument if the parameter is transposed before the
            operator, otherwise `None`.
    """

    node: Node
    position: int
    reader: Node
    order: tuple[int, ...] | None


def stored_weights(node: Node, row: Operator) -> tuple[StoredWeight, ...]:
    """Return the parameters that the operator multiplies by: one, or all weights of a recurrent operator's layers."""
    operand = None if row.weight is None else argument(node, row.weight)
    if row.weight is not None and isinstance(operand, list | tuple):
        weights = dict.fromkeys(weight for weight in operand if _is_weight(weight))
        return tuple(StoredWeight(weight, row.weight, node, None) for weight in weights)
    stored = stored_weight(node, row)
    return () if stored is None else (stored,)


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
    if motion(node) is not Motion.PERMUTE or not isinstance(value, Tensor):
        return None
    if value.is_complex() and target_name(node) in _CONJUGATING:
        return None
    strides = [1 << d for d in reversed(range(value.dim()))]
    probe = torch.empty_strided([2] * value.dim(), strides, dtype=torch.float32, device="meta")
    target: Any = node.target
    return tuple(strides.index(stride) for stride in target(probe, *node.args[1:], **node.kwargs).stride())


def is_average(node: Node) -> bool:
    """Tell whether the node is a mean or an average pool."""
    return target_name(node) in AVERAGES


def argument(node: Node, position: int) -> Any:
    """Return the argument at a schema position, passed by position or by keyword; `None` if the call omits it."""
    if position < len(node.args):
        return node.args[position]
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return node.kwargs.get(schema[position].name)


def measured_share(node: Node) -> float:
    """Return the fraction of the range that a `dynamic_qparams` node keeps: 1 in models saved by earlier versions."""
    return float(argument(node, 7) or 1)


def named_argument(node: Node, name: str) -> Any:
    """Return the argument called `name` in the operator's schema; `None` if the call omits it."""
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


def motion(node: Node) -> Motion | None:
    """Return the way in which a node moves data; `None` if it does not move data."""
    name = target_name(node)
    if name == "aten.pad.default" and (argument(node, 2) or "constant") != "constant":
        return Motion.REORDER
    return MOTIONS.get(name)


def moves(node: Node) -> bool:
    """Tell whether a node moves data in a way that commutes with rounding: its output values are input values.

    A scatter does not count: no integer kernel writes the codes of one value over codes with another scale.
    """
    return motion(node) not in (None, Motion.SCATTER)


def moved_inputs(node: Node) -> tuple[Node, ...]:
    """Return the inputs whose values a data movement returns; its other inputs are positions and sizes."""
    if motion(node) in (Motion.JOIN, Motion.SCATTER):
        return tuple(node.all_input_nodes)
    return tuple(value for value in node.args[:1] if isinstance(value, Node))


def given_bounds(node: Node) -> tuple[Any, Any] | None:
    """Return the bounds of a clamp, numbers or nodes; `None` for any other node."""
    row = CLAMPS.get(target_name(node))
    if row is None:
        return None
    bounds = (None if at is None else argument(node, at) for at in (row.low, row.high))
    low, high = (fixed if bound is None else bound for bound, fixed in zip(bounds, row.fixed, strict=True))
    return low, high


def clamp_bounds(node: Node) -> tuple[float | None, float | None] | None:
    """Return the bounds of a relu or clamp that a saturating zero point can absorb.

    `None` for every other node, and for bounds that are not numbers.
    """
    bounds = given_bounds(node)
    constant = bounds is not None and all(bound is None or isinstance(bound, int | float) for bound in bounds)
    return bounds if constant else None
