"""Static scales of activations in a converted graph, and the biases that depend on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.graph.nodes import QUANTIZE, is_parameter, parameter, target_name, tensor_of
from quark_fx.numbers.formats import INT32, parse_format
from quark_fx.numbers.qparams import QParams
from quark_fx.plan.placement import PlannedOperator, Rounding


@dataclass(frozen=True)
class QuantizedActivation:
    """Activation that is quantized with a static scale and zero point per tensor.

    Attributes:
        rounding: Metadata from conversion; its bounds combine all dropped clamps that saturation performs instead.
        scale_name, zero_point_name: Names of the tensors in the graph.
    """

    rounding: Rounding
    scale_name: str
    zero_point_name: str

    def qparams(self, gm: GraphModule) -> QParams:
        """Return the stored parameters, shape `()`."""
        return QParams(tensor_of(gm, self.scale_name), tensor_of(gm, self.zero_point_name).to(torch.int32))

    def most(self, gm: GraphModule) -> float:
        """Return the largest scale at which saturation still performs the dropped clamps, given the zero point."""
        zero_point, fmt = int(tensor_of(gm, self.zero_point_name)), self.rounding.spec.format
        # A bound must round to the last code or beyond; the factor below leaves a margin for rounding errors.
        ends = (self.rounding.low, fmt.qmin - zero_point + 0.5), (self.rounding.high, fmt.qmax - zero_point - 0.5)
        most = (end / code for end, code in ends if math.isfinite(end) and end * code > 0)
        return min(most, default=math.inf) * (1 - 1e-6)

    def tensors(self, gm: GraphModule, plan: Mapping[str, PlannedOperator], new: QParams) -> dict[str, Tensor]:
        """Return the tensors that change with new parameters, by their names, including int32 biases of later blocks.

        Args:
            gm: Whole graph.
            plan: Planned operators of the graph.
            new: New parameters, shape `()`.

        Raises:
            OverflowError: If a bias would overflow int32, or saturation would not perform a dropped clamp.
        """
        old, name = self.qparams(gm), self.scale_name
        if not new.saturates(self.rounding.low, self.rounding.high, self.rounding.spec.scheme):
            raise OverflowError("its range would no longer perform the clamp that saturation replaces")
        if float(new.scale) < scale_limits(gm, plan, [name])[name][0]:
            raise OverflowError("an int32 bias would overflow")
        scale = new.scale.to(old.scale).reshape(())
        zero_point = new.zero_point.to(tensor_of(gm, self.zero_point_name)).reshape(())
        return {name: scale, self.zero_point_name: zero_point} | biases_at(gm, plan, {name: scale})


def quantized_activations(gm: GraphModule) -> list[QuantizedActivation]:
    """Return the activations of `gm` (a converted graph, or a block of one) with a static scale, in order.

    Values with data movement between them share a scale and count as one.
    """
    activations: dict[str, QuantizedActivation] = {}
    for node in _quantizers(gm):
        rounding: Rounding | None = node.meta.get("rounding")
        if rounding is not None:
            scale, zero_point = (str(source.target) for source in node.args[1:3])  # type: ignore[union-attr]
            base = activations[scale].rounding if scale in activations else rounding
            low, high = max(base.low, rounding.low), min(base.high, rounding.high)
            activations[scale] = QuantizedActivation(replace(base, low=low, high=high), scale, zero_point)
    return list(activations.values())


def activation_scales(gm: GraphModule) -> list[str]:
    """Return the names of the static per-tensor scales that activations of `gm` are quantized with."""
    return list(dict.fromkeys(str(node.args[1].target) for node in _quantizers(gm)))  # type: ignore[union-attr]


def _quantizers(gm: GraphModule) -> Iterator[Node]:
    """Yield calls that quantize an activation to integers with a stored scale per tensor."""
    for node in gm.graph.nodes:
        if target_name(node) == QUANTIZE and is_parameter(node.args[1]):
            whole = parse_format(str(node.args[3])).is_integer
            if whole and parameter(gm, node.args[1]).dim() == 0:
                yield node


def scale_limits(
    gm: GraphModule, plan: Mapping[str, PlannedOperator], names: Iterable[str]
) -> dict[str, tuple[float, float]]:
    """Return the lower and upper limit of each activation scale, at its current zero point.

    Below the lower limit, an int32 bias of some operator would overflow; above the upper limit, saturation would no
    longer perform a dropped clamp.

    Args:
        gm: Whole graph, because operators of later blocks may read the same value.
        plan: Planned operators of the graph.
        names: Names of the scales.
    """
    least = dict.fromkeys(names, 0.0)
    for weight in quantized_weights(gm, plan):
        name = weight.input_scale
        if (bias := weight.int32_bias) is not None and name in least:
            # Stricter than the limit of `StoredBias.rescaled`, because learned scales are rounded afterwards.
            needed = bias.value(gm).abs() / (weight.scale(gm).abs() * 0.99 * INT32.qmax)
            least[name] = max(least[name], float(needed.max()))
    activations = (activation for activation in quantized_activations(gm) if activation.scale_name in least)
    most = {activation.scale_name: activation.most(gm) for activation in activations}
    return {name: (least[name], most.get(name, math.inf)) for name in least}


def biases_at(
    gm: GraphModule,
    plan: Mapping[str, PlannedOperator],
    scales: Mapping[str, Tensor],
    biases: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors, by their names, of the biases that change with activation scales, and of new biases.

    Args:
        gm: Whole graph, because int32 biases of later blocks depend on the scales as well.
        plan: Planned operators of the graph.
        scales: New activation scales, by their names.
        biases: New biases by the name of the operator's node, one value per output channel; other biases stay.
    """
    tensors: dict[str, Tensor] = {}
    new = biases or {}
    for weight in quantized_weights(gm, plan):
        follows = weight.int32_bias is not None and weight.input_scale in scales
        if (bias := weight.bias) is not None and (follows or weight.node.name in new):
            # The graph may be on another device than the new tensors.
            scale = weight.scale(gm)
            step = scales[str(weight.input_scale)].to(scale.device) * scale if follows else None
            value = new[weight.node.name].to(scale.device) if weight.node.name in new else bias.value(gm)
            tensors |= bias.tensors(gm, value, step)
    return tensors


__all__ = ["QuantizedActivation", "activation_scales", "biases_at", "quantized_activations", "scale_limits"]
