"""An operator that multiplies an activation by a weight, bound to its row of the operator table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import tensor_of
from quark_fx.graph.operators import StoredWeight, argument, named_argument, operator_row, stored_weight

_TRANSPOSED = "conv_transpose"
_CONVOLUTIONS = ("conv", _TRANSPOSED)


@dataclass(frozen=True)
class Linear:
    """The arguments of one call and its geometry. Dimensions refer to the stored weight.

    Attributes:
        node: The call.
        kind: Operator family.
        shape: Shape of the weight.
        output_axis: Dimension of the weight that indexes output channels, counted from 0.
        input_axis: Dimension of the weight that is summed over, counted from 0; it is split into quantization groups.
        kernel_axes: Dimensions of the weight that hold the kernel of a convolution, from 0; empty for a matrix product.
        activation_at: Position of the activation among the arguments.
        weight_at: Position of the weight.
        bias_at: Position of the bias, `None` if the operator has none.
        offsets_at: Position of the offsets at which the rows of each expert end, `None` if data does not select rows.
    """

    node: Node
    kind: str
    shape: tuple[int, ...]
    output_axis: int
    input_axis: int
    kernel_axes: tuple[int, ...]
    activation_at: int
    weight_at: int
    bias_at: int | None
    offsets_at: int | None

    @classmethod
    def of(cls, node: Node) -> Self | None:
        """Return the view of a call; `None` for a call that does not multiply an activation by a stored weight."""
        row = operator_row(node)
        stored = None if row is None else stored_weight(node, row)
        if row is None or stored is None or not row.activations:
            return None
        shape = _shape(stored.node)
        rank = len(shape)
        order = range(rank) if stored.order is None else stored.order
        return cls(
            node=node,
            kind=row.kind,
            shape=shape,
            output_axis=row.output_axis % rank,
            input_axis=row.input_axis % rank,
            kernel_axes=tuple(order[2:]) if row.kind in _CONVOLUTIONS else (),
            activation_at=row.activations[0],
            weight_at=stored.position,
            bias_at=row.bias,
            offsets_at=row.offsets,
        )

    def at(self, node: Node) -> Self:
        """Return the view of the same call in another graph: in a block, or after its weight became codes."""
        return replace(self, node=node)

    # Operands

    @property
    def activation(self) -> Node:
        """The activation, which is multiplied by the weight."""
        value: Node = argument(self.node, self.activation_at)
        return value

    @property
    def weight(self) -> Node:
        """The weight argument: the parameter, or a transposition or dequantization of it."""
        value: Node = argument(self.node, self.weight_at)
        return value

    @property
    def stored(self) -> StoredWeight:
        """The parameter that holds the weight.

        Raises:
            LookupError: If codes replaced the weight.
        """
        row = operator_row(self.node)
        weight = None if row is None else stored_weight(self.node, row)
        if weight is None:
            raise LookupError(f"%{self.node.name} does not read a stored weight")
        return weight

    @property
    def bias(self) -> Node | None:
        """The bias, or `None`."""
        return None if self.bias_at is None else argument(self.node, self.bias_at)

    @property
    def offsets(self) -> Node | None:
        """The offsets at which the rows of each expert end; `None` if every matrix has separate rows."""
        return None if self.offsets_at is None else argument(self.node, self.offsets_at)

    @property
    def has_factors(self) -> bool:
        """True if the product or the bias is multiplied by a number, such as `alpha` and `beta` of `addmm`."""
        return any(self.node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta"))

    # Geometry

    @property
    def kernel(self) -> tuple[int, ...]:
        """Spatial size of the kernel of a convolution; empty for a matrix product."""
        return tuple(self.shape[d] for d in self.kernel_axes)

    @property
    def stacked(self) -> bool:
        """True if the weight is a stack of matrices, one for each index of its first dimensions."""
        return len(self.shape) > 2 and not self.kernel

    @property
    def transposed(self) -> bool:
        """True if the weight is stored with its input channels before its output channels."""
        return self.input_axis < self.output_axis

    @property
    def groups(self) -> int:
        """Number of channel groups of a convolution; 1 for a matrix product."""
        return int(named_argument(self.node, "groups") or 1) if self.kernel else 1

    @property
    def output_groups(self) -> int:
        """Number of channel groups that share the indices of the weight's output dimension.

        The output dimension of a transposed convolution's weight indexes the channels of one group. For all other
        operators, it indexes the channels of all groups, and the number is 1.
        """
        return self.groups if self.kind == _TRANSPOSED else 1

    @property
    def stride(self) -> tuple[int, ...]:
        """Stride of each dimension of the kernel."""
        return self._sizes("stride", 1)

    @property
    def dilation(self) -> tuple[int, ...]:
        """Dilation of each dimension of the kernel."""
        return self._sizes("dilation", 1)

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Padding before and after each dimension: of the input, or cropped from a transposed convolution's output."""
        padding = named_argument(self.node, "padding") if self.kernel else None
        if padding == "same":
            spans = (d * (size - 1) for size, d in zip(self.kernel, self.dilation, strict=True))
            return tuple((span // 2, span - span // 2) for span in spans)
        return tuple(
            (size, size) for size in per_dimension(None if padding == "valid" else padding, len(self.kernel), 0)
        )

    @property
    def pads(self) -> bool:
        """True if the operator pads its input with zeros."""
        return self.kind == "conv" and any(map(any, self.padding))

    def _sizes(self, name: str, fill: int) -> tuple[int, ...]:
        return per_dimension(named_argument(self.node, name), len(self.kernel), fill) if self.kernel else ()

    @property
    def matrices(self) -> LinearMap | None:
        """The weight as matrices and the activation as rows; `None` if not supported.

        Not supported: transposed and three-dimensional convolutions, convolution weights stored in another order,
        images without a batch dimension, stacks with more than one stack dimension, and stacks whose product has
        another rank than the stack, unless the rows are assigned by offsets.
        """
        rank = self.node.meta["val"].dim()
        if not self.kernel:
            if not self.stacked:
                return LinearMap(transposed=self.transposed)
            alike = isinstance(self.offsets, Node) or rank == len(self.shape)
            if len(self.shape) != 3 or not alike:
                return None
            return LinearMap(self.shape[0], transposed=self.transposed, stacked=True, offsets=self.offsets)
        ordered = (self.output_axis, self.input_axis, *self.kernel_axes) == tuple(range(len(self.shape)))
        if self.kind == _TRANSPOSED or not ordered or len(self.kernel) > 2 or rank != len(self.shape):
            return None
        return LinearMap(self.groups, self.kernel, self.stride, self.padding, self.dilation)

    @property
    def rows_key(self) -> object:
        """Key that is equal for operators with `matrices` that multiply the same rows."""
        assert self.matrices is not None
        return self.activation, replace(self.matrices, transposed=False)

    # Channels

    def channel_dim(self, rank: int) -> int:
        """Return the channel dimension of an activation or output with `rank` dimensions."""
        return rank - 1 - len(self.kernel)

    def of_inputs(self, values: Tensor) -> Tensor:
        """Reshape one value per input channel, shape `(channels,)`, so that it broadcasts over the weight."""
        if self.groups == 1 or self.kind == _TRANSPOSED:
            return self._placed(values[None])
        return self._placed(self._for_each(values, self.shape[self.output_axis]))

    def of_outputs(self, values: Tensor) -> Tensor:
        """Reshape one value per output channel, shape `(channels,)`, so that it broadcasts over the weight."""
        if self.output_groups == 1:
            return self._placed(values[:, None])
        return self._placed(self._for_each(values, self.shape[self.input_axis]).T)

    def _for_each(self, values: Tensor, others: int) -> Tensor:
        """Return, for each of the `others` channels on the other side, the values of its group.

        The shape is (others, channels per group).
        """
        return values.reshape(self.groups, -1).repeat_interleave(others // self.groups, 0)

    def _placed(self, table: Tensor) -> Tensor:
        """Lay out a table of (output, input) channels in the order of the weight's dimensions."""
        shape = [1] * len(self.shape)
        shape[self.output_axis], shape[self.input_axis] = table.shape
        return (table.T if self.transposed else table).reshape(shape)

    def response(self, weight: Tensor, shift: Tensor) -> Tensor | None:
        """Return the change of each output channel when a constant is added to each input channel.

        At the padded borders of a convolution, the change is smaller.

        Args:
            weight: Weight in its stored layout.
            shift: One value per input channel.

        Returns:
            One value per output channel, float32 or wider; `None` if the change is not one value per channel (a
            transposed convolution sums a different part of its kernel at every position).
        """
        if self.kind not in ("conv", "linear") or self.stacked or self.has_factors:
            return None
        if shift.numel() != self.groups * self.shape[self.input_axis]:
            return None
        per_kernel = (
            weight.detach()
            .to(torch.promote_types(weight.dtype, torch.float32))
            .movedim((self.output_axis, self.input_axis), (0, 1))
        )
        if per_kernel.dim() > 2:
            per_kernel = per_kernel.flatten(2).sum(2)
        outputs, per_group = per_kernel.shape
        grouped = per_kernel.reshape(self.groups, outputs // self.groups, per_group)
        return (grouped @ shift.to(grouped).reshape(self.groups, per_group, 1)).flatten()


def _shape(parameter: Node) -> tuple[int, ...]:
    if "val" in parameter.meta:
        return tuple(parameter.meta["val"].shape)
    gm = parameter.graph.owning_module
    assert gm is not None  # a graph that is being built has values
    return tuple(tensor_of(gm, str(parameter.target)).shape)


def per_dimension(given: Any, rank: int, fill: int) -> tuple[int, ...]:
    """Return one size per dimension, from a size per dimension, one size for all, or `None` for the default `fill`."""
    if given is None:
        return (fill,) * rank
    if isinstance(given, int):
        return (given,) * rank
    sizes = tuple(int(size) for size in given)
    return sizes * rank if len(sizes) == 1 else sizes


__all__ = ["Linear", "per_dimension"]
