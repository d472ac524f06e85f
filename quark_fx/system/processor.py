"""Name and instruction sets of the processor, from Linux's `/proc/cpuinfo`."""

from __future__ import annotations

import platform
from pathlib import Path


def this_processor() -> tuple[str, frozenset[str]]:
    """Return the processor's name and the names of its instruction sets; without Linux, the set is empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = named.get("flags", named.get("Features", ""))
    return named.get("model name", platform.machine()), frozenset(flags.split())


__all__ = ["this_processor"]
