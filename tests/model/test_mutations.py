"""A sample of the random changes of `python -m benchmarks.mutated_files`: our errors only, no code runs, no crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import DIVISIONS, FIRST_ATTACK, make

from benchmarks.mutated_files import run


@pytest.mark.slow
def test_changed_files_are_read_or_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    make(tmp_path)
    cases = [*range(150), *range(FIRST_ATTACK, FIRST_ATTACK + DIVISIONS + 40)]
    outcomes = run(tmp_path, cases)
    assert list(outcomes) == cases
    wrong = {case: found for case, (_, found) in outcomes.items() if found[:1].isupper()}
    assert not wrong
    assert sum(found == "refused" for _, found in outcomes.values()) > 50
    called = {kind for kind, found in outcomes.values() if found == "loaded and called"}
    assert called >= {"stored graph", "call of an operator"}
