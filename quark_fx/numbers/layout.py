"""Assignment of scales to the elements of a tensor: in its stored shape, or reshaped to the matrices of an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import EllipsisType
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F


class MatrixMap(Protocol):
    """Map from a stored weight to matrices of shape (groups, outputs, inputs), implemented by `LinearMap`."""

    @property
    def groups(self) -> int:
        """Number of matrices."""
        ...

    def row_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions of a stored weight of this rank that index the matrices and their rows."""
        ...

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as matrices, shape (groups, outputs, inputs)."""
        ...

    def restore(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return matrices in the shape of the stored weight `like`: the inverse of `matrix`."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of scales to the elements of a tensor; `of` converts the (`axis`, `block_size`) of `numbers.ops`.

    Attributes:
        shape: Shape of the tensor.
        axis: Dimension along which the scales vary, counted from 0; `None` for one scale.
        block: Number of values along `axis` that share a scale.
        flat: True for a vector of scales, one per index of `axis`; False for scales with the rank of the tensor.
    """

    shape: tuple[int, ...]
    axis: int | None
    block: int
    flat: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int | None, block_size: int) -> Self:
        """Return the layout of a tensor of the given shape; a negative axis counts from the end.

        Raises:
            ValueError: If `axis` is out of range.
        """
        if axis is None:
            return cls(tuple(shape), None, 1, flat=True)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"axis {axis} does not exist in a tensor with {len(shape)} dimensions; choose another axis"
            )
        axis %= len(shape)
        block = shape[axis] if block_size < 0 else block_size
        return cls(tuple(shape), axis, max(1, block), flat=block_size == 0)

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the scales with the rank of the tensor: 1 along dimensions whose elements share a scale."""
        if self.axis is None:
            return (1,) * len(self.shape)
        along = -(-self.shape[self.axis] // self.block)
        return tuple(along if d == self.axis else 1 if self.flat else n for d, n in enumerate(self.shape))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape in which the scales are stored."""
        if self.axis is None:
            return ()
        return (self.shape[self.axis],) if self.flat else self.kept

    def spread(self, parameter: Tensor) -> Tensor:
        """Reshape or repeat scales or zero points so that they broadcast over the tensor; shape `()` is unchanged."""
        if self.axis is None or parameter.dim() == 0:
            return parameter
        if self.flat:
            return parameter.reshape(self.kept)
        if self.block == 1 or parameter.shape[self.axis] == 1:
            return parameter
        return parameter.repeat_interleave(self.block, dim=self.axis).narrow(self.axis, 0, self.shape[self.axis])

    def total(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Sum `values` over the elements that share a scale: the adjoint of `spread`.

        Args:
            values: Values in the shape of the tensor.
            shape: Shape of the scales, and of the result.
        """
        if self.axis is None or len(shape) == 0:
            return values.sum().reshape(shape)
        if self.flat:
            return values.sum_to_size(self.kept).reshape(shape)
        if self.block > 1 and shape[self.axis] > 1:
            padding = -self.shape[self.axis] % self.block
            last = F.pad(values.movedim(self.axis, -1), (0, padding)).unflatten(-1, (-1, self.block)).sum(-1)
            values = last.movedim(-1, self.axis)
        return values.sum_to_size(shape)

    def of_shape(self, shape: tuple[int, ...]) -> Layout:
        """Return the same layout for a tensor of another shape."""
        return replace(self, shape=tuple(shape))

    # Processing a few rows (indices of dimension 0) at a time.

    def pieces(self, most: int) -> Iterator[slice | EllipsisType]:
        """Yield slices of dimension 0 that hold about `most` values each and do not split a block."""
        size = math.prod(self.shape)
        if size <= most or len(self.shape) < 2:
            yield ...
            return
        whole = self.block if self.axis == 0 else 1
        rows = -(-self.shape[0] // -(-size // most))
        step = -(-rows // whole) * whole
        for first in range(0, self.shape[0], step):
            yield slice(first, first + step)

    def of_rows(self, parameter: Tensor, rows: slice | EllipsisType) -> Tensor:
        """Return the scales or zero points of some rows; `rows` must not split a block."""
        if isinstance(rows, EllipsisType) or parameter.numel() == 1 or (self.flat and self.axis != 0):
            return parameter
        if self.axis != 0:
            return parameter[rows]
        first, last, _ = rows.indices(self.shape[0])
        return parameter[first // self.block : -(-last // self.block)]

    # Scales of the operator's matrices.

    def matrices(self, parameter: Tensor, mapping: MatrixMap) -> Tensor:
        """Return the scale or zero point of every element, in the shape of the operator's matrices."""
        return mapping.matrix(self.spread(parameter).expand(self.shape))

    def columns(self, mapping: MatrixMap) -> Columns | None:
        """Return the columns that share a scale, numbered as `restore` expects; `None` if rows share scales."""
        row_dims, shape = mapping.row_dims(len(self.shape)), self.kept
        if any(shape[d] != self.shape[d] for d in row_dims):
            return None
        # All rows of a matrix have the same columns, so one row of each is enough.
        few = {d: mapping.groups if d == row_dims[0] else 1 for d in row_dims}
        one = Layout(tuple(few.get(d, n) for d, n in enumerate(self.shape)), self.axis, self.block, self.flat)
        sizes = [1 if d in row_dims else n for d, n in enumerate(shape)]
        numbers = torch.arange(math.prod(sizes)).reshape(sizes).expand(one.kept)
        order = mapping.matrix(numbers)[0, 0]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        along = one.spread(numbers.flatten() if one.flat and one.axis is not None else numbers)
        return Columns(place[mapping.matrix(along.expand(one.shape))[0, 0]])

    def restore(self, values: Tensor, mapping: MatrixMap) -> Tensor:
        """Return `values`, shape (matrices, rows, scales of a row), in the shape in which scales are stored."""
        return mapping.restore(values, values.new_empty(()).expand(self.kept)).reshape(self.scale_shape)


@dataclass(frozen=True, eq=False)
class Columns:
    """Scale number of each column of a matrix.

    The columns that share a scale are contiguous in a linear layer, and strided in a convolution with a wide kernel.

    Attributes:
        numbers: Number of each column's scale, counted from 0, shape (inputs,).
    """

    numbers: Tensor
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def in_blocks(cls, inputs: int, block: int) -> Self:
        """Return the numbers of `inputs` columns in contiguous blocks of `block` columns."""
        return cls(torch.arange(inputs) // block)

    @property
    def count(self) -> int:
        """Number of scales in a row."""
        return int(self.numbers.max()) + 1

    def members(self, device: torch.device | None = None) -> list[Tensor | slice]:
        """Return, for each scale, an index of its columns.

        Args:
            device: Device of the tensors to index. Default: the CPU.
        """
        members: list[Tensor | slice] = []
        for columns in self._members:
            first, last = int(columns[0]), int(columns[-1])
            members.append(slice(first, last + 1) if last - first + 1 == len(columns) else columns.to(device or "cpu"))
        return members

    @property
    def even(self) -> int | None:
        """Number of columns per scale; `None` if scales have different numbers of columns."""
        return self._longest if len(self.numbers) == self._longest * len(self._members) else None

    def spread(self, values: Tensor) -> Tensor:
        """Repeat the value of each scale for all of its columns: shape (..., scales) becomes (..., inputs)."""
        if self._in_order:
            return values.unsqueeze(-1).expand(*values.shape, self._longest).flatten(-2)[..., : len(self.numbers)]
        return values[..., self._on("numbers", values.device)]

    def gather(self, x: Tensor) -> Tensor:
        """Split the last dimension of `x`, the columns, into (scales, columns per scale), padded with zeros."""
        longest, inputs = self._longest, len(self.numbers)
        if self._in_order:
            filled: Tensor = F.pad(x, (0, -inputs % longest)).unflatten(-1, (-1, longest))
            return filled
        return F.pad(x, (0, 1))[..., self._on("_padded", x.device)]

    def _on(self, name: str, device: torch.device) -> Tensor:
        """Return the attribute `name`, a tensor, on a device; it is copied there once."""
        key = name, device
        if key not in self._moved:
            self._moved[key] = getattr(self, name).to(device)
        return self._moved[key]

    @cached_property
    def _members(self) -> tuple[Tensor, ...]:
        """Indices of the columns of each scale, in increasing order."""
        members: tuple[Tensor, ...] = self.numbers.argsort(stable=True).split(self.numbers.bincount().tolist())
        return members

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._members))

    @cached_property
    def _in_order(self) -> bool:
        """True if blocks are contiguous and have the same length, except for the last one."""
        return bool((self.numbers == torch.arange(len(self.numbers)) // self._longest).all())

    @cached_property
    def _padded(self) -> Tensor:
        """Indices of the columns of each scale, padded with `inputs`, shape (scales, longest)."""
        padded = torch.full((len(self._members), self._longest), len(self.numbers))
        for row, columns in zip(padded, self._members, strict=True):
            row[: len(columns)] = columns
        return padded


__all__ = ["Columns", "Layout"]
