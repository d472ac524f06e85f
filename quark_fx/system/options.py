"""Checks of the types and ranges of options when a dataclass is constructed or a function is called.

The checks follow the annotations of fields. `Annotated[float, Interval("(0, 1]")]` limits a number; `parsed` registers
functions that convert text or plain data to a class. `graph_pass` and `observer` add the checks to passes and
observers, including those in other packages; `checked` adds them to other dataclasses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from quark_fx.errors import ConfigError
from quark_fx.system.names import Stored, absent, nearest, unknown
from quark_fx.system.untrusted import brief

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Interval:
    """Interval of numbers, written in mathematical notation; an infinite number is never inside.

    >>> 1 in Interval("(0, 1]"), 0 in Interval("(0, 1]"), str(Interval("[1, inf)"))
    (True, False, 'of at least 1')
    """

    text: str

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        low, high = self.text[1:-1].split(",")
        return float(low), float(high)

    def __contains__(self, number: float) -> bool:
        low, high = self.bounds
        above = number > low or (number == low and self.text[0] == "[")
        below = number < high or (number == high and self.text[-1] == "]")
        return above and below

    def __str__(self) -> str:
        low, high = self.bounds
        if self.text[0] + self.text[-1] == "[]":
            return f"from {low:g} to {high:g}"
        words = [] if low == -math.inf else [f"{'of at least' if self.text[0] == '[' else 'above'} {low:g}"]
        words += [] if high == math.inf else [f"{'at most' if self.text[-1] == ']' else 'below'} {high:g}"]
        return " and ".join(words)


PositiveInt = Annotated[int, Interval("[1, inf)")]
NonNegativeInt = Annotated[int, Interval("[0, inf)")]
NonNegativeFloat = Annotated[float, Interval("[0, inf)")]


class _Kind(NamedTuple):
    """Kind of values that a field accepts.

    Attributes:
        read: Function from an argument to the field's value, or to `_NO` if the field does not accept the argument.
        words: Descriptions of the accepted values, for messages.
    """

    read: Callable[[Any], Any]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))


_NO = object()
_PARSED: dict[type, _Kind] = {}
_WRITTEN: dict[type, Callable[[Any], Any]] = {}


def parsed(
    cls: type, words: tuple[str, ...], plain: Any, parse: Callable[[Any], Any], write: Callable[[Any], Any]
) -> None:
    """Register how fields of type `cls` are read from plain data and written as plain data.

    Args:
        cls: Type of the fields.
        words: Descriptions of the accepted values, for messages.
        plain: Type, or types, of the plain data.
        parse: Function from plain data to a value; raises `ConfigError` for invalid data.
        write: Function from a value to plain data, the inverse of `parse`.
    """

    def read(value: Any) -> Any:
        if isinstance(value, cls | Stored):
            return value
        return parse(value) if isinstance(value, plain) else _NO

    _PARSED[cls] = _Kind(read, words)
    _WRITTEN[cls] = write


def plain(value: Any) -> Any:
    """Return a value as data for JSON and YAML.

    Containers and dataclasses become lists and mappings, enum members become text, and classes that `parsed` registers
    are written by their functions. Any other value is returned unchanged.
    """
    if isinstance(value, Stored):
        return value.plain
    if write := next((_WRITTEN[cls] for cls in type(value).__mro__ if cls in _WRITTEN), None):
        return write(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return sorted(map(plain, value))
    return plain_fields(value) if is_dataclass(value) and not isinstance(value, type) else value


def plain_fields(value: Any, default: Any = None) -> dict[str, Any]:
    """Return the fields of a dataclass instance, except its state, as plain data; empty if it is not an instance.

    Args:
        value: Instance of a dataclass, or any other value.
        default: Instance to compare with; fields that are equal in both are left out.
    """
    if not is_dataclass(value):
        return {}
    options = [f.name for f in fields(value) if f.init and not f.metadata.get("state")]
    return {
        name: plain(getattr(value, name))
        for name in options
        if default is None or getattr(value, name) != getattr(default, name)
    }


def checked(cls: C) -> C:
    """Make a dataclass check its arguments whenever it is constructed, except fields that `state()` declares.

    Text becomes the member of an enum, a list becomes a tuple, and a numpy number becomes a Python number.

    Raises:
        ConfigError: When an instance is constructed with an unknown field (the message has the nearest name), or with a
            value that the annotation does not allow (the message describes the allowed values).
    """
    if not is_dataclass(cls):
        return cls  # pyright: ignore[reportReturnType]
    init = cls.__init__
    arguments = [f for f in fields(cls) if f.init]
    positional = [f.name for f in arguments if not f.kw_only]
    required = [f.name for f in arguments if f.default is MISSING and f.default_factory is MISSING]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positional):
            raise ConfigError(
                f"{cls.__name__} takes keyword arguments: write {cls.__name__}({arguments[len(positional)].name}=...)"
                if len(arguments) > len(positional)
                else f"{cls.__name__} has {len(positional)} field(s), and {len(args)} values were given"
            )
        values = dict(zip(positional, args, strict=False)) | known_fields(cls, kwargs)
        if missing := [name for name in required if name not in values]:
            raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}: write {cls.__name__}({missing[0]}=...)")
        init(self, **_checked_fields(cls, values))

    cls.__init__ = checked_init  # type: ignore[method-assign]
    return cls  # pyright: ignore[reportReturnType]


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function check its arguments whenever it is called, like `checked` does for fields.

    Arguments are not checked if only a type checker can resolve their annotations.

    Raises:
        ConfigError: When the function is called with an unknown argument (the message has the nearest name), or with a
            value that the annotation does not allow.
    """
    signature = inspect.signature(function)

    @checked_names({})
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's error names the argument
        for name, kind in _argument_kinds(function).items():
            if name in bound.arguments:
                _value(function, name, kind, bound.arguments[name])
        return function(*args, **kwargs)

    return call


