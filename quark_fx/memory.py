"""Memory that nobody uses, back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> None:
    """Return free memory between values that stay to the system, where the C library keeps it (glibc).

    Temporaries of a few megabytes leave holes that nothing hands back before the process ends: a run would take half as
    much memory again. Costs a few milliseconds.

    Source:
        https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (OSError, AttributeError):  # another C library
        return None


__all__ = ["give_back"]
