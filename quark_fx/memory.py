"""Memory that nobody uses, back to the system."""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass, field
from typing import Any


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


def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (OSError, AttributeError):  # another C library
        return None


_PAUSE = 100
"""Length of the pause after a call, over the call's own."""

_trim = _Trim(_malloc_trim())

__all__ = ["give_back"]
