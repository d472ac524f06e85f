"""Models of a few hundred parameters, and the graph questions the tests ask about them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import quark_fx as qfx
from quark_fx.graph.nodes import parameter, target_name
from quark_fx.graph.pass_manager import PassRecord
from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Layout
from quark_fx.presets import PRESETS

M = TypeVar("M", bound=nn.Module)

WHOLE_PRESETS = [name for name, config in PRESETS.items() if not config.exclude]
"""Presets that leave no operator in float; those for language models leave embedding and head."""


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


def divided(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the samples that are learned from, and the last eighth, which is validation data."""
    samples = torch.cat(list(batches))
    validation = max(1, len(samples) // 8)
    return samples[:-validation], samples[-validation:]


def record_of(qmodel: qfx.QuantizedModel, name: str) -> PassRecord:
    """Return what the last pass of that name did."""
    return [record for record in qmodel.report().passes if record.name == name][-1]


def rand(*shape: int, seed: int = 1) -> Tensor:
    """Return normal values that do not depend on what ran before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def free_grid(weight: Tensor, largest: float, limits: tuple[float, float], block: int = 4) -> Grid:
    """Return a grid with a free scale for each block of inputs, which maps its largest magnitude to a code."""
    scale = weight.reshape(len(weight), -1, block).abs().amax(-1) / largest
    spread = scale.repeat_interleave(block, 1)
    return Grid(spread, torch.zeros_like(spread), limits, FreeScales(scale, Layout.of(weight.shape, 1, block)))


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


def quantize(
    model: nn.Module | qfx.Session, config: Any, data: Iterable[Any] | None = None, **options: Any
) -> qfx.QuantizedModel:
    """`qfx.quantize` without a progress bar; a pattern that selects nothing is the preset's business here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="pattern .* selects no operator")
        return qfx.quantize(model, config, data, progress=False, **options)


def calls(gm: GraphModule | qfx.QuantizedModel, name: str) -> list[Node]:
    """Return the calls whose qualified operator name starts with `name`, in graph order."""
    gm = gm.graph_module if isinstance(gm, qfx.QuantizedModel) else gm
    return [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node).startswith(name)]


def constant(gm: GraphModule | qfx.QuantizedModel, node: Any) -> Tensor:
    """Return the tensor a `get_attr` node reads."""
    assert isinstance(node, Node)
    assert node.op == "get_attr", node.format_node()
    return parameter(gm.graph_module if isinstance(gm, qfx.QuantizedModel) else gm, node)
