"""PP-OCRv6's small recognizer, 57 convolutions and two blocks of attention: the characters it reads on rendered words.

The images are made like those of `crnn`, three quarters as large, and the figures mean the same: `characters` is 100 %
less the edits between what is read and what is written, `words` are those read exactly, and `KL` is the mean divergence
of the probabilities of 18710 classes from the float model's, in nats per step. The weights come from the ONNX file of
`rapidocr` and are loaded into its torch network. One of the 709 characters is 0.14 %, so `KL` says more.

`xint8` has one power-of-two scale per weight. Most of its loss comes from rounding the weights, about half of that from
the depthwise convolutions: after their branches are merged, the largest channel of one is 56 times its median channel.
`CrossLayerEqualization` and `GPTQ` win back all but a point of the characters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import onnx
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real.crnn import CALIBRATION, batches, read
from benchmarks.real.error_rates import error_rate
from benchmarks.real.onnx_weights import with_weights
from benchmarks.real.packages import package, submodule
from benchmarks.real.real_model import RealModel
from benchmarks.real.rendered import CALIBRATION_WORDS, JUDGED_WORDS, spread

HEIGHT, WIDTH, JUDGED = 48, 240, 160
"""Size of an image in pixels, and number of words."""

_NAME, _CODE = "PP-OCRv6_rec_small", "inference_engine.pytorch.networks"


@cache
def load() -> RealModel:
    """Return the recognizer; batches are images `(16, 3, 48, 240)`.

    Raises:
        MissingPackageError: if network, weights or fonts are not installed.
    """
    words = spread(JUDGED_WORDS, JUDGED)
    judged = [_input(batch) for batch in batches(words, 1000)]
    file = onnx.load(package("rapidocr") / "models" / f"{_NAME}.onnx")
    model = with_weights(_network(), file, judged[0])
    with torch.no_grad():
        expected = [_logs(model(batch)) for batch in judged]
    (text,) = (entry.value for entry in file.metadata_props if entry.key == "character")
    characters = [*text.split("\n"), " "]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        found, divergence = list[str](), list[float]()
        for batch, logs in zip(judged, expected, strict=True):
            scores = runnable(batch)
            found += read(scores, characters)
            divergence.append(float(F.kl_div(_logs(scores), logs, log_target=True, reduction="none").sum(-1).mean()))
        exact = sum(one == other for one, other in zip(found, words, strict=True))
        return {
            "characters, %": 100 - error_rate(found, words),
            "words, %": 100 * exact / len(words),
            "KL": sum(divergence) / len(divergence),
        }

    calibration = [_input(batch) for batch in batches(spread(CALIBRATION_WORDS, CALIBRATION), 0)]
    return RealModel(model, calibration, judged, judge)


def _network() -> nn.Module:
    """Return the network of `rapidocr` with the branches of each convolution merged, as in the file."""
    backbone = submodule("rapidocr", f"{_CODE}.backbones.rec_lcnetv4").PPLCNetV4(model_size="small")
    backbone.rep()
    for layer in backbone.conv1.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (2, 2):
            layer.padding = "same"  # as it was: `rep` takes it for (2 - 1) // 2 pixels
    settings = yaml.safe_load((package("rapidocr") / _CODE.replace(".", "/") / "arch_config.yaml").read_text("utf-8"))
    head = {name: value for name, value in settings[_NAME]["Head"].items() if name != "name"}
    heads = submodule("rapidocr", f"{_CODE}.heads.rec_multi_head")
    return nn.Sequential(backbone, heads.MultiHead(backbone.out_channels, **head))


def _input(images: Tensor) -> Tensor:
    return F.interpolate(images, (HEIGHT, WIDTH), mode="bilinear", antialias=True).repeat(1, 3, 1, 1)


def _logs(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=1e-9).log()  # the softmax of the network has zeros, and 0 * log(0) would be NaN
