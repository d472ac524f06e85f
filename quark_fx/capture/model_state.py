"""Restore a model after its code runs or is traced."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LARGEST_COPY = 64 * 2**20
"""Size in bytes of the largest buffer that is copied, in case a forward writes to it in place."""

_LEAVES = (type, types.ModuleType, types.BuiltinFunctionType)

_OF_PROCESS = ("builtins", "logging", "quark_fx", "torch")
"""Packages whose objects may change for reasons other than the model."""

_CONTAINERS = (dict, list, deque, set, Tensor)

_DRAWING = (random.Random, np.random.Generator, np.random.RandomState)

_OF_PROCESS_DRAWS: tuple[tuple[str, Any], ...] = (("random", random.random), ("numpy.random", np.random.random))
"""Functions that draw from the generators of the process, with the names of their modules."""

_Cached = functools._lru_cache_wrapper
"""The type of functions that cache results."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Names of the containers that every module has."""

_UNSET = object()
"""The value of a variable or attribute that has none yet."""


class ModelState:
    """The attributes of a model, and the contents of the dicts, lists, and sets that can be reached from them.

    Methods of the model's classes, and functions that the model holds, such as its hooks, are followed to the variables
    that they read and write, and to functions of their file that cache results. The generators of
    random numbers of Python and NumPy count as variables, too. Those of the process, which other threads use, and
    iterators are not restored.

    Attributes:
        tensors: Tensors of the model, keyed by identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._dicts: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
        self._lists: list[tuple[list[Any] | deque[Any] | bytearray, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._variables: list[tuple[Any, str, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._positions: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, bytes]] = []
        self._names: dict[int, str] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        seen, pending = set[int](), list[Any]([model])
        for name, draw in _OF_PROCESS_DRAWS:
            generator = draw.__self__
            seen.add(id(generator))
            self._names[id(generator)] = name
            self._positions.append((generator, _position(generator)))
        while pending:
            item = pending.pop()
            if id(item) not in seen:
                seen.add(id(item))
                pending += self._parts(item)

    def _parts(self, item: Any) -> list[Any]:
        """Record the contents of `item`, and return them."""
        if isinstance(item, Tensor):
            self.tensors[id(item)] = item
            return []
        if isinstance(item, dict):
            # Subclasses may hide items or override methods with side effects; the base class returns the contents.
            self._dicts.append((item, list(dict.items(item))))
            return list(dict.values(item))
        if isinstance(item, np.ndarray) and item.nbytes <= _LARGEST_COPY:
            self._arrays.append((item, item.copy()))
            return []
        if isinstance(item, list | deque | bytearray):
            self._lists.append((item, list(item)))
            return list(item)
        if isinstance(item, set):
            self._sets.append((item, set(item)))
            return list(item)
        if isinstance(item, tuple | frozenset):
            return list(item)
        if isinstance(item, types.MethodType):
            return [item.__self__, item.__func__]
        if isinstance(item, functools.partial):
            return [item.func, item.args, item.keywords]
        if isinstance(item, types.FunctionType):
            return self._parts_of_function(item)
        if _is_iterator(item):
            self._positions.append((item, _position(item)))
            return [part for part in _variables_of(item) if not _is_iterator(part)]
        if isinstance(item, _DRAWING):
            self._generators.append((item, _position(item)))
            return []
        if isinstance(item, _Cached):
            self._caches.append((item, item.cache_info().misses))
            return [item.__wrapped__]
        if isinstance(item, _LEAVES) or not (isinstance(item, nn.Module) or _is_of_the_user(type(item))):
            return []
        kinds = inspect.getmro(type(item))
        if isinstance(item, nn.Module):
            for kind in filter(_is_of_the_user, kinds):
                self._classes.setdefault(kind, _class_attributes(kind))
        of_classes = [list(self._classes.get(kind, {}).values()) for kind in kinds]
        slots = [(item, name) for kind in kinds if _is_of_the_user(kind) for name in _slots(kind)]
        return [
            getattr(item, "__dict__", None),
            *self._values(slots),
            *(
                x
                for values in of_classes
                for x in values
                if isinstance(x, types.FunctionType | _Cached) or _is_state(x)
            ),
        ]

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """Record the variables that a function writes, and return those it reads.

        Of the variables of a file, only containers and what the file itself defines are the function's own state.
        """
        if not _is_of_the_user(function):
            return []
        reads, writes = globals_of(function.__code__)
        variables = [function.__globals__.get(name) for name in reads]
        own = [x for x in variables if _is_state(x) or _is_of_the_file(x, function)]
        self._names |= {id(function.__globals__.get(name)): name for name in reads}
        written = [(function.__globals__, name) for name in writes]
        cells = [(cell, "cell_contents") for cell in function.__closure__ or ()]
        defaults = function.__defaults__, function.__kwdefaults__
        return [vars(function), *defaults, *own, *self._values([*written, *cells])]

    def _values(self, places: list[tuple[Any, str]]) -> list[Any]:
        """Record what variables of a file and attributes hold, and return it."""
        found = [(owner, name, _value(owner, name)) for owner, name in places]
        self._variables += found
        return [value for _, _, value in found]

    def restore(self) -> None:
        """Restore the contents of every attribute and container; unchanged ones are not written."""
        for _, _, put_back in self._changes():
            put_back()

    def changed(self) -> list[str]:
        """Return the names of the attributes and variables that hold something else now."""
        attributes = [item for _, items in self._dicts for item in items if item[0] not in _OF_MODULES]
        holders = self._names | {id(value): str(key) for key, value in attributes}
        named = ([holders[id(own)]] if id(own) in holders else names for own, names, _ in self._changes())
        return list(dict.fromkeys(itertools.chain.from_iterable(named)))

    def has_advanced(self) -> bool:
        """Tell whether an iterator or a generator of the process has made values, which cannot be undone."""
        return any(_position(iterator) != position for iterator, position in self._positions)

    def _changes(self) -> Iterator[tuple[Any, list[str], Callable[[], object]]]:
        """Yield each container with other contents now, the names in it, and a function that restores them."""
        for own, items in self._dicts:
            now = list(dict.items(own))
            if not _same(now, items):
                yield own, _names_apart(dict(items), dict(now)), functools.partial(_refill, own, items)
        for sequence, parts in self._lists:
            if len(sequence) != len(parts) or any(a is not b for a, b in zip(sequence, parts, strict=True)):
                yield sequence, ["a list"], functools.partial(_refill, sequence, parts)
        for array, copy in self._arrays:
            if not np.array_equal(array, copy, equal_nan=array.dtype.kind in "fc"):
                yield array, ["an array"], functools.partial(array.__setitem__, ..., copy)
        for iterator, position in self._positions:
            if _position(iterator) != position:
                yield iterator, ["an iterator"], lambda: None
        for generator, drawn in self._generators:
            if _position(generator) != drawn:
                restored = functools.partial(_set_random_state, generator, pickle.loads(drawn))
                yield generator, ["a random number generator"], restored
        for group, members in self._sets:
            if group != members:
                yield group, ["a set"], functools.partial(_refill, group, members)
        for owner, name, value in self._variables:
            if _value(owner, name) is not value:
                yield owner, [name], functools.partial(_set, owner, name, value)
        for cached, misses in self._caches:
            if cached.cache_info().misses != misses:
                yield cached, [cached.__wrapped__.__name__], cached.cache_clear
        for kind, attributes in self._classes.items():
            for name in _names_apart(attributes, _class_attributes(kind)):
                yield kind, [name], functools.partial(_set, kind, name, attributes.get(name, _UNSET))

    def copies(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return each tensor that a forward may write to, with a copy and its version."""
        return [
            (tensor, tensor.detach().clone(), tensor._version)
            for tensor in self.tensors.values()
            if not isinstance(tensor, nn.Parameter)
            and not tensor.is_inference()
            and tensor.layout == torch.strided
            and tensor.nbytes <= _LARGEST_COPY
        ]


