"""What an observer is: a fold whose starting value is its own configuration.

An observer with no data yet is what a `TensorSpec` holds (`Percentile(percentile=99.9)`); `observe`
returns a new one that has seen more. `merge` joins two that saw different data, in order, so a data
set split over machines or interrupted by a crash gives the same result as one pass.

To add one: a frozen dataclass decorated with `@observer`, option fields first, state fields declared
with `state()`. It is then reachable by name from configurations and YAML.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.system.options import checked, nearest, parsed
from quark_fx.system.untrusted import brief

OBSERVERS: dict[str, type[Observer]] = {}
"""Every observer by its name in configurations."""

ObserverType = TypeVar("ObserverType", bound="type[Observer]")


def observer(cls: ObserverType) -> ObserverType:
    """Register an observer class under its name in snake case (`MovingAverage` is `moving_average`).

    Its options are checked by their annotations (`quark_fx.system.options`).
    """
    OBSERVERS[re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()] = cls
    return checked(cls)


def state() -> Any:
    """Declare a dataclass field that holds what was observed, `None` before the first tensor."""
    return field(default=None, repr=False, compare=False, metadata={"state": True})


@dataclass(frozen=True)
class Observer(ABC):
    """The fold every observer implements. It knows no axis, no module and, until `range`, no format."""

    weights_only: ClassVar[bool] = False
    """Whether it needs to see a tensor as a whole."""

    @abstractmethod
    def observe(self, x: Tensor) -> Self:
        """Return the observer after it saw `x`, shape `(channels, values)`, floating point, any device.

        Never synchronizes the device and never writes into `x`; `values` may differ between calls.
        """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the observer that saw what `self` saw and then what `other` saw."""

    @abstractmethod
    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Return the real range to represent, two tensors of shape `(channels,)`.

        Raises:
            ValueError: if nothing was observed, or a value was not finite.
        """

    def qparams(self, scheme: Scheme) -> QParams:
        """Return scale and zero point, shape `(channels,)`; errors as `range`."""
        low, high = self.range(scheme)
        try:
            return affine_qparams(low, high, scheme)
        except ValueError as error:
            raise ValueError(f"{error} (observer {type(self).__name__})") from None

    def reading(self, seen: Observer) -> Self | None:
        """Return this observer as if it had seen what `seen` saw; `None` if `seen` does not hold all that it needs.

        Observers that fold values alike share one fold: by default those of the same class and options.
        """
        return seen if type(seen) is type(self) and seen == self else None

    def of_constant(self, x: Tensor, scheme: Scheme) -> QParams:
        """Return the parameters of a tensor that is known as a whole, shapes as `observe` and `qparams` have them."""
        return self.observe(x).qparams(scheme)

    @property
    def name(self) -> str:
        """The name in configurations."""
        return next(name for name, cls in OBSERVERS.items() if cls is type(self))

    def options(self) -> dict[str, Any]:
        """Return the option fields (not the state) by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata.get("state")}


@dataclass(frozen=True)
class StoredObserver(Observer):
    """An observer of a stored model that nothing here has registered: its name and options, which observe nothing.

    Attributes:
        registered: the name it was registered under.
        values: its options, as plain data.
    """

    registered: str
    values: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(self.registered)

    @property
    def name(self) -> str:
        """The name in configurations."""
        return self.registered

    def options(self) -> dict[str, Any]:
        """Return the options it had."""
        return dict(self.values)

    def _unknown(self) -> ConfigError:
        return ConfigError(
            f"observer {self.registered!r} is known from a stored model only; import the module that registers it and "
            "load the model again"
        )

    def observe(self, x: Tensor) -> Self:
        """Raise `ConfigError`."""
        raise self._unknown()

    def merge(self, other: Self) -> Self:
        """Raise `ConfigError`."""
        raise self._unknown()

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Raise `ConfigError`."""
        raise self._unknown()


def stored_observer(data: Any) -> Observer:
    """Build an observer of a stored model: the registered one, or a `StoredObserver` if none has these options.

    Raises:
        ConfigError: if the data are no name or mapping with one.
    """
    name = data if isinstance(data, str) else data.get("name") if isinstance(data, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"an observer is a name, or a mapping of its name and options, not {brief(data)}")
    try:
        return observer_from_dict(data)
    except Exception:  # whatever the class of another version raises about these options
        return StoredObserver(name, {} if isinstance(data, str) else {k: v for k, v in data.items() if k != "name"})


def finite_range(low: Tensor | None, high: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(low, high)`.

    Raises:
        ValueError: if they are `None` (nothing was observed), NaN or infinite.
    """
    if low is None or high is None:
        raise ValueError("nothing was observed")
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bool(bad.any()):
        places = bad.flatten().nonzero().flatten()[:3].tolist()
        # Of a tensor in groups there are several scales in a channel.
        raise ValueError(
            f"a value that is not finite was observed, where scale {str(places)[1:-1]} of {bad.numel()} would be used"
        )
    return low, high


def observer_to_dict(value: Observer) -> dict[str, Any]:
    """Return `{"name": ..., option: value, ...}`, plain data for JSON and YAML."""
    options = value.options()
    return {"name": value.name} | {
        key: observer_to_dict(option) if isinstance(option, Observer) else option for key, option in options.items()
    }


def observer_from_dict(data: str | Mapping[str, Any]) -> Observer:
    """Build an observer from its name, or from what `observer_to_dict` returned.

    Raises:
        ConfigError: for an unknown name or option; the message lists the valid ones.
    """
    options = {"name": data} if isinstance(data, str) else dict(data)
    name = options.pop("name", None)
    if name not in OBSERVERS:
        raise ConfigError(
            f"unknown observer {brief(name)}; choose one of {', '.join(sorted(OBSERVERS))}{nearest(name, OBSERVERS)}"
        )
    cls = OBSERVERS[name]
    known = [f.name for f in fields(cls) if not f.metadata.get("state")]
    if unknown := set(options) - set(known):
        raise ConfigError(
            f"observer {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known) or 'none'}"
            f"{nearest(min(unknown), known)}"
        )
    return cls(**options)


parsed(Observer, ("an Observer", "its name", "its dict"), str | Mapping, observer_from_dict)
