"""Processes that start quickly: forked from a server that has imported the package, where the system can fork."""

from __future__ import annotations

import multiprocessing
import sys
from functools import cache
from typing import Any

FORKS = sys.platform != "win32"


@cache
def start_method() -> str:
    """Return the start method; the fork server imports these modules when the first process starts."""
    if not FORKS:
        return "spawn"
    multiprocessing.set_forkserver_preload(["quark_fx", "torch._dynamo", "torch.export"])
    return "forkserver"


def processes() -> Any:
    """Return the `multiprocessing` context to start processes with."""
    return multiprocessing.get_context(start_method())
