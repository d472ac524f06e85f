"""Memory, streams, random generators, and reads of accelerators; only this module calls torch for the first three."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_STREAMING = ("cuda", "xpu")
"""Device types whose copies can overlap with computation."""

_SLAB = 64 << 20
"""Size of a slab of pinned memory, in bytes; allocating a kilobyte would take about as long."""

_ALIGNED = 512
"""Alignment of a tensor in a slab, in bytes."""


_LEAVING = 2
"""Largest number of unfinished copies to the host; beyond this number, the device waits."""


Check = tuple[Tensor, Callable[[], Exception]]
"""A condition, bool of shape (), and a function that returns the error to raise if it is false."""

_LATER: ContextVar[list[Check] | None] = ContextVar("later", default=None)


def require(condition: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if a condition is false; within `checked_later`, defer the check and the wait for the device.

    Args:
        condition: Tensor of shape (), bool, on any device.
        error: Function that returns the error.
    """
    later = _LATER.get()
    if later is not None:
        later.append((condition, error))
    elif not bool(condition):
        raise error()


@contextmanager
def checked_later() -> Iterator[list[Check]]:
    """Collect the checks of `require` in a list for a later call of `read`.

    Raises:
        Exception: Error of the first check whose condition is false, if the block raises an error, because the failed
            check is probably the cause.
    """
    checks: list[Check] = []
    token = _LATER.set(checks)
    try:
        yield checks
    except Exception:
        read((), checks)
        raise
    finally:
        _LATER.reset(token)


