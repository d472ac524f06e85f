"""The weighted operators of a converted graph, and the tensors that store their codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import DEQUANTIZE, is_parameter, parameter, target_name
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.formats import INT32, parse_format
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.layout import Layout
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.plan.placement import Coded, PlannedOperator
from quark_fx.plan.weights import storable

FIXED = "fixed (per tensor, power of two, or shared)"
"""What reports say of scales that cannot change individually."""


def least_bias_scale(bias: Tensor) -> Tensor:
    """Return, for each value of a bias, the smallest scale at which its code fits int32, with room for rounding."""
    return bias.abs() / (0.999 * INT32.qmax)


@dataclass(frozen=True)
class StoredBias:
    """Bias stored as a parameter or as integer codes.

    Attributes:
        node: Node that provides the bias: a `get_attr` or a `dequantize`.
    """

    node: Node

    @property
    def name(self) -> str:
        """Name of the tensor that stores the bias or its codes."""
        return _name(self.node.args[0] if self.node.args else self.node)

    @property
    def is_int32(self) -> bool:
        """True if the bias is stored as int32 codes, at the scale of input times weight."""
        return target_name(self.node) == DEQUANTIZE and str(self.node.args[3]) == str(INT32)

    def value(self, gm: GraphModule) -> Tensor:
        """Return the bias that the operator currently adds, float32, one value per output channel."""
        if self.node.op == "get_attr":
            return parameter(gm, self.node).detach().float()
        return stored_tensor(gm, self.node.args).dequantize()

    def scale(self, gm: GraphModule) -> Tensor:
        """Return the scales of the codes."""
        return parameter(gm, self.node.args[1])  # type: ignore[arg-type]

    def rescaled(self, gm: GraphModule, ratio: Tensor) -> dict[str, Tensor]:
        """Return the tensors, by their names, that store the same bias at scales multiplied by `ratio`.

        Raises:
            OverflowError: If the codes do not fit int32.
        """
        scale, value = self.scale(gm) * ratio, self.value(gm)
        if bool((scale.double().abs() < least_bias_scale(value.double())).any()):
            raise OverflowError("its int32 bias would overflow")
        return self.tensors(gm, value, scale)

    def tensors(self, gm: GraphModule, value: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors, by their names, that make the operator add `value`.

        Args:
            gm: Graph that contains `node`.
            value: Bias of each output channel, float.
            scale: New scales of the codes, float32; default: unchanged.
        """
        if self.node.op == "get_attr":
            return {self.name: value.to(parameter(gm, self.node).dtype)}
        codes, scale_node, zero_point = self.node.args[:3]
        old = self.scale(gm)
        limits = Scheme(format=parse_format(str(self.node.args[3])))
        scale = old if scale is None else scale.to(old.dtype)
        points = parameter(gm, zero_point).to(value.device)  # type: ignore[arg-type]
        rounded = (value.double() / scale.double()).round() + points
        stored = rounded.clamp(limits.qmin, limits.qmax).to(parameter(gm, codes).dtype)  # type: ignore[arg-type]
        return {self.name: stored, _name(scale_node): scale}


@dataclass(frozen=True)
class QuantizedWeight:
    """Operator with a weight stored in codes.

    Attributes:
        operator: Planned operator.
        linear: Call of the operator in the graph that was searched.
        dequantize: Node that dequantizes the weight.
    """

    operator: Coded
    linear: Linear
    dequantize: Node

    @property
    def name(self) -> str:
        """Module of the operator."""
        return self.operator.name

    @property
    def node(self) -> Node:
        """Node of the call in the graph that was searched."""
        return self.linear.node

    @property
    def weight(self) -> str:
        """Name of the float weight in the graph before conversion."""
        return str(self.operator.weight_node.target)

    @property
    def scheme(self) -> Scheme:
        return self.operator.weight.scheme

    @property
    def codes(self) -> str:
        """Name of the tensor of codes."""
        return _name(self.dequantize.args[0])

    def storable(self, values: Tensor) -> Tensor:
        """Return the codes to store for values of the format, in the shape of the weight."""
        return self.limited(self.scheme.format.codes_of(values))

    def limited(self, codes: Tensor) -> Tensor:
        """Return `codes`, with each pair that would saturate on the target lowered to the target's limit."""
        return codes if self.operator.pairs is None else self.operator.pairs.limited(codes)

    def stored(self, gm: GraphModule) -> QuantizedTensor:
        """Return the stored weight."""
        return stored_tensor(gm, self.dequantize.args)

    def grid(self, gm: GraphModule, matrices: slice = slice(None)) -> Grid:
        """Return the grid of the codes; `matrices` selects some matrices of a stack."""
        return Grid.of(self.stored(gm)[matrices], self.scheme, movable=self.movable(gm))

    def movable(self, gm: GraphModule) -> bool:
        """Return whether each scale may change alone: nothing else uses it, except an int32 bias that can follow."""
        spec = self.operator.weight
        alone = spec.scale.group_size is None and spec.group_rows == 1 and spec.symmetry is not Symmetry.OFFSET
        free = alone and spec.scale != POWER_OF_TWO
        bias = self.int32_bias
        return free and (bias is None or bias.scale(gm).shape == self.scale(gm).shape)

    def storable_ranges(self, axis: int | None) -> Callable[[QParams], QParams] | None:
        """Return the function that rounds two-level scales, and scales with offsets; `None` for other scales.

        Args:
            axis: Dimension of the weight that scales vary along.
        """
        spec = self.operator.weight
        together = spec.scale.multiples is not None or spec.symmetry is Symmetry.OFFSET
        if not together or axis is None or self.int32_bias is not None:
            return None
        return partial(storable, spec=spec, axis=axis)

    def layout(self, gm: GraphModule) -> Layout:
        """Return the layout that assigns scales to codes."""
        return self.stored(gm).layout

    @property
    def zero_point_name(self) -> str:
        """Name of the tensor of zero points, or offsets."""
        return _name(self.dequantize.args[2])

    @property
    def scale_name(self) -> str:
        """Name of the tensor of scales."""
        return _name(self.dequantize.args[1])

    def scale(self, gm: GraphModule) -> Tensor:
        """Return the stored scale."""
        return parameter(gm, self.dequantize.args[1])  # type: ignore[arg-type]

    def value(self, gm: GraphModule) -> Tensor:
        """Return the dequantized weight, float32."""
        return self.stored(gm).dequantize()

    def channel_dim(self, output: Tensor) -> int:
        """Return the dimension of the operator's output that counts output channels."""
        return self.linear.channel_dim(output.dim())

    @cached_property
    def bias(self) -> StoredBias | None:
        """Bias that the operator adds, if it can be replaced: a parameter, or integer codes."""
        node = self.linear.bias
        if node is None or node.op == "get_attr":
            return None if node is None else StoredBias(node)
        stored = target_name(node) == DEQUANTIZE and is_parameter(node.args[0])
        return StoredBias(node) if stored and parse_format(str(node.args[3])).is_integer else None

    @property
    def int32_bias(self) -> StoredBias | None:
        """Bias in int32, at the scale of input times weight, so its codes depend on both scales; `None` for others."""
        return self.bias if self.bias is not None and self.bias.is_int32 else None

    @property
    def is_plain(self) -> bool:
        """True if the operator only multiplies and adds a bias that can be read, without further factors."""
        readable = self.bias is not None or self.linear.bias is None
        return readable and not self.linear.has_factors

    @property
    def input_scale(self) -> str | None:
        """Name of the scale of the operator's input, if that scale is a constant."""
        source = self.linear.activation
        scale = source.args[1] if target_name(source) == DEQUANTIZE else None
        return str(scale.target) if isinstance(scale, Node) and scale.op == "get_attr" else None


