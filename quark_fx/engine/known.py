"""Results that the runs of a session share: observers, ranges, and rounded weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quark_fx.config.quant_config import TensorSpec
from quark_fx.numbers.qparams import QParams
from quark_fx.observers import Observer, Percentile
from quark_fx.plan.weights import RoundedWeight

_SHARED_HISTOGRAM = Percentile()
"""Observer with a histogram from which most other observers can be derived without another pass over the data."""


@dataclass(frozen=True)
class Value:
    """Value that an observer sees.

    Attributes:
        source: Name of the node.
        separate: Dimensions along which ranges are observed separately; empty for one range.
        dtype: Dtype of its elements.
    """

    source: str
    separate: tuple[int, ...]
    dtype: torch.dtype

    def reading(self, observer: Observer, other: Observer) -> Observer | None:
        """Return `observer` with the data that `other` collected from this value; `None` if that is not possible."""
        # A histogram stores extremes in float32.
        return Observer.reading(observer, other) if self.dtype is torch.float64 else observer.reading(other)

    def fold(self, observer: Observer) -> Observer:
        """Return the observer to run on the value, from which `observer` and later observers can be derived."""
        # One histogram per channel would cost more than it saves.
        return observer if self.separate or self.reading(observer, _SHARED_HISTOGRAM) is None else _SHARED_HISTOGRAM


@dataclass
class Known:
    """Results for one float graph and one set of batches. Names are node names, which copies of the graph share.

    All runs share these tensors: do not change them, and copy them into results.

    Attributes:
        seen: Observers that have seen all batches, by the value that they observed.
        ranges: Quantization parameters of activations, computed by the observers in `seen`, by value and spec.
        weights: Most recently rounded weights, by operator and constant.
    """

    seen: dict[Value, list[Observer]] = field(default_factory=dict)
    ranges: dict[tuple[Value, TensorSpec], QParams] = field(default_factory=dict)
    weights: dict[tuple[str, str], RoundedWeight] = field(default_factory=dict)

    def reading(self, value: Value, observer: Observer) -> Observer | None:
        """Return an observer with the data of all batches, or `None` if that takes another pass over them."""
        readings = (value.reading(observer, other) for other in self.seen.get(value, ()))
        return next((reading for reading in readings if reading is not None), None)


__all__ = ["Known", "Value"]
