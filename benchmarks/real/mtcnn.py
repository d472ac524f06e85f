"""MTCNN, three small networks with PReLU that find faces one after the other: the faces that they find in mosaics.

Mosaics are of the `lfw_subset` of scikit-image, 100 faces and 100 other pieces of photographs in gray. `P-Net`, `R-Net`
and `O-Net` are the balanced accuracy of each network alone at the threshold of `facenet-pytorch`: the mean of the share
of windows on a face that it accepts and the share of windows on none that it rejects. P-Net reads a whole mosaic, R-Net
and O-Net read windows cut from it. Windows that overlap a face by 30 to 65 % do not count, as in training. `boxes` and
`points` compare with the float model on windows on a face: the mean distances of edges, and of eyes, nose and mouth
corners, in percent of a window.

The other figures are of the cascade: P-Net's boxes, made square, go to R-Net, and R-Net's to O-Net. `overlap` is the
mean intersection over union, in percent, of each face's tile with the best box found; `found` is the percentage of
faces whose overlap is at least one half; `extra` counts boxes that overlap no face by that much, in percent of the
faces. All faces are of one size, so P-Net reads a mosaic at one scale. The float model's boxes are as high as a tile
and three quarters as wide, which limits `overlap`. One of the 308 faces is 0.32 %.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import nms

from benchmarks.real.error_rates import Box, best_overlaps, detection_figures
from benchmarks.real.mosaics import DENSE, WINDOWS, Mosaic, cut, mosaic
from benchmarks.real.packages import package, submodule
from benchmarks.real.real_model import RealModel

NETWORKS = {"P-Net": 0.6, "R-Net": 0.7, "O-Net": 0.7}
"""The probability above which a window goes on to the next network, or is a face."""

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
    mosaics = [mosaic(faces[SEEN:], others[SEEN:], 100 + i) for i in range(JUDGED)]
    judged = [one.batch for one in mosaics]
    dense = torch.tensor([best for one in mosaics for best in best_overlaps(one.faces, DENSE)])
    near = torch.tensor([best for one in mosaics for best in best_overlaps(one.faces, one.windows)])
    with torch.no_grad():
        expected = _rows([model(**batch) for batch in judged])

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        outputs = [runnable(**batch) for batch in judged]
        found = _rows(outputs)
        moved = [(one - other).abs() for one, other in zip(found, expected, strict=True)]
        figures, shifts = dict[str, float](), list[float]()
        for i, ((name, threshold), overlaps) in enumerate(zip(NETWORKS.items(), (dense, near, near), strict=True)):
            accepted, face, none = found[2 * i + 1][:, 1] > threshold, overlaps > 0.65, overlaps < 0.3
            shares = accepted[face].double().mean() + (~accepted[none]).double().mean()
            figures[f"{name}, %"] = float(50 * shares)
            shifts.append(float(moved[2 * i][face].mean()))
        points = float(moved[-1][near > 0.65].mean())
        figures |= {"boxes, %": 100 * sum(shifts) / len(shifts), "points, %": 100 * points}
        boxes = [cascade(runnable, *pair) for pair in zip(mosaics, outputs, strict=True)]
        return figures | detection_figures(boxes, [one.faces for one in mosaics])

    calibration = [mosaic(faces[:SEEN], others[:SEEN], i).batch for i in range(CALIBRATION)]
    return RealModel(model, calibration, judged, judge)


def cascade(runnable: Callable[..., Any], where: Mosaic, outputs: tuple[Tensor, ...]) -> list[Box]:
    """Return the boxes of faces, in pixels of the mosaic.

    Args:
        runnable: called as `Networks` is.
        where: the mosaic.
        outputs: those of `runnable` for the mosaic's batch, of which P-Net's are read.

    Source:
        Zhang et al. 2016, section II.A.
    """
    boxes = _accepted(torch.tensor(DENSE), _rows([outputs]), 0)
    for i, (name, size) in enumerate((("small", 24), ("large", 48)), 1):
        middle, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]).amax(1, keepdim=True) / 2
        boxes = torch.cat([middle - half, middle + half], 1)
        inputs = where.batch | {name: cut(where.picture, boxes.tolist(), size)}
        boxes = _accepted(boxes, _rows([runnable(**inputs)]), i)
    return boxes.tolist()


def _accepted(windows: Tensor, outputs: list[Tensor], network: int) -> Tensor:
    """Return the windows `(windows, 4)` that a network accepts, with edges moved, the most probable 64 first.

    A window that overlaps a more probable one by half is left out.
    """
    shifts, scores = outputs[2 * network][: len(windows)], outputs[2 * network + 1][: len(windows), 1]
    best = nms(windows, scores, 0.5)
    best = best[scores[best] > list(NETWORKS.values())[network]][:WINDOWS]
    return (windows + shifts * (windows[:, 2:] - windows[:, :2]).repeat(1, 2))[best]


def _rows(batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return each output of all batches as `(windows, values)`, those of P-Net row by row."""
    return [torch.cat([one.movedim(1, -1).flatten(0, -2) for one in outputs]) for outputs in zip(*batches, strict=True)]
