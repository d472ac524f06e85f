"""A gated MLP behind a norm, whose inputs passes scale, rotate and split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 64
"""Channels that it reads and makes."""


class Mlp(nn.Module):
    """Two matrices read a norm's output, and a third what they make."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96, bias=False)
        self.down = nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = self.down(torch.relu(self.gate(y)) * self.up(y)) + x
        return out
