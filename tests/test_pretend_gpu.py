"""The pretend GPU, in separate processes: it becomes the accelerator of the process that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from test_ranks import run

TESTS = Path(__file__).resolve().parent

FILES = (
    "on_pretend_gpu.py",
    "numbers/test_ops.py",
    "config/test_block_formats.py",
    "plan/test_convert.py",
    "model/test_gpu_kernels.py",
)
"""Files whose tests of devices run on it; `test_on_gpu.py` runs `numbers/test_qparams.py`."""


@pytest.mark.slow
@pytest.mark.parametrize("cells", ["not whole", pytest.param("whole", marks=pytest.mark.whole)])
def test_on_a_pretend_gpu(cells: str) -> None:
    """Run pytest with it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pretend_gpu", "--tb=short"]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    own |= {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-k", "pretend", "-m", cells, *(str(TESTS / file) for file in FILES)],
        cwd=TESTS.parent,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout


def on_device(folder: Path) -> None:
    """Register the device in this process, and be one of the ranks that quantize on it."""
    from on_pretend_gpu import require_same_on_ranks

    require_same_on_ranks()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_ranks_make_the_same_tensors_on_the_device(tmp_path: Path) -> None:
    run(2, tmp_path, on_device)
