"""PP-OCRv6's small text detector, 83 convolutions, 17 of them depthwise: the words it finds on rendered pages.

The figures mean the same as those of `craft`. The network takes words of a line for one region of text; here they are
30 to 60 pixels further apart than a space, as in a form, so that each is a region of its own. The 199 words are read at
twice the size of `craft`'s. The weights come from the ONNX file of `rapidocr` and are loaded into its torch network.
`rapidocr` scales pixels to -1 to 1 and lets regions grow by a ratio of 1.6. Here pixels are normalized as for ImageNet
and the ratio is 0.7, which fit the float model's boxes better to the words of calibration pages.

Boxes that move can move towards the words, so `unchanged` says more than `overlap`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
import torch
from scipy import ndimage
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks.real.error_rates import Box
from benchmarks.real.onnx_weights import with_weights
from benchmarks.real.packages import package, submodule
from benchmarks.real.real_model import RealModel
from benchmarks.real.text_detection import text_detector

SCALE = 2
"""Pixels of the network's input along one pixel of a page."""

_CODE = "inference_engine.pytorch.networks"


@cache
def load() -> RealModel:
    """Return the detector.

    Raises:
        MissingPackageError: if network, weights or fonts are not installed.
    """
    file = onnx.load(package("rapidocr") / "models" / "PP-OCRv6_det_small.onnx")
    model = with_weights(_network(), file, torch.zeros(1, 3, 64, 64))
    return text_detector(model, lambda outputs: boxes(outputs[0, 0]), SCALE, gap=(30, 60))


def _network() -> nn.Module:
    """Return the network of `rapidocr` with branches and batch norms merged into convolutions, as in the file."""
    backbone = submodule("rapidocr", f"{_CODE}.backbones.rec_lcnetv4").PPLCNetV4(det=True, model_size="small")
    neck = submodule("rapidocr", f"{_CODE}.necks.db_fpn").RepLKFPN(backbone.out_channels, 96)
    head = submodule("rapidocr", f"{_CODE}.heads.det_db_head").Head(96).eval()
    backbone.rep()
    neck.rep()
    backbone.stem.stem2a.conv.padding = backbone.stem.stem2b.conv.padding = "same"  # see ppocr.py
    head.conv1, head.conv_bn1 = fuse_conv_bn_eval(head.conv1, head.conv_bn1), nn.Identity()
    head.conv2, head.conv_bn2 = fuse_conv_bn_eval(head.conv2, head.conv_bn2, transpose=True), nn.Identity()
    return nn.Sequential(backbone, neck, head)


def boxes(scores: Tensor, pixel: float = 0.3, mean: float = 0.5, growth: float = 0.7) -> list[Box]:
    """Return the boxes of words, in pixels of the page.

    Args:
        scores: that a pixel is in the middle of a word, `(576, 896)`.
        pixel: pixels with more make regions.
        mean: a region whose box has a lower mean is no word.
        growth: a region grows to all sides by this share of the ratio of its box's area to its perimeter.

    Source:
        Liao et al. 2020, section 3.5, and the settings of `rapidocr`.
    """
    regions: Any = ndimage.label(scores.numpy() > pixel)
    found = list[Box]()
    for rows, columns in ndimage.find_objects(regions[0]):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3 or float(scores[rows, columns].mean()) < mean:
            continue
        grown = growth * height * width / (2 * (height + width))
        edges = (columns.start - grown, rows.start - grown, columns.stop + grown, rows.stop + grown)
        found.append(tuple(edge / SCALE for edge in edges))
    return found
