"""CRAFT, EasyOCR's text detector, a VGG16 with a U-net: the words it finds on rendered pages.

`overlap` is the mean intersection over union, in percent, of each word's box with the best box found; `found` is the
percentage of words whose overlap is at least one half; `extra` counts boxes that overlap no word by that much, in
percent of the words. `unchanged` is the mean overlap of the float model's boxes with the best box found. Boxes are the
bounds of connected regions, as in CRAFT's code but without slants.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import ndimage
from torch import Tensor

from benchmarks.real.easyocr_weights import with_weights
from benchmarks.real.error_rates import Box
from benchmarks.real.packages import submodule
from benchmarks.real.real_model import RealModel
from benchmarks.real.text_detection import text_detector


@cache
def load() -> RealModel:
    """Return the detector.

    Raises:
        MissingPackageError: if network, weights or fonts are not installed.
    """
    model = with_weights(submodule("easyocr", "craft").CRAFT(), "craft_mlt_25k.pth")
    return text_detector(model, lambda outputs: boxes(outputs[0][0]))


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
