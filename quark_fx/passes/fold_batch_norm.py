"""Fold affine maps with constants, including batch norms, into the adjacent convolution or matrix product."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.graph.absorbed import AbsorbedMaps
from quark_fx.graph.affine import Step, affine_step, affine_step_to, carried_dim, readers
from quark_fx.graph.computed import computed_constants, is_constant
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    CAST,
    get_attr,
    is_finite,
    is_floating,
    is_parameter,
    parameter,
    set_parameter,
    target_name,
    value_of,
)
from quark_fx.graph.operators import clamp_bounds, set_argument
from quark_fx.graph.pass_manager import graph_pass


@graph_pass()
def fold_batch_norm(gm: GraphModule) -> int:
    """Fold every affine map with constants into the operator before it, or else into the operator after it, if exact.

    An affine map multiplies each channel by a constant `g` and adds a constant `c`. It can be a batch norm in eval
    mode, or any chain of products and sums with parameters, buffers, and numbers, with any operators and shapes.

    Into the operator before the map: `W' = W * g` along the output channels, `b' = b * g + c`. This is valid if the map
    is the operator's only consumer, and the constants vary only along the operator's output channels. Transpositions
    and reshapes may be in between.
    Into the operator after the map: `W' = W * g` along the input channels, `b' = b + W @ c`. This is valid if the
    operator is the map's only consumer, and `c` is zero if the operator pads (otherwise the padded zeros would have to
    be shifted).

    Transpositions that cancel after the map between them is gone are removed.

    Not folded: a single factor for all channels next to a matrix product, which gains nothing unless a clamp follows
    (models scale logits and queries this way); the weights of a normalization, where scale sites and rotations end; and
    infinite constants. If a batch norm is folded into the operator before it, that operator's `node.meta["batch_norm"]`
    holds the mean and the standard deviation of its output per channel: float32, shape `(channels,)` each.

    Returns:
        Number of folded maps.

    Source:
        Jacob et al. 2018, section 3.2.
    """
    linears = [
        linear for node in gm.graph.nodes if (linear := Linear.of(node)) is not None and _is_foldable(gm, linear)
    ]
    notes = AbsorbedMaps(gm, computed_constants(gm.graph))
    folded = sum(_fold_into_producer(gm, linear, notes) for linear in linears)
    folded += sum(_fold_into_consumer(gm, linear, notes) for linear in linears)
    if folded:
        notes.cancel_transpositions()
    return folded


@dataclass
class _Chain:
    """A chain of affine maps, combined into one.

    Attributes:
        factor, offset: Combined map, float64, shape `(channels,)` each.
        steps: Steps in the order in which they are applied.
        statistics: Mean and standard deviation of each channel of the result; `None` without a batch norm.
    """

    factor: Tensor
    offset: Tensor
    steps: list[Step] = field(default_factory=list)
    statistics: tuple[Tensor, Tensor] | None = None

    def append(self, step: Step) -> None:
        self.factor, self.offset = self.factor * step.factor, self.offset * step.factor + step.offset
        if step.statistics is not None:
            self.statistics = step.statistics
        elif self.statistics is not None:
            mean, deviation = self.statistics
            self.statistics = mean * step.factor + step.offset, deviation * step.factor.abs()
        self.steps.append(step)

    def prepend(self, step: Step) -> None:
        self.factor, self.offset = self.factor * step.factor, self.factor * step.offset + self.offset
        self.steps.insert(0, step)

    @property
    def per_channel(self) -> bool:
        return any(step.per_channel for step in self.steps)


def _fold_into_producer(gm: GraphModule, linear: Linear, notes: AbsorbedMaps) -> int:
    value, channels = linear.node, linear.channel_dim(value_of(gm, linear.node).dim())
    chain = _identity(linear, linear.shape[linear.output_axis] * linear.output_groups)
    if "batch_norm" in value.meta:
        chain.statistics = tuple(x.cpu().double() for x in value.meta["batch_norm"])
    while True:
        user = _only_reader(value)
        if user is not None and (moved := carried_dim(gm, user, channels)) is not None:
            value, channels = user, moved
            continue
        step = affine_step(gm, value, channels, notes.constants)
        if step is None or (linear.bias_at is None and bool(step.offset.any())):
            break
        chain.append(step)
        value = step.result
    clamped = user is not None and clamp_bounds(user) is not None
    if not chain.steps or not (chain.per_channel or linear.kernel or clamped):
        return 0
    weight = _multiplied(gm, linear, linear.of_outputs, chain.factor)
    bias = chain.offset if linear.bias is None else chain.offset + parameter(gm, linear.bias).cpu() * chain.factor
    if not _store(gm, linear, weight, bias):
        return 0
    if chain.statistics is not None:
        linear.node.meta["batch_norm"] = tuple(x.float().to(weight.device) for x in chain.statistics)
    return _drop(gm, linear, chain, notes, before=False)


def _fold_into_consumer(gm: GraphModule, linear: Linear, notes: AbsorbedMaps) -> int:
    value, channels = linear.activation, linear.channel_dim(value_of(gm, linear.activation).dim())
    chain = _identity(
        linear, linear.shape[linear.input_axis] * (1 if linear.kind == "conv_transpose" else linear.groups)
    )
    keeps_zero = linear.pads or linear.kind == "conv_transpose" or linear.bias_at is None
    while isinstance(value, Node) and value.op == "call_function" and _only_reader(value) is not None:
        source = value.all_input_nodes[0] if value.all_input_nodes else value
        rank = value_of(gm, source).dim() if isinstance(value_of(gm, source), Tensor) else 0
        moved = next((d for d in range(rank) if carried_dim(gm, value, d) == channels), None)
        if moved is not None:
            value, channels = source, moved
            continue
        step = affine_step_to(gm, value, channels, notes.constants)
        if step is None or (keeps_zero and bool(step.offset.any())):
            break
        chain.prepend(step)
        value = step.value
    if not chain.steps or not (chain.per_channel or linear.kernel) or _is_normalized(gm, value, notes.constants):
        return 0
    added = linear.response(parameter(gm, linear.stored.node), chain.offset) if bool(chain.offset.any()) else None
    if added is None and bool(chain.offset.any()):
        return 0
    weight = _multiplied(gm, linear, linear.of_inputs, chain.factor)
    bias = None if added is None else added if linear.bias is None else added + parameter(gm, linear.bias)
    return _drop(gm, linear, chain, notes, before=True) if _store(gm, linear, weight, bias) else 0


def _identity(linear: Linear, channels: int) -> _Chain:
    return _Chain(torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64))


def _is_foldable(gm: GraphModule, linear: Linear) -> bool:
    """Tell whether the weight and the bias of an operator can absorb an affine map."""
    return (
        (linear.bias is None or is_parameter(linear.bias))
        and not linear.has_factors
        and not linear.stacked
        and isinstance(value_of(gm, linear.node), Tensor)
    )


def _is_normalized(gm: GraphModule, value: Node, constants: Collection[Node]) -> bool:
    """Tell whether a value is a product or quotient of two activations, such as a normalized activation."""
    while target_name(value) == CAST:
        value = value.args[0]  # type: ignore[assignment]
    factors = [n for n in value.all_input_nodes if is_floating(gm, n) and not is_constant(n, constants)]
    return target_name(value) in ("aten.mul.Tensor", "aten.div.Tensor") and len(factors) == 2


def _only_reader(value: Node) -> Node | None:
    """Return the only consumer of a value, not counting consumers of its sizes; `None` if it has several."""
    nodes = readers(value)
    return nodes[0] if len(nodes) == 1 else None


def _multiplied(gm: GraphModule, linear: Linear, placed: Callable[[Tensor], Tensor], factor: Tensor) -> Tensor:
    """Return the weight times one factor per channel, in float32 or wider."""
    weight = parameter(gm, linear.stored.node).detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight * placed(factor.to(weight.device, wide))


def _store(gm: GraphModule, linear: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    """Store an operator's weight and bias, unless they overflow; return whether they were stored."""
    stored = linear.stored
    old, like = linear.bias, parameter(gm, stored.node)
    weight = weight.to(like.dtype)
    bias = None if bias is None or (linear.bias_at is None) else bias.detach().to(like.device, like.dtype)
    if not is_finite(weight) or (bias is not None and not is_finite(bias)):
        return False
    position = stored.position if stored.reader is linear.node else 0
    _replace(gm, stored.reader, position, stored.node, str(stored.node.target), weight)
    if bias is not None and linear.bias_at is not None and (old is not None or bool(bias.any())):
        name = str(stored.node.target)
        name = name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}_bias"
        _replace(gm, linear.node, linear.bias_at, old, str(old.target) if old is not None else name, bias)
    return True


def _replace(gm: GraphModule, node: Node, position: int, old: Node | None, name: str, value: Tensor) -> None:
    """Give `node` the constant `value`: under the old name if `node` is the only consumer, else under a new name."""
    if old is not None and len(old.users) == 1:
        set_parameter(gm, name, value)
        return
    with gm.graph.inserting_before(node):
        set_argument(node, position, get_attr(gm, name, value))


def _drop(gm: GraphModule, linear: Linear, chain: _Chain, notes: AbsorbedMaps, *, before: bool) -> int:
    """Remove a chain of maps from the graph; return the number of its steps."""
    notes.note(linear.node, chain.steps, chain.factor, chain.offset, before=before)
    for step in reversed(chain.steps):
        for node in reversed(step.nodes):
            node.replace_all_uses_with(step.value)  # consumers of the result, and of sizes
            gm.graph.erase_node(node)
    return len(chain.steps)
