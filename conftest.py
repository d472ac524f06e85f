"""The root names `passes`, `observers` and `export` are links into the package: collect it once, nested."""

import os

import pytest
import torch

collect_ignore = ["passes", "observers", "export"]

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same weights in every run, whatever ran before."""
    torch.manual_seed(0)
