"""Observers, which compute ranges from tensors; one file per family."""

from quark_fx.observers.adjusted import Adjusted
from quark_fx.observers.base import OBSERVERS, Observer, observer, observer_from_dict, observer_to_dict, state
from quark_fx.observers.distribution import Distribution
from quark_fx.observers.entropy import Entropy
from quark_fx.observers.histogram import Bins, Histogram
from quark_fx.observers.hqq import Hqq
from quark_fx.observers.minmax import MinMax, MovingAverage, Placeholder
from quark_fx.observers.mse import HistogramL2, Mse
from quark_fx.observers.percentile import Percentile
from quark_fx.observers.power_of_two import NonOverflow, PowerOfTwoMinMse
from quark_fx.observers.reading import HistogramObserver

__all__ = [
    "OBSERVERS",
    "Adjusted",
    "Bins",
    "Distribution",
    "Entropy",
    "Histogram",
    "HistogramL2",
    "HistogramObserver",
    "Hqq",
    "MinMax",
    "MovingAverage",
    "Mse",
    "NonOverflow",
    "Observer",
    "Percentile",
    "Placeholder",
    "PowerOfTwoMinMse",
    "observer",
    "observer_from_dict",
    "observer_to_dict",
    "state",
]
