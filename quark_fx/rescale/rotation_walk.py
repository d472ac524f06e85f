"""Analysis of values that can be rotated together: `quark_fx.rescale.scale_walk` with rules for orthogonal maps.

Here, a component is a coordinate: values with the same components are multiplied by the same orthogonal matrix, which
mixes components that may be mixed (`RotationWalk.mixes`). Operators that are linear and treat all coordinates equally
pass a rotation on, matrix products absorb it, and norms without factors commute with it. At other operators, the value
is rotated, or rotated back, at run time (`made`, `read`), so no operator ends the analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import CAST, is_floating, is_parameter, parameter, static_size, target_name, value_of
from quark_fx.graph.operators import MOTIONS, PADS, Motion, argument
from quark_fx.rescale.scale_rules import RULES as SCALE_RULES
from quark_fx.rescale.scale_rules import visit
from quark_fx.rescale.scale_walk import Walk, lift, made_by, read_by

_MAX_HASH = 1 << 62


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm with a factor per channel: its input can be rotated if the factor is folded into all consumers.

    Attributes:
        node: Operator that multiplies by the factor.
        value: Input of the norm.
        factor: Constant factor.
        offset: Constant offset, or `None`.
        inputs: Component of each channel before the factor.
        outputs: Component of each channel after the factor.
        centers: Whether the norm subtracts the mean.
    """

    node: Node
    value: Node
    factor: Node
    offset: Node | None
    inputs: Tensor
    outputs: Tensor
    centers: bool


