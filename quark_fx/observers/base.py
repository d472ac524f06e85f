"""Base class of observers. An observer is a fold whose starting value is its configuration.

A `TensorSpec` holds an observer without data (`Percentile(percentile=99.9)`). `observe` returns a new
observer that includes more data. `merge` joins two observers of different data, in order, so a data set
that is split over machines or interrupted by a crash gives the same result as one pass.

To add an observer, decorate a frozen dataclass with `@observer`: option fields first, then state fields
declared with `state()`. Configurations and YAML can then name it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from quark_fx.errors import QuarkError
from quark_fx.numbers.qparams import QParams, Scheme, require_range, unchecked_affine_qparams
from quark_fx.system import accelerator
from quark_fx.system.memory import is_shortage
from quark_fx.system.options import checked, parsed
from quark_fx.system.registry import Registry

ObserverType = TypeVar("ObserverType", bound="type[Observer]")


class ObserverError(ValueError):
    """Error about an observer that raised an unexpected exception or returned a wrong value."""

    remedy = "fix the observer, choose another one, or exclude the operator"
    """Next step, for the error about the value that was observed."""


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


OBSERVERS: Registry[type[Observer], Observer] = Registry(
    "observer",
    spelled=_snake_case,
    answers={"weights_only": False},
    remedy="; a class without @observer is not registered",
    own="; an observer of your own is not registered until you decorate it with @observer and import its module",
)
"""Every observer by its name in configurations."""
_register = OBSERVERS.add


def observer(cls: ObserverType) -> ObserverType:
    """Register an observer class under its name in snake case (`MovingAverage` is `moving_average`).

    Its options are checked by their annotations (`quark_fx.system.options`). A class can be defined again, for
    example by a notebook cell that runs twice.

    Raises:
        ConfigError: If another class has the name.
    """
    _register(cls)
    return checked(cls)


def state() -> Any:
    """Declare a dataclass field for the state of an observer, `None` before the first tensor."""
    return field(default=None, repr=False, compare=False, metadata={"state": True})


@dataclass(frozen=True)
class Observer(ABC):
    """Base class of observers: a fold that depends on no axis or module, and on a format only in its results."""

    weights_only: ClassVar[bool] = False
    """True if the observer needs the whole tensor at once."""

    @abstractmethod
    def observe(self, x: Tensor) -> Self:
        """Return the observer after it saw `x`, shape `(channels, values)`, floating point, any device.

        It must not synchronize the device or write into `x`; the number of values may differ between calls.
        """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the observer of the data of `self`, followed by the data of `other`."""

    @abstractmethod
    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Return the real range to represent, two tensors of shape `(channels,)`.

        Raises:
            ValueError: If nothing was observed, or a value was not finite.
        """

    def qparams(self, scheme: Scheme) -> QParams:
        """Return scale and zero point, shape `(channels,)`; raises the errors of `range`."""
        with accelerator.checked_together():
            low, high = self.range(scheme)
            require_range(low, high, f" (observer {type(self).__name__})", inverted=ObserverError)
            return unchecked_affine_qparams(low, high, scheme)

    def reading(self, seen: Observer) -> Self | None:
        """Return this observer with the data of `seen`; `None` if `seen` lacks data that this observer needs.

        Observers with the same fold can share it: by default, observers of the same class and options.
        """
        return seen if type(seen) is type(self) and seen == self else None

    def of_constant(self, x: Tensor, scheme: Scheme) -> QParams:
        """Return the quantization parameters of a whole tensor; shapes as in `observe` and `qparams`."""
        return observed(self, x).qparams(scheme)

    @property
    def name(self) -> str:
        """The name in configurations."""
        return OBSERVERS.name_of(self)


@contextmanager
def naming_observer(observer: Observer) -> Iterator[None]:
    """Turn an unexpected exception of an observer into an `ObserverError` that names the observer."""
    try:
        yield
    except (QuarkError, ValueError):
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise ObserverError(f"observer {type(observer).__name__} raised {type(error).__name__}: {error}") from error


def observed(observer: Observer, x: Tensor) -> Observer:
    """Return an observer after it saw `x`; shapes as in `Observer.observe`.

    Raises:
        ObserverError: If the observer raises an unexpected exception or does not return an observer.
    """
    with naming_observer(observer):
        after: object = observer.observe(x)
    if not isinstance(after, Observer):
        raise ObserverError(
            f"observe of {type(observer).__name__} returned {type(after).__name__} instead of an observer"
        )
    return after


def per_channel(observer: Observer, qparams: QParams, channels: int) -> QParams:
    """Return the quantization parameters that an observer chose, after a check of their shape.

    Raises:
        ObserverError: If the shape is not `(channels,)`.
    """
    if qparams.scale.shape != (channels,):
        raise ObserverError(
            f"range of {type(observer).__name__} has shape {tuple(qparams.scale.shape)} instead of {(channels,)}"
        )
    return qparams


def finite_range(low: Tensor | None, high: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(low, high)` after a check that both are finite.

    Raises:
        ValueError: If an end is `None` (nothing was observed), or holds NaN or infinity.
    """
    if low is None or high is None:
        raise ValueError("nothing was observed")
    fine = torch.isfinite(low) & torch.isfinite(high)

    def error() -> ValueError:
        places = (~fine).flatten().nonzero().flatten()[:3].tolist()
        # A tensor in groups has several scales per channel.
        return ValueError(f"observed values are not finite: those for scale {str(places)[1:-1]} of {fine.numel()}")

    accelerator.require(fine.all(), error)
    return low, high


observer_from_dict = OBSERVERS.make
"""Function that builds an observer from its name or dictionary (`observer_to_dict`); its error lists valid names."""
observer_to_dict = OBSERVERS.plain
"""Function that returns `{"name": ..., option: value, ...}` for an observer, plain data for JSON and YAML."""

parsed(Observer, ("an Observer", "its name", "its dict"), str | Mapping, OBSERVERS.make, OBSERVERS.plain)
