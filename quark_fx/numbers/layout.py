"""Which scale belongs to which element of a tensor, as it is stored and as the matrices an operator multiplies by."""

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


class Matrices(Protocol):
    """How a stored weight becomes matrices of shape (groups, outputs, inputs): `graph.linear_map.LinearMap`."""

    @property
    def groups(self) -> int:
        """How many matrices there are."""
        ...

    def row_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions of the stored weight that index matrices and their rows."""
        ...

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as matrices."""
        ...

    def restore(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Inverse of `matrix`, in the shape of `like`."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Which scale belongs to which element of a tensor; `of` makes one of `numbers.ops`' (`axis`, `block_size`).

    Attributes:
        shape: of the tensor.
        axis: dimension the scales vary along, counted from 0; `None` for one scale.
        block: values along `axis` that share a scale.
        flat: the scale is a vector, one per index of `axis`; otherwise it has the rank of the tensor.
    """

    shape: tuple[int, ...]
    axis: int | None
    block: int
    flat: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int | None, block_size: int) -> Self:
        """Return the layout of a tensor of that shape; a negative axis counts from the end.

        Raises:
            ValueError: for an axis that the tensor does not have.
        """
        if axis is None:
            return cls(tuple(shape), None, 1, flat=True)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} of a tensor with {len(shape)} dimensions; choose one within its rank")
        axis %= len(shape)
        block = shape[axis] if block_size < 0 else block_size
        return cls(tuple(shape), axis, max(1, block), flat=block_size == 0)

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the scales with the rank of the tensor: 1 along dimensions that share them."""
        if self.axis is None:
            return (1,) * len(self.shape)
        along = -(-self.shape[self.axis] // self.block)
        return tuple(along if d == self.axis else 1 if self.flat else n for d, n in enumerate(self.shape))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape the scales are stored in."""
        if self.axis is None:
            return ()
        return (self.shape[self.axis],) if self.flat else self.kept

    def spread(self, parameter: Tensor) -> Tensor:
        """Return a scale or zero point so that it broadcasts over the tensor; one of shape `()` is for all."""
        if self.axis is None or parameter.dim() == 0:
            return parameter
        if self.flat:
            return parameter.reshape(self.kept)
        if self.block == 1 or parameter.shape[self.axis] == 1:
            return parameter
        return parameter.repeat_interleave(self.block, dim=self.axis).narrow(self.axis, 0, self.shape[self.axis])

    def total(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the sums of `values`, one per element, over the elements that share a scale: the adjoint of `spread`.

        Args:
            values: the shape of the tensor.
            shape: of the scale.
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
        """Return the layout of a tensor of another shape whose scales lie alike."""
        return replace(self, shape=tuple(shape))

    # Some rows, dimension 0, at a time.

    def pieces(self, most: int) -> Iterator[slice | EllipsisType]:
        """Yield ranges of dimension 0 that hold about `most` values each and cut through no block."""
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
        """Return the part of a scale or zero point that is for some rows, which cut through no block."""
        if isinstance(rows, EllipsisType) or parameter.numel() == 1 or (self.flat and self.axis != 0):
            return parameter
        if self.axis != 0:
            return parameter[rows]
        first, last, _ = rows.indices(self.shape[0])
        return parameter[first // self.block : -(-last // self.block)]

    # As matrices.

    def matrices(self, parameter: Tensor, mapping: Matrices) -> Tensor:
        """Return the scale or zero point of every element, as the operator's matrices."""
        return mapping.matrix(self.spread(parameter).expand(self.shape))

    def columns(self, mapping: Matrices) -> Columns | None:
        """Return which columns of a row share a scale, in the order of `restore`; `None` if rows share scales."""
        own, kept = mapping.row_dims(len(self.shape)), self.kept
        if any(kept[d] != self.shape[d] for d in own):
            return None
        # All rows are alike: one of each matrix tells.
        few = {d: mapping.groups if d == own[0] else 1 for d in own}
        one = Layout(tuple(few.get(d, n) for d, n in enumerate(self.shape)), self.axis, self.block, self.flat)
        sizes = [1 if d in own else n for d, n in enumerate(kept)]
        numbers = torch.arange(math.prod(sizes)).reshape(sizes).expand(one.kept)
        order = mapping.matrix(numbers)[0, 0]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        along = one.spread(numbers.flatten() if one.flat and one.axis is not None else numbers)
        return Columns(place[mapping.matrix(along.expand(one.shape))[0, 0]])

    def restore(self, values: Tensor, mapping: Matrices) -> Tensor:
        """Return values per matrix, row and number of `columns` in the shape the scales are stored in."""
        return mapping.restore(values, values.new_empty(()).expand(self.kept)).reshape(self.scale_shape)


@dataclass(frozen=True, eq=False)
class Columns:
    """Which columns of a matrix share a scale: contiguous ones of a linear, strided ones of a wide kernel.

    Attributes:
        numbers: of the scale of each column, from 0, shape (inputs,).
    """

    numbers: Tensor
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def in_blocks(cls, inputs: int, block: int) -> Self:
        """Return those of `inputs` columns of which `block` in a row share a scale."""
        return cls(torch.arange(inputs) // block)

    @property
    def count(self) -> int:
        """How many scales a row has."""
        return int(self.numbers.max()) + 1

    def members(self, device: torch.device | None = None) -> list[Tensor | slice]:
        """Return, for each scale, what selects its columns of a tensor on the device; default: the CPU."""
        found: list[Tensor | slice] = []
        for columns in self._members:
            first, last = int(columns[0]), int(columns[-1])
            found.append(slice(first, last + 1) if last - first + 1 == len(columns) else columns.to(device or "cpu"))
        return found

    @property
    def even(self) -> int | None:
        """How many columns share each scale; `None` if not all scales have as many."""
        return self._longest if len(self.numbers) == self._longest * len(self._members) else None

    def spread(self, values: Tensor) -> Tensor:
        """Return values per scale, the last dimension, for each column."""
        return values[..., self._on("numbers", values.device)]

    def gather(self, x: Tensor) -> Tensor:
        """Return columns, the last dimension of `x`, as (scales, columns of a scale); zeros fill up short ones."""
        longest, inputs = self._longest, len(self.numbers)
        if self._in_order:
            filled: Tensor = F.pad(x, (0, -inputs % longest)).unflatten(-1, (-1, longest))
            return filled
        return F.pad(x, (0, 1))[..., self._on("_padded", x.device)]

    def _on(self, name: str, device: torch.device) -> Tensor:
        """Return one of the tensors on a device, where it is copied once."""
        key = name, device
        if key not in self._moved:
            self._moved[key] = getattr(self, name).to(device)
        return self._moved[key]

    @cached_property
    def _members(self) -> tuple[Tensor, ...]:
        """The columns of each scale, in order."""
        found: tuple[Tensor, ...] = self.numbers.argsort(stable=True).split(self.numbers.bincount().tolist())
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._members))

    @cached_property
    def _in_order(self) -> bool:
        """Whether every run of as many columns as the longest block has is a block."""
        return bool((self.numbers == torch.arange(len(self.numbers)) // self._longest).all())

    @cached_property
    def _padded(self) -> Tensor:
        """The columns of each scale, filled up with one beyond the last, shape (scales, longest)."""
        padded = torch.full((len(self._members), self._longest), len(self.numbers))
        for row, columns in zip(padded, self._members, strict=True):
            row[: len(columns)] = columns
        return padded


__all__ = ["Columns", "Layout", "Matrices"]
