"""Run transformers and llama.cpp in the process of a test: another process would import torch again."""

from __future__ import annotations

import sys
from subprocess import CompletedProcess
from typing import Any

import pytest

from quark_fx.export.runtime import checkpoint_process


def read_checkpoints_here(patch: pytest.MonkeyPatch) -> None:
    """Let `verify`, `evaluate`, and `compare` load checkpoints in this process, in a tenth of the time.

    One test of the command line starts the separate process, like users do.
    """

    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-P", checkpoint_process.__file__]
        try:
            checkpoint_process.main(*command[3:])
        except Exception as error:
            return CompletedProcess(command, 1, "", f"a warning\n{type(error).__name__}: {error}\n")
        return CompletedProcess(command, 0, "", "")

    patch.setattr("subprocess.run", run)
