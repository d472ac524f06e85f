"""Small networks trained within seconds on scikit-learn's 8×8 digits, for tests that need trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from benchmarks.common import one_thread

TRAINING = 900
"""Images to train and calibrate on; the other 897 are held out."""

BATCH = 60


@dataclass(frozen=True)
class Trained:
    """A trained network with the data it may be calibrated on and the data it is judged by.

    Attributes:
        model: in eval mode.
        calibration: batches of training images, `(60, 1, 8, 8)` in [0, 1].
        images: validation images.
        labels: their digits.
    """

    model: nn.Module
    calibration: list[Tensor]
    images: Tensor
    labels: Tensor

    def accuracy(self, predict: Callable[[Tensor], Tensor] | Path) -> float:
        """Return the share of validation images, in percent, whose largest logit is the right one."""
        from quark_fx.evaluation import Classification  # benchmarks.against_commit runs commits that have none

        return 100 * qfx.evaluate(predict, Classification([(self.images, self.labels)]))["accuracy"]


class ResidualCnn(nn.Module):
    """Convolutions with batch norm, a residual addition and a pool."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem = _conv(1, width // 2)
        self.down = _conv(width // 2, width, stride=2)
        self.first = _conv(width, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.stem(x))
        x = F.relu(x + self.second(self.first(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


def _conv(inputs: int, outputs: int, stride: int = 1, groups: int = 1, size: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU() if groups == 1 and size == 3 else nn.ReLU6())


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, each with batch norm; ReLU6 after the first two."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            _conv(inputs, wide, size=1),
            _conv(wide, wide, stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


class MobileNet(nn.Sequential):
    """A stem, four inverted residuals and a linear head."""

    def __init__(self) -> None:
        shapes = [(16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2)]
        blocks = [InvertedResidual(*shape) for shape in shapes]
        head = [_conv(48, 128, size=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
        super().__init__(_conv(1, 16), *blocks, *head)


class Encoder(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Sixteen overlapping 4×4 patches, learned positions, two encoder layers, the mean of the tokens."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.layers = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x)).mean(1))  # type: ignore[no-any-return]


def train(network: Callable[[], nn.Module], *, epochs: int, rate: float, seed: int = 0) -> Trained:
    """Build and train a network on one thread; the same seed gives the same one on the same kind of processor."""
    from sklearn.datasets import load_digits  # device tests of other networks run without it

    data, target = load_digits(return_X_y=True)
    images = torch.from_numpy(data).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(target).long()
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        order = torch.randperm(len(images))
        images, labels = images[order], labels[order]
        model = network().train()
        steps = epochs * TRAINING // BATCH
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        for _ in range(epochs):
            for batch in torch.randperm(TRAINING).split(BATCH):
                loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    calibration = list(images[:TRAINING].split(BATCH))
    return Trained(model.eval(), calibration, images[TRAINING:], labels[TRAINING:])


_RECIPES: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "cnn": (ResidualCnn, 12, 5e-3),
    "mobilenet": (MobileNet, 15, 5e-3),
    "vit": (VisionTransformer, 25, 3e-3),
}

NETWORKS = tuple(_RECIPES)
"""The names `trained` knows."""


@cache
def trained(name: str) -> Trained:
    """Return a network, trained the first time a test run asks for it; tests leave it as it is."""
    network, epochs, rate = _RECIPES[name]
    return train(network, epochs=epochs, rate=rate)
