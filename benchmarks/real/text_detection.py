"""Detectors of text, judged by the words that they find on rendered pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real.error_rates import Box, detection_figures
from benchmarks.real.real_model import RealModel
from benchmarks.real.rendered import CALIBRATION_WORDS, JUDGED_WORDS, Page, page

HEIGHT, WIDTH, PAGES = 288, 448, 8
"""Size of a page in pixels, and pages to calibrate on and to judge by."""


def text_detector(
    model: nn.Module, boxes: Callable[[Any], list[Box]], scale: int = 1, gap: tuple[int, int] = (4, 12)
) -> RealModel:
    """Return a detector; batches are pages normalized as for ImageNet, `(1, 3, scale * 288, scale * 448)`.

    Args:
        model: in eval mode.
        boxes: makes boxes of words, in pixels of the page, of the outputs of the model.
        scale: pixels of an input along one pixel of a page.
        gap: the fewest and the most pixels between words, added to a space.

    Raises:
        MissingPackageError: if fonts are not installed.
    """
    pages = _pages(JUDGED_WORDS, 100, gap)
    judged = [_input(one, scale) for one in pages]
    with torch.no_grad():
        expected = [boxes(model(batch)) for batch in judged]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        found = [boxes(runnable(batch)) for batch in judged]
        unchanged = detection_figures(found, expected)["overlap, %"]
        return detection_figures(found, [one.boxes for one in pages]) | {"unchanged, %": unchanged}

    return RealModel(model, [_input(one, scale) for one in _pages(CALIBRATION_WORDS, 0, gap)], judged, judge)


def _pages(words: list[str], seed: int, gap: tuple[int, int]) -> list[Page]:
    step = len(words) // PAGES
    return [page(words[i * step :][:40], HEIGHT, WIDTH, seed + i, gap) for i in range(PAGES)]


def _input(one: Page, scale: int) -> Tensor:
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    image = F.interpolate(one.image[None, None], scale_factor=scale, mode="bilinear")
    return (image - mean[:, None, None]) / deviation[:, None, None]