def _same(now: list[tuple[Any, Any]], items: list[tuple[Any, Any]]) -> bool:
    return len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True))


def _names_apart(before: dict[Any, Any], now: dict[Any, Any]) -> list[str]:
    return [str(key) for key in before | now if before.get(key, _UNSET) is not now.get(key, _UNSET)]


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in contents:
            container[key] = value
    else:
        container.update(contents) if isinstance(container, set) else container.extend(contents)


def _is_state(value: Any) -> bool:
    return isinstance(value, (*_CONTAINERS, *_DRAWING)) or _is_iterator(value)


def _is_iterator(value: Any) -> bool:
    """Tell whether a value is a generator or another iterator of Python, whose position no attribute shows."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _variables_of(iterator: Any) -> list[Any]:
    """Return the variables of a generator; none for other iterators."""
    frame = iterator.gi_frame if isinstance(iterator, types.GeneratorType) else None
    return [] if frame is None else list(frame.f_locals.values())


def _position(source: Any) -> Any:
    """Return a value that differs once an iterator or a generator of random numbers has made another value."""
    if isinstance(source, _DRAWING):
        return pickle.dumps(_random_state(source))
    if isinstance(source, types.GeneratorType):
        parts = [source.gi_frame and source.gi_frame.f_lasti, *_variables_of(source)]
    else:
        try:
            _, arguments, *state = source.__reduce__()
        except (RuntimeError, TypeError):  # a dict changed its size; itertools since Python 3.14
            return repr(source)
        parts = [*arguments, *(part for one in state for part in (one if isinstance(one, tuple) else (one,)))]
    return [_position(part) if _is_iterator(part) else _identity(part) for part in parts]


def _identity(part: Any) -> Any:
    """Return a number, the length of a list, which iterators of dicts make anew, or the identity of another value."""
    return part if isinstance(part, int | float | str) else len(part) if isinstance(part, list) else id(part)


def _random_state(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else _bits(generator).state


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def _is_of_the_user(defined: type | types.FunctionType) -> bool:
    return str(defined.__module__).partition(".")[0] not in _OF_PROCESS


def _is_of_the_file(value: Any, function: types.FunctionType) -> bool:
    defined = value if isinstance(value, types.FunctionType | _Cached) else type(value)
    return defined.__module__ == function.__module__


def _slots(kind: type) -> list[str]:
    """Return the names of a class's slots. Classes written in C have similar members, which may be read-only."""
    if "__slots__" not in vars(kind):
        return []
    return [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]


