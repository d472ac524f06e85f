"""Networks with the batches they are calibrated on and others that they are judged by, for benchmarks of runtimes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.models import prepared

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from networks import trained


@dataclass(frozen=True)
class Network:
    """A model, the batches it is calibrated on, and one that it is judged by."""

    model: nn.Module
    calibration: list[Any]
    judged: Any


def digits(name: str, samples: int | None = None) -> Callable[[], Network]:
    """Return what makes a network that is trained on digits (`tests/networks.py`), judged by so many images or all."""

    def make() -> Network:
        found = trained(name)
        return Network(found.model, found.calibration, found.images[:samples])

    return make


def random_weights(name: str) -> Callable[[], Network]:
    """Return what makes a model of `benchmarks.models`, with random weights."""

    def make() -> Network:
        model, batches = prepared(name)
        return Network(model, batches[:-1], batches[-1])

    return make


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median ratio of figures that were taken in turn, as text."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"
