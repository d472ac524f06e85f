from __future__ import annotations

from collections.abc import Iterator

import pytest
from captured_once import Captures

from quark_fx import session


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """Share captures among all sessions in a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "capture_graph", Captures())
        yield
