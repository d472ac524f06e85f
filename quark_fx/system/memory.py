"""Return unused memory to the system, and keep small tensors that live long from holding more than their own."""

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
    """The C library's call, and when it is due again."""

    function: Any
    due: float = field(default=0.0)

    def __call__(self) -> None:
        began = time.perf_counter()
        if self.function is not None and began >= self.due:
            self.function(0)
            ended = time.perf_counter()
            self.due = ended + _PAUSE * (ended - began)


def give_back() -> None:
    """Return free memory between values that stay to the system, where the C library keeps it (glibc).

    Temporaries of a few megabytes leave holes that nothing hands back before the process ends: a run would take half as
    much memory again. A call may be made as often as memory becomes free: one that comes too soon after the last does
    nothing, so that all together take at most a hundredth of the time.

    Source:
        https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    _trim()


@contextmanager
def short_memory(short: bool = True) -> Iterator[None]:
    """Meanwhile return every megabyte to the system as soon as it is free, where the C library keeps it (glibc).

    Allocations then cost the system's zeroing of pages. The kernels that oneDNN generates for every shape it meets, of
    which a product of experts has a new one with every batch, are kept in smaller numbers, unless the process has run a
    model before: oneDNN reads the variables once. Variables that are set already are left alone.

    Args:
        short: Whether to change anything.

    Source:
        https://man7.org/linux/man-pages/man3/mallopt.3.html;
        https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    variables = [name for name in _KERNELS_KEPT if short and name not in os.environ]
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
    """Memory for small tensors that live long, side by side in large pieces.

    Allocated among large temporaries, a small tensor takes the start of a block that one of them freed. The rest no
    longer fits another one, so each small tensor would cost the memory of a large one.
    """

    _left: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def empty_like(self, x: Tensor) -> Tensor:
        """Return room for the values of `x`, contiguous: in a slab on a CPU, as other allocators have no such holes."""
        slab, size = _SLAB // x.element_size(), x.numel()
        if not x.is_cpu or size > slab // 2:
            return x.new_empty(x.shape)
        left = self._left.get(x.dtype)
        if left is None or len(left) < size:
            left = x.new_empty(slab)  # pages that nothing is written to take no memory
        self._left[x.dtype] = left[-(-size // _ALIGNED) * _ALIGNED :]
        return left[:size].view(x.shape)


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error says that there is no memory left: torch raises a `RuntimeError` for that, too."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def available() -> int | None:
    """Return the bytes that this process may still take, `None` where the system does not say.

    Source:
        https://docs.kernel.org/filesystems/proc.html (`MemAvailable`); https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    free = _kilobytes("/proc/meminfo", "MemAvailable:")
    rooms = [] if free is None else [free]
    for file in _CONTAINER_LIMITS:
        try:
            rooms.append(int(Path(file).read_text("ascii")) - occupied())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        mapped = _kilobytes("/proc/self/status", "VmSize:")
        if limit != resource.RLIM_INFINITY and mapped is not None:
            rooms.append(limit - mapped)
    return max(0, min(rooms)) if rooms else None


def _kilobytes(file: str, name: str) -> int | None:
    """Return the bytes of a line of a file of the system's that counts in kB, `None` where there is none."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(name)), None)
    return None if found is None else int(found.split()[1]) << 10


def occupied() -> int:
    """Return the bytes of memory that are this process's own (files it maps are not), 0 where the system hides them."""
    return _kilobytes("/proc/self/status", "RssAnon:") or 0


_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a container, in both versions of cgroups."""

_SLAB = 64 << 20
"""Bytes of a slab: more than what the C library ever puts into a hole (`DEFAULT_MMAP_THRESHOLD_MAX` of glibc)."""

_ALIGNED = 64
"""Elements that a tensor in a slab begins at a multiple of."""

_M_MMAP_THRESHOLD = -3

_THRESHOLD = 32 << 20
"""The largest threshold that glibc chooses by itself (`DEFAULT_MMAP_THRESHOLD_MAX`), as before the first call."""

_KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""What oneDNN, and torch on top of it, read when they are first used: how many kernels each keeps."""

_KERNELS = 64
"""Instead of 1024, of about half a megabyte each."""


def _function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name) if sys.platform == "linux" else None
    except (OSError, AttributeError):  # another C library
        return None


_PAUSE = 100
"""Length of the pause after a call, over the call's own."""

_trim = _Trim(_function("malloc_trim"))

__all__ = ["Slabs", "available", "give_back", "is_shortage", "occupied", "short_memory"]