def _value(owner: Any, name: str) -> Any:
    try:
        return owner[name] if isinstance(owner, dict) else object.__getattribute__(owner, name)
    except (AttributeError, KeyError, ValueError):  # the last for a variable of an outer function
        return _UNSET


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(name) if value is _UNSET else owner.update({name: value})
    else:
        kind: Any = type if isinstance(owner, type) else object  # not the class's own: also of frozen dataclasses
        kind.__delattr__(owner, name) if value is _UNSET else kind.__setattr__(owner, name, value)


@functools.cache
def globals_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the variables of a file that a function reads, and of those that it writes."""
    steps = list(dis.get_instructions(code))
    found = [globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    reads, writes = (
        frozenset(str(step.argval) for step in steps if step.opname.startswith(kind)).union(*inner)
        for kind, inner in (("LOAD_GLOBAL", [r for r, _ in found]), ("STORE_GLOBAL", [w for _, w in found]))
    )
    return reads, writes


def _class_attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc_"))}


@contextmanager
def untouched(model: nn.Module, *, runs: bool = False) -> Iterator[ModelState]:
    """Restore a model when the code inside ends, normally or with an error.

    Args:
        model: The user's model.
        runs: Whether the model runs on real tensors inside, so that it may write to its buffers in place.
    """
    state = ModelState(model)
    copies = state.copies() if runs else []
    try:
        yield state
    finally:
        state.restore()
        with torch.no_grad():
            for tensor, copy, version in copies:
                if tensor._version != version:
                    tensor.copy_(copy)


def made_since(model: nn.Module, before: ModelState) -> list[Tensor]:
    """Return the tensors that a forward has stored in the model since `before`."""
    return [tensor for key, tensor in ModelState(model).tensors.items() if key not in before.tensors]


__all__ = ["ModelState", "globals_of", "made_since", "untouched"]
