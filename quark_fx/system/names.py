"""Errors for unknown names, and placeholders for entries of a stored model that this process does not register."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

from quark_fx.errors import ConfigError
from quark_fx.system.untrusted import brief


def unknown(
    what: str,
    name: object,
    names: Iterable[object],
    *,
    also: str = "",
    error: Callable[[str], Exception] = ConfigError,
) -> Exception:
    """Return an error about an unknown name, with all valid names and the closest one.

    >>> print(unknown("preset", "int8_sttic", ["int8_static", "fp16"]))
    unknown preset 'int8_sttic'; choose one of int8_static, fp16; did you mean 'int8_static'?
    """
    choices = list(dict.fromkeys(map(str, names)))
    return error(f"unknown {what} {brief(name)}; choose one of {', '.join(choices)}{also}{nearest(name, choices)}")


def absent(owner: str, what: str, names: Iterable[str], valid: Iterable[str]) -> ConfigError:
    """Return an error about arguments, fields, or options that `owner` does not have, with the valid names.

    >>> print(absent("pass 'Rotate'", "option", ["sead"], ["seed", "only"]))
    pass 'Rotate' has no option sead; it has seed, only; did you mean 'seed'?
    """
    missing, existing = sorted(names), list(valid)
    listed = ", ".join(existing) or "none"
    return ConfigError(f"{owner} has no {what} {', '.join(missing)}; it has {listed}{nearest(missing[0], existing)}")


def nearest(name: object, names: Iterable[str]) -> str:
    """Return the question "did you mean ...?" with the most similar of `names`; empty if none is similar.

    >>> nearest("iteration", ["iterations", "seed"])
    "; did you mean 'iterations'?"
    """
    simple = {re.sub(r"[^a-z0-9]", "", str(valid).lower()): str(valid) for valid in names}
    near = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", str(name).lower()), simple, n=1)
    return f"; did you mean {simple[near[0]]!r}?" if near else ""


@dataclass(frozen=True)
class Stored:
    """The name and options of a registry entry that a stored model contains, but that is not registered.

    It replaces a pass, an observer, or a target, so that the model can be loaded and run. Using the entry itself raises
    `ConfigError`.

    Attributes:
        what: Kind of entry, such as "observer".
        name: Name under which the entry was registered.
        options: Options as plain data; `None` for entries that are values, which files store as a name.
        answers: Values of the attributes that can be read without the registered entry; keys are names of attributes.
        remedy: Additional advice at the end of the error message.
    """

    what: str
    name: str
    options: Mapping[str, Any] | None
    answers: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    remedy: str = field(default="", repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.what, self.name))

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> Any:
        """The entry as plain data, in the form in which models store it."""
        return self.name if self.options is None else {"name": self.name, **self.options}

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `ConfigError`, because the entry is not registered."""
        raise self._error()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python reads special attributes when it copies, pickles, or inspects a value
            raise AttributeError(attribute)
        if attribute in self.answers:
            return self.answers[attribute]
        raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            f"{self.what} {self.name!r} is known only by its name, from a stored model; import the module that "
            f"registers it and load the model again{self.remedy}"
        )


_READS_STORED = ContextVar("_READS_STORED", default=False)


@contextmanager
def keeping_stored(keep: bool = True) -> Iterator[None]:
    """Make registries return `Stored` values for unregistered passes, observers, and targets instead of raising.

    Args:
        keep: Whether to do so.
    """
    token = _READS_STORED.set(keep)
    try:
        yield
    finally:
        _READS_STORED.reset(token)


def keeps_stored() -> bool:
    """Tell whether registries return `Stored` values for unregistered entries; see `keeping_stored`."""
    return _READS_STORED.get()


__all__ = ["Stored", "absent", "keeping_stored", "keeps_stored", "nearest", "unknown"]
