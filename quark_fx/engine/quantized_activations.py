"""The static scales that activations of a converted graph are quantized with, and what depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.graph.nodes import parameter, target_name
from quark_fx.graph.straight_through import QUANTIZE
from quark_fx.numbers.formats import INT32, IntFormat, parse_format
from quark_fx.plan.placement import PlannedOperator


def activation_scales(gm: GraphModule) -> list[str]:
    """Return the names of the static per-tensor scales that activations of `gm` are quantized with."""
    found = [
        str(node.args[1].target)
        for node in gm.graph.nodes
        if target_name(node) == QUANTIZE
        and isinstance(node.args[1], Node)
        and node.args[1].op == "get_attr"
        and parameter(gm, node.args[1]).dim() == 0
        and isinstance(parse_format(str(node.args[3])), IntFormat)
    ]
    return list(dict.fromkeys(found))


def least_scales(gm: GraphModule, plan: Mapping[str, PlannedOperator], names: Iterable[str]) -> dict[str, float]:
    """Return, for each activation scale, the smallest at which no int32 bias of any operator overflows.

    Args:
        gm: the whole graph: operators of later blocks may read the same value.
        plan: of its operators.
        names: of the scales.
    """
    least = dict.fromkeys(names, 0.0)
    for weight in quantized_weights(gm, plan):
        name = weight.input_scale
        if weight.bias_scale_follows and name in least:
            needed = weight.bias_value(gm).abs() / (weight.scale(gm).abs() * 0.99 * INT32.qmax)
            least[name] = max(least[name], float(needed.max()))
    return least


def biases_at(
    gm: GraphModule,
    plan: Mapping[str, PlannedOperator],
    scales: Mapping[str, Tensor],
    biases: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors, by name, of the biases that change with activation scales, and of those that are new.

    Args:
        gm: the whole graph: int32 biases of later blocks lie on grids that follow the scales, too.
        plan: of its operators.
        scales: the new ones by name.
        biases: new values by the operator's node, one per output channel; the others keep theirs.
    """
    tensors: dict[str, Tensor] = {}
    new = biases or {}
    for weight in quantized_weights(gm, plan):
        follows = weight.bias_scale_follows and weight.input_scale in scales
        if follows or weight.node.name in new:
            step = scales[str(weight.input_scale)] * weight.scale(gm) if follows else None
            value = new[weight.node.name] if weight.node.name in new else weight.bias_value(gm)
            tensors |= weight.bias_tensors(gm, value, step)
    return tensors


__all__ = ["activation_scales", "biases_at", "least_scales"]
