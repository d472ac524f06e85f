"""Rules that pass a scale through each operator, for `quark_fx.rescale.scale_sites`. To support an operator, add a row.

A rule reads the labels (`rescale.scale_walk`) of an operator's inputs and output and derives labels from them in either
direction; it runs again whenever one of them changes. An operator without a rule stops every scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_floating, is_getitem, is_parameter, parameter, target_name, value_of
from quark_fx.graph.operators import (
    CLAMPS,
    MOTIONS,
    PADS,
    Motion,
    Operator,
    argument,
    given_bounds,
    operator_row,
    stored_weight,
)
from quark_fx.rescale.scale_walk import Absorption, ScaledInput, Walk, lift

W = TypeVar("W", bound=Walk)
Rule = Callable[[Walk, Node], None]


def visit(walk: W, node: Node, rules: Mapping[str, Callable[[W, Node], None]] | None = None) -> None:
    """Run the rule of a node, by default from `RULES`: derive labels of its inputs and output from each other."""
    if node.op == "call_function":
        rule = (RULES if rules is None else rules).get(target_name(node), Walk.stop)
        if (linear := Linear.of(node)) is not None:
            rule = partial(_weighted, linear=linear)
        elif (row := operator_row(node)) is not None and row.weight is not None and not row.activations:
            rule = partial(_look_up, row=row)
        try:
            rule(walk, node)
        except Declined:
            walk.stop(node)
    elif node.op == "get_attr":
        _constant(walk, node)
    elif node.op == "output":
        walk.stop_read(node, node.all_input_nodes)
    else:
        walk.stop_made(node)


def weight_sharer(walk: Walk, linear: Linear) -> Node | None:
    """Return another consumer of the operator's weight, or `None`."""
    return walk.sharer(linear.stored.node, linear.stored.reader)


def _weighted(walk: Walk, node: Node, linear: Linear) -> None:
    """Let weight and bias absorb scales: input channels are multiplied; output channels and the bias are divided."""
    if (sharer := weight_sharer(walk, linear)) is not None:
        return _stop_shared(walk, node, sharer)
    weight, bias, value = linear.stored.node, linear.bias, linear.activation
    absorptions = []
    axis = linear.channel_dim(len(walk.shape(value)))
    if (vector := walk.along(value, [axis])) is not None:
        labels = linear.of_inputs(vector)
        absorptions.append(Absorption(node, linear.weight_at, weight, labels, divides=False))
        walk.inputs[node] = ScaledInput(linear, value, axis, vector)
    if is_parameter(bias) and (sharer := walk.sharer(bias, node)) is not None:
        walk.stop_made(node, shared_with=sharer)
    elif (vector := walk.along(node, [linear.channel_dim(len(walk.shape(node)))])) is not None:
        labels = linear.of_outputs(vector)
        absorptions.append(Absorption(node, linear.weight_at, weight, labels, divides=True))
        if is_parameter(bias):
            shape = [1] * (len(walk.shape(bias)) - 1) + [-1]
            absorptions.append(Absorption(node, linear.bias_at or 0, bias, vector.reshape(shape), divides=True))
    if isinstance(bias, Node) and not is_parameter(bias):
        walk.broadcast([bias], node)
    walk.absorptions[node] = absorptions
    return None


def _look_up(walk: Walk, node: Node, row: Operator) -> None:
    """Let a lookup table absorb scales: its columns are divided."""
    stored = stored_weight(node, row)
    if stored is None:
        return None
    if (sharer := walk.sharer(stored.node, stored.reader)) is not None:
        return _stop_shared(walk, node, sharer)
    vector = walk.along(node, [-1])
    if vector is not None:
        labels = vector.reshape([-1 if d == row.input_axis else 1 for d in range(2)])
        walk.absorptions[node] = [Absorption(node, stored.position, stored.node, labels, divides=True)]
    return None


def _stop_shared(walk: Walk, node: Node, sharer: Node) -> None:
    walk.absorptions.pop(node, None)
    walk.stop_read(node, node.all_input_nodes, shared_with=sharer)
    walk.stop_made(node, shared_with=sharer)


def _constant(walk: Walk, node: Node) -> None:
    """Let a constant that is used as a value, such as a concatenated class token, absorb scales: it is divided."""
    if node not in walk.labels:
        return None
    reader = next(iter(node.users))
    if (sharer := walk.sharer(node, reader)) is not None:
        walk.absorptions.pop(node, None)
        return walk.stop_made(node, shared_with=sharer)
    walk.absorptions[node] = [Absorption(reader, -1, node, walk.labels[node], divides=True)]
    return None