def checked_names(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a function check the names and the number of its arguments.

    Args:
        elsewhere: Advice about arguments that belong to another call; keys are names of arguments.
    """

    def checking(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return function  # a function with **keywords checks the names itself
        owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        placed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        most = sys.maxsize if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(placed)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            require_names(owner, kwargs, names, elsewhere)
            if len(args) > most:
                raise _too_many(owner, [n for n in placed if n != "self"], by_name, len(args) - most, elsewhere)
            return function(*args, **kwargs)

        return call

    return checking


def _too_many(
    owner: str, placed: Sequence[str], by_name: Sequence[str], extra: int, elsewhere: Mapping[str, str]
) -> ConfigError:
    """Return the error for too many positional arguments."""
    return ConfigError(
        f"{owner} takes {len(placed)} positional argument(s), {', '.join(placed)}, but {len(placed) + extra} were given"
        + (f"; pass the others by name: {', '.join(by_name)}" if by_name else "")
        + elsewhere.get("device", "")
    )


def require_names(owner: str, given: Iterable[str], names: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raise `ConfigError` if an argument is not in `names`.

    Args:
        owner: Name of the function or class, for the message.
        given: Names of the arguments that were passed.
        names: Names of the arguments that the function or class has.
        elsewhere: Advice about arguments that belong to another call; keys are names of arguments.
    """
    if missing := sorted(set(given) - set(names)):
        if advice := [elsewhere[name] for name in missing if name in elsewhere]:
            listed, places = ", ".join(missing), "".join(advice)
            raise ConfigError(f"{owner} has no argument {listed}; it has {', '.join(names)}{places}")
        raise absent(owner, "argument", missing, names)


@functools.cache
def _argument_kinds(function: Callable[..., Any]) -> dict[str, _Kind]:
    inner = inspect.unwrap(function)
    return dict(_annotated(inner, set(inspect.signature(inner).parameters), inner.__globals__))


def _value(owner: Any, name: str, kind: _Kind, given: Any) -> Any:
    value = kind.read(given)
    if value is not _NO:
        return value
    advice = ""
    if isinstance(given, type) and is_dataclass(given):
        advice = f"; write {given.__name__}()"
    elif given is not None and kind.read((given,)) is not _NO:
        advice = f"; write {name}=({brief(given)},)"
    elif isinstance(given, str):
        advice = nearest(given, (word.strip("'") for word in kind.words if word[0] == "'"))
    text = brief(given)
    shown = text if "\n" not in text else _with_article(type(given).__name__)
    raise ConfigError(f"{name} of {owner.__name__} must be {kind}, not {shown}{advice}")


@functools.cache
def _kinds(cls: type) -> dict[str, _Kind]:
    options = {f.name for f in fields(cls) if f.init and not f.metadata.get("state")}
    annotated = (_annotated(base, options, vars(sys.modules[base.__module__])) for base in reversed(cls.__mro__))
    return {name: kind for kinds in annotated for name, kind in kinds}


def _annotated(owner: Any, names: Set[str], namespace: dict[str, Any]) -> Iterator[tuple[str, _Kind]]:
    """Yield the name and the kind of each annotation of `owner` whose name is in `names`.

    Annotations that only a type checker can resolve are left out.
    """
    for name, annotation in inspect.get_annotations(owner).items():
        if name not in names:
            continue
        with contextlib.suppress(NameError):
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            yield name, _kind(get_type_hints(alone, namespace, include_extras=True)[name])


def _kind(hint: Any) -> _Kind:
    """Return the kind of value that a type annotation allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(_kind(arguments[0]), [limit for limit in arguments[1:] if isinstance(limit, Interval)])
    if origin in (Union, types.UnionType):
        return _any_of([_kind(argument) for argument in arguments])
    if origin in (tuple, frozenset) and (origin is frozenset or arguments[1:] == (...,)):
        return _items_of(origin, _kind(arguments[0]))
    if origin is tuple:
        return _fixed_tuple([_kind(argument) for argument in arguments])
    if origin is Literal:
        return _Kind(lambda value: value if value in arguments else _NO, tuple(map(repr, arguments)))
    if hint is Path or origin is os.PathLike:
        return _instance(os.PathLike, "a path")
    if origin is get_origin(Iterable[Any]):  # an object with only `__getitem__`, such as a data set, is iterable, too
        return _Kind(lambda value: value if _is_iterable(value) else _NO, ("an iterable",))
    if hint is Any:
        return _instance(object, "anything")
    if origin is not None or not isinstance(hint, type):
        if origin is get_origin(Callable[..., Any]):
            return _Kind(lambda value: value if callable(value) else _NO, ("a function",))
        return (
            _instance(origin, _with_article(origin.__name__))
            if isinstance(origin, type)
            else _instance(object, "anything")
        )
    if hint in _PARSED:
        return _PARSED[hint]
    if hint in _PLAIN:
        return _PLAIN[hint]
    if issubclass(hint, StrEnum):
        return _Kind(functools.partial(_member, hint), tuple(f"'{member}'" for member in hint))
    if is_dataclass(hint):
        return _Kind(functools.partial(_built, hint), (_with_article(hint.__name__),))
    return _instance(hint, _with_article(hint.__name__))


def _built(cls: type, value: Any) -> Any:
    """Return `value` if it is an instance of `cls`, an instance built from a mapping of fields, or else `_NO`."""
    if isinstance(value, cls):
        return value
    return cls(**_checked_fields(cls, known_fields(cls, value))) if isinstance(value, Mapping) else _NO


def _checked_fields(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: _value(cls, name, kind, given[name]) for name, kind in _kinds(cls).items() if name in given}


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _instance(cls: type, words: str) -> _Kind:
    return _Kind(lambda value: value if isinstance(value, cls) else _NO, (words,))


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _limited(kind: _Kind, limits: list[Interval]) -> _Kind:
    def read(value: Any) -> Any:
        number = kind.read(value)
        return number if number is not _NO and all(number in limit for limit in limits) else _NO

    return _Kind(read, (" ".join((str(kind), *map(str, limits))),))


def _any_of(kinds: list[_Kind]) -> _Kind:
    def read(value: Any) -> Any:
        return next((result for kind in kinds if (result := kind.read(value)) is not _NO), _NO)

    return _Kind(read, tuple(dict.fromkeys(word for kind in kinds for word in kind.words)))


def _items_of(container: type, item: _Kind) -> _Kind:
    """Return the kind of a tuple or frozenset of any length."""
    plain = (list, tuple) if container is tuple else (list, tuple, Set)

    def read(value: Any) -> Any:
        items = container(map(item.read, value)) if isinstance(value, plain) else (_NO,)
        return _NO if _NO in items else items

    return _Kind(read, (f"a {container.__name__} whose items are each {item}",))


def _fixed_tuple(items: list[_Kind]) -> _Kind:
    def read(value: Any) -> Any:
        parts = value if isinstance(value, list | tuple) and len(value) == len(items) else ()
        result = tuple(item.read(part) for item, part in zip(items, parts, strict=False))
        return result if result and _NO not in result else _NO

    return _Kind(read, (f"a tuple of {' and '.join(map(str, items))}",))


def _member(enum: type[StrEnum], value: Any) -> Any:
    return enum_member(enum, value) if isinstance(value, str) else _NO


def _whole(value: Any) -> Any:
    return _NO if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def _real(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return _NO
    try:
        number = float(value)
    except OverflowError:  # an integer that is too large for a float
        return _NO
    whole = _whole(value)
    return _NO if math.isnan(number) else number if whole is _NO else whole


_PLAIN = {
    bool: _Kind(lambda value: value if isinstance(value, bool) else _NO, ("True or False",)),
    int: _Kind(_whole, ("an integer",)),
    float: _Kind(_real, ("a number",)),
    str: _instance(str, "a string"),
    type(None): _Kind(lambda value: _NO if value is not None else None, ("None",)),
}


def known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` as a dictionary whose keys are all fields of the dataclass `cls`.

    Raises:
        ConfigError: If `data` is not a mapping, or a key is not a field; the message has the nearest name.
    """
    names = [f.name for f in fields(cls) if f.init]
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"a {cls.__name__} must be a mapping with the keys {', '.join(names)}, not {brief(data)}")
    options = [f.name for f in fields(cls) if not f.metadata.get("state")]
    if missing := set(data) - set(names):
        for name in sorted(missing):
            if (value := fixed_value(cls, name)) is not None:
                raise ConfigError(f"{name} of {cls.__name__} is fixed at {value}; omit this field")
        if hint := next(filter(None, map(getattr(cls, "earlier_fields", {}).get, sorted(missing))), ""):
            raise ConfigError(f"{cls.__name__} has no field {', '.join(sorted(missing))}; {hint}")
        raise absent(cls.__name__, "field", missing, options)
    return dict(data)


def fixed_value(cls: type, name: str) -> float | None:
    """Return the value of a numeric option that is a constant (`ClassVar`) of a class; `None` if there is none."""
    annotations = (inspect.get_annotations(base).get(name) for base in cls.__mro__)
    value = getattr(cls, name, None)
    return value if isinstance(value, int | float) and any("ClassVar" in str(a) for a in annotations) else None


def enum_member(enum: type[StrEnum], value: str) -> Any:
    """Return the member of `enum` with this value.

    Raises:
        ConfigError: If `enum` does not have the value; the message lists all values and the nearest one.
    """
    try:
        return enum(value)
    except ValueError:
        raise unknown(enum.__name__, value, enum) from None


__all__ = [
    *("Interval", "NonNegativeFloat", "NonNegativeInt", "PositiveInt"),
    *(
        "checked",
        "checked_call",
        "checked_names",
        "enum_member",
        "known_fields",
        "parsed",
        "plain",
        "plain_fields",
        "require_names",
    ),
]
