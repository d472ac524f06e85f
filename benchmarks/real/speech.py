"""Sentences as espeak-ng says them, in four voices, one after the other in clips of up to 28 seconds."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.io import wavfile
from scipy.signal import resample_poly

from benchmarks.real.packages import MissingPackageError

RATE = 16_000
"""Samples per second."""

_VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb-x-rp+m3")
_SECONDS, _PAUSE = 28, 0.4


@dataclass(frozen=True)
class Clip:
    """What is said, and how it sounds: samples from -1 to 1."""

    text: str
    samples: npt.NDArray[np.float32]


def clips(sentences: Iterable[str]) -> Iterator[Clip]:
    """Yield all sentences in clips that are as long as they may be.

    Raises:
        MissingPackageError: if there is no espeak-ng.
    """
    pause = np.zeros(round(_PAUSE * RATE), np.float32)
    clip: Clip | None = None
    for sentence, voice in zip(sentences, itertools.cycle(_VOICES), strict=False):
        heard = said(sentence, voice)
        if clip is None:
            clip = Clip(sentence, heard)
        elif len(clip.samples) + len(pause) + len(heard) <= _SECONDS * RATE:
            clip = Clip(f"{clip.text} {sentence}", np.concatenate([clip.samples, pause, heard]))
        else:
            yield clip
            clip = Clip(sentence, heard)
    if clip is not None:
        yield clip


def said(sentence: str, voice: str) -> npt.NDArray[np.float32]:
    """Return how a voice of espeak-ng says a sentence: samples from -1 to 1.

    Raises:
        MissingPackageError: if there is no espeak-ng.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingPackageError("espeak-ng is not installed; run: apt-get install espeak-ng")
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run([program, "-v", voice, "-s", "150", "-w", file.name, sentence], check=True)
        rate, samples = wavfile.read(file.name)
    return np.asarray(resample_poly(samples / 32768, RATE, rate), np.float32)