def stored_tensor(gm: GraphModule, dequantize: Sequence[Any]) -> QuantizedTensor:
    """Return the tensor that `dequantize` reads from its arguments; the first three are `get_attr` nodes of `gm`."""
    codes, scale, zero_point = (parameter(gm, node) for node in dequantize[:3])
    return QuantizedTensor.of(codes, scale, zero_point, *dequantize[3:6])


def quantized_weights(gm: GraphModule, plan: Mapping[str, PlannedOperator]) -> list[QuantizedWeight]:
    """Return the operators of `gm` (a converted graph, or a block of one) whose weights are codes, in order.

    Embeddings are excluded, because they multiply nothing, and so are recurrent layers.
    """
    weights = []
    for node in gm.graph.nodes:
        # An input of a block has the name of the operator that computes it.
        operator = plan.get(node.name) if node.op == "call_function" else None
        if not isinstance(operator, Coded) or operator.linear is None:
            continue
        linear = operator.linear.at(node)
        value: object = linear.weight
        while isinstance(value, Node) and target_name(value) != DEQUANTIZE and value.op == "call_function":
            value = value.args[0]
        if not isinstance(value, Node) or target_name(value) != DEQUANTIZE:
            continue
        weights.append(QuantizedWeight(operator, linear, value))
    return weights


def shared_tensors(gm: GraphModule) -> set[str]:
    """Return the names of the tensors with several readers, which may need different values."""
    readers: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            readers[str(node.target)] += len(node.users)
    return {name for name, count in readers.items() if count > 1}


def own_weights(
    gm: GraphModule, context: Context, chooser: Selective
) -> Callable[[GraphModule], list[QuantizedWeight]]:
    """Return a function that lists the selected weights of a block whose codes have one reader; report skipped weights.

    Args:
        gm: Converted graph.
        context: Context of the run.
        chooser: Pass that learns the codes.
    """
    learned = {weight.node.name: weight for weight in quantized_weights(gm, context.plan)}
    shared, plan = shared_tensors(gm), chooser.selected(context.plan)
    for name, operator in context.plan.items():
        if not isinstance(operator, Coded):
            continue
        if reason := chooser.why_not(operator):
            pass
        elif name not in learned:
            reason = _reason(operator)
        elif learned[name].codes in shared:
            reason = "several operators read its weight"
        elif (fmt := operator.weight.format).vector > 1:
            reason = f"{fmt} stores {fmt.vector} values in each code, so they are rounded to nearest together"
        if reason:
            context.note(Change.skipped(operator.name, reason))
    return lambda block: [
        weight
        for weight in quantized_weights(block, plan)
        if weight.codes not in shared and weight.scheme.format.vector == 1
    ]


def _reason(operator: Coded) -> str:
    """Return the reason that a weight is not in `quantized_weights`."""
    if not operator.row.activations:
        return "its rows are looked up, not multiplied"
    if operator.linear is None:
        return "a recurrent layer multiplies its own results by its weights, so they are rounded to nearest"
    return f"{operator.weight.format} is a cast, without codes"


def share_changed(old: Tensor, new: Tensor) -> Tensor:
    """Return the fraction of codes that differ, 0 to 1; float64, shape ()."""
    if old.is_floating_point():  # torch does not compare 8-bit floats
        old, new = old.float(), new.float()
    return (old != new).count_nonzero().double() / old.numel()


def _name(node: object) -> str:
    assert isinstance(node, Node)
    assert node.op == "get_attr"
    return str(node.target)


__all__ = [
    "FIXED",
    "QuantizedWeight",
    "StoredBias",
    "least_bias_scale",
    "own_weights",
    "quantized_weights",
    "share_changed",
    "shared_tensors",
    "stored_tensor",
]
