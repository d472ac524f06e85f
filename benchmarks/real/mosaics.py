"""Mosaics of faces and other pieces of photographs in gray, and windows of them as MTCNN's networks read them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.real.error_rates import Box

TILES, TILE, SMALL, WINDOWS = 6, 25, 13, 64
"""Tiles along an edge of a mosaic, their size in pixels, their size as P-Net reads them, and windows of a batch."""

_SIZE, _STEPS = TILES * TILE, range(0, TILES * SMALL - 11, 2)

DENSE: list[Box] = [tuple(edge * TILE / SMALL for edge in (x, y, x + 12, y + 12)) for y in _STEPS for x in _STEPS]  # type: ignore[misc]
"""The windows that P-Net judges, row by row, in pixels of the mosaic."""


@dataclass(frozen=True)
class Mosaic:
    """Faces and other pieces of photographs.

    Attributes:
        picture: gray values from 0 to 1, noise aside, `(150, 150)`.
        faces: their boxes, in pixels.
        windows: 64 of them, near to pieces and about as large.
        batch: the mosaic and these windows as the three networks read them.
    """

    picture: Tensor
    faces: list[Box]
    windows: list[Box]
    batch: dict[str, Tensor]


def mosaic(faces: Tensor, others: Tensor, seed: int) -> Mosaic:
    """Return a mosaic of pictures drawn from both, `(pictures, 25, 25)` from 0 to 1."""
    draw = random.Random(seed)
    picture, boxes = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(seed)) * 0.04, list[Box]()
    corners = [(x, y) for y in range(0, _SIZE, TILE) for x in range(0, _SIZE, TILE)]
    for x, y in corners:
        kind = draw.choice((faces, others))
        picture[y : y + TILE, x : x + TILE] += kind[draw.randrange(len(kind))] * draw.uniform(0.7, 1)
        boxes += [(x, y, x + TILE, y + TILE)] * (kind is faces)
    windows = [_window(*draw.choice(corners), draw) for _ in range(WINDOWS)]
    small, large = cut(picture, windows, 24), cut(picture, windows, 48)
    return Mosaic(picture, boxes, windows, {"mosaic": _input([picture], TILES * SMALL), "small": small, "large": large})


def cut(picture: Tensor, windows: Sequence[Box], size: int) -> Tensor:
    """Return what is inside of windows, at most 64 and black after these, from -1 to 1, `(64, 3, size, size)`."""
    parts = [torch.zeros(1, 1)] * WINDOWS
    for i, (left, top, right, bottom) in enumerate(windows):
        x, y = (min(max(round(edge), 0), _SIZE - 1) for edge in (left, top))
        parts[i] = picture[y : max(round(bottom), y + 1), x : max(round(right), x + 1)]
    return _input(parts, size)


def _window(x: int, y: int, draw: random.Random) -> Box:
    """Return a window of 20 to 30 pixels that is up to 5 away from a tile."""
    edge = draw.randint(20, 30)
    left, top = (min(max(corner + (TILE - edge) // 2 + draw.randint(-5, 5), 0), _SIZE - edge) for corner in (x, y))
    return left, top, left + edge, top + edge


def _input(pictures: list[Tensor], size: int) -> Tensor:
    scaled = [F.interpolate(one[None, None], (size, size), mode="bilinear", antialias=True) for one in pictures]
    return ((255 * torch.cat(scaled).clamp(0, 1) - 127.5) / 128).repeat(1, 3, 1, 1)
