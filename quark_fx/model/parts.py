"""Assembly of parameters from their parts, which are separate constants of a quantized graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quark_fx.model.constants import Constant
from quark_fx.numbers.quantized_tensor import QuantizedTensor

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride, and offset of a constant in a contiguous parameter (`quark_fx.graph.provenance.Folded`)."""


@dataclass(frozen=True)
class Part:
    """A constant that data movement extracted from a parameter.

    Attributes:
        constant: Codes or values of the part.
        view: Size, stride, and offset of the part in the parameter.
    """

    constant: Constant
    view: View


def whole_of(shape: Sequence[int], parts: Sequence[Part]) -> Constant | None:
    """Assemble a parameter from its parts; `None` if they leave gaps, overlap, or have incompatible scales.

    Args:
        shape: Shape of the parameter.
        parts: All parts of the parameter, in any order.
    """
    shape, parts = tuple(shape), sorted(parts, key=lambda part: part.view[2])
    if len(parts) == 1 and math.prod(parts[0].view[0]) == math.prod(shape):
        return _rearranged(shape, parts[0])
    end, rows = 0, list[QuantizedTensor | Tensor]()
    for part in parts:
        size, stride, offset = part.view
        fitted = size if len(size) == len(shape) else (1, *size)
        if offset != end or stride != _strides(size) or fitted[1:] != shape[1:]:
            return None
        end += math.prod(size)
        codes = _as_rows(part.constant, fitted)
        if codes is None:
            return None
        rows.append(codes)
    if (
        end != math.prod(shape)
        or len({(part.constant.dtype, _kind(x)) for part, x in zip(parts, rows, strict=True)}) > 1
    ):
        return None
    names = tuple(name for part in parts for name in part.constant.names)
    return replace(parts[0].constant, names=names, stored=_concatenated(rows))


def _kind(rows: QuantizedTensor | Tensor) -> tuple[object, ...]:
    if isinstance(rows, Tensor):
        return (rows.dtype,)
    return rows.format, rows.axis, rows.block_size, rows.has_offsets


def _concatenated(parts: Sequence[QuantizedTensor | Tensor]) -> QuantizedTensor | Tensor:
    codes = [part for part in parts if isinstance(part, QuantizedTensor)]
    if not codes:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    values, scale, zero = (torch.cat([getattr(x, name) for x in codes]) for name in ("codes", "scale", "zero_point"))
    return QuantizedTensor.of(values, scale, zero, codes[0].format, codes[0].axis, codes[0].block_size)


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))


def _as_rows(constant: Constant, shape: tuple[int, ...]) -> QuantizedTensor | Tensor | None:
    """Reshape a constant so that it can be concatenated along dimension 0; return `None` if its scales prevent that."""
    codes = constant.quantized
    if codes is None:
        return constant.tensor.reshape(shape)
    added, axis = len(shape) - codes.codes.dim(), codes.axis
    values = codes.codes.reshape(shape)
    if axis is None or (codes.block_size == 0 and axis == 0 and not added):
        scale, zero = (p.expand(shape[0]).contiguous() for p in (codes.scale, codes.zero_point))
        return QuantizedTensor.of(values, scale, zero, codes.format, 0)
    if added and axis == 0 and codes.block_size == 0 and len(shape) == 3:
        # A matrix of a stack with a scale for each row.
        scale, zero = (p.expand(shape[1]).reshape(1, -1, 1) for p in (codes.scale, codes.zero_point))
        return QuantizedTensor.of(values, scale, zero, codes.format, 2, shape[2])
    if codes.block_size and axis > 0:
        scale = codes.scale.reshape((1,) * added + tuple(codes.scale.shape))
        zero = codes.zero_point.reshape((1,) * added + tuple(codes.zero_point.shape)).expand(scale.shape)
        return QuantizedTensor.of(values, scale, zero, codes.format, axis + added, codes.block_size)
    return None


def _rearranged(shape: tuple[int, ...], part: Part) -> Constant | None:
    """Return the parameter whose elements `part` has in another order; `None` if the scales cannot be rearranged."""
    size, stride, offset = part.view

    def moved(x: Tensor) -> Tensor:
        return torch.empty(shape, dtype=x.dtype, device=x.device).as_strided_(size, stride, offset).copy_(x)

    codes = part.constant.quantized
    if codes is None:
        values = moved(part.constant.tensor).as_strided(shape, _strides(shape), 0)
        return replace(part.constant, stored=values)
    values = moved(codes.codes).as_strided(shape, _strides(shape), 0)
    axis = codes.axis
    if axis is not None and codes.block_size:
        if [n for n in size if n > 1] != [n for n in shape if n > 1] or stride != _strides(size):
            return None
        axes = [i for i, n in enumerate(shape) if n > 1]
        axis = axes[[i for i, n in enumerate(size) if n > 1].index(axis)] if size[axis] > 1 else None
        if axis is None:
            return None
        blocks = [n if i != axis else codes.scale.shape[codes.axis or 0] for i, n in enumerate(shape)]
        scale = codes.scale.reshape(blocks)
        zero = codes.zero_point.expand(codes.scale.shape).reshape(blocks)
        tensor = QuantizedTensor.of(values, scale, zero, codes.format, axis, codes.block_size)
        return replace(part.constant, stored=tensor)
    if axis is not None:
        dims = zip(shape, _strides(shape), strict=True)
        places = [i for i, dim in enumerate(dims) if dim == (size[axis], stride[axis])]
        if not places:
            return None
        axis = places[0]
    return replace(part.constant, stored=QuantizedTensor.of(values, codes.scale, codes.zero_point, codes.format, axis))


__all__ = ["Part", "View", "whole_of"]
