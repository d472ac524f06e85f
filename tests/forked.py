"""Processes that start quickly: where the system has forks, from a server that imported the package once."""

from __future__ import annotations

import multiprocessing
import sys
from functools import cache
from typing import Any

FORKS = sys.platform != "win32"


@cache
def start_method() -> str:
    """Return how processes start; the server imports when the first one does."""
    if not FORKS:
        return "spawn"
    multiprocessing.set_forkserver_preload(
        [
            "quark_fx",
            "quark_fx.passes",
            "quark_fx.export",
            "torch._dynamo",
            "torch._inductor.decomposition",
            "torch.export",
            "torch.testing",
            "pytest",
        ]
    )
    return "forkserver"


def processes() -> Any:
    """Return what `multiprocessing` is to its callers."""
    return multiprocessing.get_context(start_method())
