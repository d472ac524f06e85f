"""Convolutions that add the codes of a residual connection to their sums before the sums are rounded.

oneDNN's kernel overwrites the codes that it adds. Compiled graphs have an operator without side effects instead;
`AddInPlace` replaces this operator with the kernel if nothing reads the codes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.model.kernels.product import RELU, Activated, Activation, Product, Rounded, quantizers_of
from quark_fx.targets.inductor import adds_to_sums


@dataclass(frozen=True)
class Residual:
    """The addition after a convolution that the kernel of the convolution computes.

    Attributes:
        onto: Codes that the kernel adds to its sums.
        sum: Result of the addition, after the ReLU if one follows.
        quantizers: Quantizers of the sum; all have one scale and format.
        after: Codes that the quantizers return.
    """

    onto: Rounded
    sum: Activated
    quantizers: tuple[Node, ...]
    after: Rounded

    @classmethod
    def of(cls, product: Product) -> Residual | None:
        """Return the addition, or `None` unless the other operand has one calibrated scale and a quantizer follows."""
        add = next(iter(product.node.users), None)
        if add is None or not adds_to_sums(product.node, add):
            return None
        (other,) = (node for node in add.all_input_nodes if node is not product.node)
        onto, total = Rounded.of(other), Activated.of(add, RELU)
        quantizers = quantizers_of(total.node)
        after = Rounded.of(quantizers[0]) if quantizers else None
        if onto is None or after is None or onto.kind is not Activation.STATIC:
            return None
        if not onto.format.is_integer or onto.format.bits > 8:
            return None
        return cls(onto, total, quantizers, after)


@torch.library.custom_op("quark_fx::convolve_onto", mutates_args=())
def convolve_onto(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    onto: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    scale: float,
    zero_point: int,
    onto_scale: float,
    onto_zero_point: int,
    activation: str,
) -> Tensor:
    """Return the codes, uint8, of the sum of a convolution and the values of the codes `onto`.

    Args:
        x: Codes of the activation, uint8, `(batch, channels, height, width)`.
        x_scale: Scale of `x`.
        x_zero_point: Zero point of `x`.
        weight: Weight packed by `onednn.qconv_prepack`.
        weight_scale: Scale of each output.
        weight_zero_point: Zero point of each output.
        onto: Codes, uint8, with the shape of the result.
        bias: Bias, float32.
        stride: Stride of the convolution.
        padding: Padding of the convolution.
        dilation: Dilation of the convolution.
        groups: Groups of the convolution.
        scale: Scale of the result.
        zero_point: Zero point of the result.
        onto_scale: Scale of `onto`.
        onto_zero_point: Zero point of `onto`.
        activation: "relu" or "none".
    """
    copied = onto.clone(memory_format=torch.channels_last)  # the kernel requires dense memory in this format
    head = (x, x_scale, x_zero_point, weight, weight_scale, weight_zero_point, copied, bias, stride, padding)
    rest = (dilation, groups, scale, zero_point, onto_scale, onto_zero_point, activation)
    return torch.empty_like(onto).copy_(in_place_kernel()(*in_place_arguments(*head, *rest)))


@convolve_onto.register_fake
def _like_onto(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[6])


CONVOLVE_ONTO = torch.ops.quark_fx.convolve_onto.default


def in_place_kernel() -> Any:
    """Return oneDNN's kernel, which torch has on x64 processors only."""
    return torch.ops.onednn.qconv2d_pointwise.binary


def in_place_arguments(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernel for the arguments of `convolve_onto`."""
    *head, onto_scale, onto_zero_point, activation = arguments
    return (*head, torch.uint8, onto_scale, onto_zero_point, "sum", 1.0, activation, [], "")


__all__ = ["CONVOLVE_ONTO", "Residual", "convolve_onto", "in_place_arguments", "in_place_kernel"]
