"""Processors that tests run files on: the one there is, and one without VNNI, which qemu emulates."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

EMULATOR = shutil.which("qemu-x86_64")

needs_emulator = pytest.mark.skipif(
    EMULATOR is None or platform.machine() != "x86_64",
    reason="no qemu-x86_64 (Debian's qemu-user) to emulate a processor without VNNI",
)
"""Skips a test that needs `run_without_vnni`."""

Arrays = Mapping[str, Any]


def run_here(file: Path, feeds: Arrays) -> list[Any]:
    """Return what ONNX Runtime computes from `feeds` on this processor."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return list(onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]).run(None, feeds))


def run_without_vnni(work: Mapping[Path, Arrays], folder: Path, runtime: str = "onnxruntime") -> dict[Path, list[Any]]:
    """Return what a runtime computes from each file's feeds on an emulated Haswell, which has AVX2 and no VNNI.

    Args:
        work: inputs by file.
        folder: for the arrays on their way, empty.
        runtime: `"onnxruntime"` or `"openvino"`.
    """
    for index, feeds in enumerate(work.values()):
        np.savez(folder / f"{index}.npz", **feeds)
    script = Path(__file__).parent / "run_files.py"
    command = [str(EMULATOR), "-cpu", "Haswell", sys.executable, str(script), runtime, str(folder), *map(str, work)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=600)
    found = {}
    for index, file in enumerate(work):
        with np.load(folder / f"{index}.out.npz") as arrays:
            found[file] = [arrays[name] for name in arrays.files]
    return found
