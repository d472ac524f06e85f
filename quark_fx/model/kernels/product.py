"""The view that kernel rules get of an operator with a quantized weight: operands and rounding of the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.errors import Declined
from quark_fx.graph.linear import per_dimension
from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, get_attr, is_parameter, parameter, static_size, target_name
from quark_fx.graph.operators import Operator, argument, named_argument, row_by_target
from quark_fx.model.constants import constant_of, parameter_name
from quark_fx.numbers.formats import Format, parse_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.placement import module_name


class Activation(StrEnum):
    """Rounding of an operator's activation."""

    FLOAT = "float"
    STATIC = "static"
    """One scale, calibrated."""
    DYNAMIC = "dynamic"
    """One scale, measured at run time."""
    TOKEN = "token"
    """A scale for each row of the last dimension, measured at run time."""
    OTHER = "other"


@dataclass(frozen=True)
class Rounded:
    """A quantized value that an operator reads.

    Attributes:
        codes: Node of the codes.
        scale: Node of the scale.
        zero_point: Node of the zero point.
        format: Format of the codes.
        axis: Scale axis (`quark_fx.numbers.ops`).
        block_size: Block size of the scales (`quark_fx.numbers.ops`).
    """

    codes: Node
    scale: Node
    zero_point: Node
    format: Format
    axis: int | None
    block_size: int

    @classmethod
    def of(cls, node: Node) -> Rounded | None:
        """Return the codes that a `dequantize` reads or a `quantize` returns; `None` for any other node."""
        if target_name(node) not in (DEQUANTIZE, QUANTIZE):
            return None
        source, scale, zero_point, name, axis, block_size = (argument(node, position) for position in range(6))
        codes = source if target_name(node) == DEQUANTIZE else node
        return cls(codes, scale, zero_point, parse_format(name), axis, block_size or 0)

    @property
    def kind(self) -> Activation:
        """Kind of rounding, by the number of scales and whether they are calibrated or measured."""
        if self.axis is None:
            return Activation.STATIC if is_parameter(self.scale) else Activation.DYNAMIC
        rank = self.codes.meta["val"].dim()
        whole_rows = self.axis % rank == rank - 1 and self.block_size == -1
        return Activation.TOKEN if whole_rows and not is_parameter(self.scale) else Activation.OTHER

    @property
    def is_symmetric(self) -> bool:
        """True if the range is measured at run time and symmetric."""
        pair = self._measured
        return pair is not None and Symmetry(argument(pair, 2)) is not Symmetry.ASYMMETRIC

    @property
    def scale_type(self) -> str:
        """Name of the format of scales that are measured at run time; `"float32"` for calibrated scales."""
        return "float32" if self._measured is None else argument(self._measured, 5) or "float32"

    @property
    def _measured(self) -> Node | None:
        """Node that measures scale and zero point at run time, `None` if they are constants."""
        pair = self.scale.args[0] if self.scale.args else None
        return pair if isinstance(pair, Node) and target_name(pair) == "quark_fx.dynamic_qparams.default" else None


