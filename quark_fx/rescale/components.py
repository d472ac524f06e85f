"""Components of scales, ties between components, and the scales of a tensor's elements by labels (`scale_walk`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Components:
    """Scale components, the ties between them, and the reasons for components that cannot be scaled."""

    def __init__(self) -> None:
        self._count = 0
        self._parent = torch.arange(1024)
        self._reason = torch.zeros(1024, dtype=torch.long)

    def fresh(self, count: int) -> Tensor:
        """Return `count` new components."""
        first, self._count = self._count, self._count + count
        if self._count > len(self._parent):
            size = 2 * self._count
            self._parent = torch.cat([self._parent, torch.arange(len(self._parent), size)])
            self._reason = torch.cat([self._reason, torch.zeros(size - len(self._reason), dtype=torch.long)])
        return torch.arange(first, self._count)

    @property
    def count(self) -> int:
        """Number of components, tied or not."""
        return self._count

    def roots(self, labels: Tensor) -> Tensor:
        """Return one representative per set of tied components, in the shape of `labels`; -1 stays."""
        indices = labels.clamp(min=0)
        parents = self._parent[indices]
        while not torch.equal(above := self._parent[parents], parents):
            parents = above
        self._parent[indices] = parents
        return torch.where(labels >= 0, parents, labels)

    def tie(self, a: Tensor, b: Tensor) -> bool:
        """Tie the components `a[i]` and `b[i]`, all >= 0; return whether any tie is new."""
        changed = False
        while True:
            a, b = self.roots(a), self.roots(b)
            differ = a != b
            if not bool(differ.any()):
                return changed
            changed = True
            low, high = torch.minimum(a, b)[differ], torch.maximum(a, b)[differ]
            # If a component has several partners, one is tied now; the others are tied in the next round.
            self._parent[high] = low
            self._reason.scatter_reduce_(0, low, self._reason[high], "amax")

    def freeze(self, labels: Tensor, reason: int) -> bool:
        """Fix the scales of the components `labels` at one, for a `reason` above 0; return whether any was free."""
        roots = self.roots(labels[labels >= 0])
        free = roots[self._reason[roots] == 0]
        self._reason[free] = reason
        return len(free) > 0

    def reasons(self, labels: Tensor) -> Tensor:
        """Return the reason why each component is frozen, 0 for a free one, in the shape of `labels`."""
        return torch.where(labels >= 0, self._reason[self.roots(labels).clamp(min=0)], 0)


def per_element(labels: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of each element, in the shape of `labels`; 1 where the label is -1."""
    labels = labels.to(scale.device)
    return torch.where(labels >= 0, scale[labels.clamp(min=0)], 1)


def largest_per_component(labels: Tensor, values: Tensor, components: int) -> Tensor:
    """Return the largest value of each component, shape (components,), 0 for a component without values.

    Args:
        labels: Component of each value, of size 1 along dimensions in which it does not change.
        values: Nonnegative values with the same number of dimensions, broadcastable with `labels`.
        components: Number of components.
    """
    alike = [dim for dim, size in enumerate(labels.shape) if size == 1]
    peaks = (values.amax(alike, keepdim=True) if alike else values).float()
    labels, peaks = torch.broadcast_tensors(labels.to(peaks.device), peaks)
    is_labeled = labels >= 0
    largest = torch.zeros(components, device=peaks.device, dtype=torch.float32)
    return largest.scatter_reduce_(0, labels[is_labeled], peaks[is_labeled], "amax")


@dataclass(frozen=True)
class Means:
    """Means of the values of each component, on the CPU: the order of sums on a GPU is not deterministic.

    Attributes:
        total: Sums of the values, shape (components,).
        count: Numbers of values, shape (components,).
    """

    total: Tensor
    count: Tensor

    @classmethod
    def of_none(cls, components: int) -> Means:
        """Return the means before any values are added."""
        return cls(torch.zeros(components, dtype=torch.float32), torch.zeros(components, dtype=torch.float32))

    @staticmethod
    def sums(labels: Tensor, values: Tensor) -> Tensor:
        """Return the sums of values over the expanded dimensions of `labels`, in the shape without these dimensions."""
        alike = tuple(dim for dim in range(values.dim()) if labels.stride(dim) == 0)
        return values.sum(alike) if alike else values

    def add(self, labels: Tensor, values: Tensor) -> None:
        """Add each value to its component in `labels`, a tensor of the same shape; label -1 means no component."""
        self.add_sums(labels, self.sums(labels, values).cpu(), values.numel())

    def add_sums(self, labels: Tensor, sums: Tensor, size: int) -> None:
        """Add the result of `sums` for `size` values, moved to the CPU."""
        labels = labels[tuple(0 if stride == 0 else slice(None) for stride in labels.stride())]
        is_labeled = labels >= 0
        self.total.index_add_(0, labels[is_labeled], sums[is_labeled])
        self.count.index_add_(0, labels[is_labeled], torch.full_like(sums[is_labeled], size / sums.numel()))

    @property
    def means(self) -> Tensor:
        """The means, 0 for components without values."""
        return self.total / self.count.clamp_min(1)


__all__ = ["Components", "Means", "largest_per_component", "per_element"]
