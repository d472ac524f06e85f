"""Fold batch normalization into the convolution or linear operator next to it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.errors import CalibrationError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    describe,
    erase_dead,
    get_attr,
    is_finite,
    is_parameter,
    parameter,
    set_parameter,
    target_name,
    value_of,
)
from quark_fx.graph.operators import argument, set_argument
from quark_fx.graph.pass_manager import graph_pass


@graph_pass()
def fold_batch_norm(gm: GraphModule) -> int:
    """Fold every batch norm into the operator before it, or else the one after it, where that is exact.

    Before: `g = weight / sqrt(var + eps)`, `W' = W * g` along the output channels, `b' = (b - mean) * g +
    bias`; legal if the batch norm is the operator's only reader and its channels are the output channels.
    After: `W' = W * g` along the input channels, `b' = b + W @ (bias - mean * g)`; legal if the operator
    is the batch norm's only reader and does not pad (a padded zero would have been shifted). A batch norm
    with neither neighbor stays. An operator a batch norm after it went into keeps, as `node.meta["batch_norm"]`, the
    mean and the deviation of its output per channel: float32, shape `(channels,)`.

    Source:
        Jacob et al. 2018, section 3.2.
    """
    folded = 0
    for node in list(gm.graph.nodes):
        affine = _affine(gm, node)
        if affine is None:
            continue
        output = next(iter(node.users)) if node.target is _NATIVE else node
        if _fold_into_producer(gm, node, *affine) or _fold_into_consumer(gm, node, output, *affine):
            output.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(output)
            if node is not output:
                gm.graph.erase_node(node)
            folded += 1
    erase_dead(gm)
    return folded


_NATIVE = torch.ops.aten._native_batch_norm_legit_no_training.default


def _affine(gm: GraphModule, node: Node) -> tuple[Tensor, Tensor] | None:
    """Return factor and offset per channel of an eval-mode batch norm with constant statistics."""
    if target_name(node) == "aten.batch_norm.default":
        epsilon, training = argument(node, 7), argument(node, 5)
    elif node.target is _NATIVE and [user.target for user in node.users] == [operator.getitem]:
        epsilon, training = argument(node, 6), False
    else:
        return None
    weight, bias, mean, variance = (argument(node, i) for i in (1, 2, 3, 4))
    if training or not all(p is None or is_parameter(p) for p in (weight, bias, mean, variance)) or mean is None:
        return None
    _require_usable(gm, node, variance, epsilon)
    # In half precision the sum of a small variance and epsilon, or its root, is off by per cents.
    wide = torch.promote_types(parameter(gm, variance).dtype, torch.float32)
    factor = torch.rsqrt(parameter(gm, variance).to(wide) + epsilon)
    if weight is not None:
        factor = factor * parameter(gm, weight)
    offset = -parameter(gm, mean) * factor
    return factor, offset if bias is None else offset + parameter(gm, bias)


def _require_usable(gm: GraphModule, node: Node, variance: Any, epsilon: float) -> None:
    """Raise `CalibrationError` for a constant that is not finite, or a variance that no data has."""
    for constant in node.args:
        if is_parameter(constant) and not is_finite(parameter(gm, constant)):
            raise CalibrationError(
                f"{constant.target} of {describe(node)} holds NaN or infinity; mend the model's weights"
            )
    smallest = float(parameter(gm, variance).detach().min()) if parameter(gm, variance).numel() else 0.0
    if smallest + epsilon <= 0:
        raise CalibrationError(
            f"{variance.target} of {describe(node)} is {smallest:.3g} in channel "
            f"{int(parameter(gm, variance).argmin())}, and a variance is not negative; mend the model's weights"
        )


def _fold_into_producer(gm: GraphModule, norm: Node, factor: Tensor, offset: Tensor) -> bool:
    node: Any = norm.args[0]
    linear = Linear.of(node)
    if linear is None or linear.bias_at is None or len(node.users) > 1 or not _foldable(gm, linear):
        return False
    weight, bias = linear.weight, linear.bias
    scaled = parameter(gm, weight) * linear.of_outputs(factor)
    _replace(gm, node, linear.weight_at, weight, scaled, weight)
    shifted = offset if bias is None else offset + parameter(gm, bias) * factor
    _replace(gm, node, linear.bias_at, bias, shifted, weight)
    node.meta["batch_norm"] = _statistics(gm, norm, factor)
    return True


def _statistics(gm: GraphModule, norm: Node, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation, per channel, of what a batch norm makes of the data it was trained on."""
    gamma, beta = argument(norm, 1), argument(norm, 2)
    mean = torch.zeros_like(like) if beta is None else parameter(gm, beta).detach()
    deviation = torch.ones_like(like) if gamma is None else parameter(gm, gamma).detach().abs()
    return mean.float(), deviation.float()


def _fold_into_consumer(gm: GraphModule, norm: Node, output: Node, factor: Tensor, offset: Tensor) -> bool:
    users = list(output.users)
    linear = Linear.of(users[0]) if len(users) == 1 else None
    if linear is None or linear.bias_at is None or not _foldable(gm, linear):
        return False
    if linear.activation is not output or linear.kind == "conv_transpose" or linear.pads:
        return False
    weight, bias = linear.weight, linear.bias
    old = parameter(gm, weight)
    if factor.numel() != linear.groups * old.shape[linear.input_axis]:
        return False
    added = (old * linear.of_inputs(offset)).movedim(linear.output_axis, 0).flatten(1).sum(1)
    _replace(gm, linear.node, linear.weight_at, weight, old * linear.of_inputs(factor), weight)
    shifted = added if bias is None else added + parameter(gm, bias)
    _replace(gm, linear.node, linear.bias_at, bias, shifted, weight)
    return True


def _foldable(gm: GraphModule, linear: Linear) -> bool:
    """Tell whether the operator's channels are dimension 1 of its values, as a batch norm's are."""
    constants = (linear.weight, linear.bias)
    if not all(p is None or is_parameter(p) for p in constants) or linear.has_factors:
        return False
    value = value_of(gm, linear.node)
    # A matrix has its features last, which is dimension 1 of two; a convolution without a batch has them in front.
    return isinstance(value, Tensor) and value.dim() == len(linear.kernel) + 2


def _replace(gm: GraphModule, node: Node, position: int, old: Node | None, value: Tensor, weight: Node) -> None:
    """Give `node` the constant `value`: under the old name if nothing else reads it, else under a fresh one."""
    value = value.detach().to(parameter(gm, weight).dtype)
    if old is not None and len(old.users) == 1:
        set_parameter(gm, str(old.target), value)
        return
    name = str((old or weight).target)
    if old is None:
        name = name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}_bias"
    with gm.graph.inserting_before(node):
        set_argument(node, position, get_attr(gm, name, value))
