"""What runs on one session share: observers, ranges and rounded weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quark_fx.config.quant_config import TensorSpec
from quark_fx.numbers.qparams import QParams
from quark_fx.observers import Observer, Percentile
from quark_fx.plan.weights import RoundedWeight

_SHARED_HISTOGRAM = Percentile()
"""Most other observers can be read off its histogram, which costs far less than another pass over the data."""


@dataclass(frozen=True)
class Value:
    """What an observer sees.

    Attributes:
        source: name of the node.
        tokens: of a value that is seen channel by channel, the dimension that counts tokens.
        dtype: of its elements.
    """

    source: str
    tokens: int | None
    dtype: torch.dtype

    def reading(self, observer: Observer, seen: Observer) -> Observer | None:
        """Return an observer as if it had seen what another one saw of the value, `None` if that does not tell."""
        # The extremes that a histogram has are float32.
        return Observer.reading(observer, seen) if self.dtype is torch.float64 else observer.reading(seen)

    def fold(self, observer: Observer) -> Observer:
        """Return what should see the value so that `observer`, and others of later runs, can be read off it."""
        # Histograms of all channels would take more than they tell.
        return (
            observer
            if self.tokens is not None or self.reading(observer, _SHARED_HISTOGRAM) is None
            else _SHARED_HISTOGRAM
        )


@dataclass
class Known:
    """What is known of one float graph on the same batches. Names are those of its nodes, which copies keep.

    Tensors in it are shared by all runs: they are read, and copied into results.

    Attributes:
        seen: observers that saw all batches, by what they saw.
        ranges: parameters of activations that were read off them.
        weights: as they were rounded last, by operator and constant.
    """

    seen: dict[Value, list[Observer]] = field(default_factory=dict)
    ranges: dict[tuple[Value, TensorSpec], QParams] = field(default_factory=dict)
    weights: dict[tuple[str, str], RoundedWeight] = field(default_factory=dict)

    def reading(self, value: Value, observer: Observer) -> Observer | None:
        """Return an observer as if it had seen the batches, `None` if that takes another pass over them."""
        found = (value.reading(observer, seen) for seen in self.seen.get(value, ()))
        return next((reading for reading in found if reading is not None), None)


__all__ = ["Known", "Value"]
