"""`Registry`, a dictionary of passes, observers, targets, presets, or other entries that configurations and files name.

A registry protects its names. A module can redefine its own entry, for example in a notebook cell that runs twice, but
it cannot replace an entry of another module, such as a built-in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from quark_fx.errors import ConfigError
from quark_fx.system.names import Stored, absent, keeps_stored, unknown
from quark_fx.system.options import fixed_value, plain_fields
from quark_fx.system.untrusted import brief

E = TypeVar("E")
V = TypeVar("V")


class Registry(dict[str, E], Generic[E, V]):
    """Dictionary of entries of one kind; keys are their names.

    `E` is the type of an entry, such as an observer class; `V` is the type of the values that configurations hold, such
    as observers. The types are equal if entries are values (targets, presets, formats).

    Args:
        what: Kind of entry for messages, such as "observer".
        by_name: Whether entries are values, which files store as a name without options.
        spelled: Function from the Python name of an entry to its registered name.
        error: Error class for names that are unknown or already used.
        answers: Values of the attributes of a `Stored` value of this kind; keys are names of attributes.
        remedy: Advice in errors about `Stored` values, in addition to importing the module that registers them.
        own: Advice for a user's own entry in errors about unknown names.
        names_of: Things that have the names already, such as "operators"; empty if modules choose the names. A module
            may then replace its own entry by any other definition.
    """

    every: ClassVar[list[Registry[Any, Any]]] = []
    """All registries, so that tests can restore them."""

    def __init__(
        self,
        what: str,
        *,
        by_name: bool = False,
        spelled: Callable[[str], str] = str,
        error: Callable[[str], Exception] = ConfigError,
        answers: Mapping[str, Any] | None = None,
        remedy: str = "",
        own: str = "",
        names_of: str = "",
    ) -> None:
        super().__init__()
        self.what, self.by_name, self.spelled, self.error = what, by_name, spelled, error
        self.answers, self.remedy, self.own, self.names_of = answers or {}, remedy, own, names_of
        self._owners: dict[str, tuple[str, str]] = {}
        self._names: dict[int, str] = {}
        self._definitions: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.every.append(self)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return dict, (dict(self),)

    def add(self, entry: E, name: str = "", *, depth: int = 1) -> E:
        """Register an entry.

        Args:
            entry: Class, function, or value to register.
            name: Name of the entry; default: the name of the class or function.
            depth: Number of stack frames between this call and the module that owns a value.

        Returns:
            The entry.

        Raises:
            ConfigError: If another module or another definition has registered the name. The class is the registry's
                `error`, if it has one.
        """
        qualname = getattr(entry, "__qualname__", None)
        if qualname is not None:
            owner = (entry.__module__, qualname)
            name = name or self.spelled(entry.__name__)  # type: ignore[attr-defined]
        else:
            owner = (sys._getframe(depth).f_globals.get("__name__", ""), "")
        compared = 1 if self.names_of else 2  # whether only the modules have to be equal
        if name in self and _definition(self._owners.get(name, owner))[:compared] != _definition(owner)[:compared]:
            raise self.error(
                f"{_place(owner)} registers {self.what} {name!r}, but {self.owner(name)} already "
                + (
                    f"does; the names are those of {self.names_of}, so only its module can register another"
                    if self.names_of
                    else "uses that name, by which configurations and files refer to it; choose another name"
                )
            )
        self[name], self._owners[name] = entry, owner
        if hasattr(entry, "__qualname__"):
            self._names[id(entry)] = name
            self._definitions[id(entry)] = entry
        return entry

    def find(self, name: Any) -> E:
        """Return the entry called `name`.

        Raises:
            ConfigError: If `name` is not registered; the message lists all names and the closest one. The class is the
                registry's `error`, if it has one.
        """
        if not isinstance(name, str) or name not in self:
            raise self.unknown(name)
        return self[name]

    def attribute(self, name: str) -> E:
        """Return the entry with a Python name; serves as `__getattr__` of a module or class with entries as attributes.

        Raises:
            AttributeError: If the name is not registered.
        """
        if (key := self.spelled(name)) in self:
            return self[key]
        raise AttributeError(str(self.unknown(name)))

    def unknown(self, name: Any, also: str = "") -> Exception:
        """Return the error for a name that is not registered; `also` is appended to the list of names."""
        return unknown(self.what, name, self, also=also + self.own, error=self.error)

    def make(self, data: Any) -> V:
        """Return the value that plain data describe.

        While a stored model is read (`keeping_stored`), an entry that is not registered, or that does not have these
        options, becomes a `Stored` value.

        Args:
            data: Name, or mapping with the key `name` and options.

        Raises:
            ConfigError: If the name or an option is unknown, or the data are not a name or a mapping.
        """
        options = {"name": data} if isinstance(data, str) else dict(data) if isinstance(data, Mapping) else {}
        name = options.pop("name", None)
        if not isinstance(name, str):
            article = "an" if self.what[0] in "aeiou" else "a"
            raise ConfigError(
                f"{article} {self.what} must be a name, or a mapping of a name and options, not {brief(data)}"
            )
        try:
            return self._made(name, options)
        except Exception:  # a class of another version may raise any error for its options
            if not keeps_stored():
                raise
            return cast(V, Stored(self.what, name, None if self.by_name else options, self.answers, self.remedy))

    def _made(self, name: str, options: Mapping[str, Any]) -> V:
        entry: Any = self.find(name)
        builds = isinstance(entry, type)
        valid = [f.name for f in fields(entry) if not f.metadata.get("state")] if builds and is_dataclass(entry) else []
        missing = set(map(str, options)) - set(valid)
        constants = {option: fixed_value(entry, option) for option in missing} if builds else {}
        # Drop options of files from earlier versions that are constants now, if the values agree.
        options = {option: value for option, value in options.items() if constants.get(option) != value}
        if missing := {option for option in missing if constants.get(option) is None}:
            raise absent(f"{self.what} {name!r}", "option", missing, valid)
        return cast(V, entry(**options) if builds else entry)

    def name_of(self, value: Any) -> str:
        """Return the name under which the class or function of a value was registered.

        Raises:
            ConfigError: If the class or function is not registered, and another entry has its name.
        """
        if isinstance(value, Stored):
            return value.name
        definition = value if hasattr(value, "__qualname__") else type(value)
        if self._definitions.get(id(definition)) is definition:
            return self._names[id(definition)]
        name = self.spelled(definition.__name__)
        if name in self and self[name] is not definition:
            place = _place((definition.__module__, definition.__qualname__))
            raise self.error(
                f"{place} is not registered, and {self.owner(name)} already uses its name, {name!r}, in configurations "
                "and files; register yours under another name"
            )
        return name

    def plain(self, value: Any) -> Any:
        """Return a mapping with `name` and the options of a value: plain data for JSON and YAML that `make` reads."""
        return value.plain if isinstance(value, Stored) else {"name": self.name_of(value), **plain_fields(value)}

    def owner(self, name: str) -> str:
        """Return the module and definition that registered a name."""
        return _place(self._owners.get(name, (f"{self.what} {name!r}", "")))


def _definition(owner: tuple[str, str]) -> tuple[str, str]:
    """Return the file and the qualified name of a definition.

    The file replaces the name of the module, so that a file that runs as `__main__` and is also imported counts once.
    """
    module, qualname = owner
    file = getattr(sys.modules.get(module), "__file__", None)
    return (os.path.realpath(file) if file else module, qualname)


def _place(owner: tuple[str, str]) -> str:
    return ".".join(filter(None, owner))


__all__ = ["Registry"]