def _move(walk: Walk, node: Node, *, arguments: tuple[Any, ...] | None = None, uniform: Sequence[int] = ()) -> None:
    """Pass scales through a rearrangement: each element keeps its component."""
    if is_getitem(node) and RULES.get(target_name(node.args[0])) is not _parts:  # type: ignore[arg-type]
        return walk.stop(node, inputs=False)
    return walk.move(node, arguments, uniform=uniform)


def _parts(walk: Walk, node: Node) -> None:
    """Leave a rearrangement with several results to the nodes that select one result each."""
    walk.pending.update(dict.fromkeys(node.users))


def _pad(walk: Walk, node: Node) -> None:
    """Pass scales through padding with zeros, which no scale changes, or with values of the input; otherwise stop."""
    constant = target_name(node) == "aten.constant_pad_nd.default"
    mode = "constant" if constant else argument(node, 2) or "constant"
    value = argument(node, 2 if constant else 3)
    if mode != "constant":
        return _move(walk, node)
    if value not in (None, 0):
        return walk.stop(node)
    fill = (-1,) if constant else ("constant", -1)
    return _move(walk, node, arguments=(*node.args[:2], *fill))


def _same(walk: Walk, node: Node, *, values: tuple[int, ...] = (0,)) -> None:
    """Pass scales through an elementwise operator with `f(s * x, s * y) = s * f(x, y)` for s > 0.

    Args:
        walk: The analysis.
        node: The call.
        values: Positions of the arguments that are scaled: floating-point tensors, or numbers that are zero or
            infinite. The scale of every other argument is one.
    """
    operands = [argument(node, position) for position in values]
    scaled = [v for v in operands if isinstance(v, Node) and is_floating(walk.gm, v)]
    if not is_floating(walk.gm, node) or any(v not in scaled and not _invariant(v) for v in operands):
        return walk.stop(node)
    walk.stop_read(node, (v for v in node.all_input_nodes if v not in scaled))
    walk.broadcast([v for v in scaled if not is_parameter(v)], node)
    return _absorb(walk, node, [v for v in scaled if is_parameter(v)])


def _invariant(value: Any) -> bool:
    return isinstance(value, int | float) and (value == 0 or math.isinf(value))


def _absorb(walk: Walk, node: Node, constants: list[Node]) -> None:
    """Let the constant operands of an elementwise operator absorb scales: they are divided."""
    labels = walk.fixed(node) if constants else None
    if labels is None:
        return None
    walk.absorptions[node] = []
    for constant in constants:
        value = parameter(walk.gm, constant)
        if value.numel() == 1 and _invariant(value.item()):
            continue
        if (sharer := walk.sharer(constant, node)) is not None:
            return _stop_shared(walk, node, sharer)
        if not _holds(value, labels):
            return walk.stop(node)
        walk.absorptions[node].append(Absorption(node, _position(node, constant), constant, labels, divides=True))
    return None


def _holds(value: Tensor, labels: Tensor) -> bool:
    """Tell whether a constant, expanded to vary with `labels`, is at most as large as the larger of the two."""
    size = torch.broadcast_shapes(value.shape, labels.shape).numel()
    return value.is_floating_point() and size <= max(value.numel(), labels.numel())


def _position(node: Node, value: Node) -> int:
    return next(i for i in range(len(node.args) + len(node.kwargs)) if argument(node, i) is value)


def _multiply(walk: Walk, node: Node) -> None:
    """Scale a product by the product of its factors' scales; a constant factor absorbs any difference."""
    factors = [v for v in node.args[:2] if isinstance(v, Node) and is_floating(walk.gm, v)]
    constants = [v for v in factors if is_parameter(v)]
    if len(factors) < 2:  # numbers and integers
        return walk.broadcast(factors, node) if factors else walk.stop(node)
    if not constants:
        return _multiply_activations(walk, node, factors[0], factors[1])
    value = next((v for v in factors if v is not constants[0]), None)
    if len(constants) == 2 or value is None:
        return walk.stop(node)
    return _multiply_constant(walk, node, value, constants[0])


def _multiply_constant(walk: Walk, node: Node, value: Node, constant: Node) -> None:
    """Multiply a constant vector by the scale of the other factor, and divide it by the scale of the output."""
    stored, rank = parameter(walk.gm, constant), len(walk.shape(node))
    sides = {divides: walk.fixed(side) for side, divides in ((value, False), (node, True))}
    labels = {divides: lift(side, rank) for divides, side in sides.items() if side is not None}
    size = torch.broadcast_shapes(stored.shape, *(side.shape for side in labels.values())).numel()
    if stored.numel() == 1 or size != stored.numel() or walk.sharer(constant, node) is not None:
        walk.absorptions.pop(node, None)
        return walk.broadcast([value], node)
    position = _position(node, constant)
    walk.absorptions[node] = [Absorption(node, position, constant, side, divides) for divides, side in labels.items()]
    return None


