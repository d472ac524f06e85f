"""Choose some of many rows, samples or batches."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_indices(count: int, most: int, seed: int = 0) -> Tensor:
    """Return at most `most` of the indices below `count`, in order, the same in every call.

    One is drawn at random from each of `most` equal stretches. Every n-th index would always meet the same channel of
    each attention head, or the same source of interleaved data.

    Args:
        count: Number of indices.
        most: Number to return, if there are more.
        seed: Seed of the draw.

    >>> spread_indices(3, 8)
    tensor([0, 1, 2])
    >>> spread_indices(1000, 4) // 250
    tensor([0, 1, 2, 3])
    """
    if count <= most:
        return torch.arange(count)
    ends = torch.arange(most + 1) * count // most
    drawn = torch.rand(most, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ends[:-1] + (drawn * ends.diff()).long()


__all__ = ["spread_indices"]
