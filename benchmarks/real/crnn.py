"""EasyOCR's recognizer, a VGG and two bidirectional LSTMs: the characters it reads on images of rendered words.

`characters` is 100 % less the edits between what is read and what is written; `words` are those read exactly. Reading
takes the largest of 97 classes, which small errors do not change: `KL` is the mean divergence of the classes'
probabilities from the float model's, in nats per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real.easyocr_weights import with_weights
from benchmarks.real.error_rates import error_rate
from benchmarks.real.packages import submodule
from benchmarks.real.real_model import RealModel
from benchmarks.real.rendered import CALIBRATION_WORDS, JUDGED_WORDS, spread, word_image

HEIGHT, WIDTH, BATCH, CALIBRATION, JUDGED = 64, 320, 16, 64, 320
"""Size of an image in pixels, words of a batch, and numbers of words."""

CHARACTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Those of the classes after the blank."""


class Recognizer(nn.Module):
    """EasyOCR's network without the argument that it does not read."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """Return logits `(words, steps, 97)` of images `(words, 1, 64, width)` from -1 to 1."""
        return self.network(image, None)  # type: ignore[no-any-return]


@cache
def load() -> RealModel:
    """Return the recognizer; batches are images `(16, 1, 64, 320)`.

    Raises:
        MissingPackageError: if network, weights or fonts are not installed.
    """
    network = submodule("easyocr", "model.vgg_model").Model(1, 256, 256, len(CHARACTERS) + 1)
    model = Recognizer(with_weights(network, "english_g2.pth")).eval()
    words = spread(JUDGED_WORDS, JUDGED)
    judged = batches(words, 1000)
    with torch.no_grad():
        expected = torch.cat([model(batch) for batch in judged]).log_softmax(-1)

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        logits = torch.cat([runnable(batch) for batch in judged])
        found = read(logits)
        exact = sum(one == other for one, other in zip(found, words, strict=True))
        divergence = F.kl_div(logits.log_softmax(-1), expected, log_target=True, reduction="none").sum(-1).mean()
        return {
            "characters, %": 100 - error_rate(found, words),
            "words, %": 100 * exact / len(words),
            "KL": float(divergence),
        }

    return RealModel(model, batches(spread(CALIBRATION_WORDS, CALIBRATION), 0), judged, judge)


def batches(words: list[str], seed: int) -> list[Tensor]:
    """Return images of words, `(16, 1, 64, 320)` from -1 to 1, each drawn from a seed of its own."""
    images = [word_image(word, HEIGHT, WIDTH, seed + i) for i, word in enumerate(words)]
    return list((2 * torch.stack(images)[:, None] - 1).split(BATCH))


def read(logits: Tensor, characters: Sequence[str] = CHARACTERS) -> list[str]:
    """Return the text of the best class of every step, `(words, steps, classes)`: repetitions, then blanks, left out.

    Args:
        logits: or anything that grows with them.
        characters: those of the classes after the blank.

    Source:
        Graves et al. 2006, best path decoding of connectionist temporal classification.
    """
    best = [torch.unique_consecutive(steps) for steps in logits.argmax(-1)]
    return ["".join(characters[i - 1] for i in steps[steps > 0]) for steps in best]
