"""Names that users and files write: the error for an unknown one, and entries that a stored model names."""

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
    """Return the error for a name that a table does not have; it lists all names and the closest one.

    >>> print(unknown("preset", "int8_sttic", ["int8_static", "fp16"]))
    unknown preset 'int8_sttic'; choose one of int8_static, fp16; did you mean 'int8_static'?
    """
    choices = list(dict.fromkeys(map(str, names)))
    return error(f"unknown {what} {brief(name)}; choose one of {', '.join(choices)}{also}{nearest(name, choices)}")


def absent(owner: str, what: str, names: Iterable[str], valid: Iterable[str]) -> ConfigError:
    """Return the error for arguments, fields, or options that `owner` does not have; it lists the valid ones.

    >>> print(absent("pass 'Rotate'", "option", ["sead"], ["seed", "only"]))
    pass 'Rotate' has no option sead; it has seed, only; did you mean 'seed'?
    """
    missing, existing = sorted(names), list(valid)
    listed = ", ".join(existing) or "none"
    return ConfigError(f"{owner} has no {what} {', '.join(missing)}; it has {listed}{nearest(missing[0], existing)}")


def nearest(name: object, names: Iterable[str]) -> str:
    """Return a question for the name that was meant, or nothing.

    >>> nearest("iteration", ["iterations", "seed"])
    "; did you mean 'iterations'?"
    """
    simple = {re.sub(r"[^a-z0-9]", "", str(valid).lower()): str(valid) for valid in names}
    near = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", str(name).lower()), simple, n=1)
    return f"; did you mean {simple[near[0]]!r}?" if near else ""


@dataclass(frozen=True)
class Stored:
    """An entry of a stored model that nothing in this process registers: its name and options, kept as data.

    It stands in for a pass, an observer, or a target, so that the model loads and runs; using it raises `ConfigError`.

    Attributes:
        what: Kind of entry, such as "observer".
        name: Name it was registered under.
        options: Options as plain data; `None` for entries that are values, which files write as a name.
        answers: Attributes that can be read without the registered entry.
        remedy: End of the error message.
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
        """The data of the stored model."""
        return self.name if self.options is None else {"name": self.name, **self.options}

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `ConfigError`."""
        raise self._error()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python asks for these when it copies, pickles, or inspects a value
            raise AttributeError(attribute)
        if attribute in self.answers:
            return self.answers[attribute]
        raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            f"{self.what} {self.name!r} is known from a stored model only; import the module that registers it and "
            f"load the model again{self.remedy}"
        )


_READS_STORED = ContextVar("_READS_STORED", default=False)


@contextmanager
def keeping_stored(keep: bool = True) -> Iterator[None]:
    """Keep unregistered passes, observers, and targets as `Stored` values instead of raising."""
    token = _READS_STORED.set(keep)
    try:
        yield
    finally:
        _READS_STORED.reset(token)


def keeps_stored() -> bool:
    """Tell whether unregistered entries are kept."""
    return _READS_STORED.get()


__all__ = ["Stored", "absent", "keeping_stored", "keeps_stored", "nearest", "unknown"]