def _multiply_activations(walk: Walk, node: Node, a: Node, b: Node) -> None:
    """Request the scale from both factors; one of them is chosen after all other scales are settled."""
    rank = len(walk.shape(node))
    labels_of = [lift(walk.labels[v], rank) for v in (node, a, b) if v in walk.labels]
    if not labels_of:
        return
    asked = torch.stack(torch.broadcast_tensors(*labels_of)).amax(0) >= 0
    for value in (node, a, b):
        walk.ask(value, asked)
    everywhere, *triple = torch.broadcast_tensors(asked, *(lift(walk.labels[v], rank) for v in (node, a, b)))
    walk.products[node] = torch.stack([labels[everywhere] for labels in triple])
    return


def _clamp(walk: Walk, node: Node) -> None:
    """Divide the bounds along with the value: `min(x, b) / s = min(x / s, b / s)`."""
    bounds = given_bounds(node)
    walk.broadcast([argument(node, 0)], node)
    if bounds is None or not is_floating(walk.gm, node):
        return walk.stop(node)
    if all(bound is None or (not isinstance(bound, Node) and _invariant(bound)) for bound in bounds):
        return None
    labels = walk.fixed(node)
    for bound in (b for b in bounds if isinstance(b, Node)):
        if not is_parameter(bound) or (labels is not None and not _holds(parameter(walk.gm, bound), labels)):
            return walk.stop(node)
        if (sharer := walk.sharer(bound, node)) is not None:
            return _stop_shared(walk, node, sharer)
    if labels is not None:
        walk.bounds[node] = labels
    return None


def _normalize(walk: Walk, node: Node, *, weight: int, bias: int | None, dims: int = 0) -> None:
    """Divide a norm's factor and offset by the scale of its output; its input is not scaled.

    Args:
        walk: The analysis.
        node: The call.
        weight: Position of the factor.
        bias: Position of the offset, if the operator has one.
        dims: Position of the sizes of the last dimensions, along which the factor varies; 0 if it varies along
            dimension 1.
    """
    walk.stop_read(node, [argument(node, 0)])
    parameters = [(p, argument(node, p)) for p in (weight, bias) if p is not None]
    affine = [(p, constant) for p, constant in parameters if constant is not None]
    if not affine or affine[0][0] != weight or not all(is_parameter(constant) for _, constant in affine):
        return walk.stop(node)
    for _, constant in affine:
        if (sharer := walk.sharer(constant, node)) is not None:
            return _stop_shared(walk, node, sharer)
    vector = walk.along(node, range(-len(argument(node, dims)), 0) if dims else [1])
    if vector is not None:
        walk.absorptions[node] = [Absorption(node, p, constant, vector, divides=True) for p, constant in affine]
    return None


def _reduce(walk: Walk, node: Node) -> None:
    """Pass scales through a sum, mean, maximum, or minimum; the scale must be constant along the reduced dimensions."""
    value, dims, keep = argument(node, 0), argument(node, 1), bool(argument(node, 2))
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(walk.shape(value))))
    return walk.link(
        [value], node, f"reduce {dims} {keep}", lambda: walk.numbered(value).amin(dims, keepdim=keep), uniform=dims
    )


def _spatial(walk: Walk, node: Node, *, dims: int) -> None:
    """Pass scales through pooling and interpolation over the last dimensions."""
    value = argument(node, 0)
    last = list(range(-dims, 0))
    return walk.link(
        [value], node, f"last {dims}", lambda: _first(walk, value, last).expand(walk.sizes(node)), uniform=last
    )


def _mix_rows(walk: Walk, node: Node, value: Node, others: list[Any]) -> None:
    """Pass scales through a matrix product of activations: the columns of the right operand keep their scales."""
    walk.stop_read(node, (v for v in others if isinstance(v, Node)), ", not as its right operand")
    sizes, columns = walk.sizes(node), walk.sizes(value)
    if not 2 <= len(columns) <= len(sizes):
        return walk.stop(node)

    def positions() -> Tensor:
        numbers = _first(walk, value, [-2])
        if numbers.dim() > 2 and numbers.shape[-3] not in (1, sizes[-3]):  # grouped-query attention
            numbers = numbers.repeat_interleave(sizes[-3] // numbers.shape[-3], -3)
        return numbers.expand(sizes)

    return walk.link([value], node, "columns", positions, uniform=[-2])


def _first(walk: Walk, value: Node, dims: list[int]) -> Tensor:
    """Return the numbers of the first elements of a value along `dims`."""
    return walk.numbered(value).amin(dims, keepdim=True)


def _matmul(walk: Walk, node: Node) -> None:
    a, b = argument(node, 0), argument(node, 1)
    return _mix_rows(walk, node, b, [a]) if len(walk.shape(a)) > 1 else walk.stop(node)


def _attention(walk: Walk, node: Node) -> None:
    return _mix_rows(walk, node, argument(node, 2), [argument(node, i) for i in (0, 1, 3)])


def _pick(walk: Walk, node: Node) -> None:
    """Pass scales through indexing by integers, where any index may select any element."""
    where = argument(node, 1)
    dims = [where] if isinstance(where, int) else [d for d, index in enumerate(where) if index is not None]
    indices = [argument(node, 2)] if isinstance(where, int) else [index for index in where if index is not None]
    if any(value_of(walk.gm, index).dtype in (torch.bool, torch.uint8) for index in indices):
        return walk.stop(node)
    return _move(walk, node, uniform=dims)


def _index_add(walk: Walk, node: Node) -> None:
    value, dim, source = argument(node, 0), argument(node, 1), argument(node, 3)
    walk.broadcast([value], node)
    walk.uniform(source, [dim])
    return walk.link(
        [node],
        source,
        f"add {dim}",
        lambda: _first(walk, node, [dim]).expand(walk.sizes(source)),
        uniform=[dim],
    )


def _free(walk: Walk, node: Node) -> None:
    """Do nothing: any scale passes zeros, and operators that use only the shape of an input."""


_make = partial(Walk.stop, inputs=False)
"""Rule for operators that use only the shape of an input and return constants, which cannot be scaled."""

RULES: dict[str, Rule] = {
    **{name: _move for name, motion in MOTIONS.items() if motion not in (Motion.CHOOSE, Motion.LOOK_UP)},
    **dict.fromkeys((name for name, motion in MOTIONS.items() if motion is Motion.SPLIT), _parts),
    "python.getitem": _move,
    **dict.fromkeys(PADS, _pad),
    **dict.fromkeys(CLAMPS, _clamp),
    **dict.fromkeys(
        (
            *("aten.relu.default", "aten.leaky_relu.default", "aten.prelu.default", "aten.abs.default"),
            *("aten.neg.default", "aten._to_copy.default", "aten.mul.Scalar", "aten.div.Scalar", "aten.div.Tensor"),
        ),
        _same,
    ),
    **dict.fromkeys(
        ("aten.add.Tensor", "aten.sub.Tensor", "aten.minimum.default", "aten.maximum.default"),
        partial(_same, values=(0, 1)),
    ),
    **dict.fromkeys(
        ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"),
        partial(_same, values=(0, 2)),
    ),
    **dict.fromkeys(
        ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"),
        partial(_same, values=(1, 2)),
    ),
    "aten.mul.Tensor": _multiply,
    "aten.layer_norm.default": partial(_normalize, weight=2, bias=3, dims=1),
    "aten.rms_norm.default": partial(_normalize, weight=2, bias=None, dims=1),
    "aten.group_norm.default": partial(_normalize, weight=2, bias=3),
    "aten.batch_norm.default": partial(_normalize, weight=1, bias=2),
    "aten.instance_norm.default": partial(_normalize, weight=1, bias=2),
    **dict.fromkeys(("aten.mean.dim", "aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default"), _reduce),
    **{
        f"aten.{pool}{d}d.default": partial(_spatial, dims=d)
        for pool in ("max_pool", "avg_pool", "adaptive_avg_pool")
        for d in (1, 2, 3)
    },
    **{
        f"aten.upsample_{how}{d}d.{overload}": partial(_spatial, dims=d)
        for d, ways in {
            1: ("nearest", "linear"),
            2: ("nearest", "bilinear", "bicubic"),
            3: ("nearest", "trilinear"),
        }.items()
        for how in ways
        for overload in ("vec", "default")
    },
    **dict.fromkeys(("aten.matmul.default", "aten.bmm.default", "aten.mm.default"), _matmul),
    "aten.scaled_dot_product_attention.default": _attention,
    **dict.fromkeys(("aten.index.Tensor", "aten.index_select.default", "aten.gather.default"), _pick),
    "aten.index_add.default": _index_add,
    **dict.fromkeys(
        ("aten.sym_size.int", "aten.zeros_like.default", "aten.new_zeros.default", "aten.zeros.default"), _free
    ),
    **dict.fromkeys(
        (
            *("aten.ones_like.default", "aten.full_like.default", "aten.empty_like.default", "aten.new_ones.default"),
            *("aten.new_full.default", "aten.new_empty.default"),
        ),
        _make,
    ),
}
"""Rules of operators at which a scale arrives, keyed by operator."""
