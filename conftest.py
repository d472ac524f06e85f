"""The root names `passes`, `observers` and `export` are links into the package: collect it once, nested."""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore = ["passes", "observers", "export"]

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same weights in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def only_the_known_passes() -> Iterator[None]:
    """Unregister the passes that a test defines, so that a test in another module can use the same name."""
    from quark_fx.graph.pass_manager import PASSES

    before = dict(PASSES)
    yield
    PASSES.clear()
    PASSES.update(before)
