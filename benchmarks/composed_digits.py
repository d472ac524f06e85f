"""Networks that quantization can hurt: pairs of noisy digits or letters, 100 classes, three networks, five seeds.

    python -m benchmarks.composed_digits

Two of scikit-learn's 8×8 digits stand side by side, each shifted and scaled at random, under noise; the class is the
number from 00 to 99 they spell. No digit of a held-out image occurs in a training image. Float networks are right on
92 to 96 % of the held-out images. The network `depthwise` has badly scaled weights, so that 8 bits per tensor cost it
many points and leave something to repair; the others are for less than 8 bits. A network is trained on one thread the
first time it is loaded, in one to four minutes, and kept in the folder named by `QUARK_FX_CACHE` (default:
`~/.cache/quark_fx`). The command trains all that are missing.

`load("vit, letters", seed)` has letters instead of digits, ten of them, drawn in Debian's fonts at an angle (`apt-get
install fonts-dejavu fonts-liberation fonts-freefont-ttf`); the held-out ones are of fonts that no training image has.
Nothing was chosen by what quantization does on them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from benchmarks.common import one_thread, table
from benchmarks.experiment import experiment
from quark_fx.evaluation import Classification

RECIPE = 1
"""Part of the cached files' path: raise it with every change to data, networks or training."""

SEEDS = range(5)
"""The seeds that `main` trains; `load` takes any."""

HEIGHT, WIDTH, CLASSES = 12, 20, 100

DIGITS = 1200
"""Digits to compose training images of; the other 597 are for held-out images."""

LETTERS = "ACEGHKMNST"
"""The letters of the ten classes."""

_FONTS, _OTHER_FONTS = ("freefont", "liberation"), ("dejavu",)
"""Folders of fonts: for training, and for held-out images."""

_TURNED = 5
"""How often each letter of a font is drawn."""

EPOCH = 12_000
"""Training images composed afresh in each epoch."""


@dataclass(frozen=True)
class Benchmark:
    """A trained network with the data it may be calibrated on and the data it is judged by.

    Attributes:
        model: in eval mode.
        calibration: 16 batches of shape `(64, 1, 12, 20)`, composed of the training digits.
        images: 4,000 held-out images.
        labels: their classes, 0 to 99.
    """

    model: nn.Module
    calibration: list[Tensor]
    images: Tensor
    labels: Tensor

    def accuracy(self, predict: Callable[[Tensor], Tensor] | None = None) -> float:
        """Return the share of held-out images, in percent, whose largest logit (default: the model's) is right."""
        pairs = list(zip(self.images.split(500), self.labels.split(500), strict=True))
        return 100 * qfx.evaluate(predict or self.model, Classification(pairs))["accuracy"]


@cache
def load(name: str, seed: int) -> Benchmark:
    """Return a network from the cache, trained now if it is not there; callers leave it as it is.

    Raises:
        KeyError: if `name` is not in `NETWORKS`.
    """
    kind, _, source = name.partition(", ")
    network, epochs, batch, rate = _RECIPES[kind]
    known = data(source or "digits")
    file = cache_folder() / f"{name}-{seed}.safetensors"
    if not file.exists():
        state = train(network, known, epochs=epochs, batch=batch, rate=rate, seed=seed).state_dict()
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renaming is atomic: whoever reads meanwhile finds the whole file or none.
        partial = file.with_suffix(f".{os.getpid()}")
        save_file({key: value.contiguous() for key, value in state.items()}, partial)
        partial.replace(file)
    with torch.random.fork_rng(devices=[]):
        model = network()
    model.load_state_dict(load_file(file))
    return Benchmark(model.eval(), list(known.calibration.split(64)), known.images, known.labels)


def cache_folder() -> Path:
    """Return the folder of the current recipe's networks, which need not exist."""
    root = os.environ.get("QUARK_FX_CACHE") or Path.home() / ".cache" / "quark_fx"
    return Path(root) / "composed_digits" / f"v{RECIPE}"


