"""Resemblyzer's speaker encoder, three layers of an LSTM: embeddings of synthetic voices.

`cosine` is the mean between embeddings before and after. `voices` are the clips whose voice has the nearest mean of the
embeddings of other clips, of eight voices of espeak-ng. The network reads the power of mel channels, not its
logarithm, so that 256 codes from zero to the loudest say little of most clips: `int8_dynamic` is not fit for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import sentences
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel
from benchmarks.real.speech import RATE, said

VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb-x-rp+m3", "en-us+m7", "en-gb+f5", "en-us+f1", "en-gb+m1")
CHANNELS, HIDDEN, FRAMES, LOUDNESS = 40, 256, 160, 10 ** (-30 / 20)
"""Mel channels, size of the state, 10 ms frames of a clip, and root mean square of quiet speech once it is louder."""

CALIBRATION, KNOWN, JUDGED = 48, 16, 48
"""Numbers of sentences: to calibrate on, to learn the voices from, and to recognize them in."""


class Encoder(nn.Module):
    """The network that the weights are of."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(CHANNELS, HIDDEN, 3, batch_first=True), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, mels: Tensor) -> Tensor:
        """Return embeddings `(clips, 256)` of length 1 of mel spectrograms `(clips, frames, 40)`."""
        _, (hidden, _) = self.lstm(mels)
        return F.normalize(torch.relu(self.linear(hidden[-1])), dim=1)


@cache
def load() -> RealModel:
    """Return the encoder; batches are spectrograms `(16, 160, 40)`, a clip of each sentence.

    Raises:
        MissingPackageError: if weights or espeak-ng are not installed.
    """
    model = Encoder()
    path = package("resemblyzer") / "pretrained.pt"
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model_state"], strict=False)
    model.eval()
    judged = _batches(sentences.HELD_OUT[: KNOWN + JUDGED])
    with torch.no_grad():
        expected = torch.cat([model(batch) for batch in judged])

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        found = torch.cat([runnable(batch) for batch in judged])
        voices = torch.arange(len(found)) % len(VOICES)
        means = torch.stack([found[:KNOWN][voices[:KNOWN] == voice].mean(0) for voice in range(len(VOICES))])
        nearest = (found[KNOWN:] @ F.normalize(means, dim=1).T).argmax(1)
        return {
            "cosine": float((expected * found).sum(1).mean()),
            "voices, %": float(100 * (nearest == voices[KNOWN:]).double().mean()),
        }

    return RealModel(model, _batches(sentences.CALIBRATION[:CALIBRATION]), judged, judge)


def _batches(texts: list[str]) -> list[Tensor]:
    clips = [_mels(said(text, VOICES[i % len(VOICES)])) for i, text in enumerate(texts)]
    return list(torch.stack(clips).split(16))


def _mels(samples: Any) -> Tensor:
    """Return the mel power `(160, 40)` of the middle of a sentence, which is repeated where it is too short.

    Source:
        Resemblyzer, `audio.wav_to_mel_spectrogram` and `audio.normalize_volume`, without its voice detector.
    """
    loud = samples * max(1.0, LOUDNESS / float(np.sqrt((samples**2).mean())))
    bank = mel_filter_bank(201, CHANNELS, 0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    options = {"frame_length": 400, "hop_length": RATE // 100, "power": 2.0, "pad_mode": "constant"}
    mels = torch.from_numpy(spectrogram(loud, window_function(400, "hann"), mel_filters=bank, **options)).float().T
    mels = mels.repeat(-(-FRAMES // len(mels)), 1)
    start = (len(mels) - FRAMES) // 2
    return mels[start : start + FRAMES]
