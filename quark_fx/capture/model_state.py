"""Restore a model after its code runs or is traced."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import pickle
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quark_fx.capture.written_tensors import WrittenTensors, memory_of

_LARGEST_COPY = 64 * 2**20
"""Size in bytes of the largest array that is copied, in case a forward writes to it in place."""

_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
"""Folders in which packages are installed."""

_OF_PROCESS = ("builtins", "logging", "quark_fx", "torch")
"""Packages whose objects may change for reasons other than the model."""

_DRAWING = (random.Random, np.random.Generator, np.random.RandomState)

_OF_PROCESS_DRAWS: tuple[tuple[str, Any], ...] = (("random", random.random), ("numpy.random", np.random.random))
"""Functions that draw from the global random number generators, with the names of their modules."""

_OF_ITERATORS = ("builtins", "itertools", "_collections", "array")
"""Modules that define Python's iterators."""

_REACH_VARIABLES = frozenset(("globals", "modules", "setattr", "import_module"))
"""Names in the code of functions that may write any variable of their file."""

_Cached = functools._lru_cache_wrapper
"""The type of functions that cache results."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Names of the containers that every module has."""

_UNSET = object()
"""Placeholder for the value of a variable or attribute that is not set yet."""


class ModelState:
    """The attributes of a model, and the contents of the dicts, lists, and sets that can be reached from them.

    The search starts at methods of the model's classes and at functions that the model holds, such as its hooks. It
    visits the variables that they read and write, objects and classes in these variables, and functions of their file
    that cache results. From files of installed packages, it visits only objects of other files; from other files, it
    also visits the functions, classes, and variables of files that they import. Random number generators of Python and
    NumPy count as variables, too. The global generators, which other threads use, and iterators are not restored.

    Attributes:
        tensors: Tensors of the model, keyed by identity.
        writes: Context in which operators may write to the tensors; `untouched` sets it.
    """

    writes: WrittenTensors

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._dicts: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
        self._lists: list[tuple[list[Any] | deque[Any] | bytearray, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._variables: list[tuple[Any, str, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        self._files: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._contexts: list[tuple[ContextVar[Any], Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._positions: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, bytes]] = []
        self._names: dict[int, str] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        ids, pending = set[int](), list[Any]([model])
        for name, draw in _OF_PROCESS_DRAWS:
            generator = draw.__self__
            ids.add(id(generator))
            self._names[id(generator)] = name
            self._positions.append((generator, _position(generator)))
        while pending:
            item = pending.pop()
            if id(item) not in ids:
                ids.add(id(item))
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
        if isinstance(item, ContextVar):
            value = _UNSET
            with suppress(LookupError):
                value = item.get()
            self._contexts.append((item, value))
            return [value]
        if isinstance(item, staticmethod | classmethod):
            return [item.__func__]
        if isinstance(item, property):
            return [item.fget]
        if isinstance(item, type):
            if not _is_followed(item):
                return []
            self._classes[item] = _class_attributes(item)
            return [*self._classes[item].values(), *item.__bases__, vars(item).get("__call__")]
        if isinstance(item, types.ModuleType | types.BuiltinFunctionType):
            return []
        if not (isinstance(item, nn.Module) or _is_of_the_user(type(item))):
            return []
        kinds = inspect.getmro(type(item))
        slots = [(item, name) for kind in kinds if _is_of_the_user(kind) for name in _slots(kind)]
        return [getattr(item, "__dict__", None), *self._values(slots), type(item)]

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """Record the variables that a function writes, and return those it reads.

        Functions and classes from another file are not state of the function, unless neither file belongs to an
        installed package.
        """
        if not _is_followed(function):
            return []
        reads, writes = globals_of(function.__code__)
        variables = [function.__globals__.get(name) for name in reads]
        own_variables = [x for x in variables if _is_own(x, function)]
        self._names |= {id(function.__globals__.get(name)): name for name in reads}
        written = [(function.__globals__, name) for name in writes]
        files = [x for x in own_variables if isinstance(x, types.ModuleType)]
        for file in files:
            places = [(vars(file), name) for name in attributes_of(function.__code__) if name in vars(file)]
            inner = [_value(*place) for place in places]
            files += [x for x in inner if isinstance(x, types.ModuleType) and _is_own(x, function) and x not in files]
            written += places
        if not _REACH_VARIABLES.isdisjoint(attributes_of(function.__code__)):
            self._files[id(function.__globals__)] = function.__globals__, _file_variables(function.__globals__)
        cells = [(cell, "cell_contents") for cell in function.__closure__ or ()]
        defaults = function.__defaults__, function.__kwdefaults__
        return [vars(function), *defaults, *own_variables, *self._values([*written, *cells])]

    def _values(self, places: list[tuple[Any, str]]) -> list[Any]:
        """Record the values of variables of a file and of attributes, and return them."""
        variables = [(owner, name, _value(owner, name)) for owner, name in places]
        self._variables += variables
        return [value for _, _, value in variables]

    def restore(self) -> None:
        """Restore the contents of every attribute and container; unchanged ones are not written."""
        for _, _, put_back in self._changes():
            put_back()

    def changed(self) -> list[str]:
        """Return the names of the attributes and variables that changed."""
        attributes = [item for _, items in self._dicts for item in items if item[0] not in _OF_MODULES]
        holders = self._names | {id(value): str(key) for key, value in attributes}
        named = (
            [holders[id(container)]] if id(container) in holders else names for container, names, _ in self._changes()
        )
        return list(dict.fromkeys(itertools.chain.from_iterable(named)))

    def memory(self) -> dict[int, int]:
        """Return the identity of the memory of each tensor, which an assignment to `data` changes."""
        return {key: memory_of(x) for key, x in self.tensors.items() if x.layout == torch.strided}

    def has_advanced(self) -> bool:
        """Tell whether an iterator or a global random number generator has advanced, which cannot be undone."""
        return any(_position(iterator) != position for iterator, position in self._positions)

    @property
    def holds_generators(self) -> bool:
        """True if the model's code can reach a generator, whose variables cannot be restored."""
        return any(isinstance(iterator, types.GeneratorType) for iterator, _ in self._positions)

    def _changes(self) -> Iterator[tuple[Any, list[str], Callable[[], object]]]:
        """Yield each container whose contents changed, the changed names, and a function that restores the contents."""
        for mapping, items in self._dicts:
            now = list(dict.items(mapping))
            if not _same(now, items):
                yield mapping, _names_apart(dict(items), dict(now)), functools.partial(_refill, mapping, items)
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
        for variable, value in self._contexts:
            if (now := variable.get(_UNSET)) is not value and now is not _UNSET:
                # A variable that is set cannot become unset; callers of `isolated` and traced code have own contexts.
                restore = functools.partial(variable.set, value)
                yield variable, [variable.name], restore if value is not _UNSET else lambda: None
        for namespace, variables in self._files.values():
            for name in _names_apart(variables, _file_variables(namespace)):
                yield namespace, [name], functools.partial(_set, namespace, name, variables.get(name, _UNSET))
        for cached, misses in self._caches:
            if cached.cache_info().misses != misses:
                yield cached, [getattr(cached.__wrapped__, "__name__", "a cached function")], cached.cache_clear
        for kind, attributes in self._classes.items():
            for name in _names_apart(attributes, _class_attributes(kind)):
                yield kind, [name], functools.partial(_set, kind, name, attributes.get(name, _UNSET))


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


def _is_iterator(value: Any) -> bool:
    """Tell whether a value is a generator or another built-in iterator, whose position is not an attribute."""
    return isinstance(value, Iterator) and type(value).__module__ in _OF_ITERATORS


def _variables_of(iterator: Any) -> list[Any]:
    """Return the variables of a generator; none for other iterators."""
    frame = iterator.gi_frame if isinstance(iterator, types.GeneratorType) else None
    return [] if frame is None else list(frame.f_locals.values())


def _position(source: Any) -> Any:
    """Return a value that changes when an iterator or a random number generator advances."""
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
    """Return a number or string itself, the length of a list, or the `id` of any other value, to detect changes.

    The `id` of a list would not do: `__reduce__` of a dict iterator creates a new list at each call.
    """
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


def _is_followed(defined: type | types.FunctionType) -> bool:
    """Tell whether the attributes of a class, or the variables of a function, may be state of a model."""
    return _is_of_the_user(defined) and str(defined.__module__).partition(".")[0] not in sys.stdlib_module_names


def _is_own(value: Any, function: types.FunctionType) -> bool:
    """Tell whether a function's variable may hold state: an object, or a definition from a file that is searched."""
    if not isinstance(value, types.FunctionType | types.ModuleType | type | _Cached):
        return True
    file = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return bool(file == function.__module__) or not (_is_installed(file) or _is_installed(function.__module__))


@functools.cache
def _is_installed(module: str) -> bool:
    """Tell whether a module belongs to Python or to an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    package = module.partition(".")[0]
    return package in _OF_PROCESS or package in sys.stdlib_module_names or file.startswith(_INSTALLED)


def _slots(kind: type) -> list[str]:
    """Return the names of a class's slots. Classes written in C have similar members, which may be read-only."""
    if "__slots__" not in vars(kind):
        return []
    return [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]


def _value(owner: Any, name: str) -> Any:
    try:
        return owner[name] if isinstance(owner, dict) else object.__getattribute__(owner, name)
    except (AttributeError, KeyError, ValueError):  # ValueError for a variable of an outer function
        return _UNSET


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(name) if value is _UNSET else owner.update({name: value})
    else:
        kind: Any = type if isinstance(owner, type) else object  # frozen dataclasses override these methods
        kind.__delattr__(owner, name) if value is _UNSET else kind.__setattr__(owner, name, value)


@functools.cache
def globals_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the variables of a file that a function reads, and of the variables that it writes."""
    steps = list(dis.get_instructions(code))
    nested = [globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    reads, writes = (
        frozenset(str(step.argval) for step in steps if step.opname.startswith(kind)).union(*inner)
        for kind, inner in (("LOAD_GLOBAL", [r for r, _ in nested]), ("STORE_GLOBAL", [w for _, w in nested]))
    )
    return reads, writes


@functools.cache
def attributes_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function reads or writes."""
    return frozenset(code.co_names).union(*(attributes_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _file_variables(namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if not name.startswith("__")}


def _class_attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc_"))}


@contextmanager
def untouched(model: nn.Module) -> Iterator[ModelState]:
    """Restore a model when the code inside ends, normally or with an error.

    Within `writes` of the yielded state, operators may write to the model's tensors.
    """
    state = ModelState(model)
    state.writes = WrittenTensors(state.tensors.values())
    try:
        yield state
    finally:
        state.restore()
        state.writes.restore()


def made_since(model: nn.Module, before: ModelState) -> list[Tensor]:
    """Return the tensors that a forward has stored in the model since `before`."""
    return [tensor for key, tensor in ModelState(model).tensors.items() if key not in before.tensors]


__all__ = ["ModelState", "globals_of", "made_since", "untouched"]