@dataclass(frozen=True)
class Data:
    """What all networks and seeds share.

    Attributes:
        digits: digits or letters to compose training images of, `(count, 8, 8)` in [0, 1].
        classes: which one each of them is, 0 to 9, `(count,)`.
        calibration: images composed of `digits`, `(1024, 1, 12, 20)`.
        images: images composed of the other digits, `(4000, 1, 12, 20)`.
        labels: the classes of `images`, `(4000,)`.
    """

    digits: Tensor
    classes: Tensor
    calibration: Tensor
    images: Tensor
    labels: Tensor


@cache
def data(source: str = "digits") -> Data:
    """Return the signs of a source, and the images composed of them to calibrate on and to judge by."""
    generator = torch.Generator().manual_seed(0)
    known, held_out = _SOURCES[source](generator)
    calibration, _ = _compose(*known, 1_024, generator)
    return Data(*known, calibration, *_compose(*held_out, 4_000, generator))


_Signs = tuple[Tensor, Tensor]
"""Images of signs, `(count, 8, 8)` in [0, 1], and their classes."""


def _digits(generator: torch.Generator) -> tuple[_Signs, _Signs]:
    """Return digits to compose training images of, and the others."""
    pixels, target = load_digits(return_X_y=True)
    order = torch.randperm(len(target), generator=generator)
    digits = torch.from_numpy(pixels).float().reshape(-1, 8, 8)[order] / 16
    labels = torch.from_numpy(target).long()[order]
    return (digits[:DIGITS], labels[:DIGITS]), (digits[DIGITS:], labels[DIGITS:])


def _letters(generator: torch.Generator) -> tuple[_Signs, _Signs]:
    """Return letters of the fonts to compose training images of, and of others.

    Raises:
        FileNotFoundError: if the fonts are not installed.
    """

    def drawn(folders: Sequence[str]) -> _Signs:
        files = sorted(file for folder in folders for file in (_FONT_FOLDER / folder).glob("*.ttf"))
        if not files:
            raise FileNotFoundError("run apt-get install fonts-dejavu fonts-liberation fonts-freefont-ttf")
        signs = [(file, label) for file in files for label in range(len(LETTERS)) for _ in range(_TURNED)]
        angles = 30 * torch.rand(len(signs), generator=generator) - 15
        images = [_letter(file, LETTERS[c], float(angle)) for (file, c), angle in zip(signs, angles, strict=True)]
        return torch.stack(images), torch.tensor([label for _, label in signs])

    return drawn(_FONTS), drawn(_OTHER_FONTS)


_FONT_FOLDER = Path("/usr/share/fonts/truetype")


def _letter(file: Path, letter: str, angle: float) -> Tensor:
    """Return a letter in 8×8 pixels, turned by an angle in degrees."""
    image = Image.new("L", (64, 64))
    font = ImageFont.truetype(file, 72)
    ImageDraw.Draw(image).text((32, 32), letter, 255, font, anchor="mm")
    small = image.rotate(angle, Image.Resampling.BILINEAR).resize((8, 8), Image.Resampling.BOX)
    pixels = torch.from_numpy(np.array(small, dtype=np.float32))
    return pixels / pixels.max()


_SOURCES = {"digits": _digits, "letters": _letters}


