"""Deterministic sampling of row, sample, or batch indices."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_indices(count: int, most: int, seed: int = 0) -> Tensor:
    """Return at most `most` indices from `range(count)`, in increasing order, the same in every call.

    If `count` exceeds `most`, the range is split into `most` equal parts, and one index is drawn at random from each
    part. Taking every n-th index could pick the same channel of each attention head every time, or the same source of
    interleaved data.

    Args:
        count: Number of indices to choose from.
        most: Largest number of indices to return.
        seed: Seed of the random draw.

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
