"""Processes that start quickly: forked from a server that has imported the package, where the system can fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
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


def run_program(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has imported the package and has used none of it; return what it printed.

    Args:
        text: the code.
        *arguments: `sys.argv[1:]` of the process, as text.
    """
    given = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "out"), Path(folder, "err")
        process = processes().Process(target=_execute, args=(text, given, printed))
        process.start()
        process.join()
        out, err = (file.read_text(encoding="utf-8") for file in printed)
    return subprocess.CompletedProcess(["-c", *given], process.exitcode, out, err)


def _execute(text: str, arguments: list[str], printed: tuple[Path, Path]) -> None:
    for descriptor, file in zip((1, 2), printed, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
