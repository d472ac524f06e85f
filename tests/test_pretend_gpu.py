"""The pretend GPU, in processes of its own: once it is there, it is the accelerator of the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

GROUPS = {
    "runs": ("on_pretend_gpu.py",),
    "kernels": ("model/test_gpu_kernels.py",),
    "numbers": (
        "numbers/test_qparams.py",
        "numbers/test_ops.py",
        "config/test_block_formats.py",
        "plan/test_convert.py",
    ),
}
"""Files whose tests of `on_devices` run on it, in one process each."""


def run_on_it(*arguments: str, ranks: int = 1) -> None:
    """Run pytest with the pretend GPU in a process of its own, or in several that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pretend_gpu", "--tb=short"]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    own |= {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=TESTS.parent, env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout


@pytest.mark.parametrize("name", GROUPS)
def test_on_a_pretend_gpu(name: str) -> None:
    run_on_it(*([] if name == "runs" else ["-k", "pretend"]), *(str(TESTS / file) for file in GROUPS[name]))


def test_two_ranks_on_pretend_gpus() -> None:
    run_on_it("-k", "ranks", str(TESTS / "on_pretend_gpu.py"), ranks=2)
