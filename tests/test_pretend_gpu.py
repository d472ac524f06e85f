"""The pretend GPU, in separate processes: once it is there, it is the accelerator of the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

FILES = (
    "on_pretend_gpu.py",
    "numbers/test_qparams.py",
    "numbers/test_ops.py",
    "config/test_block_formats.py",
    "plan/test_convert.py",
)
"""Files whose tests of `on_devices` run on it; `test_on_gpu.py` runs `model/test_gpu_kernels.py`."""


@pytest.mark.slow
@pytest.mark.parametrize(("files", "chosen", "ranks"), [(FILES, "pretend", 1), (FILES[:1], "ranks", 2)])
def test_on_a_pretend_gpu(files: tuple[str, ...], chosen: str, ranks: int) -> None:
    """Run pytest with it, in one process or in several that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pretend_gpu", "--tb=short"]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    own |= {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-k", chosen, *(str(TESTS / file) for file in files)],
        cwd=TESTS.parent,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout
