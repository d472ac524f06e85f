"""From the components of a scale site to the elements of a tensor and back, by labels (`ScaleSite`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def per_element(labels: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of each labelled element, 1 where the label is -1; the shape of `labels`."""
    labels = labels.to(scale.device)
    return torch.where(labels >= 0, scale[labels.clamp(min=0)], 1)


def largest_per_component(labels: Tensor, values: Tensor, components: int) -> Tensor:
    """Return the largest of values that are not negative, shape (components,); 0 where a component has none.

    Args:
        labels: the component of each value, of size 1 along dimensions it does not vary along.
        values: of the same number of dimensions, broadcastable with `labels`.
        components: how many there are.
    """
    alike = [dim for dim, size in enumerate(labels.shape) if size == 1]
    found = (values.amax(alike, keepdim=True) if alike else values).float()
    labels, found = torch.broadcast_tensors(labels.to(found.device), found)
    known = labels >= 0
    largest = torch.zeros(components, device=found.device, dtype=torch.float32)
    return largest.scatter_reduce_(0, labels[known], found[known], "amax")


def sums_along(labels: Tensor, values: Tensor) -> Tensor:
    """Return the sums of values, of the shape of `labels`, along the dimensions that these were expanded in."""
    alike = tuple(dim for dim in range(values.dim()) if labels.stride(dim) == 0)
    return values.sum(alike) if alike else values


@dataclass(frozen=True)
class Means:
    """Means of the values that belong to each component, on the CPU: sums on a GPU have no order.

    Attributes:
        total: their sums, shape (components,).
        count: how many, shape (components,).
    """

    total: Tensor
    count: Tensor

    @classmethod
    def of_none(cls, components: int) -> Means:
        """Return those of no values."""
        return cls(torch.zeros(components, dtype=torch.float32), torch.zeros(components, dtype=torch.float32))

    def add(self, labels: Tensor, values: Tensor) -> None:
        """Add values, each to the component in `labels`, which are of their shape; -1 is none."""
        sums, size = sums_along(labels, values), values.numel()
        self.add_sums(labels, sums.cpu(), size)

    def add_sums(self, labels: Tensor, sums: Tensor, size: int) -> None:
        """Add what `sums_along` made of `size` values, moved to the CPU."""
        labels = labels[tuple(0 if stride == 0 else slice(None) for stride in labels.stride())]
        known = labels >= 0
        self.total.index_add_(0, labels[known], sums[known])
        self.count.index_add_(0, labels[known], torch.full_like(sums[known], size / sums.numel()))

    @property
    def means(self) -> Tensor:
        """The means, 0 of no values."""
        return self.total / self.count.clamp_min(1)


__all__ = ["Means", "largest_per_component", "per_element", "sums_along"]
