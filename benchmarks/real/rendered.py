"""Words on paper: rendered with Debian's fonts in sizes, grays, slants and blurs drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import sentences
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from benchmarks.real.error_rates import Box
from benchmarks.real.packages import MissingPackageError

_FONTS = (
    "dejavu/DejaVuSans.ttf",
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSerif.ttf",
    "dejavu/DejaVuSansMono.ttf",
    "liberation/LiberationSans-Regular.ttf",
    "liberation/LiberationSerif-Italic.ttf",
    "liberation/LiberationSansNarrow-Regular.ttf",
    "freefont/FreeSerif.ttf",
)

CALIBRATION_WORDS = " ".join(sentences.CALIBRATION).split()
JUDGED_WORDS = " ".join(sentences.HELD_OUT).split()
"""Words of English sentences with their punctuation."""


@dataclass(frozen=True)
class Page:
    """A page of words.

    Attributes:
        image: gray values from 0 to 1, `(height, width)`.
        words: in the order of reading.
        boxes: around the ink of each word, in pixels.
    """

    image: Tensor
    words: list[str]
    boxes: list[Box]


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    file = Path("/usr/share/fonts/truetype") / path
    if not file.exists():
        raise MissingPackageError(
            f"{file} is not there; run: apt-get install fonts-dejavu fonts-liberation fonts-freefont-ttf"
        )
    return ImageFont.truetype(file, size)


def page(words: Sequence[str], height: int, width: int, seed: int, gap: tuple[int, int]) -> Page:
    """Return a page with as many of the words, in lines, as it holds.

    Words are a space and from `gap[0]` to `gap[1]` pixels apart.
    """
    draw = random.Random(seed)
    paper = draw.randint(170, 255)
    image = Image.new("L", (width, height), paper)
    pen, boxes = ImageDraw.Draw(image), list[Box]()
    y, rest = draw.randint(8, 20), list(words)
    while rest:
        size = draw.randint(14, 34)
        font, ink, x = _font(draw.choice(_FONTS), size), draw.randint(0, paper - 110), draw.randint(8, 30)
        if y + size * 1.4 > height:
            break
        while rest and x + font.getlength(rest[0]) < width - 8:
            word = rest.pop(0)
            pen.text((x, y), word, ink, font)
            boxes.append(tuple(float(edge) for edge in pen.textbbox((x, y), word, font)))  # type: ignore[arg-type]
            x += round(font.getlength(word + " ")) + draw.randint(*gap)
        y += round(size * draw.uniform(1.5, 1.9))
    return Page(_developed(image, draw), list(words[: len(boxes)]), boxes)


def spread(words: Sequence[str], count: int) -> list[str]:
    """Return so many of the words, at equal distances."""
    return [words[i * len(words) // count] for i in range(count)]


def word_image(word: str, height: int, width: int, seed: int) -> Tensor:
    """Return one word, gray values from 0 to 1, `(height, width)`; a word that is too wide is set smaller."""
    draw = random.Random(seed)
    path, size, paper = draw.choice(_FONTS), draw.randint(height // 2, height * 3 // 4), draw.randint(150, 255)
    size = min(size, int(size * (width - 16) / _font(path, size).getlength(word)))
    image = Image.new("L", (width, height), paper)
    ImageDraw.Draw(image).text((8, height // 2), word, draw.randint(0, paper - 80), _font(path, size), anchor="lm")
    image = image.rotate(draw.uniform(-3, 3), Image.Resampling.BICUBIC, fillcolor=paper)
    return _developed(image, draw)


def _developed(image: Image.Image, draw: random.Random) -> Tensor:
    """Blur an image and add noise."""
    image = image.filter(ImageFilter.GaussianBlur(draw.uniform(0, 1.4)))
    pixels = torch.from_numpy(np.array(image, np.float32) / 255)
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(draw.randint(0, 1 << 30)))
    return (pixels + draw.uniform(0, 0.1) * noise).clamp(0, 1)
