"""Stop a function between two changes of the file system, as a signal does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from quark_fx.conversion import convert


@dataclass
class Steps:
    """How many changes there were."""

    done: int = 0
    exceeded: bool = False


@contextmanager
def interrupted(moment: int) -> Iterator[Steps]:
    """Raise `KeyboardInterrupt` instead of change number `moment` of what files are called, and end the block there."""
    steps = Steps()

    def counted(change: Any) -> Any:
        def changed(self: Path, *args: Any, **options: Any) -> Any:
            if steps.done == moment:
                steps.exceeded = True
                raise KeyboardInterrupt
            steps.done += 1
            return change(self, *args, **options)

        return changed

    names = ("replace", "hardlink_to", "unlink")
    with (
        mock.patch.multiple(Path, **{name: counted(getattr(Path, name)) for name in names}),
        suppress(KeyboardInterrupt),
    ):
        yield steps


def convert_and_die(source: Path, output: Path, count: int) -> None:
    """Convert a checkpoint, and end the process without a trace as it begins with tensor number `count`."""
    converted, seen = convert._converted, iter(range(count))

    def ends(*args: Any) -> Iterator[Any]:
        if next(seen, None) is None:
            os._exit(9)
        return converted(*args)

    with mock.patch.multiple(convert, _converted=ends, _UNIT=1, _SHARD=1 << 15):
        convert.convert(source, "mxfp4_weight_only", output, progress=False)


def start_and_die(writer: Any) -> None:
    """Start a process as `convert` does, which waits for work, and end this one without a trace."""
    multiprocessing.get_context("fork").Process(target=_waiting, args=(writer,)).start()
    os.kill(os.getpid(), signal.SIGKILL)


def _waiting(_: Any) -> None:
    convert._end_with_parent()
    time.sleep(600)


__all__ = ["Steps", "convert_and_die", "interrupted", "start_and_die"]