class RotationWalk(Walk):
    """Analysis of values that can be rotated together.

    Attributes:
        norms: Norms, keyed by the node that multiplies by the factor.
        made: Values that must be rotated after the operator that computes them, with reasons.
        read: Values that must be rotated back for a consumer, keyed by value and consumer, with reasons.
        centering: Components of values from which a mean is subtracted.
        measured: Components of values whose lengths a norm computes, so that no factor can be folded out of the values.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.norms: dict[Node, Norm] = {}
        self.made: dict[Node, str] = {}
        self.read: dict[tuple[Node, Node], str] = {}
        self.centering: list[Tensor] = []
        self.measured: list[Tensor] = []
        self._apart: list[tuple[Node, tuple[int, ...]]] = []

    def run(self) -> None:
        """Run rules until nothing changes, then once more to record the operators where a rotation stops."""
        while self.pending:
            node = next(iter(self.pending))
            del self.pending[node]
            _visit(self, node)
        for noted in (self.made, self.read, self.centering, self.measured, self._apart):
            noted.clear()
        for node in self.gm.graph.nodes:
            if node in self.labels or any(n in self.labels for n in node.all_input_nodes):
                _visit(self, node)
        self.pending.clear()
        for node in self.made:
            self._absorb_not(node, divides=True)
        for _, node in self.read:
            self._absorb_not(node, divides=False)

    def _absorb_not(self, node: Node, *, divides: bool) -> None:
        """Remove the absorptions of a node on the side where a rotation stops."""
        if node in self.absorptions:
            self.absorptions[node] = [a for a in self.absorptions[node] if a.divides is not divides]

    def stop_read(self, node: Node, values: Iterable[Node], how: str = "", *, shared_with: Node | None = None) -> None:
        """Record that `values` must be rotated back for `node`."""
        for value in values:
            if value in self.labels:
                self.read[value, node] = f"{read_by(node, shared_with)}{how}"

    def stop_made(self, node: Node, *, shared_with: Node | None = None) -> None:
        """Record that the result of `node` must be rotated after `node`."""
        if node in self.labels:
            self.made[node] = made_by(node, shared_with)

    def varying(self, value: Node) -> list[int]:
        """Return the dimensions along which the components of a value differ."""
        labels = self.labels.get(value)
        return [] if labels is None else [d for d, size in enumerate(labels.shape) if size > 1]

    def keep_apart(self, value: Node, dims: Sequence[int]) -> None:
        """Record that components at different indices of `dims` must not be mixed: an operator distinguishes them."""
        if dims:
            self._apart.append((value, tuple(dims)))

    def mixes(self, root_of: Tensor) -> Tensor:
        """Return a number per component that is equal for components that may be mixed with each other.

        Such components occur in the same values, equally often, and no operator distinguishes them.

        Args:
            root_of: Coordinate of each component.
        """
        signature = torch.zeros(self.components.count, dtype=torch.long)
        generator = torch.Generator().manual_seed(0)

        def note(labels: Tensor, index: Tensor | None = None) -> None:
            """Add a random number for each occurrence of a component: one per index if `index` is given."""
            is_labeled, count = labels >= 0, 1 if index is None else int(index.max()) + 1
            numbers = torch.randint(_MAX_HASH, (count,), generator=generator)
            places = torch.zeros_like(labels[is_labeled]) if index is None else index[is_labeled]
            signature.index_add_(0, root_of[self.components.roots(labels[is_labeled])], numbers[places])

        for labels in self.labels.values():
            note(labels)
        for absorption in (a for absorptions in self.absorptions.values() for a in absorptions):
            note(absorption.labels)
        for value, dims in self._apart:
            labels = self.labels[value]
            labels = labels.expand([size if d in dims else labels.shape[d] for d, size in enumerate(self.sizes(value))])
            index = torch.zeros(labels.shape, dtype=torch.long)
            for d in dims:
                shape = [-1 if e == d else 1 for e in range(labels.dim())]
                index = index * labels.shape[d] + torch.arange(labels.shape[d]).reshape(shape)
            note(labels, index)
        return signature


def _visit(walk: RotationWalk, node: Node) -> None:
    """Run the rule of a node, but stop at grouped products: a rotation would mix channels of different groups."""
    linear = Linear.of(node)
    if linear is not None and linear.groups > 1:
        return walk.stop(node)
    return visit(walk, node, RULES)


def _multiply(walk: RotationWalk, node: Node) -> None:
    """Pass rotations through a product if the factor is equal for all coordinates along at least one dimension.

    A parameter with one value per channel is treated as the weight of a norm. Other factors stop rotations.
    """
    values = [v for v in node.args[:2] if isinstance(v, Node) and isinstance(value_of(walk.gm, v), Tensor)]
    if len(values) == 2 and values[0] is values[1]:
        return _square(walk, node)
    if len(values) < 2:
        return walk.broadcast(values, node) if values and is_floating(walk.gm, node) else walk.stop(node)
    value = _rotated_factor(walk, node, values)
    if value is None:
        return walk.stop(node)
    (factor,) = (v for v in values if v is not value)
    rank = len(walk.shape(node))
    varying = {d + rank - len(walk.shape(v)) for v in (value, node) for d in walk.varying(v)}
    differs = {d for d in varying if _size(walk, factor, d - rank) != 1}
    if not differs or differs < varying:
        walk.broadcast([value], node)
        return walk.keep_apart(node, sorted(differs))
    channels = walk.sizes(node)[next(iter(varying))]
    if not is_parameter(factor) or len(varying) > 1 or parameter(walk.gm, factor).numel() != channels:
        return walk.stop(node)
    return _norm(walk, node, value, factor, None, differs.pop() - rank, centers=False)


def _rotated_factor(walk: RotationWalk, node: Node, factors: list[Node]) -> Node | None:
    """Return the only factor that has coordinates, or must get the coordinates of the product; otherwise `None`."""
    factors = [v for v in factors if is_floating(walk.gm, v)]
    labelled = [v for v in factors if v in walk.labels and not is_parameter(v)]
    if not labelled and node in walk.labels:
        dims = [d - len(walk.shape(node)) for d in walk.varying(node)]
        labelled = [v for v in factors if not is_parameter(v) and all(_size(walk, v, d) != 1 for d in dims)]
    return labelled[0] if len(labelled) == 1 else None


def _size(walk: Walk, value: Node, dim: int) -> int | None:
    """Return the size of a dimension, counted from the last: 1 for a missing dimension, `None` for a dynamic one."""
    shape = walk.shape(value)
    return static_size(shape[dim]) if -dim <= len(shape) else 1


def _norm(
    walk: RotationWalk, node: Node, value: Node, factor: Node, offset: Node | None, axis: int, *, centers: bool
) -> None:
    """Give coordinates to the values before and after a factor per channel, and do not tie them yet."""
    if any(c is not None and walk.sharer(c, node) is not None for c in (factor, offset)):
        return walk.stop(node)
    outputs = walk.along(node, [axis])
    if outputs is None:
        return walk.stop_read(node, [value])
    everywhere = torch.ones([len(outputs), *([1] * (-axis - 1))], dtype=torch.bool)
    walk.ask(value, lift(everywhere, len(walk.shape(node))))
    inputs = walk.along(value, [axis])
    assert inputs is not None
    walk.norms[node] = Norm(node, value, factor, offset, inputs, outputs, centers)
    return None


def _normalize(walk: RotationWalk, node: Node, *, centers: bool) -> None:
    """Pass rotations through a norm: it commutes with maps that preserve lengths (and means, if the norm centers)."""
    value, sizes, factor = (argument(node, i) for i in range(3))
    offset = argument(node, 3) if centers else None
    constants = [c for c in (factor, offset) if c is not None]
    if len(sizes) > 1 or not all(map(is_parameter, constants)) or (factor is None and offset is not None):
        return walk.stop(node)
    if factor is not None:
        return _norm(walk, node, value, factor, offset, -1, centers=centers)
    walk.broadcast([value], node)
    labels = walk.along(node, [-1])
    if labels is not None:
        walk.measured.append(labels)
        walk.centering += [labels] * centers
    return None


def _square(walk: RotationWalk, node: Node) -> None:
    """Accept a mean square over all coordinates, as in a norm, because a rotation does not change it; else stop."""
    value: Any = node.args[0]
    varying = walk.varying(value)
    summed = [_summed(walk, user) for user in node.users]
    if node in walk.labels:
        return walk.stop(node)
    if (target_name(node) == "aten.pow.Tensor_Scalar" and node.args[1] != 2) or not all(summed):
        return walk.stop(node)
    distinct = [d for d in varying if not all(d in dims for dims in summed)]
    if distinct == varying and varying:
        return walk.stop(node)
    if varying:
        walk.measured.append(walk.labels[value])
    return walk.keep_apart(value, distinct)


def _summed(walk: Walk, node: Node) -> list[int]:
    """Return the dimensions over which a node sums or averages."""
    if target_name(node) not in _SUMS:
        return []
    rank = len(walk.shape(argument(node, 0)))
    dims = argument(node, 1)
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))]


def _reduce(walk: RotationWalk, node: Node) -> None:
    """Stop at a sum over coordinates; pass rotations through a sum over other dimensions."""
    if set(_summed(walk, node)) & set(walk.varying(argument(node, 0))):
        return walk.stop(node)
    return SCALE_RULES[target_name(node)](walk, node)


def _mix_rows(walk: RotationWalk, node: Node, *, value: int) -> None:
    """Pass rotations through a product that mixes rows; each matrix of a stack mixes them differently."""
    columns = argument(node, value)
    if sum(n is columns for n in node.args) > 1:
        return walk.stop(node)
    SCALE_RULES[target_name(node)](walk, node)
    last = len(walk.shape(columns)) - 1
    return walk.keep_apart(columns, [d for d in walk.varying(columns) if d != last])


def _roll(walk: RotationWalk, node: Node) -> None:
    """Pass rotations through a roll along dimensions without coordinates; otherwise stop."""
    rank = len(walk.shape(node))
    dims = {d % rank for d in argument(node, 2) or range(rank)}
    value = argument(node, 0)
    return walk.stop(node) if dims & {*walk.varying(value), *walk.varying(node)} else walk.move(node)


def _divide(walk: RotationWalk, node: Node) -> None:
    """Pass rotations through a division if the divisor is equal for all coordinates; otherwise stop."""
    value, divisor = node.args[:2]
    rank = len(walk.shape(node))
    if not isinstance(value, Node) or node.kwargs or not is_floating(walk.gm, value):
        return walk.stop(node)
    varying = {d + rank - len(walk.shape(v)) for v in (value, node) for d in walk.varying(v)}
    tensor = isinstance(divisor, Node) and isinstance(value_of(walk.gm, divisor), Tensor)
    if tensor and any(_size(walk, divisor, d - rank) != 1 for d in varying):  # type: ignore[arg-type]
        return walk.stop(node)
    return walk.broadcast([value], node)


_SUMS = ("aten.mean.dim", "aten.sum.dim_IntList")

RULES: Mapping[str, Callable[[RotationWalk, Node], None]] = {
    name: SCALE_RULES[name]
    for name in (
        *(name for name, motion in MOTIONS.items() if motion not in (Motion.CHOOSE, Motion.LOOK_UP)),
        *(*PADS, CAST, "aten.neg.default", "aten.mul.Scalar", "aten.div.Scalar", "aten.add.Tensor", "aten.sub.Tensor"),
        *("aten.index.Tensor", "aten.index_select.default", "aten.index_add.default", "aten.sym_size.int"),
        *("aten.zeros_like.default", "aten.new_zeros.default", "aten.zeros.default"),
        *(f"aten.{kind}{d}d.default" for kind in ("avg_pool", "adaptive_avg_pool") for d in (1, 2, 3)),
    )
} | {
    "aten.mul.Tensor": _multiply,
    "aten.div.Tensor": _divide,
    "aten.roll.default": _roll,
    "aten.pow.Tensor_Scalar": _square,
    **dict.fromkeys(_SUMS, _reduce),
    "aten.layer_norm.default": partial(_normalize, centers=True),
    "aten.rms_norm.default": partial(_normalize, centers=False),
    "aten.scaled_dot_product_attention.default": partial(_mix_rows, value=2),
    **{f"aten.{name}.default": partial(_mix_rows, value=1) for name in ("matmul", "bmm", "mm")},
}
"""Rules of operators at which a rotation arrives, keyed by operator; other operators stop it."""
