"""MTCNN, three small networks with PReLU that find faces one after the other: the windows that they take for faces.

Windows are of mosaics of the `lfw_subset` of scikit-image, 100 faces and 100 other pieces of photographs in gray. P-Net
reads a whole mosaic, R-Net and O-Net read windows cut from it. `P-Net`, `R-Net` and `O-Net` are the balanced accuracy
of each network at the threshold of `facenet-pytorch`: the mean of the share of windows on a face that it accepts and
the share of windows on none that it rejects. Windows that overlap a face by 30 to 65 % do not count, as in training.
`boxes` and `points` compare with the float model on windows on a face: the mean distances of edges, and of eyes, nose
and mouth corners, in percent of a window.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real.error_rates import Box, best_overlaps
from benchmarks.real.packages import package, submodule
from benchmarks.real.real_model import RealModel

NETWORKS = {"P-Net": 0.6, "R-Net": 0.7, "O-Net": 0.7}
"""The probability above which a window goes on to the next network, or is a face."""

TILES, TILE, SMALL, WINDOWS = 6, 25, 13, 64
"""Tiles along an edge of a mosaic, their size in pixels, their size as P-Net reads them, and windows cut from one."""

CALIBRATION, JUDGED, SEEN = 4, 16, 60
"""Numbers of mosaics to calibrate on and to judge by, and of the faces and other pieces that calibration sees."""


class Networks(nn.Module):
    """The three networks side by side."""

    def __init__(self, pnet: nn.Module, rnet: nn.Module, onet: nn.Module) -> None:
        super().__init__()
        self.pnet, self.rnet, self.onet = pnet, rnet, onet

    def forward(self, mosaic: Tensor, small: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        """Return shifts of edges and probabilities of each network, and points of O-Net; inputs are from -1 to 1.

        Args:
            mosaic: what P-Net reads, `(1, 3, height, width)`: it has outputs for every second pixel.
            small: what R-Net reads, `(windows, 3, 24, 24)`.
            large: what O-Net reads, `(windows, 3, 48, 48)`.
        """
        shifts, points, probabilities = self.onet(large)
        return *self.pnet(mosaic), *self.rnet(small), shifts, probabilities, points


@cache
def load() -> RealModel:
    """Return the networks; batches are a mosaic `(1, 3, 78, 78)` and 64 of its windows in both sizes.

    Raises:
        MissingPackageError: if networks or pictures are not installed.
    """
    code, folder = submodule("facenet_pytorch", "models.mtcnn"), package("facenet_pytorch") / "data"
    model = Networks(*(kind(pretrained=False) for kind in (code.PNet, code.RNet, code.ONet))).eval()
    for name, network in model.named_children():
        network.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    pictures = torch.from_numpy(np.load(package("skimage") / "data" / "lfw_subset.npy")).float()
    faces, others = pictures[:100], pictures[100:]
    mosaics = [_mosaic(faces[SEEN:], others[SEEN:], 100 + i) for i in range(JUDGED)]
    judged = [batch for batch, _, _ in mosaics]
    dense, cut = torch.cat([one for _, one, _ in mosaics]), torch.cat([one for _, _, one in mosaics])
    with torch.no_grad():
        expected = _rows([model(**batch) for batch in judged])

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        found = _rows([runnable(**batch) for batch in judged])
        moved = [(one - other).abs() for one, other in zip(found, expected, strict=True)]
        figures, shifts = dict[str, float](), list[float]()
        for i, ((name, threshold), overlaps) in enumerate(zip(NETWORKS.items(), (dense, cut, cut), strict=True)):
            accepted, face, none = found[2 * i + 1][:, 1] > threshold, overlaps > 0.65, overlaps < 0.3
            shares = accepted[face].double().mean() + (~accepted[none]).double().mean()
            figures[f"{name}, %"] = float(50 * shares)
            shifts.append(float(moved[2 * i][face].mean()))
        points = float(moved[-1][cut > 0.65].mean())
        return {**figures, "boxes, %": 100 * sum(shifts) / len(shifts), "points, %": 100 * points}

    calibration = [_mosaic(faces[:SEEN], others[:SEEN], i)[0] for i in range(CALIBRATION)]
    return RealModel(model, calibration, judged, judge)


def _rows(batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return each output of all batches as `(windows, values)`, those of P-Net row by row."""
    return [torch.cat([one.movedim(1, -1).flatten(0, -2) for one in outputs]) for outputs in zip(*batches, strict=True)]


def _mosaic(faces: Tensor, others: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return a batch, and the overlaps of P-Net's windows, and of those that are cut, with the nearest face."""
    draw, size = random.Random(seed), TILES * TILE
    picture, boxes = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 0.04, list[Box]()
    corners = [(x, y) for y in range(0, size, TILE) for x in range(0, size, TILE)]
    for x, y in corners:
        kind = draw.choice((faces, others))
        picture[y : y + TILE, x : x + TILE] += kind[draw.randrange(len(kind))] * draw.uniform(0.7, 1)
        boxes += [(x, y, x + TILE, y + TILE)] * (kind is faces)
    steps, scale = range(0, TILES * SMALL - 11, 2), TILE / SMALL
    dense = [(x * scale, y * scale, (x + 12) * scale, (y + 12) * scale) for y in steps for x in steps]
    windows = [_window(*draw.choice(corners), draw) for _ in range(WINDOWS)]
    cut = [picture[top:bottom, left:right] for left, top, right, bottom in windows]
    batch = {"mosaic": _input([picture], TILES * SMALL), "small": _input(cut, 24), "large": _input(cut, 48)}
    return batch, torch.tensor(best_overlaps(boxes, dense)), torch.tensor(best_overlaps(boxes, windows))


def _window(x: int, y: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Return a window of 20 to 30 pixels that is up to 5 away from a tile."""
    edge = draw.randint(20, 30)
    left, top = (
        min(max(corner + (TILE - edge) // 2 + draw.randint(-5, 5), 0), TILES * TILE - edge) for corner in (x, y)
    )
    return left, top, left + edge, top + edge


def _input(pictures: list[Tensor], size: int) -> Tensor:
    scaled = [F.interpolate(one[None, None], (size, size), mode="bilinear", antialias=True) for one in pictures]
    return ((255 * torch.cat(scaled).clamp(0, 1) - 127.5) / 128).repeat(1, 3, 1, 1)
