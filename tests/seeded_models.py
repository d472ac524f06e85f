"""Models of a few hundred parameters and their data, built by torch alone: any commit of the package can read them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def seeded(model: M, seed: int = 0) -> M:
    """Return `model` in eval mode with every parameter and statistic drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            assert module.running_mean is not None
            module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    with torch.no_grad():
        for p in model.parameters():
            fan_in = p[0].numel() if p.dim() > 1 else 4
            p.copy_(torch.randn(p.shape, generator=generator) / max(fan_in, 1) ** 0.5)
    return model.eval()


def rand(*shape: int, seed: int = 1) -> Tensor:
    """Return normal values that do not depend on what ran before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """A residual block of a convolutional network: `relu(conv(x) + x)`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Cnn(nn.Module):
    """Stem, in-place relu, max pool, residual block, global pool, linear: every kind of edge a ResNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.block = Residual(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool(self.stem(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Mlp(nn.Module):
    """Embedding, two linears with a gelu between them; `(batch, sequence)` of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        return out


def cnn() -> nn.Module:
    return seeded(Cnn())


def mlp() -> nn.Module:
    return seeded(Mlp())


def images(*sizes: int) -> list[Tensor]:
    """Return one batch of 8×8 images per batch size."""
    return [rand(n, 3, 8, 8, seed=i) for i, n in enumerate(sizes or (4, 4))]


def tokens(*sizes: int) -> list[Tensor]:
    """Return one batch of token ids, five long, per batch size."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 11, (n, 5), generator=generator) for n in (sizes or (4, 4))]
