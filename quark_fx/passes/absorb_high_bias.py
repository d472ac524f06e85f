"""Take the part of a bias that a ReLU never cuts into the bias of the next layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.context import Context
from quark_fx.graph import get_attr, is_parameter, parameter, set_parameter, target_name, value_of
from quark_fx.operators import argument, channel_dim, operator_row, response, set_argument
from quark_fx.options import NonNegativeFloat
from quark_fx.pass_manager import Change, graph_pass
from quark_fx.placement import names_of
from quark_fx.selection import NOT_SELECTED, Selective


@graph_pass(exact=False, after=("fold_batch_norm",))
@dataclass(frozen=True)
class AbsorbHighBias(Selective):
    """Lower biases by `c = max(0, beta - deviations * |gamma|)`, and raise those of the next operator by `W @ c`.

    `beta` and `gamma` are the batch norm's that was folded into the operator: the mean and the deviation of its output.
    Where a ReLU lies between, its input is above `c`, and the rewrite exact, for all but a share of the data (0.14 % of
    a normal distribution at 3 deviations); with nothing between it is exact, and `c` is `beta`. Lower biases make
    activations, and the steps they are quantized with, smaller. The next operator must be the only reader, and must not
    pad: the zeros of a border would have been lowered, too.

    Attributes:
        deviations: how many there are to be between the mean and `c`.

    Source:
        Nagel et al. 2019, section 4.1.3.
    """

    deviations: NonNegativeFloat = 3.0

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Rewrite `gm`, note what became of each operator, and return how many biases were lowered."""
        absorbed = 0
        for node in list(gm.graph.nodes):
            if (position := _bias_position(node)) is None:
                continue
            names, found = names_of(node), None
            if self.selects(names):
                found = self._absorb(gm, node, position)
            moved = isinstance(found, float)
            what = f"lowered by up to {found:.3g}" if moved else NOT_SELECTED if found is None else f"left: {found}"
            if context is not None:
                context.note(Change(names.name, what, moved))
            absorbed += moved
        return absorbed

    def _absorb(self, gm: GraphModule, producer: Node, position: int) -> float | str:
        """Move what can be moved of a bias; return the most that a channel's is lowered by, or why nothing is."""
        if "batch_norm" not in producer.meta:
            return "no batch norm was folded into it"
        consumer, rectified = _only_reader(producer), False
        if consumer is not None and target_name(consumer) == "aten.relu.default":
            consumer, rectified = _only_reader(consumer), True
        if consumer is None:
            return "several operators read what it makes"
        beta, gamma = producer.meta["batch_norm"]
        shift = (beta - self.deviations * gamma).clamp(min=0) if rectified else beta
        if not bool((shift != 0).any()):
            return "its mean is too near to where the ReLU cuts"
        if reason := _refusal(gm, producer, consumer):
            return reason
        bias = argument(producer, position)
        weight, other = argument(consumer, 1), argument(consumer, 2)
        if not is_parameter(bias) or len(bias.users) > 1:
            return "its bias is not its own"
        row = operator_row(consumer)
        assert row is not None
        moved = response(consumer, row, parameter(gm, weight), shift)
        if moved is None:
            return f"the response of %{consumer.name} is not constant"
        _add(gm, producer, position, bias, -shift)
        _add(gm, consumer, 2, other, moved)
        producer.meta["batch_norm"] = (beta - shift, gamma)
        return float(shift.max())


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _bias_position(node: Node) -> int | None:
    row = operator_row(node)
    return row.bias if row is not None else None


def _refusal(gm: GraphModule, producer: Node, consumer: Node) -> str:
    """Return why the consumer does not sum over the producer's channels with constants alone; empty if it does."""
    row = operator_row(consumer)
    if row is None or row.kind not in ("conv", "linear") or (row.weight, row.bias) != (1, 2):
        return f"it is read by {target_name(consumer)} (%{consumer.name})"
    weight, bias = argument(consumer, 1), argument(consumer, 2)
    if not is_parameter(weight) or not (bias is None or is_parameter(bias)):
        return f"weight or bias of %{consumer.name} is not constant"
    padding = argument(consumer, 4) if row.kind == "conv" else None
    if padding not in (None, "valid") and any(p != 0 for p in padding):
        return f"%{consumer.name} pads with zeros, which would have to be lowered, too"
    made = operator_row(producer)
    assert made is not None
    assert made.weight is not None
    rank = value_of(gm, producer).dim()
    ranks = (value_of(gm, argument(producer, made.weight)).dim(), value_of(gm, weight).dim())
    if channel_dim(made, ranks[0], rank) != channel_dim(row, ranks[1], rank):
        return f"%{consumer.name} sums over another dimension than its channels"
    return ""


def _add(gm: GraphModule, node: Node, position: int, old: Node | None, change: Tensor) -> None:
    if old is not None and len(old.users) == 1:
        bias = parameter(gm, old).detach()
        set_parameter(gm, str(old.target), (bias.float() + change.to(bias.device)).to(bias.dtype))
        return
    weight = argument(node, 1)
    like = parameter(gm, weight)
    value = change.to(like.device) if old is None else parameter(gm, old).detach().float() + change.to(like.device)
    name = str(weight.target).removesuffix("weight") + "bias"
    with gm.graph.inserting_before(node):
        set_argument(node, position, get_attr(gm, name, value.to(like.dtype)))