def _compose(digits: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `count` images, `(count, 1, 12, 20)`, and their classes: two digits, up to 3 pixels off, under noise."""
    images = torch.randn(count, HEIGHT, WIDTH, generator=generator) * 0.15
    classes = torch.zeros(count, dtype=torch.long)
    image, row, column = torch.arange(count)[:, None, None], torch.arange(8)[:, None], torch.arange(8)
    for left in (0, WIDTH // 2 - 1):
        chosen = torch.randint(len(digits), (count,), generator=generator)
        down, right = torch.randint(4, (2, count, 1, 1), generator=generator)
        gain = 0.5 + torch.rand(count, 1, 1, generator=generator)
        images[image, row + down, column + left + right] += gain * digits[chosen]
        classes = 10 * classes + labels[chosen]
    return images.unsqueeze(1), classes


class Residual(nn.Module):
    """Two convolutions with batch norm beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_conv(inputs, outputs, 3, stride), nn.ReLU(), *_conv(outputs, outputs, 3))
        self.shortcut = nn.Sequential(*(_conv(inputs, outputs, 1, stride) if stride > 1 else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, each with batch norm; ReLU6 after the first two."""

    def __init__(self, inputs: int, outputs: int, stride: int, spread: bool) -> None:
        super().__init__()
        wide = 4 * inputs
        self.residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *_conv(inputs, wide, 1),
            nn.ReLU6(),
            *_conv(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *_conv(wide, outputs, 1),
        )
        if spread:
            _spread(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs)


def _spread(norm: nn.Module) -> None:
    """Spread a batch norm's factors evenly over three decades and keep training from changing them.

    Folded, they give the channels of one weight very different ranges, as MobileNetV2 has them after a long training
    on ImageNet (Nagel et al. 2019, figure 2); the batch norm after the depthwise convolution makes up for them.
    """
    assert isinstance(norm, nn.BatchNorm2d)
    exponents = torch.linspace(-2, 1, norm.num_features)[torch.randperm(norm.num_features)]
    norm.weight = nn.Parameter(10**exponents, requires_grad=False)


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
    """Fifteen tokens from a stem of convolutions, learned positions, four encoder layers, a logit for each digit.

    The stem (Xiao et al. 2021) and the head, in which a class's logit is the sum of its two digits', spare a
    transformer most of the training it would need to find out that images and numbers are made that way.
    """

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, width, 3, stride=2, padding=1),
        )
        self.positions = nn.Parameter(torch.randn(1, 15, width) * 0.2)
        self.layers = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(15 * width, 2 * 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2) + self.positions
        tens, units = self.head(self.norm(self.layers(x)).flatten(1)).unflatten(1, (2, 10)).unbind(1)
        return (tens.unsqueeze(2) + units.unsqueeze(1)).flatten(1)  # type: ignore[no-any-return]


def _cnn(first: nn.Module, *blocks: nn.Module) -> nn.Sequential:
    """Add a stem of 16 channels and a head for 64, which sees where a digit stands."""
    pooled = nn.AdaptiveAvgPool2d((1, 5))
    return nn.Sequential(*_conv(1, 16, 3), first, *blocks, pooled, nn.Flatten(), nn.Linear(64 * 5, CLASSES))


def resnet() -> nn.Module:
    """Return a residual network of five blocks."""
    shapes = [(16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    return _cnn(nn.ReLU(), *(Residual(*shape) for shape in shapes))


def depthwise() -> nn.Module:
    """Return a MobileNetV2 of five blocks, the third of which has spread factors before its depthwise convolution."""
    shapes = [(16, 16, 1, False), (16, 32, 2, False), (32, 32, 1, True), (32, 64, 2, False), (64, 64, 1, False)]
    return _cnn(nn.ReLU6(), *(InvertedResidual(*shape) for shape in shapes))


_RECIPES: dict[str, tuple[Callable[[], nn.Module], int, int, float]] = {
    "resnet": (resnet, 6, 100, 5e-3),
    "depthwise": (depthwise, 6, 100, 5e-3),
    "vit": (VisionTransformer, 10, 50, 4e-3),
}
"""Network, epochs, batch size and largest learning rate."""

NETWORKS = (*_RECIPES, *(f"{name}, letters" for name in _RECIPES))
"""The names `load` knows."""


def train(
    network: Callable[[], nn.Module], known: Data, *, epochs: int, batch: int, rate: float, seed: int
) -> nn.Module:
    """Build and train a network; the same seed gives the same one on the same kind of processor."""
    generator = torch.Generator().manual_seed(1 + seed)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        model = network().to(memory_format=torch.channels_last).train()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * EPOCH // batch)
        for _ in range(epochs):
            images, labels = _compose(known.digits, known.classes, EPOCH, generator)
            for x, y in zip(images.split(batch), labels.split(batch), strict=True):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model


@experiment()
def main() -> None:
    """Train what is missing, seed by seed, and print the accuracy of all."""
    rows = []
    for seed in SEEDS:
        for name in NETWORKS:
            start = time.perf_counter()
            rows.append((name, seed, f"{load(name, seed).accuracy():.2f}"))
            print(*rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    print(table(("network", "seed", "float, %"), rows))


if __name__ == "__main__":
    main()
