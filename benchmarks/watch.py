"""What a process takes while something runs."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from quark_fx.system.memory import occupied


class Watch:
    """The peak of this process's own memory while it is open, in bytes, and the least room on a disk.

    Args:
        folder: on the disk.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder, self.closed = folder, threading.Event()
        self.before = self.peak = occupied()
        self.least_free = shutil.disk_usage(folder).free

    def __enter__(self) -> Watch:
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.closed.wait(0.01):
            self.peak = max(self.peak, occupied())
            self.least_free = min(self.least_free, shutil.disk_usage(self.folder).free)
