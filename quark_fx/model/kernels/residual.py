"""Convolutions that add the codes of a residual connection to their sums, before these are rounded.

oneDNN's kernel writes its result over the codes that it adds. Graphs that are compiled have an operator without side
effects instead, and where nothing reads these codes later, Inductor is told to take the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from quark_fx.model.kernels.product import RELU, Activated, Activation, Product, Rounded, quantizers_of
from quark_fx.numbers.formats import UINT8
from quark_fx.targets.inductor import adds_to_sums


@dataclass(frozen=True)
class Residual:
    """What follows a convolution that adds codes to its sums.

    Attributes:
        onto: the codes.
        sum: the addition, rectified or not.
        quantizers: which round the sum, to codes of one kind.
        after: these codes.
    """

    onto: Rounded
    sum: Activated
    quantizers: tuple[Node, ...]
    after: Rounded

    @classmethod
    def of(cls, product: Product) -> Residual | None:
        """Return what follows a convolution, `None` where that is something else."""
        add = next(iter(product.node.users), None)
        if add is None or not adds_to_sums(product.node, add) or product.dtype != torch.float32:
            return None
        (other,) = (node for node in add.all_input_nodes if node is not product.node)
        onto, total = Rounded.of(other), Activated.of(add, RELU)
        quantizers = quantizers_of(total.node)
        after = Rounded.of(quantizers[0]) if quantizers else None
        if onto is None or after is None or product.node < onto.codes:
            return None
        if onto.kind is not Activation.STATIC or not onto.format == after.format == UINT8:
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
    """Return the codes, uint8, of a convolution plus what the codes `onto` stand for.

    Args:
        x: uint8, `(batch, channels, height, width)`.
        x_scale, x_zero_point: of `x`.
        weight: packed by `onednn.qconv_prepack`.
        weight_scale, weight_zero_point: of each output.
        onto: uint8, of the result's shape.
        bias: float32.
        stride, padding, dilation, groups: of the convolution.
        scale, zero_point: of the result.
        onto_scale, onto_zero_point: of `onto`.
        activation: "relu" or "none".
    """
    given = (x, x_scale, x_zero_point, weight, weight_scale, weight_zero_point, onto.clone(), bias, stride, padding)
    rest = (dilation, groups, scale, zero_point, onto_scale, onto_zero_point, activation)
    return torch.empty_like(onto).copy_(_KERNEL(*_in_place(*given, *rest)))


@convolve_onto.register_fake
def _like_onto(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[6])


_OPERATOR = torch.ops.quark_fx.convolve_onto.default
_KERNEL = torch.ops.onednn.qconv2d_pointwise.binary


def _in_place(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernel for those of `convolve_onto`."""
    *given, onto_scale, onto_zero_point, activation = arguments
    return (*given, torch.uint8, onto_scale, onto_zero_point, "sum", 1.0, activation, [], "")


class AddInPlace(CustomGraphPass):
    """Lets Inductor write over codes that nothing reads later: its pass on graphs before it looks for patterns.

    Args:
        before: a pass to run first, as that of Inductor's configuration.
    """

    def __init__(self, before: Any = None) -> None:
        self._before = before

    def __call__(self, graph: Graph) -> None:
        if self._before is not None:
            self._before(graph)
        for node in list(graph.nodes):
            if node.target is not _OPERATOR or not _is_last(node.args[6], node):
                continue
            with graph.inserting_before(node):
                made = graph.call_function(_KERNEL, _in_place(*node.args))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)

    def uuid(self) -> Any:
        """Return what tells compiled graphs of other versions apart."""
        return get_hash_for_files((__file__,)), getattr(self._before, "uuid", lambda: None)()


def _is_last(onto: Any, reader: Node) -> bool:
    """Tell whether codes are in memory of their own, and nobody reads them after `reader`."""
    if onto.op != "call_function" or not isinstance(onto.target, torch._ops.OpOverload):
        return False
    views = any(result.alias_info is not None for result in onto.target._schema.returns)
    return not views and all(user <= reader for user in onto.users)


__all__ = ["AddInPlace", "Residual", "convolve_onto"]
