"""Stop a function between two changes of the file system, as a signal does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


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


__all__ = ["Steps", "interrupted"]
