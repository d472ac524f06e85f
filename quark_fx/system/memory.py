"""Functions that return unused memory to the system, measure memory, and allocate small tensors compactly."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


@dataclass
class _Trim:
    """A C library function that returns memory to the system, with a minimum pause between calls.

    Attributes:
        function: Function `malloc_trim`; `None` if the C library does not have it.
        due: Earliest time of the next call, in seconds of `time.perf_counter`.
    """

    function: Any
    due: float = field(default=0.0)

    def __call__(self) -> None:
        began = time.perf_counter()
        if self.function is not None and began >= self.due:
            self.function(0)
            ended = time.perf_counter()
            self.due = ended + _PAUSE * (ended - began)


def give_back() -> None:
    """Return free memory between live allocations to the system, if the C library would keep it (glibc).

    Temporary tensors of a few megabytes leave holes that would stay allocated until the process ends, which would
    increase the memory of a run by half. Call this function whenever memory becomes free. A call too soon after the
    previous one does nothing, so that all calls together take at most one percent of the time.

    Source:
        https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    _trim()


@contextmanager
def short_memory(short: bool = True) -> Iterator[None]:
    """Return blocks of a megabyte or more to the system as soon as they are free, if the C library is glibc.

    The cost is that the system zeroes the pages of each new allocation. oneDNN also caches fewer kernels: it generates
    one per shape, and matrix products of experts have new shapes in every batch. The cache keeps its capacity if the
    process has run a model before, because oneDNN reads the environment variables once. Environment variables that are
    already set do not change.

    Args:
        short: Whether memory is short; if not, nothing changes.

    Source:
        https://man7.org/linux/man-pages/man3/mallopt.3.html;
        https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    variables = [name for name in _KERNEL_CACHES if short and name not in os.environ]
    mallopt = _function("mallopt") if short else None
    os.environ.update(dict.fromkeys(variables, str(_KERNELS)))
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)


@dataclass
class Slabs:
    """Large blocks of memory in which small long-lived tensors are placed next to each other.

    Without slabs, a small tensor would take the start of a block that a large temporary tensor has freed. The rest of
    the block is too small for the next large tensor, so each small tensor would cost as much memory as a large one.
    """

    _free: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def empty_like(self, x: Tensor) -> Tensor:
        """Return an uninitialized contiguous tensor with the shape, dtype, and device of `x`.

        It is in a slab only if it is small and on a CPU, where memory fragments.
        """
        slab, size = _SLAB // x.element_size(), x.numel()
        if not x.is_cpu or size > slab // 2:
            return x.new_empty(x.shape)
        free = self._free.get(x.dtype)
        if free is None or len(free) < size:
            free = x.new_empty(slab)  # pages take memory only when they are written
        self._free[x.dtype] = free[-(-size // _ALIGNED) * _ALIGNED :]
        return free[:size].view(x.shape)


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error reports a lack of memory, including the `RuntimeError` that torch raises for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def available() -> int | None:
    """Return the number of bytes that this process can still allocate; `None` if it is unknown.

    Source:
        https://docs.kernel.org/filesystems/proc.html (`MemAvailable`); https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    free = _kilobytes("/proc/meminfo", "MemAvailable:")
    rooms = [] if free is None else [free]
    for file in _CONTAINER_LIMITS:
        try:
            rooms.append(int(Path(file).read_text("ascii")) - occupied())
        except (OSError, ValueError):  # the file does not exist, or says that memory is not limited ("max")
            continue
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        mapped = _kilobytes("/proc/self/status", "VmSize:")
        if limit != resource.RLIM_INFINITY and mapped is not None:
            rooms.append(limit - mapped)
    return max(0, min(rooms)) if rooms else None


def _kilobytes(file: str, name: str) -> int | None:
    """Return, in bytes, the value of a line such as `VmSize: 12 kB` in a system file; `None` without file or line."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) << 10


def occupied() -> int:
    """Return the number of bytes of memory of this process, without mapped files; 0 if it is unknown."""
    return _kilobytes("/proc/self/status", "RssAnon:") or 0


_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a container, for the two versions of cgroups."""

_SLAB = 64 << 20
"""Size of a slab in bytes, above the largest block that glibc puts on its heap (`DEFAULT_MMAP_THRESHOLD_MAX`)."""

_ALIGNED = 64
"""Alignment of a tensor in a slab, in elements."""

_M_MMAP_THRESHOLD = -3

_THRESHOLD = 32 << 20
"""Threshold to restore: the largest value that glibc chooses automatically (`DEFAULT_MMAP_THRESHOLD_MAX`)."""

_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables with the capacities of the kernel caches of oneDNN and torch, which are read at first use."""

_KERNELS = 64
"""Capacity of a kernel cache; the default is 1024 kernels of about half a megabyte each."""


def _function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name) if sys.platform == "linux" else None
    except (OSError, AttributeError):  # another C library than glibc
        return None


_PAUSE = 100
"""Length of the pause after a call of `_Trim`, as a multiple of the call's duration."""

_trim = _Trim(_function("malloc_trim"))


def bytes_text(count: float) -> str:
    """Return a number of bytes as text with a suitable unit.

    >>> bytes_text(999), bytes_text(1536), bytes_text(3 << 30)
    ('999 B', '1.5 KiB', '3.00 GiB')
    """
    for unit, power, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if count >= 1 << power:
            return f"{count / (1 << power):.{digits}f} {unit}"
    return f"{count:.0f} B"


__all__ = ["Slabs", "available", "give_back", "is_shortage", "occupied", "short_memory"]