@dataclass(frozen=True)
class Product:
    """An operator of a quantized graph that multiplies an activation by a quantized weight.

    Attributes:
        gm: Quantized graph.
        node: Node of the operator.
        row: Row of the operator in the operator table.
        weight: Weight of the operator, in the layout that the operator reads.
        name: Module path, the name in `QuantizedModel.report`.
        packs: Whether weights may be packed, see `use_kernels`.
    """

    gm: GraphModule
    node: Node
    row: Operator
    weight: QuantizedTensor
    name: str
    packs: bool = True

    @classmethod
    def of(cls, gm: GraphModule, node: Node, *, packs: bool = True) -> Product | None:
        """Return the view of a node; `None` if it does not multiply an activation by a quantized weight."""
        row = row_by_target(node)
        if row is None or row.weight is None or not row.activations:
            return None
        weight = argument(node, row.weight)
        constant = constant_of(gm, weight) if isinstance(weight, Node) else None
        if constant is None or constant.quantized is None:
            return None
        name = module_name(node, parameter_name(gm, constant.names[0]))
        return cls(gm, node, row, constant.quantized, name, packs)

    @property
    def activation(self) -> Node:
        """The activation, which is multiplied by the weight."""
        value: Node = argument(self.node, self.row.activations[0])
        return value

    @property
    def rounded(self) -> Rounded | None:
        """Rounding of the activation; `None` if it is in float."""
        return Rounded.of(self.activation)

    @property
    def read(self) -> Rounded:
        """Rounding of the activation; raises `Declined` if it is in float."""
        if self.rounded is None:
            raise Declined("its activation is in float")
        return self.rounded

    @property
    def rounding(self) -> Activation:
        """Kind of the activation's rounding."""
        return Activation.FLOAT if self.rounded is None else self.rounded.kind

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype

    def matrix(self) -> QuantizedTensor:
        """Return the weight with a row per output.

        Raises:
            Declined: If the weight is a stack of matrices, or the product has factors.
        """
        weight = self.weight
        if weight.codes.dim() != 2:
            raise Declined("its weight is a stack of matrices")
        if any(self.node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
            raise Declined("its product or its bias has a factor (alpha or beta)")
        if self.row.output_axis % 2 == 0:
            return weight
        scale, zero_point = (p.mT if p.dim() == 2 else p for p in (weight.scale, weight.zero_point))
        axis = None if weight.axis is None else 1 - weight.axis
        return QuantizedTensor.of(
            weight.codes.mT.contiguous(), scale, zero_point, weight.format, axis, weight.block_size
        )

    def bias(self) -> Tensor | None:
        """Return the bias, float32.

        Raises:
            Declined: If the bias is not a constant.
        """
        bias = None if self.row.bias is None else argument(self.node, self.row.bias)
        if bias is None:
            return None
        constant = constant_of(self.gm, bias)
        if constant is None:
            raise Declined("its bias is computed, not stored")
        return constant.value().float()

    def geometry(self) -> tuple[list[int], list[int], list[int], int]:
        """Return stride, padding, dilation, and groups of a convolution.

        Raises:
            Declined: If the padding is a string.
        """
        rank = self.weight.codes.dim() - 2
        padding = named_argument(self.node, "padding")
        if isinstance(padding, str):
            raise Declined(f"its padding is {padding!r}")
        sizes = (named_argument(self.node, "stride"), padding, named_argument(self.node, "dilation"))
        stride, padding, dilation = (
            list(per_dimension(size, rank, fill)) for size, fill in zip(sizes, (1, 0, 1), strict=True)
        )
        return stride, padding, dilation, named_argument(self.node, "groups") or 1

    def sizes_read(self) -> list[int]:
        """Return the sizes of the activation, 16 for dynamic dimensions."""
        return [static_size(size) or 16 for size in self.activation.meta["val"].shape]

    def number(self, node: Node) -> float:
        """Return the value of a constant with one element."""
        return parameter(self.gm, node).item()

    def insert(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the operator, with a copy of its `meta`; tensors become constants of the graph."""
        with self.gm.graph.inserting_before(self.node):
            nodes = [get_attr(self.gm, "kernel_constant", a) if isinstance(a, Tensor) else a for a in args]
            call = self.gm.graph.call_function(target, tuple(nodes), kwargs)
        call.meta = dict(self.node.meta)
        return call


@dataclass(frozen=True)
class Activated:
    """A value after the activation function that a kernel applies to its sums.

    Attributes:
        node: Result of the function, or the sums without a function.
        function: oneDNN's name of the function; `"none"` without a function.
        algorithm: Variant of GELU, `"none"` or `"tanh"`; empty for any other function.
    """

    node: Node
    function: str = "none"
    algorithm: str = ""

    @classmethod
    def of(cls, node: Node, functions: Mapping[str, str]) -> Activated:
        """Return the value after the function that is the only consumer of `node`, or the value of `node` itself.

        Args:
            node: Node that computes sums.
            functions: oneDNN's names of the functions that the kernel applies, keyed by ATen's names.
        """
        if len(node.users) != 1:
            return cls(node)
        (reader,) = node.users
        function = functions.get(target_name(reader))
        if function is None:
            return cls(node)
        return cls(reader, function, str(reader.kwargs.get("approximate", "none")) if function == "gelu" else "")


RELU = {"aten.relu.default": "relu"}
RELU_OR_GELU = RELU | {"aten.gelu.default": "gelu"}


def quantizers_of(result: Node) -> tuple[Node, ...]:
    """Return the quantizers of a node if they are its only consumers, with one calibrated scale and 8-bit codes."""
    readers = tuple(result.users)
    roundings = [Rounded.of(reader) if target_name(reader) == QUANTIZE else None for reader in readers]
    first = roundings[0] if roundings else None
    if first is None or first.kind is not Activation.STATIC or not first.format.is_integer:
        return ()
    if first.format.bits != 8:
        return ()
    same = all(
        other is not None
        and (other.format, other.axis) == (first.format, None)
        and (other.scale.target, other.zero_point.target) == (first.scale.target, first.zero_point.target)
        for other in roundings
    )
    return readers if same else ()


__all__ = ["RELU", "RELU_OR_GELU", "Activated", "Activation", "Product", "Rounded", "quantizers_of"]