def read(values: Sequence[Tensor], checks: Sequence[Check] = ()) -> list[float]:
    """Return the values of tensors as Python numbers, and evaluate checks, with one wait per device.

    Args:
        values: Tensors of shape (), float32, on any devices.
        checks: Results of `checked_later`.

    Raises:
        Exception: Error of the first check whose condition is false.
    """
    tensors = [*values, *(condition.to(torch.float32) for condition, _ in checks)]
    places: dict[torch.device, list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault(x.device, []).append(i)
    numbers = [math.nan] * len(tensors)
    for here in places.values():
        for i, number in zip(here, torch.stack([tensors[i] for i in here]).tolist(), strict=True):
            numbers[i] = number
    for fine, (_, error) in zip(numbers[len(values) :], checks, strict=True):
        if not fine:
            raise error()
    return numbers[: len(values)]


@contextmanager
def checked_together() -> Iterator[None]:
    """Defer the checks of `require` to the end of the block, with one wait per device.

    Within `checked_later`, the checks are deferred further, to the call of `read`.

    Raises:
        Exception: Error of the first check whose condition is false, even if the block raised another error.
    """
    if _LATER.get() is not None:
        yield
        return
    with checked_later() as checks:
        yield
    read((), checks)


def moved(tensors: Sequence[Tensor], device: torch.device, *, copy: bool) -> list[Tensor]:
    """Move tensors to a device; contiguous tensors from the same device are copied together.

    Args:
        tensors: Tensors on any devices.
        device: Device of the results.
        copy: Whether to copy, so that results share memory neither with `tensors` nor with each other.
    """
    results = [x.to(device, copy=copy) if x.device == device else None for x in tensors]
    groups: dict[torch.device, list[int]] = {}
    for i, x in enumerate(tensors):
        if results[i] is None and x.is_contiguous():
            groups.setdefault(x.device, []).append(i)
    for group in groups.values():
        group.sort(key=lambda i: -tensors[i].element_size())  # so that each begins at a multiple of its element size
        whole = torch.cat([tensors[i].detach().flatten().view(torch.uint8) for i in group]).to(device)
        for i, part in zip(group, whole.split([tensors[i].nbytes for i in group]), strict=True):
            view = part.view(tensors[i].dtype).view(tensors[i].shape)
            results[i] = view.clone() if copy else view
    return [x.to(device) if y is None else y for x, y in zip(tensors, results, strict=True)]


_HALVINGS: ContextVar[int] = ContextVar("halvings", default=0)


@contextmanager
def smaller_pieces(halvings: int) -> Iterator[None]:
    """Halve the results of `values_at_once` in the block, the given number of times."""
    token = _HALVINGS.set(halvings)
    try:
        yield
    finally:
        _HALVINGS.reset(token)


def values_at_once(like: Tensor, on_cpu: int, doublings: int) -> int:
    """Return the number of values to compute at once.

    Args:
        like: Tensor on the device of the computation.
        on_cpu: Number for a CPU, chosen for its caches.
        doublings: Number of times to double `on_cpu` for other devices.
    """
    return on_cpu if like.is_cpu else on_cpu << max(0, doublings - _HALVINGS.get())


def new_generator(device: torch.device) -> torch.Generator:
    """Return a random generator for tensors on `device`."""
    return torch.Generator(device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; `None` for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def cuda_version() -> tuple[int, int]:
    """Return the version of CUDA that torch was built for; `(0, 0)` without CUDA."""
    major, minor, *_ = [*(torch.version.cuda or "0.0").split("."), "0"]
    return int(major), int(minor)


def has_streams(device: torch.device) -> bool:
    """Tell whether copies to and from `device` can run while the device computes."""
    return device.type in _STREAMING


def new_stream(device: torch.device) -> Any:
    """Return a stream that runs independently of the other streams of `device`."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which operators on `device` run."""
    return torch.accelerator.current_stream(device)


def pinned_bytes(count: int) -> Tensor | None:
    """Return `count` bytes of uninitialized pinned host memory, uint8, which a device can access asynchronously.

    The result is `None` if the system cannot provide more pinned memory.
    """
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes for new tensors on `device`, including memory that torch caches; 0 if unknown."""
    if not has_streams(device):
        return 0
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device))


def return_unused(device: torch.device) -> None:
    """Return the memory that torch caches to the device, so that large contiguous tensors fit."""
    if has_streams(device):
        torch.accelerator.empty_cache()


@dataclass
class PinnedSlabs:
    """Large slabs of pinned host memory for tensors; a slab is reused after all of its tensors are dropped."""

    _slabs: dict[int, Tensor] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)
    _tensors: Counter[int] = field(default_factory=Counter)
    _is_full: bool = False

    def empty_like(self, x: Tensor) -> Tensor | None:
        """Return an uninitialized tensor in a slab with the dtype, shape, and strides of `x`, which must be dense.

        The result is `None` if the system cannot provide more pinned memory.
        """
        size = -(-x.nbytes // _ALIGNED) * _ALIGNED
        fits = (key for key, slab in self._slabs.items() if self._used[key] + size <= len(slab))
        if (key := next(fits, None)) is None:
            slab = None if self._is_full else pinned_bytes(max(_SLAB, size))
            if slab is None:
                self._is_full = True  # do not ask the system again
                return None
            key = slab.data_ptr()
            self._slabs[key], self._used[key] = slab, 0
        start = self._used[key]
        self._used[key] += size
        self._tensors[key] += 1
        values = self._slabs[key][start : start + x.nbytes].view(x.dtype)
        return values.as_strided(x.shape, x.stride())

    def drop(self, x: Tensor) -> None:
        """Free the memory of a tensor if it belongs to a slab."""
        key = x.untyped_storage().data_ptr()
        if key in self._slabs:
            self._tensors[key] -= 1
            if not self._tensors[key]:
                self._used[key] = 0


@dataclass(frozen=True)
class Arriving:
    """A tensor on its way to or from a device.

    Attributes:
        value: Tensor on the device; call `Transfers.received` before reading it.
        event: Event that is recorded when the copy ends.
    """

    value: Tensor
    event: Any


class Transfers:
    """Copies between a device and pinned host memory, on a separate stream.

    Copies run in the order of the calls. The host never waits for a copy, except in `to_host` without pinned memory.

    Device memory belongs to the stream of the computation, which waits for the copies before it reuses the memory. With
    `record_stream`, memory would be free only after the device finishes, while the host keeps allocating more.

    Args:
        device: Device with streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._slabs = device, new_stream(device), PinnedSlabs()
        self._leaving: deque[Arriving] = deque()

    def to_host(self, value: Tensor) -> Tensor:
        """Start to copy a dense tensor to pinned memory; return the copy, which is for `to_device`, not for the host.

        If the system cannot provide more pinned memory, the host waits for the copy.
        """
        room = self._slabs.empty_like(value)
        if room is None:
            return value.cpu()
        self._stream.wait_stream(current_stream(self._device))
        with self._stream:
            room.copy_(value, non_blocking=True)
            self._leaving.append(Arriving(value, self._stream.record_event()))
        self.settle(_LEAVING)
        return room

    def settle(self, left: int = 0) -> None:
        """Make the device wait until at most `left` copies to the host are unfinished, then free their sources.

        The host does not wait.
        """
        while len(self._leaving) > left:
            self.received(self._leaving.popleft())

    def to_device(self, room: Tensor) -> Arriving:
        """Start to copy a result of `to_host` back; call `received` even if the tensor is no longer needed.

        The copy waits for work that the device has already been given, but not for later work.
        """
        value = torch.empty_strided(room.shape, room.stride(), dtype=room.dtype, device=self._device)
        self._stream.wait_stream(current_stream(self._device))
        with self._stream:
            value.copy_(room, non_blocking=True)
            return Arriving(value, self._stream.record_event())

    def received(self, arriving: Arriving) -> Tensor:
        """Make the device wait for a copy, and return the tensor, which its operators may then read.

        The host does not wait.
        """
        current_stream(self._device).wait_event(arriving.event)
        return arriving.value

    def drop(self, room: Tensor) -> None:
        """Free the pinned memory of a result of `to_host`."""
        self._slabs.drop(room)


__all__ = [
    "Arriving",
    "Check",
    "PinnedSlabs",
    "Transfers",
    "capability",
    "checked_later",
    "checked_together",
    "cuda_version",
    "current_stream",
    "free_bytes",
    "has_streams",
    "moved",
    "new_generator",
    "new_stream",
    "pinned_bytes",
    "read",
    "require",
    "return_unused",
    "smaller_pieces",
    "values_at_once",
]
