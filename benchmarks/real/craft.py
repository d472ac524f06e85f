"""CRAFT, EasyOCR's text detector, a VGG16 with a U-net: the words it finds on rendered pages.

`overlap` is the mean intersection over union, in percent, of each word's box with the best box found; `found` is the
percentage of words whose overlap is at least one half; `extra` counts boxes that overlap no word by that much, in
percent of the words. Boxes are the bounds of connected regions, as in CRAFT's code but without slants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from benchmarks.real.easyocr_weights import with_weights
from benchmarks.real.error_rates import Box, best_overlaps
from benchmarks.real.packages import submodule
from benchmarks.real.real_model import RealModel
from benchmarks.real.rendered import CALIBRATION_WORDS, JUDGED_WORDS, Page, page

HEIGHT, WIDTH, PAGES = 288, 448, 8
"""Size of a page in pixels, and pages to calibrate on and to judge by."""


@cache
def load() -> RealModel:
    """Return the detector; batches are pages normalized as for ImageNet, `(1, 3, 288, 448)`.

    Raises:
        MissingPackageError: if network, weights or fonts are not installed.
    """
    network = submodule("easyocr", "craft").CRAFT()
    pages = _pages(JUDGED_WORDS, 100)
    judged = [_input(one) for one in pages]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        overlaps, extra = list[float](), 0
        for one, batch in zip(pages, judged, strict=True):
            found = boxes(runnable(batch)[0][0])
            overlaps += best_overlaps(found, one.boxes)
            extra += sum(best < 0.5 for best in best_overlaps(one.boxes, found))
        return {
            "overlap, %": float(100 * np.mean(overlaps)),
            "found, %": float(100 * np.mean([best >= 0.5 for best in overlaps])),
            "extra, %": 100 * extra / len(overlaps),
        }

    calibration = [_input(one) for one in _pages(CALIBRATION_WORDS, 0)]
    return RealModel(with_weights(network, "craft_mlt_25k.pth"), calibration, judged, judge)


def _pages(words: list[str], seed: int) -> list[Page]:
    step = len(words) // PAGES
    return [page(words[i * step :][:40], HEIGHT, WIDTH, seed + i) for i in range(PAGES)]


def _input(one: Page) -> Tensor:
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((one.image - mean[:, None, None]) / deviation[:, None, None])[None]


def boxes(scores: Tensor, text: float = 0.7, link: float = 0.4, low: float = 0.4) -> list[Box]:
    """Return the boxes of words, in pixels of the page.

    Args:
        scores: that a pixel is the middle of a character, and that it is between two of one word, `(h, w, 2)`, at half
            the resolution of the page.
        text: a region whose best character has less is no word.
        link: pixels between characters that count as part of a word.
        low: pixels of characters that count as part of a word.

    Source:
        Baek et al. 2019, section 3.3, and the reference code's dilation.
    """
    character, between = scores[..., 0].numpy(), scores[..., 1].numpy()
    regions, count = ndimage.label((character > low) | (between > link))
    found = list[Box]()
    for index in range(1, count + 1):
        inside = regions == index
        if inside.sum() < 10 or character[inside].max() < text:
            continue
        rows, columns = np.nonzero(inside)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        rows, columns = np.nonzero(inside & (character > low))
        grown = int(2 * (inside.sum() * min(height, width) / (height * width)) ** 0.5) / 2
        edges = (columns.min() - grown, rows.min() - grown, columns.max() + 1 + grown, rows.max() + 1 + grown)
        found.append(tuple(2 * float(edge) for edge in edges))  # type: ignore[arg-type]
    return found
