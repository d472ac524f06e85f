"""Move the part of a bias that a ReLU never clips into the bias of the next layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import get_attr, is_parameter, parameter, set_parameter, target_name, value_of
from quark_fx.graph.operators import set_argument
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import names_of
from quark_fx.plan.roles import Uses
from quark_fx.system.options import NonNegativeFloat


@graph_pass(exact=False, after=("fold_batch_norm",))
@dataclass(frozen=True)
class AbsorbHighBias(Selective):
    """Lower biases by `c = max(0, beta - deviations * |gamma|)`, and raise the next operator's biases by `W @ c`.

    `beta` and `gamma` come from the batch norm that was folded into the operator: the mean and the standard deviation
    of the operator's output. Across a ReLU, the rewrite is exact where the input of the ReLU is above `c`, which holds
    for all but a fraction of the data (0.14 % of a normal distribution at 3 deviations). Without a ReLU, it is exact,
    and `c` is `beta`. Lower biases make activations, and their quantization steps, smaller. The next operator must be
    the only consumer, and must not pad, because the padded zeros would have to be lowered as well.

    Attributes:
        deviations: Number of standard deviations between the mean and `c`.

    Source:
        Nagel et al. 2019, section 4.1.3.
    """

    deviations: NonNegativeFloat = 3.0

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Rewrite `gm`, report each operator, and return the number of lowered biases."""
        absorbed, uses = 0, Uses(gm.graph)  # new biases do not change the uses
        for node in list(gm.graph.nodes):
            linear = Linear.of(node)
            if linear is None or linear.bias_at is None:
                continue
            names = names_of(node, uses)
            try:
                self.require_selected(names)
                change = Change(names.name, f"lowered by up to {self._absorb(gm, linear, linear.bias_at):.3g}")
            except Declined as declined:
                change = Change.skipped(names.name, declined.reason)
            if context is not None:
                context.note(change)
            absorbed += change.changed
        return absorbed

    def _absorb(self, gm: GraphModule, producer: Linear, position: int) -> float:
        """Move part of a bias; return the largest amount for a channel. Raise `Declined` if no part can be moved."""
        if "batch_norm" not in producer.node.meta:
            raise Declined("no batch norm was folded into it")
        consumer, rectified = _only_reader(producer.node), False
        if consumer is not None and target_name(consumer) == "aten.relu.default":
            consumer, rectified = _only_reader(consumer), True
        if consumer is None:
            raise Declined("several operators read its output")
        beta, gamma = producer.node.meta["batch_norm"]
        shift = (beta - self.deviations * gamma).clamp(min=0) if rectified else beta
        if not bool((shift != 0).any()):
            raise Declined("its mean is too close to the ReLU's threshold")
        reader = Linear.of(consumer)
        if reader is None or reader.bias_at is None:
            raise Declined(f"it is read by {target_name(consumer)} (%{consumer.name}), which cannot absorb a bias")
        _require_sum(gm, producer, reader)
        bias = producer.bias
        if not is_parameter(bias) or len(bias.users) > 1:
            raise Declined("its bias is computed, or other operators read it too")
        moved = reader.response(parameter(gm, reader.weight), shift)
        if moved is None:
            raise Declined(f"the response of %{consumer.name} is not constant")
        _add(gm, producer, position, -shift)
        _add(gm, reader, reader.bias_at, moved)
        producer.node.meta["batch_norm"] = (beta - shift, gamma)
        return float(shift.max())


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _require_sum(gm: GraphModule, producer: Linear, reader: Linear) -> None:
    """Raise `Declined` unless the reader sums over the producer's channels with a constant weight and bias."""
    name = reader.node.name
    if reader.kind not in ("conv", "linear") or (reader.weight_at, reader.bias_at) != (1, 2):
        raise Declined(f"it is read by {target_name(reader.node)} (%{name}), which cannot absorb a bias")
    if not is_parameter(reader.weight) or not (reader.bias is None or is_parameter(reader.bias)):
        raise Declined(f"the weight or bias of %{name} is not constant")
    if reader.pads:
        raise Declined(f"%{name} pads with zeros, which would also have to be lowered")
    rank = value_of(gm, producer.node).dim()
    if producer.channel_dim(rank) != reader.channel_dim(rank):
        raise Declined(f"%{name} sums over a dimension other than the channels")


def _add(gm: GraphModule, linear: Linear, position: int, change: Tensor) -> None:
    """Add `change` to an operator's bias, the argument at `position`; a shared bias is copied first."""
    old = linear.bias
    if old is not None and len(old.users) == 1:
        bias = parameter(gm, old).detach()
        set_parameter(gm, str(old.target), (bias.float() + change.to(bias.device)).to(bias.dtype))
        return
    like = parameter(gm, linear.weight)
    value = change.to(like.device) if old is None else parameter(gm, old).detach().float() + change.to(like.device)
    name = str(linear.weight.target).removesuffix("weight") + "bias"
    with gm.graph.inserting_before(linear.node):
        set_argument(linear.node, position, get_attr(gm, name, value.to(like.dtype)))
