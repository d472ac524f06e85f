"""Interpolation of uint8 images in integers, one axis after the other, like in torch.

torch multiplies bytes by fixed-point weights, and rounds the sum along each axis to bytes. In ONNX Runtime, `Resize`
of bytes truncates instead of rounding and lacks a cubic kernel. Interpolation in float differs by one in some pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.graph.nodes import call, cast, get_attr, static_size, target_name, value_of
from quark_fx.graph.operators import argument

aten = torch.ops.aten

INTERPOLATIONS = frozenset(
    f"aten.{kind}.{overload}"
    for kind in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    for overload in ("default", "vec")
)
"""Operators that interpolate uint8 images in fixed point."""


def has_fixed_size(gm: GraphModule, node: Node) -> bool:
    """Tell whether the height and width of the input and of the result are fixed."""
    return None not in (static_size(size) for image in (argument(node, 0), node) for size in _size(gm, image))


def _size(gm: GraphModule, image: Node) -> Any:
    return value_of(gm, image).shape[-2:]


def interpolate_bytes(gm: GraphModule, node: Node) -> Node:
    """Interpolate a uint8 image of a fixed size, with torch's weights and rounding."""
    before, after = _size(gm, argument(node, 0)), _size(gm, node)
    value = cast(gm, argument(node, 0), torch.int32, node)
    for axis in (-1, -2):
        if before[axis] != after[axis]:  # torch skips the axis even if a scale factor moves the pixels
            value = _along(gm, node, value, axis, _weights(node, axis, int(before[axis]), int(after[axis])))
    return cast(gm, value, torch.uint8, node)


def round_interpolation(gm: GraphModule, node: Node) -> Node:
    """Interpolate a uint8 image of varying size in float32, and round after each axis like torch."""
    value = cast(gm, argument(node, 0), torch.float32, node)
    is_vec = target_name(node).endswith(".vec")
    sizes = argument(node, 1)
    scales = argument(node, 3) if is_vec else (argument(node, 3), argument(node, 4))
    for axis in (-1, -2):
        size = scale = None
        if sizes is not None:
            size = [call(gm, aten.sym_size.int, value, 2 if axis == -1 else 3, like=node)] * 2
            size[axis] = sizes[axis]
        if scales is not None:
            scale = [1.0 if is_vec else None] * 2
            scale[axis] = scales[axis]
        options = (scale,) if is_vec else (scale or (None, None))
        result = call(gm, node.target, value, size, argument(node, 2), *options, like=node)
        nearest = call(gm, aten.floor.default, call(gm, aten.add.Tensor, result, 0.5, like=node), like=node)
        value = call(gm, aten.clamp.default, nearest, 0, 255, like=node)
    return cast(gm, value, torch.uint8, node)


def _weights(node: Node, axis: int, old: int, new: int) -> Tensor:
    """Return the weight of each input pixel (row) in each output pixel (column), shape `(old, new)`.

    The weights are torch's float64 interpolation of the identity matrix.
    """
    scales = argument(node, 3) if target_name(node).endswith(".vec") else (argument(node, 3), argument(node, 4))
    scale = None if scales is None else scales[axis]
    kind = getattr(aten, target_name(node).split(".")[1]).default
    each = torch.eye(old, dtype=torch.float64)[None, None]
    weights: Tensor = kind(each, [old, new], argument(node, 2), None, scale)[0, 0]
    return weights


def _along(gm: GraphModule, node: Node, value: Node, axis: int, weights: Tensor) -> Node:
    """Compute each output pixel along an axis as the weighted sum of its input pixels, rounded to a byte.

    The weights become fixed-point numbers of 15 bits, with as many fractional bits as fit, at most 22.
    """
    bits, largest = 0, float(weights.max())
    while bits < 22 and int(0.5 + largest * 2 ** (bits + 1)) < 1 << 15:
        bits += 1
    codes = (weights * 2**bits + 0.5 * weights.sign()).trunc().to(torch.int32)
    taps = int((codes != 0).sum(0).max())
    pixels = (codes != 0).int().argsort(dim=0, descending=True, stable=True)[:taps]
    codes, device = codes.gather(0, pixels).T, value_of(gm, value).device
    if axis == -2:
        codes = codes[..., None]
    places = get_attr(gm, "_pixels", pixels.T.flatten().to(device))
    value = call(gm, aten.index_select.default, value, axis, places, like=node)
    value = call(gm, aten.unflatten.int, value, axis, [weights.shape[1], taps], like=node)
    value = call(gm, aten.mul.Tensor, value, get_attr(gm, "_weights", codes.contiguous().to(device)), like=node)
    value = call(gm, aten.sum.dim_IntList, value, [axis], dtype=torch.int32, like=node)
    value = call(gm, aten.add.Tensor, value, 1 << bits >> 1, like=node)
    value = call(gm, aten.clamp.default, value, 0, (256 << bits) - 1, like=node)
    return call(gm, aten.div.Tensor_mode, value, 1 << bits, rounding_mode="trunc", like=node)
